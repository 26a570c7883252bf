"""The logical slot through the server's SQL functions: create, look, peek, advance, drop.

A peek is one `COPY` of the slot function's result in binary format. The server holds the result (R1.32), the
client holds one batch of messages at a time and makes no Python object per value. A peek moves nothing;
`advance_slot` does.

| what went wrong                                   | error             |
|---------------------------------------------------|-------------------|
| the slot does not exist                           | SlotMissing       |
| another process reads the slot (55006)            | SlotActive        |
| the slot was invalidated (55000, wal_status lost) | SlotLost          |
| the server cannot decode at all (wal_level, …)    | PublisherNotReady |
| a publication is unknown to the historic catalog  | PublicationMissing|
| the role may not                                  | MissingPrivilege  |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import errors as pg
from psycopg import sql

from cdc_replay.errors import (
    CdcReplayError,
    MissingPrivilege,
    PublicationMissing,
    PublisherNotReady,
    SlotLost,
    SlotMissing,
)
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.postgres.connection import Connection, translated_errors

Buffer: TypeAlias = bytes | bytearray | memoryview

PLUGIN: Final = "pgoutput"

BATCH_ROWS: Final = 50_000
BATCH_BYTES: Final = 16 << 20

RESYNCHRONIZE: Final = (
    "Run `cdc-replay teardown` for the publisher, move its change log away, run `cdc-replay setup`, then"
    " `cdc-replay snapshot` for each of its subscriptions."
)
"""The remedy when changes are gone: there is no repair (R1.33)."""

SLOT_STATUS: Final = """
    select plugin::text, database::text, active_pid, restart_lsn::text, confirmed_flush_lsn::text, wal_status,
           safe_wal_size, two_phase, to_jsonb(s) ->> 'invalidation_reason',
           case when not pg_is_in_recovery()
                then pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint end
    from pg_replication_slots s
    where slot_name = %s
"""

SYSTEM_IDENTITY: Final = """
    select system_identifier::text,
           ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int
    from pg_control_system()
"""

OLDEST_SERVER: Final = 150000

READINESS: Final = """
    select current_setting('server_version_num')::int, current_setting('server_version'),
           current_setting('wal_level'), pg_is_in_recovery(), current_user::text,
           (select rolreplication or rolsuper from pg_roles where rolname = current_user)
"""

# Named arguments exist since these versions; the others take their defaults.
CREATE_SLOT: Final = sql.SQL(
    "select lsn::text from pg_create_logical_replication_slot(slot_name => {slot}, plugin => {plugin},"
    " temporary => false, twophase => {two_phase}{failover})"
)
FAILOVER_SINCE: Final = 170000

DROP_SLOT: Final = """
    select pg_drop_replication_slot(slot_name)
    from pg_replication_slots
    where slot_name = %s and plugin = %s and database = current_database()
