"""Prepares a publisher for capture, and undoes it. Idempotent.

    checks → capture publications and event triggers, in one transaction → slot → mark → change log

A dry run also prints the grants that the role lacks (`grants`), so that an administrator can run all of it
for a role that is no superuser.

A publication that does not exist at a change blocks the slot or loses the change (R1.19), so the publications
are created before the slot. The log starts at the slot's position. An interrupted setup is completed by the
next one: an unmoved slot has delivered nothing, so the log starts at its position. A moved slot has a log;
if that is missing, a new one would hide it. The mark distinguishes the two (`log_start`).

Event triggers are optional: if the role may not create them, a warning says so. If they or the log are new,
all definitions are written into the stream, which makes them exact from that position on (R9.11).

Root publications may be added to an existing slot: only pulls with a TRUNCATE of a partition read them. A
TRUNCATE before their creation stops the capture; it is not captured as one of the leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from psycopg import sql

from cdc_replay.capture.change_origins import ORIGIN_OPTION_SINCE
from cdc_replay.capture.ddl.event_triggers import (
    EVENT_TRIGGERS,
    OWNERSHIP_GUARD,
    apply_plan,
    emit_full_catalog,
    foreign_event_triggers,
    is_installed,
    plan_event_triggers,
    plan_removal,
    remove_event_triggers,
)
from cdc_replay.capture.grants import plan_grants
from cdc_replay.capture.log_start import check_unread, execute_marks, plan_mark, plan_unmark, read_mark
from cdc_replay.capture.ownership import check_ownership, nothing_adopted
from cdc_replay.capture.publications import (
    OUR_PUBLICATIONS,
    ROOT_PUBLICATIONS,
    PublicationPlan,
    drop_capture_publications,
    plan_capture_publications,
)
from cdc_replay.capture.slot_continuity import check_continuity, check_header, slot_missing
from cdc_replay.capture.slot_lock import only_reader
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import PublicationMissing, PublisherNotReady
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublishAction, PublisherCatalog, Table
from cdc_replay.model.relation import ReplicaIdentity
from cdc_replay.postgres.connection import Connection, connect, translated_errors
from cdc_replay.postgres.slot import (
    check_server,
    check_slot,
    create_slot,
    create_slot_statement,
    drop_slot,
    slot_exists,
    slot_status,
    system_identity,
)
from cdc_replay.publication.capture_set import ROOT_DEPTHS, CaptureMembers, capture_set, roots_too_deep

logger = logging.getLogger(__name__)

_OWNER: Final = (
    "Nothing was removed. Run it again with the DSN of the role that owns them, such as the administrator's"
    " who ran the script of `setup --dry-run`."
)


@dataclass(frozen=True, slots=True)
class SetupRequest:
    """The configuration of a publisher; `publications` are those of all its subscriptions.

    `origin_none`: one of them has `origin = none`. `event_trigger`: create event triggers if permitted.
    """

    publisher: str
    dsn: str
    slot: str
    change_log: str
    publications: tuple[str, ...]
    two_phase: bool = False
    origin_none: bool = False
    event_trigger: bool = False

    def __repr__(self) -> str:
        # Without the DSN, which may hold a password.
        return f"SetupRequest(publisher={self.publisher!r}, slot={self.slot!r})"


@dataclass(frozen=True, slots=True)
class SetupOutcome:
    """The executed statements in order, or those that a dry run would execute.

    `from_lsn` is the start of the log, None after a dry run. `event_trigger`: the event triggers exist now.
    """

    statements: tuple[str, ...]
    warnings: tuple[str, ...]
    slot_created: bool
    log_created: bool
    from_lsn: Lsn | None
    event_trigger: bool


def setup_publisher(request: SetupRequest, *, dry_run: bool = False) -> SetupOutcome:
    """Check the publisher, and create its capture publications, slot and change log if they are missing.

    Raises:
        PublisherNotReady, MissingPrivilege, PublicationMissing: listing all obstacles.
        SlotMissing, SlotLost: if there is a log, but no slot that continues it.
        ChangeLogMissing: if the slot has delivered changes to a log that is missing now.
        ChangeLogMismatch: if the log belongs to another publisher, history or slot.
    """
    with connect(request.dsn, purpose=f"setup {request.publisher}") as connection:
        check_server(connection, grants_follow=dry_run)
        check_ownership(connection, EVENT_TRIGGERS)
        catalog = read_catalog(connection, texts=False)
        _check_publications(catalog, request.publications)
        grants = plan_grants(connection, catalog, request.publications) if dry_run else ()
        slot_created = not slot_exists(connection, request.slot)
        log_created = not ChangeLog.exists(request.change_log)
        _check_log(connection, request, has_slot=not slot_created)
        warnings = _setup_warnings(connection, catalog, request)
        objects, object_warnings = (_plan_objects if dry_run else _create_objects)(
            connection, catalog, request
        )
        warnings = (*warnings, *object_warnings)
        plan = _plan_slot_and_mark(connection, request, has_slot=not slot_created)
        statements = tuple(
            statement.as_string(connection) for statement in (*grants, *objects, *plan.statements)
        )
        from_lsn = None
        if not dry_run:
            from_lsn, mark_warnings = _create_slot_and_log(connection, request, plan)
            warnings = (*warnings, *mark_warnings)
        has_triggers = is_installed(connection, request.slot)
    return SetupOutcome(statements, warnings, slot_created, log_created, from_lsn, has_triggers)


def teardown_publisher(request: SetupRequest) -> tuple[str, ...]:
    """Remove what `setup_publisher` created, except the log; returns what was removed.

    Raises:
        MissingPrivilege: if the role may not drop one of them; nothing is removed.
        SlotActive: if a capture is running.
    """
    removed = []
    with (
        connect(request.dsn, purpose=f"teardown {request.publisher}") as connection,
        only_reader(connection, request.slot),
    ):
        _check_may_drop(connection, request.slot)
        if drop_slot(connection, request.slot):
            removed.append(f"replication slot {request.slot}")
        failpoint("teardown.after_slot")
        removed += [f"publication {name}" for name in drop_capture_publications(connection, request.slot)]
        failpoint("teardown.after_publications")
        removed += [f"event trigger {name}" for name in remove_event_triggers(connection, request.slot)]
    return tuple(removed)


def _check_may_drop(connection: Connection, slot: str) -> None:
    """Try what a slot cannot be part of: a transaction."""
    with (
        translated_errors("cannot drop the publications and event triggers of the capture", grant=_OWNER),
        connection.transaction(force_rollback=True),
    ):
        drop_capture_publications(connection, slot)
        remove_event_triggers(connection, slot)


def _check_publications(catalog: PublisherCatalog, publications: Sequence[str]) -> None:
    missing = [name for name in publications if name not in catalog.publications]
    if missing:
        raise PublicationMissing(
            f"publications that subscriptions name do not exist: {', '.join(missing)}",
            hint="Create them on the publisher, or remove them from the subscriptions.",
            rule="R1.19",
        )
    ours = [name for name in publications if name in OUR_PUBLICATIONS]
    if ours:
        raise PublisherNotReady(
            f"capture publications cannot be subscribed to: {', '.join(ours)}",
            hint="Name the real publications.",
        )


_Objects: TypeAlias = tuple[tuple[sql.Composed, ...], tuple[str, ...]]
"""Statements, and warnings of those that are left out."""

# A guard must see what was committed until then, and what the transaction itself has created. The search path
# is that of our sessions: an administrator's could lead to a stranger's functions and operators.
_BEGIN: Final = (
    sql.SQL("begin isolation level read committed").format(),
    sql.SQL("set local search_path = ''").format(),
)
_COMMIT: Final = sql.SQL("commit").format()


def _plan_objects(connection: Connection, catalog: PublisherCatalog, request: SetupRequest) -> _Objects:
    """The transaction that creates or changes capture publications and event triggers."""
    publications = plan_capture_publications(connection, catalog, request.publications, request.slot)
    triggers, warnings = _plan_event_triggers(connection, request)
    return _in_one_transaction(publications, triggers), warnings


def _create_objects(connection: Connection, catalog: PublisherCatalog, request: SetupRequest) -> _Objects:
    """Execute that transaction, without the event triggers if they are not permitted."""
    with nothing_adopted(connection, EVENT_TRIGGERS), connection.transaction():
        connection.execute("set transaction isolation level read committed")
        connection.execute(OWNERSHIP_GUARD)
        publications = plan_capture_publications(connection, catalog, request.publications, request.slot)
        for plan in publications:
            _execute(connection, request.publisher, plan)
        connection.execute(OWNERSHIP_GUARD)
        triggers, warnings = _plan_event_triggers(connection, request)
        if (refusal := apply_plan(connection, triggers)) is not None:
            triggers, warnings = (), (*warnings, _not_permitted(refusal))
    return _in_one_transaction(publications, triggers), warnings


def _in_one_transaction(
    publications: Sequence[PublicationPlan], triggers: Sequence[sql.Composed]
) -> tuple[sql.Composed, ...]:
    """The statements between guards; none if there are none."""
    statements = [statement for plan in publications for statement in plan.statements]
    if not statements and not triggers:
        return ()
    guard = () if OWNERSHIP_GUARD in triggers else (OWNERSHIP_GUARD,)
    return (*_BEGIN, OWNERSHIP_GUARD, *statements, *guard, *triggers, _COMMIT)


def _execute(connection: Connection, publisher: str, plan: PublicationPlan) -> None:
    # In one transaction: a change between drop and creation would be blocked or lost (R1.19).
    script = f"Let an administrator run in psql what `cdc-replay setup {publisher} --dry-run` prints."
    with translated_errors(f'cannot set up publication "{plan.name}"', grant=script):
        for statement in plan.statements:
            connection.execute(statement)


def _plan_event_triggers(connection: Connection, request: SetupRequest) -> _Objects:
    """The statements that create or remove the event triggers, or a warning if they are another slot's."""
    if not request.event_trigger:
        return plan_removal(connection, request.slot), ()
    if (foreign := foreign_event_triggers(connection, request.slot)) is not None:
        return (), (f"event triggers are not set up: {foreign} [R9.11]",)
    return plan_event_triggers(connection, request.slot, request.publications), ()


