"""Prepare a publisher for capture, and undo it. Running it again changes nothing that is right already.

    checks → capture publications → event triggers → slot → mark → change log

A dry run begins with what the role lacks (`grants`), so that an administrator can run the whole for a role
that is no superuser; what that role finds then is right already.

The order matters: a publication that does not exist at a change blocks or loses it (R1.19), so the
publications are there before the slot; the log starts where the slot does. A setup that dies in between is
completed by the next one: a slot that has not moved from where it was made has delivered nothing, so the log
starts at its position. A slot that has moved has a log, and if that is not there a new one would only hide
it: the mark tells the two apart (`log_mark`).

The event triggers are wanted, not needed: where the role may not create them the rest is set up, and a
warning says so. When they or the log are new, all definitions are written into the stream, which makes them
exact from that position on (R9.11).

Root publications that a slot was made without can be added: they are read only by pulls with a TRUNCATE of a
partition, and from behind their creation on nothing is missing. A TRUNCATE before it stops the capture,
rather than being read as one of the leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc_replay.capture.change_origins import ORIGIN_OPTION_SINCE
from cdc_replay.capture.ddl.event_triggers import (
    EVENT_TRIGGERS,
    apply_plan,
    emit_full_catalog,
    foreign_event_triggers,
    is_installed,
    plan_event_triggers,
    plan_removal,
    remove_event_triggers,
)
from cdc_replay.capture.grants import plan_grants
from cdc_replay.capture.log_start import check_unread, execute_marks, log_mark, plan_mark, plan_unmark
from cdc_replay.capture.ownership import check_ownership
from cdc_replay.capture.publications import (
    OUR_PUBLICATIONS,
    ROOT_PUBLICATIONS,
    PublicationPlan,
    drop_capture_publications,
    plan_capture_publications,
)
from cdc_replay.capture.slot_continuity import check_continuity, check_header, only_reader, slot_missing
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

if TYPE_CHECKING:
    from psycopg import sql

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SetupRequest:
    """A publisher as the configuration wants it; `publications` are those of all its subscriptions.

    `origin_none`: one of them asks for `origin = none`. `event_trigger`: definitions are to be exact by
    position, where the role may create event triggers.
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
    """What was done, as SQL; `from_lsn` is where the log starts, None if it was a dry run without a slot.

    Statements are in order; after a dry run they are those that would have been executed. `event_trigger`
    says whether the event triggers are there now.
    """

    statements: tuple[str, ...]
    warnings: tuple[str, ...]
    slot_created: bool
    log_created: bool
    from_lsn: Lsn | None
    event_trigger: bool