"""

PEEK: Final = sql.SQL(
    "copy (select lsn, xid, data from pg_logical_slot_peek_binary_changes("
    "{slot}, {upto_lsn}, {upto_nchanges}, variadic {options})) to stdout (format binary)"
)

# COPY BINARY: a header before the first row, then per row the number of fields and length and value of each.
_COPY_HEADER_BYTES: Final = 19
_COPY_TRAILER_BYTES: Final = 2
_LSN_OFFSET: Final = 2 + 4
_XID_OFFSET: Final = _LSN_OFFSET + 8 + 4
_DATA_OFFSET: Final = _XID_OFFSET + 4 + 4
# Arrow computes with `stop`: its default, the largest number there is, overflows there.
_NO_END: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """A row of pg_replication_slots; `retained_wal_bytes` is what the slot keeps the server from removing."""

    name: str
    plugin: str
    database: str
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_flush: Lsn
    """Where the slot is; 0 for a slot that is none of logical decoding."""
    wal_status: str | None
    safe_wal_size_bytes: int | None
    two_phase: bool
    invalidation_reason: str | None
    retained_wal_bytes: int | None

    @property
    def is_lost(self) -> bool:
        """The slot cannot be read or advanced any more (R1.33)."""
        return self.wal_status == "lost" or self.restart_lsn is None or self.invalidation_reason is not None


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """Which cluster, and which history of it."""

    system_identifier: str
    timeline: int


@dataclass(frozen=True, slots=True)
class PeekOptions:
    """What pgoutput is asked for; never for two_phase: even a peek with it would change the slot (R1.25)."""

    slot: str
    publications: tuple[str, ...]
    streaming: bool = False
    two_phase: bool = False
    """The slot has the property; streamed transactions can then be prepared, which needs protocol 3."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names and values of the plugin's options, alternating (R1.18)."""
        version = (3 if self.two_phase else 2) if self.streaming else 1
        streaming = ("streaming", "on") if self.streaming else ()
        return (
            "proto_version", str(version), "publication_names", identifier_list(self.publications),
            "messages", "true", *streaming,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RawMessages:
    """Consecutive messages as the server sent them: equal lengths, in the stream's order (R1.22).

    `data` is an Arrow array of type binary; `lsn` and `xid` are what the slot function says beside it.
    """

    lsn: npt.NDArray[np.int64]
    xid: npt.NDArray[np.int64]
    data: pa.BinaryArray


def identifier_list(names: Sequence[str]) -> str:
    """Names as a list of quoted identifiers, so that none is folded to lower case (R1.18)."""
    return ",".join('"' + name.replace('"', '""') + '"' for name in names)


def slot_exists(connection: Connection, slot: str) -> bool:
    """There is a slot of that name."""
    found = connection.execute("select from pg_replication_slots where slot_name = %s", (slot,))
    return found.rowcount > 0


def slot_status(connection: Connection, slot: str) -> SlotStatus:
    """The slot as the server shows it.

    Raises:
        SlotMissing: if there is none of that name.
    """
    row = connection.execute(SLOT_STATUS, (slot,)).fetchone()
    if row is None:
        raise SlotMissing(
            f'replication slot "{slot}" does not exist',
            hint="Run `cdc-replay setup` for the publisher; if it had a slot before: " + RESYNCHRONIZE,
            rule="R1.33",
        )
    plugin, database, active_pid, restart_lsn, confirmed_flush, *rest = row
    return SlotStatus(
        slot, plugin, database, active_pid,
        None if restart_lsn is None else Lsn.parse(restart_lsn),
        ZERO if confirmed_flush is None else Lsn.parse(confirmed_flush),
        *rest,
    )  # fmt: skip


def check_slot(connection: Connection, slot: str) -> SlotStatus:
    """The slot, if this session's database can read it with pgoutput.

    Raises:
        SlotMissing: if there is none of that name.
        SlotLost: if it was invalidated.
        PublisherNotReady: if it belongs to another database or plugin.
    """
    status = slot_status(connection, slot)
    if status.plugin != PLUGIN or status.database != connection.info.dbname:
        raise PublisherNotReady(
            f'replication slot "{slot}" is not ours to read',
            detail=f'It belongs to plugin "{status.plugin}" and database "{status.database}".',
            hint="Choose another `slot` in the configuration, or drop this one.",
            rule="R1.33",
        )
    if status.is_lost:
        reason = status.invalidation_reason or "it no longer reserves WAL"
        raise SlotLost(
            f'replication slot "{slot}" is lost',
            detail=f"The server invalidated it: {reason}.",
            hint=RESYNCHRONIZE,
            rule="R1.33",
        )
    return status


def server_problems(connection: Connection) -> tuple[CdcReplayError, ...]:
    """What keeps this role from decoding on this server, empty if nothing does (R1.33)."""
    number, version, wal_level, in_recovery, role, may_replicate = _one_row(connection.execute(READINESS))
    problems: list[CdcReplayError] = []
    if number < OLDEST_SERVER:
        hint = "Upgrade it to 15 or later."
        problems.append(PublisherNotReady(f"the publisher is PostgreSQL {version}", hint=hint))
    if wal_level != "logical":
        hint = "Set wal_level to logical and restart the server."
        problems.append(PublisherNotReady(f'wal_level of the publisher is "{wal_level}"', hint=hint))
    if in_recovery:
        hint = "Connect to the primary server."
        problems.append(PublisherNotReady("the publisher is a standby", hint=hint))
    if not may_replicate:
        hint = f'Run `alter role "{role}" replication` as a superuser.'
        problems.append(MissingPrivilege(f'role "{role}" lacks the attribute REPLICATION', hint=hint))
    return tuple(problems)


def check_server(connection: Connection) -> None:
    """Check that this role can decode on this server.

    Raises:
        PublisherNotReady, MissingPrivilege: the problem, or one error that lists all of them.
    """
    problems = server_problems(connection)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise PublisherNotReady(
            "the publisher cannot be captured: " + "; ".join(problem.message for problem in problems),
            hint=" ".join(problem.hint for problem in problems if problem.hint),
            rule="R1.33",
        )


def create_slot(connection: Connection, slot: str, *, two_phase: bool) -> Lsn:
    """Create the slot and return its consistent point. Waits for all transactions open at its start (R1.35).

    From PostgreSQL 17 on it is a failover slot, which standbys can take over.

    Raises:
        PublisherNotReady: if the server has no slot left.
        MissingPrivilege: if the role lacks REPLICATION.
    """
    what = f'cannot create replication slot "{slot}"'
    try:
        with translated_errors(what):
            created = connection.execute(create_slot_statement(connection, slot, two_phase=two_phase))
            return Lsn.parse(_one_row(created)[0])
    except pg.ConfigurationLimitExceeded as error:
        hint = "Raise max_replication_slots and restart the server, or drop a slot that nobody needs."
        raise PublisherNotReady(f"{what}: {error.diag.message_primary}", hint=hint, rule="R1.33") from error


def create_slot_statement(connection: Connection, slot: str, *, two_phase: bool) -> sql.Composed:
    """The statement of `create_slot`."""
    has_failover = connection.info.server_version >= FAILOVER_SINCE
    return CREATE_SLOT.format(
        slot=sql.Literal(slot),
        plugin=sql.Literal(PLUGIN),
        two_phase=sql.Literal(two_phase),
        failover=sql.SQL(", failover => true" if has_failover else ""),
    )


def advance_slot(connection: Connection, slot: str, upto: Lsn) -> Lsn:
    """Tell the slot that everything before `upto` is durable elsewhere, and return where it is then (R1.29).

    Raises:
        SlotMissing, SlotActive, SlotLost: as for `peek`.
    """
    with _slot_errors(f'cannot advance replication slot "{slot}"'):
        advanced = connection.execute(
            "select end_lsn::text from pg_replication_slot_advance(%s, %s::pg_lsn)", (slot, str(upto))
        )
        return Lsn.parse(_one_row(advanced)[0])


def drop_slot(connection: Connection, slot: str) -> bool:
    """Drop the slot; False if this database has none of that name for pgoutput.

    Raises:
        SlotActive: if a process uses it.
    """
    with _slot_errors(f'cannot drop replication slot "{slot}"'):
        return connection.execute(DROP_SLOT, (slot, PLUGIN)).rowcount > 0


def system_identity(connection: Connection) -> SystemIdentity:
    """The cluster's system identifier and the timeline that it writes now. Not during recovery."""
    return SystemIdentity(*_one_row(connection.execute(SYSTEM_IDENTITY)))


def peek(
    connection: Connection, options: PeekOptions, *, upto_lsn: Lsn, upto_nchanges: int
) -> Iterator[RawMessages]:
    """The messages of the transactions that commit before `upto_lsn` and that the slot has not confirmed.

    Ends early, after a whole transaction, once `upto_nchanges` messages are out; with streaming perhaps
    inside one (R1.23, R1.24). Batches are bounded in messages and bytes, one message may exceed them.

    Raises:
        SlotMissing, SlotActive, SlotLost, PublicationMissing, MissingPrivilege: as the table above says.
    """
    statement = PEEK.format(
        slot=sql.Literal(options.slot),
        upto_lsn=sql.Literal(str(upto_lsn)),
        upto_nchanges=sql.Literal(upto_nchanges),
        options=sql.Literal(list(options.arguments)),
    )
    with (
        _slot_errors(f'cannot read replication slot "{options.slot}"'),
        _warnings_refused(connection),
        connection.cursor() as cursor,
        cursor.copy(statement) as copy,
    ):
        yield from _batches(copy)


def _one_row(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    [row] = cursor.fetchall()
    return row


def _batches(rows: Iterable[Buffer]) -> Iterator[RawMessages]:
    held: list[Buffer] = []
    held_bytes = 0
    for number, block in enumerate(rows):
        row = block[_COPY_HEADER_BYTES:] if number == 0 else block
        if len(row) <= _COPY_TRAILER_BYTES:
            continue
        held.append(row)
        held_bytes += len(row)
        if len(held) >= BATCH_ROWS or held_bytes >= BATCH_BYTES:
            yield _raw_messages(held)
            held, held_bytes = [], 0
    if held:
        yield _raw_messages(held)


def _raw_messages(rows: Sequence[Buffer]) -> RawMessages:
    """Rows of COPY BINARY, one per element, as columns."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, rows), dtype=np.int32, count=len(rows)), out=offsets[1:])
    joined = b"".join(rows)
    content = np.frombuffer(joined, dtype=np.uint8)
    whole = pa.BinaryArray.from_buffers(
        pa.binary(), len(rows), [None, pa.py_buffer(offsets), pa.py_buffer(joined)]
    )
    starts = offsets[:-1]
    return RawMessages(
        lsn=_big_endian(content, starts + _LSN_OFFSET, 8),
        xid=_big_endian(content, starts + _XID_OFFSET, 4),
        data=pc.binary_slice(whole, start=_DATA_OFFSET, stop=_NO_END),
    )


def _big_endian(
    content: npt.NDArray[np.uint8], positions: npt.NDArray[np.int32], width: int
) -> npt.NDArray[np.int64]:
    """The unsigned integers of `width` bytes that start at `positions`."""
    numbers = np.zeros(len(positions), dtype=np.int64)
    for byte in range(width):
        numbers = numbers << 8 | content[positions + byte]
    return numbers


@contextlib.contextmanager
def _warnings_refused(connection: Connection) -> Iterator[None]:
    """PostgreSQL 18 skips a missing publication with a warning only: changes would pass unseen (R1.19)."""
    warnings: list[str] = []

    def keep(diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == "WARNING":
            warnings.append(diagnostic.message_primary or "")

    connection.add_notice_handler(keep)
    try:
        yield
    finally:
        connection.remove_notice_handler(keep)
    if warnings:
        raise PublicationMissing(
            "the server left changes out while it decoded",
            detail="It said: " + "; ".join(dict.fromkeys(warnings)),
            hint="A capture publication was dropped while its slot was in use. " + RESYNCHRONIZE,
            rule="R1.19",
        )


@contextlib.contextmanager
def _slot_errors(what: str) -> Iterator[None]:
    """As `translated_errors`, with the errors that only slots have; `what` is the attempt that failed."""
    try:
        with translated_errors(what):
            yield
    except pg.UndefinedObject as error:
        said = error.diag.message_primary
        hint = (
            "A capture publication was missing when a change was made; this slot is blocked. " + RESYNCHRONIZE
        )
        raise PublicationMissing(f"{what}: {said}", hint=hint, rule="R1.19") from error
    except pg.ObjectNotInPrerequisiteState as error:
        said, detail = error.diag.message_primary, error.diag.message_detail
        raise SlotLost(f"{what}: {said}", detail=detail, hint=RESYNCHRONIZE, rule="R1.33") from error
