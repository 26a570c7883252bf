"""The slots of a throw-away subscription on the publisher: room for them, their names, and their removal.

| slot                            | created by           | name                                      |
|---------------------------------|----------------------|-------------------------------------------|
| of the subscription             | CREATE SUBSCRIPTION  | `cdc_replay_certify_<system identifier>`  |
| of a table that is being copied | its tablesync worker | `pg_<oid>_sync_<oid>_<system identifier>` |

The system identifier is that of the throw-away server, which no other server has. A run holds an advisory
lock of its slot's name on the publisher until its slots are dropped: if no role with REPLICATION holds it,
and the slot is not active, the run was killed. The subscription's slot is dropped last, so the others can
always be told.

A slot retains WAL. A killed run's slots do so until the next run of any subscription of the same database.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Final

import psycopg
from psycopg import errors as pg

from cdc_replay.errors import (
    CdcReplayError,
    MissingPrivilege,
    PublisherNotReady,
    SlotActive,
    SlotMissing,
)
from cdc_replay.postgres.advisory_locks import FixedLock, acquire, advisory_key, holders
from cdc_replay.postgres.connection import Connection, connect, translated_errors
from cdc_replay.postgres.exported_snapshot import MAY_REPLICATE

logger = logging.getLogger(__name__)

PREFIX: Final = "cdc_replay_certify_"

SYNC_WORKERS: Final = 2
"""Tables that are copied at the same time, each with a slot and a walsender."""

NEEDED: Final = 1 + SYNC_WORKERS

_LOCK_SECONDS: Final = 10.0
_DROP_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.05

_HEADROOM: Final = """
    select pg_catalog.current_setting('wal_level'),
        pg_catalog.current_setting('max_replication_slots')::int
            - (select count(*) from pg_catalog.pg_replication_slots),
        pg_catalog.current_setting('max_wal_senders')::int
            - (select count(*) from pg_catalog.pg_stat_replication)
"""

_OF_RUNS: Final = """
    select slot_name::text from pg_catalog.pg_replication_slots
    where database = pg_catalog.current_database() and plugin = 'pgoutput' and not temporary
        and slot_name::text ~ %s
    order by slot_name
"""

_OF_ONE_RUN: Final = """
    select slot_name::text from pg_catalog.pg_replication_slots
    where database = pg_catalog.current_database() and plugin = 'pgoutput' and not temporary
        and (slot_name::text = %(main)s or slot_name::text ~ %(copies)s)
    order by slot_name::text = %(main)s, slot_name
"""

_ACTIVE: Final = "select active from pg_catalog.pg_replication_slots where slot_name = %s"

_END_READER: Final = """
    select pg_catalog.pg_terminate_backend(active_pid) from pg_catalog.pg_replication_slots
    where slot_name = %s and active_pid is not null