def setup_publisher(request: SetupRequest, *, dry_run: bool = False) -> SetupOutcome:
    """Check the publisher, create its capture publications, slot and change log where they are missing.

    Raises:
        PublisherNotReady, MissingPrivilege, PublicationMissing: listing everything that is in the way.
        SlotMissing, SlotLost: if there is a log, but no slot that continues it.
        ChangeLogMissing: if the slot has delivered changes to a log that is not there now.
        ChangeLogMismatch: if there is a log of something else.
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
        warnings = _warnings(connection, catalog, request)
        statements = (
            *(each.as_string(connection) for each in grants),
            *_refresh(connection, catalog, request, dry_run=dry_run),
        )
        triggers, refused = _event_triggers(connection, request, dry_run=dry_run)
        statements, warnings = (*statements, *triggers), (*warnings, *refused)
        making = _making(connection, request, has_slot=not slot_created)
        statements = (*statements, *(each.as_string(connection) for each in making.statements))
        from_lsn = None
        if not dry_run:
            from_lsn, unmarked = _slot_and_log(connection, request, making)
            warnings = (*warnings, *unmarked)
        has_triggers = is_installed(connection, request.slot)
    return SetupOutcome(statements, warnings, slot_created, log_created, from_lsn, has_triggers)


def refresh_capture_publications(request: SetupRequest, *, dry_run: bool = False) -> tuple[str, ...]:
    """Bring the capture publications to what the subscribed publications are now; returns the statements.

    Raises:
        PublicationMissing: if a subscribed publication does not exist.
        MissingPrivilege: if the role may not change them.
    """
    with connect(request.dsn, purpose=f"setup {request.publisher}") as connection:
        check_ownership(connection, EVENT_TRIGGERS)
        catalog = read_catalog(connection, texts=False)
        _check_publications(catalog, request.publications)
        return _refresh(connection, catalog, request, dry_run=dry_run)


def teardown_publisher(request: SetupRequest, *, remove_log: bool = False) -> tuple[str, ...]:
    """Remove what `setup_publisher` has created; returns what was removed. The log stays unless told.

    Raises:
        SlotActive: if a capture is running.
    """
    removed = []
    with (
        connect(request.dsn, purpose=f"teardown {request.publisher}") as connection,
        only_reader(connection, request.slot),
    ):
        if drop_slot(connection, request.slot):
            removed.append(f"replication slot {request.slot}")
        failpoint("teardown.after_slot")
        with translated_errors("cannot drop the capture publications"):
            removed += [f"publication {name}" for name in drop_capture_publications(connection, request.slot)]
        failpoint("teardown.after_publications")
        with translated_errors("cannot drop the event triggers"):
            removed += [f"event trigger {name}" for name in remove_event_triggers(connection, request.slot)]
    if remove_log and ChangeLog.remove(request.change_log):
        removed.append(f"change log {request.change_log}")
    return tuple(removed)


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


def _refresh(
    connection: Connection, catalog: PublisherCatalog, request: SetupRequest, *, dry_run: bool
) -> tuple[str, ...]:
    plans = plan_capture_publications(connection, catalog, request.publications, request.slot)
    if not dry_run:
        for plan in plans:
            _execute(connection, plan)
    return tuple(statement.as_string(connection) for plan in plans for statement in plan.statements)


def _execute(connection: Connection, plan: PublicationPlan) -> None:
    # One transaction: no change may find the publication missing between its drop and its creation.
    with translated_errors(f'cannot set up publication "{plan.name}"'), connection.transaction():
        for statement in plan.statements:
            connection.execute(statement)


def _event_triggers(
    connection: Connection, request: SetupRequest, *, dry_run: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Bring the event triggers to what is wanted; the statements, and a warning if that is not permitted."""
    if request.event_trigger:
        if (foreign := foreign_event_triggers(connection, request.slot)) is not None:
            return (), (f"event triggers are not set up: {foreign} [R9.11]",)
        plan = plan_event_triggers(connection, request.slot, request.publications)
    else:
        plan = plan_removal(connection, request.slot)
    refused = None if dry_run else apply_plan(connection, plan)
    if refused is None:
        return tuple(statement.as_string(connection) for statement in plan), ()
    warning = (
        f"event triggers cannot be set up ({refused}): let a superuser run what `setup --dry-run` prints;"
        " until then a changed definition takes effect from the beginning of the pull that finds it [R9.11]"
    )
    return (), (warning,)


def _check_log(connection: Connection, request: SetupRequest, *, has_slot: bool) -> None:
    """Check that slot and log, where they are there already, belong together."""
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
    """The statements that make what is missing of slot and mark, in order; `slot` is None if it is there."""

    unmark: tuple[sql.Composed, ...] = ()
    slot: sql.Composed | None = None
    mark: tuple[sql.Composed, ...] = ()

    @property
    def statements(self) -> tuple[sql.Composed, ...]:
        return (*self.unmark, *(() if self.slot is None else (self.slot,)), *self.mark)


def _making(connection: Connection, request: SetupRequest, *, has_slot: bool) -> _SetupPlan:
    if not has_slot:
        return _SetupPlan(
            plan_unmark(connection, request.slot),
            create_slot_statement(connection, request.slot, two_phase=request.two_phase),
            (plan_mark(request.slot),),
        )
    if log_mark(connection, request.slot) is not None:
        return _SetupPlan()
    # A setup died before the mark, or the log is older than marks are.
    has_log = ChangeLog.exists(request.change_log)
    start = ChangeLog.open(request.change_log).header.start_lsn if has_log else None
    return _SetupPlan(mark=(plan_mark(request.slot, start),))