def _not_permitted(refusal: str) -> str:
    return (
        f"event triggers cannot be set up ({refusal}): let a superuser run what `setup --dry-run` prints;"
        " until then a changed definition takes effect at the start of the pull that detects it [R9.11]"
    )


def _check_log(connection: Connection, request: SetupRequest, *, has_slot: bool) -> None:
    if not ChangeLog.exists(request.change_log):
        if has_slot:
            check_unread(connection, request.slot, request.change_log)
        return
    log = ChangeLog.open(request.change_log)
    if has_slot:
        check_continuity(connection, log, request.slot)
        return
    raise slot_missing(log, request.slot, check_header(connection, log, request.slot))


@dataclass(frozen=True, slots=True)
class _SetupPlan:
    """The statements that create a missing slot and mark, in order; `slot` is None if it exists."""

    unmark: tuple[sql.Composed, ...] = ()
    slot: sql.Composed | None = None
    mark: tuple[sql.Composed, ...] = ()

    @property
    def statements(self) -> tuple[sql.Composed, ...]:
        return (*self.unmark, *(() if self.slot is None else (self.slot,)), *self.mark)


def _plan_slot_and_mark(connection: Connection, request: SetupRequest, *, has_slot: bool) -> _SetupPlan:
    if not has_slot:
        return _SetupPlan(
            plan_unmark(connection, request.slot),
            create_slot_statement(connection, request.slot, two_phase=request.two_phase),
            (plan_mark(request.slot),),
        )
    if read_mark(connection, request.slot) is not None:
        return _SetupPlan()
    # A setup died before the mark, or an earlier release created the log.
    has_log = ChangeLog.exists(request.change_log)
    start = ChangeLog.open(request.change_log).header.start_lsn if has_log else None
    return _SetupPlan(mark=(plan_mark(request.slot, start),))