"""


def slot_name(system_identifier: str) -> str:
    """The name of the slot of the subscription on the server with this system identifier."""
    return f"{PREFIX}{system_identifier}"


def check_headroom(publisher: Connection) -> None:
    """Check that a native subscription can be created now.

    Raises:
        MissingPrivilege: if the role lacks REPLICATION.
        PublisherNotReady: if the server has no room for its slots and walsenders; all shortages are named.
    """
    ((role, may_replicate),) = publisher.execute(MAY_REPLICATE).fetchall()
    if not may_replicate:
        raise MissingPrivilege(
            f'role "{role}" of the publisher may not create a replication slot for a native subscription',
            hint=f"Let an administrator run: alter role {role} replication",
        )
    ((wal_level, slots, senders),) = publisher.execute(_HEADROOM).fetchall()
    lacking = [] if wal_level == "logical" else [f"wal_level is {wal_level}, not logical"]
    if slots < NEEDED:
        lacking.append(f"{max(slots, 0)} of max_replication_slots are free")
    if senders < NEEDED:
        lacking.append(f"{max(senders, 0)} of max_wal_senders are free")
    if lacking:
        raise PublisherNotReady(
            f"the publisher has no room for a native subscription, which needs {NEEDED} replication slots and"
            f" {NEEDED} walsenders while it copies tables",
            detail=f"{'; '.join(lacking)}.",
            hint="Drop replication slots that nobody reads, or raise the settings and restart the server.",
        )


@contextlib.contextmanager
def own_slots(publisher: Connection, dsn: str, system_identifier: str) -> Iterator[str]:
    """The name for the subscription's slot; at the end, this slot and those of its copies are dropped.

    The server that reads them must have ended, or be ending. A slot that cannot be dropped is named in the
    log: an error of the context is not replaced.
    """
    name = slot_name(system_identifier)
    run = _run_lock(publisher, name)
    if not acquire(run, _LOCK_SECONDS):
        raise PublisherNotReady(
            f'another session holds the lock of replication slot "{name}"',
            detail=run.holder(),
            hint="Run `cdc-replay certify` again: its next slot has another name.",
        )
    try:
        yield name
    finally:
        try:
            # Another connection: that of the run may be lost, or in a failed state.
            with connect(dsn, purpose="certify, removal of slots") as cleaning:
                _drop(cleaning, name)
        except (CdcReplayError, psycopg.Error) as error:
            logger.warning(
                "replication slot %s remains on the publisher and retains WAL: %s. The next `cdc-replay"
                " certify` drops it; so does pg_drop_replication_slot",
                *(name, str(error).partition("\n")[0]),
            )
        with contextlib.suppress(psycopg.Error):
            run.release()


def remove_leftovers(publisher: Connection) -> tuple[str, ...]:
    """Drop the slots of runs that were killed; the names of those that were dropped.

    Slots of runs in progress, here or on other machines, are left.
    """
    removed: list[str] = []
    for (name,) in publisher.execute(_OF_RUNS, (f"^{PREFIX}[0-9]+$",)).fetchall():
        run = _run_lock(publisher, name)
        is_free = run.try_acquire()
        # Anybody can hold the lock of a slot; only a role that can read the slot can be its run.
        if not is_free and any(holder.is_ours for holder in holders(publisher, run.keys)):
            continue
        try:
            if publisher.execute(_ACTIVE, (name,)).fetchall() == [(False,)]:
                removed += _drop(publisher, name)
        finally:
            if is_free:
                run.release()
    for name in removed:
        logger.warning("dropped replication slot %s of the publisher, which a killed certify had left", name)
    return tuple(removed)


def _run_lock(publisher: Connection, slot: str) -> FixedLock:
    return FixedLock(publisher, advisory_key("certify", slot))


def _drop(publisher: Connection, main: str) -> list[str]:
    """Drop the slots of one run; a reader that is ending is waited for, and ended if it does not."""
    identifier = main.removeprefix(PREFIX)
    values = {"main": main, "copies": f"^pg_[0-9]+_sync_[0-9]+_{identifier}$"}
    dropped = []
    for (name,) in publisher.execute(_OF_ONE_RUN, values).fetchall():
        began = time.monotonic()
        while not _try_to_drop(publisher, name, gives_up=time.monotonic() > began + _DROP_SECONDS):
            if time.monotonic() > began + _DROP_SECONDS / 4:
                publisher.execute(_END_READER, (name,))
            time.sleep(_POLL_SECONDS)
        dropped.append(name)
    return dropped


def _try_to_drop(publisher: Connection, name: str, *, gives_up: bool) -> bool:
    """Whether the slot is gone; False if it has a reader, or this process is asked to end."""
    try:
        with translated_errors(f'cannot drop replication slot "{name}"'):
            publisher.execute("select pg_catalog.pg_drop_replication_slot(%s)", (name,))
    except SlotMissing:
        return True
    except (SlotActive, pg.QueryCanceled):  # SIGTERM cancels statements for some seconds
        if gives_up:
            raise
        return False
    return True