def _slot_and_log(
    connection: Connection, request: SetupRequest, making: _SetupPlan
) -> tuple[Lsn, tuple[str, ...]]:
    """Create the slot and the log that are missing; where the log starts, and warnings."""
    slot_created = not slot_exists(connection, request.slot)
    if slot_created:
        # First: if this dies before the new mark, the next setup would take the new slot, which is past the
        # old mark, for one that was read. If it may not be taken back, that is what happens.
        execute_marks(connection, making.unmark)
        create_slot(connection, request.slot, two_phase=request.two_phase)
        logger.info("created replication slot %s of publisher %s", request.slot, request.publisher)
    # Before the log: a log without a mark could be captured to, and then be missed by nobody.
    warnings = execute_marks(connection, making.mark)
    if ChangeLog.exists(request.change_log):
        return ChangeLog.open(request.change_log).header.start_lsn, warnings
    if slot_created:
        start = check_slot(connection, request.slot).confirmed_flush
    else:
        # Again, at the last moment: the log may have been there when everything was checked.
        start = check_unread(connection, request.slot, request.change_log)
    if is_installed(connection, request.slot):
        # Before there is a log: a setup that dies here is completed by the next one.
        emit_full_catalog(connection)
    identity = system_identity(connection)
    header = LogHeader(identity.system_identifier, identity.timeline, request.slot, start, identity.database)
    ChangeLog.create(request.change_log, header)
    logger.info("created the change log of publisher %s at %s", request.publisher, start)
    return start, warnings


def _warnings(connection: Connection, catalog: PublisherCatalog, request: SetupRequest) -> tuple[str, ...]:
    return (
        *_two_phase_warnings(connection, request),
        *_identity_warnings(catalog, request.publications),
        *_root_warnings(connection, catalog, request),
        *_origin_warnings(catalog, request),
    )


def _two_phase_warnings(connection: Connection, request: SetupRequest) -> Iterator[str]:
    if not slot_exists(connection, request.slot):
        return
    found = slot_status(connection, request.slot).two_phase
    if found != request.two_phase:
        yield (
            f'replication slot "{request.slot}" has two_phase = {str(found).lower()}; the configuration says'
            f" {str(request.two_phase).lower()}, which only a new slot can have"
        )


def _root_warnings(connection: Connection, catalog: PublisherCatalog, request: SetupRequest) -> Iterator[str]:
    for name in roots_too_deep(catalog, request.publications):
        yield (
            f"table {name} has more than {ROOT_DEPTHS - 1} ancestors: a TRUNCATE of it, as the published"
            " relation, is not captured [R2.14]"
        )
    late = [name for name in ROOT_PUBLICATIONS if name not in catalog.publications]
    if late and slot_exists(connection, request.slot):
        yield (
            f'publications {", ".join(late)} are younger than replication slot "{request.slot}": run'
            " `cdc-replay capture` before the next TRUNCATE of a partitioned table [R1.19]"
        )


def _origin_warnings(catalog: PublisherCatalog, request: SetupRequest) -> Iterator[str]:
    if request.origin_none and catalog.server_version < ORIGIN_OPTION_SINCE:
        yield (
            "a subscription asks for origin = none: before PostgreSQL 16 the publisher tells the origin of"
            " whole transactions only, so changes with an origin in a local transaction are applied [R8.20]"
        )


def _identity_warnings(catalog: PublisherCatalog, publications: Sequence[str]) -> Iterator[str]:
    """Tables on which UPDATE or DELETE fails, as it does without the capture publications (R2.17)."""
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
        return not any(one.name in members.exceptions for one in family)
    return any(one.name in members.tables or one.name.schema in members.schemas for one in family)