def _create_slot_and_log(
    connection: Connection, request: SetupRequest, plan: _SetupPlan
) -> tuple[Lsn, tuple[str, ...]]:
    slot_created = not slot_exists(connection, request.slot)
    if slot_created:
        # First: with the old mark still set, a crash before the new mark would make the next setup regard the
        # new slot, which is past the old mark, as one that was read from.
        execute_marks(connection, plan.unmark)
        create_slot(connection, request.slot, two_phase=request.two_phase)
        logger.info("created replication slot %s of publisher %s", request.slot, request.publisher)
    # Before the log: if a log without a mark is captured to and then lost, nothing shows the loss.
    warnings = execute_marks(connection, plan.mark)
    if ChangeLog.exists(request.change_log):
        return ChangeLog.open(request.change_log).header.start_lsn, warnings
    if slot_created:
        start = check_slot(connection, request.slot).confirmed_flush
    else:
        # Checked again: the log may have existed at the first check.
        start = check_unread(connection, request.slot, request.change_log)
    if is_installed(connection, request.slot):
        # Before the log is created: a setup that dies here is completed by the next one.
        emit_full_catalog(connection)
    identity = system_identity(connection)
    header = LogHeader(identity.system_identifier, identity.timeline, request.slot, start, identity.database)
    ChangeLog.create(request.change_log, header)
    logger.info("created the change log of publisher %s at %s", request.publisher, start)
    return start, warnings


def _setup_warnings(
    connection: Connection, catalog: PublisherCatalog, request: SetupRequest
) -> tuple[str, ...]:
    return (
        *_two_phase_warnings(connection, request),
        *_identity_warnings(catalog, request.publications),
        *_root_warnings(connection, catalog, request),
        *_origin_warnings(catalog, request),
    )


def _two_phase_warnings(connection: Connection, request: SetupRequest) -> Iterator[str]:
    if not slot_exists(connection, request.slot):
        return
    two_phase = slot_status(connection, request.slot).two_phase
    if two_phase != request.two_phase:
        yield (
            f'replication slot "{request.slot}" has two_phase = {str(two_phase).lower()}; the configuration'
            f" has {str(request.two_phase).lower()}, which requires a new slot"
        )


def _root_warnings(connection: Connection, catalog: PublisherCatalog, request: SetupRequest) -> Iterator[str]:
    for name in roots_too_deep(catalog, request.publications):
        yield (
            f"table {name} has more than {ROOT_DEPTHS - 1} ancestors: a TRUNCATE of it, as the published"
            " relation, is not captured [R2.14]"
        )
    younger = [name for name in ROOT_PUBLICATIONS if name not in catalog.publications]
    if younger and slot_exists(connection, request.slot):
        yield (
            f'publications {", ".join(younger)} are younger than replication slot "{request.slot}": run'
            " `cdc-replay capture` before the next TRUNCATE of a partitioned table [R1.19]"
        )


def _origin_warnings(catalog: PublisherCatalog, request: SetupRequest) -> Iterator[str]:
    if request.origin_none and catalog.server_version < ORIGIN_OPTION_SINCE:
        yield (
            "a subscription has origin = none: before PostgreSQL 16 the publisher sends only the origin of"
            " whole transactions, so changes with an origin in a local transaction are applied [R8.20]"
        )


def _identity_warnings(catalog: PublisherCatalog, publications: Sequence[str]) -> Iterator[str]:
    """Tables on which UPDATE or DELETE fails, with or without the capture publications (R2.17)."""
    members = capture_set(catalog, publications)
    for table in sorted(catalog.tables.values(), key=lambda table: table.name):
        if table.is_partitioned or not table.is_publishable or _has_identity(table):
            continue
        failing = [
            action.name
            for action in (PublishAction.UPDATE, PublishAction.DELETE)
            if _covers(catalog, members[action], table)
        ]
        if failing:
            yield f"table {table.name} has no replica identity: {' and '.join(failing)} on it fail [R2.17]"


def _has_identity(table: Table) -> bool:
    return table.replica_identity is ReplicaIdentity.FULL or bool(table.key_columns)


def _covers(catalog: PublisherCatalog, members: CaptureMembers, table: Table) -> bool:
    family = (table, *catalog.ancestors(table.id))
    if members.all_tables:
        return not any(relative.name in members.exceptions for relative in family)
    return any(
        relative.name in members.tables or relative.name.schema in members.schemas for relative in family
    )
