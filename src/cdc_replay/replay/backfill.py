"""`backfill`: replay a past range of the log again.

| into             | the range is               | and ends with                                              |
|------------------|----------------------------|------------------------------------------------------------|
| the subscriber   | repaired: every row that   | those rows as of the subscriber's applied LSN: no row      |
|                  | it changes is applied      | goes back in time                                          |
| another database | applied as it was          | the state at its end, if the tables held the state at its  |
|                  |                            | start; empty tables get the rows of the range              |

An existing row is overwritten and counted as a conflict. A missing whole row is inserted if it is to be
repaired, or if its table is empty. Unsent values (R4.6) are looked for as in a replay, but the range is never
extended; if nothing has them, nothing is applied. A table without a key can go into another database only:
its rows cannot be told apart.

A choice of tables is a choice of routes: a change of another table is never routed, a TRUNCATE of several
tables truncates the chosen ones, and foreign keys are not checked, as in a native apply worker (R8.13).
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.compare.other_feeds import other_feeds
from cdc_replay.errors import CdcReplayError, InvalidConfiguration, InvalidLsn, SubscriberNotReady
from cdc_replay.failpoints import failpoint
from cdc_replay.model.frames import NetKind
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import BackfillResult
from cdc_replay.model.subscription import ConflictPolicy, OriginPolicy, SubscribedTable, Subscription
from cdc_replay.model.suggestion import did_you_mean
from cdc_replay.model.table_state import Ready, TableState
from cdc_replay.model.timestamp import parse_timestamp_us, timestamp_text
from cdc_replay.postgres.advisory_locks import FixedLock, holders
from cdc_replay.postgres.connection import Connection, connect, translated_errors
from cdc_replay.replay.apply.session import Applied, ApplyRequest, open_apply_session
from cdc_replay.replay.apply.staging import Stager
from cdc_replay.replay.compact import NullRule, Repair, Revision, Upsert, WindowFacts
from cdc_replay.replay.engine import replay_sessions
from cdc_replay.replay.log_window import definitions
from cdc_replay.replay.other_origins import last_of_other_origins
from cdc_replay.replay.publisher_fence import open_fences
from cdc_replay.replay.route.routes import NOT_RENAMED, Routes, Target, plan_routes
from cdc_replay.replay.routing_groups import window_job
from cdc_replay.replay.sent_rows import tables_with_every_row
from cdc_replay.replay.table_rewrites import first_rewrites, rewrites_in
from cdc_replay.replay.toast import ChangeHistory
from cdc_replay.replay.toast.sources import ToastSources
from cdc_replay.replay.toast.window import PublisherAccess, stage_with_values
from cdc_replay.replay.unsubscribed_tables import tables_renamed_to
from cdc_replay.replay.window_job import RoutingGroup, StagedGroup, WindowJob
from cdc_replay.spark.errors import translated_spark_errors
from cdc_replay.spark.progress import report_tasks
from cdc_replay.subscriber import state_schema, subscription_lock, subscription_records
from cdc_replay.subscriber.as_owner import has_rows
from cdc_replay.subscriber.copy_definitions import read_copy_definitions
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.target_checks import check_targets
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables

_IS_DATABASE_OF_LOG: Final = """
    select system_identifier::text = %s and database.oid = %s
    from pg_control_system(), pg_database as database
    where datname = current_database()
"""

_IS_STANDBY: Final = "select pg_is_in_recovery()"

_KEY_BITS: Final = 63

_DROPPED_SINCE: Final = (
    "If a column was dropped on both sides since, choose a range that begins after that, or other tables with"
    " `--table`."
)


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where the range goes; its progress is kept under the subscription's name meanwhile."""

    subscription: Subscription
    dsn: str
    is_subscriber: bool


@dataclass(frozen=True, slots=True)
class _BackfillRange:
    """A range to apply: `read_window` of the log, of which `revision` takes what is wanted."""

    change_log: ChangeLog
    read_window: Window
    routes: Routes
    revision: Revision
    destination: _Destination
    publisher: PublisherAccess
    shared: Mapping[int, str]
    """By target that is repaired, another subscription that feeds it."""


def backfill_range(
    source: CaptureSource,
    session: SubscriptionSession,
    wanted: Window,
    *,
    tables: Sequence[QualifiedName] = (),
    into: str | None = None,
    dry_run: bool = False,
) -> BackfillResult:
    """Apply the transactions of a range again; with `dry_run` only count what would be applied.

    Args:
        source: the publisher.
        session: the subscription, whose publications select the changes.
        wanted: the range, which the log holds.
        tables: only these, by their names on the subscriber; default: all.
        into: DSN of another database; default: the subscriber.
        dry_run: read and compact the range, write nothing.

    Raises:
        InvalidConfiguration: if the range is not applied yet, or a chosen table is not known.
        SubscriberNotReady: if a chosen table is not ready, the destination lacks a table or column, or rows
            that can be those of another subscription would be deleted.
        UnchangedToastLost: if a row of the range lacks a value that nothing has any more (R4.6).
    """
    began = time.monotonic()
    change_log = ChangeLog.open(source.change_log)
    is_repair = into is None
    name = session.subscription.name
    states = session.table_states()
    chosen = choose_tables(name, states, tables)
    read = wanted
    if is_repair:
        upto = _common_applied_lsn(source, session, chosen, wanted, dry_run=dry_run)
        read = Window(wanted.after, upto)
    with (
        _open_destination(source, session, change_log, into) as destination,
        open_fences(source) as fences,
    ):
        backfill = _plan_range(session, wanted, read, chosen, destination, PublisherAccess(source, fences))
        with (
            translated_spark_errors(f'backfill of subscription "{name}"'),
            report_tasks(session.report, "backfill", name),
        ):
            counts, applied = _apply(backfill, dry_run=dry_run)
    summary = change_log.summary(wanted)
    return BackfillResult(
        subscription=name,
        from_lsn=wanted.after,
        to_lsn=wanted.upto,
        seconds=time.monotonic() - began,
        changes_read=summary.messages,
        transactions=summary.transactions,
        filtered_out=counts.get("filtered_out", 0),
        updates_to_insert=counts.get("updates_to_insert", 0),
        updates_to_delete=counts.get("updates_to_delete", 0),
        applied=applied.counts,
        conflicts=dict(applied.conflicts),
        dry_run=dry_run,
        tables=tuple(map(str, dict.fromkeys(tables))),
        left_out=() if tables else tuple(map(str, sorted(states.keys() - chosen))),
    )


def parse_range(change_log: ChangeLog, start: str, to: str) -> Window:
    """The range between two WAL positions or timestamps.

    Raises:
        InvalidConfiguration: if it is empty, or reaches beyond the log.
        ChangeLogPruned: if its start was pruned from the log.
    """
    # A time before the first transaction is the start of the log, which may be pruned.
    first = _parse_position(change_log, start, change_log.header.start_lsn)
    window = Window(first, _parse_position(change_log, to, change_log.start_lsn))
    whole = Window(change_log.header.start_lsn, change_log.end_lsn)
    if window.is_empty:
        raise InvalidConfiguration(
            f"the range {window} is empty",
            detail=f"The log holds {describe_log(change_log)}.",
            hint="`--from` must be before `--to`, with a transaction of the log between them.",
        )
    change_log.check_holds(window)
    if window.after < whole.after or window.upto > whole.upto:
        raise InvalidConfiguration(
            f"the range {window} is not in the change log",
            detail=f"The log holds {describe_log(change_log)}.",
        )
    return window


def describe_log(change_log: ChangeLog) -> str:
    """What the log holds, as WAL positions and times of commits: the bounds of a range."""
    window = Window(change_log.start_lsn, change_log.end_lsn)
    if (times := change_log.commit_times()) is None:
        return f"{window}, and no transaction"
    first, last = map(timestamp_text, times)
    return f"{window}, committed from {first} to {last}"


def _parse_position(change_log: ChangeLog, text: str, before_all: Lsn) -> Lsn:
    try:
        return Lsn.parse(text)
    except InvalidLsn:
        time_us = parse_timestamp_us(text)
    whole = Window(change_log.start_lsn, change_log.end_lsn)
    before = (commit.commit_lsn for commit in change_log.commits(whole) if commit.commit_time <= time_us)
    return max(before, default=before_all)


def choose_tables(
    subscription: str, states: Mapping[QualifiedName, TableState], tables: Collection[QualifiedName]
) -> frozenset[QualifiedName]:
    """The tables to backfill: those named, or all that are ready.

    Raises:
        InvalidConfiguration: if the subscription does not have one of them.
        SubscriberNotReady: if one of them is not ready: its rows are not those of an applied LSN.
    """
    if unknown := [str(table) for table in tables if table not in states]:
        raise InvalidConfiguration(
            f'subscription "{subscription}" has no table {", ".join(unknown)}',
            detail=f"It has: {', '.join(map(str, sorted(states))) or 'none'}.",
            hint=did_you_mean(unknown[0], map(str, states)),
        )
    if waiting := [str(table) for table in tables if not isinstance(states[table], Ready)]:
        raise SubscriberNotReady(
            f'table {", ".join(waiting)} of subscription "{subscription}" is not ready',
            hint=f"`cdc-replay status {subscription}` shows what it waits for.",
        )
    return frozenset(tables or (table for table, state in states.items() if isinstance(state, Ready)))


def _common_applied_lsn(
    source: CaptureSource,
    session: SubscriptionSession,
    chosen: Collection[QualifiedName],
    wanted: Window,
    *,
    dry_run: bool,
) -> Lsn:
    """The applied LSN of the chosen tables, after a replay if they differ; a dry run takes it for granted."""
    applied_lsns = _applied_lsns(session, chosen)
    if len(applied_lsns) > 1 and dry_run:
        end_lsn = ChangeLog.open(source.change_log).end_lsn
        applied_lsns = {max(lsn, end_lsn) for lsn in applied_lsns}
    elif len(applied_lsns) > 1:
        (result,) = replay_sessions(source, [session])
        if result.error is not None:
            raise SubscriberNotReady(
                f'subscription "{session.subscription.name}" cannot be replayed', detail=result.error
            )
        applied_lsns = _applied_lsns(session, chosen)
    if len(applied_lsns) > 1:
        # A row of a table that was copied after the end of the log would go back in time.
        raise SubscriberNotReady(
            f'tables of subscription "{session.subscription.name}" are ahead of the change log',
            detail=f"They have reached {', '.join(map(str, sorted(applied_lsns)))}.",
            hint=f"Run `cdc-replay sync {session.subscription.name}` first.",
        )
    applied = min(applied_lsns, default=wanted.after)
    if applied < wanted.upto:
        raise InvalidConfiguration(
            f"the range {wanted} is not applied yet",
            detail=f'Subscription "{session.subscription.name}" is at {applied}.',
            hint="Run `cdc-replay replay`: what is not applied yet needs no backfill.",
        )
    return applied


def _applied_lsns(session: SubscriptionSession, chosen: Collection[QualifiedName]) -> set[Lsn]:
    return {lsn for table, lsn in session.ready_tables().items() if table in chosen}


@contextlib.contextmanager
def _open_destination(
    source: CaptureSource, session: SubscriptionSession, change_log: ChangeLog, into: str | None
) -> Iterator[_Destination]:
    """The subscriber, or another database with temporary state of its own."""
    policy = dataclasses.replace(session.subscription, on_conflict=ConflictPolicy.OVERWRITE)
    if into is None:
        yield _Destination(policy, session.dsn, is_subscriber=True)
        return
    name = f"{session.subscription.name} backfill"
    with connect(into, purpose=f"backfill {session.subscription.name}") as connection:
        if subscription_records.subscription_record(connection, session.subscription.name) is not None:
            raise InvalidConfiguration(
                f'the destination is the subscriber of subscription "{session.subscription.name}"',
                hint="Leave out `--into` to repair it.",
            )
        identifier = change_log.header.system_identifier
        if _is_publisher(connection, source, change_log.header):
            raise InvalidConfiguration(
                f'the destination is the publisher "{session.subscription.publisher}" itself',
                detail="Its rows would go back in time, and that would be captured for all subscriptions.",
                hint="Give another database. A copy of the publisher's server is accepted while the publisher"
                " can be reached.",
            )
        state_schema.install(connection)
        with subscription_lock.lock(connection, name):
            database = change_log.header.database
            subscription_records.bind_subscription(
                connection, name, identifier, policy.publications, database
            )
            failpoint("backfill.after_state")
            try:
                yield _Destination(dataclasses.replace(policy, name=name), into, is_subscriber=False)
            finally:
                subscription_records.remove_subscription(connection, name)


def _is_publisher(destination: Connection, source: CaptureSource, header: LogHeader) -> bool:
    """Whether the destination is the database of the log, or that of the publisher's DSN.

    The slot does not identify it: it is gone once it was lost, and on a promoted standby. A copy of the
    server has the same system identifier; a lock of the publisher tells it from the publisher, unless the
    publisher cannot be asked, or is a standby, to which the destination may be the primary.
    """
    values = (header.system_identifier, header.database.oid)
    ((is_database_of_log,),) = destination.execute(_IS_DATABASE_OF_LOG, values)
    key = secrets.randbits(_KEY_BITS)
    try:
        with (
            translated_errors(f'cannot lock a key on publisher "{source.publisher}"'),
            connect(source.dsn, purpose=f"backfill {source.publisher}") as publisher,
        ):
            FixedLock(publisher, key).try_acquire()
            ((is_standby,),) = publisher.execute(_IS_STANDBY)
            return bool(holders(destination, (key,)) or (is_standby and is_database_of_log))
    except CdcReplayError:
        return bool(is_database_of_log)


def _plan_routes(
    change_log: ChangeLog,
    session: SubscriptionSession,
    destination: _Destination,
    since: Mapping[QualifiedName, Lsn],
    window: Window,
) -> tuple[Routes, dict[QualifiedName, TargetTable]]:
    defined = definitions(change_log, window)
    _check_not_rewritten(change_log, session, destination, since, window)
    names = tuple(name for name in session.ready_tables() if name in since)
    with connect(destination.dsn, purpose=f"backfill {session.subscription.name}") as connection:
        run_as_owner = session.subscription.run_as_owner
        targets = read_target_tables(connection, names, run_as_owner=run_as_owner)
    wanted = {name: Target.from_table(targets.get(name), since[name]) for name in names}
    # All names: one that another table of the subscription has now is no former name of a chosen table.
    renamed = tables_renamed_to(change_log, window.after, tuple(session.ready_tables()))
    routes = plan_routes(defined, session.subscription.publications, wanted, renamed)
    check_targets({table.name: table.columns for table in routes.tables}, targets, advice=_DROPPED_SINCE)
    return routes, targets


def _check_not_rewritten(
    change_log: ChangeLog,
    session: SubscriptionSession,
    destination: _Destination,
    since: Mapping[QualifiedName, Lsn],
    window: Window,
) -> None:
    rewrites = rewrites_in(change_log, window, change_log.summary(window))
    tables = sorted(first_rewrites(since, rewrites, session.subscription.publications, NOT_RENAMED))
    if tables:
        is_repair, name = destination.is_subscriber, session.subscription.name
        begins_after = f"begins after it, or other tables, or first run `cdc-replay snapshot {name} --table`"
        raise SubscriberNotReady(
            f"the publisher has rewritten {', '.join(map(str, tables))} in that range"
            + (" or since" if is_repair else ""),
            detail="A rewrite sends no changes: the log does not have the rows' new values.",
            hint=f"Choose a range that {begins_after if is_repair else 'ends before it, or other tables'}.",
            rule="R11.9",
        )


def _plan_range(
    session: SubscriptionSession,
    wanted: Window,
    read: Window,
    chosen: Collection[QualifiedName],
    destination: _Destination,
    publisher: PublisherAccess,
) -> _BackfillRange:
    """What the range becomes in its destination.

    Raises:
        SubscriberNotReady: if a table was rewritten, or is to be repaired and has no key, or with
            `origin: none` changes of others.
        TargetMismatch: if a table cannot receive the range.
    """
    change_log = ChangeLog.open(publisher.source.change_log)
    since = dict.fromkeys(chosen, read.after)
    if not destination.is_subscriber:
        routes, targets = _plan_routes(change_log, session, destination, since, read)
        fill = Upsert(_empty_tables(routes, targets, destination))
        return _BackfillRange(change_log, read, routes, fill, destination, publisher, {})
    copied = read_copy_definitions(session.connection, session.subscription.name)
    # A copy is newer than the changes before it, which may have reached it in another way or not at all.
    since |= {table: max(read.after, copied[table].lsn) for table in copied.keys() & since.keys()}
    routes, _ = _plan_routes(change_log, session, destination, since, read)
    _check_keys(routes, session.subscription)
    _check_origins(change_log, session.subscription, routes, since, read)
    names = tuple(session.ready_tables())
    whole = tables_with_every_row(change_log, session.subscription, routes, copied, names, read.upto)
    repair = Repair(wanted.upto, {table.index: table for table in routes.tables}, whole)
    feeds = other_feeds(session, (table.name for table in routes.tables))
    shared = {table.index: feeds[table.name][0] for table in routes.tables if table.name in feeds}
    return _BackfillRange(change_log, read, routes, repair, destination, publisher, shared)


def _check_keys(routes: Routes, subscription: Subscription) -> None:
    """Check that rows that are to be repaired can be told apart.

    Raises:
        SubscriberNotReady: if a table has no key.
    """
    if keyless := [str(table.name) for table in routes.tables if not table.has_own_key]:
        raise SubscriberNotReady(
            f"rows without a key cannot be repaired: {', '.join(keyless)}",
            hint="Choose the other tables with `--table`, and copy these again with"
            f" `cdc-replay snapshot {subscription.name} --table`.",
        )


def _check_origins(
    change_log: ChangeLog,
    subscription: Subscription,
    routes: Routes,
    since: Mapping[QualifiedName, Lsn],
    window: Window,
) -> None:
    """Check that the rows to repair hold no changes but the publisher's own.

    Raises:
        SubscriberNotReady: if with `origin: none` the log has others, which are in no row that is written.
    """
    if subscription.origin is not OriginPolicy.NONE:
        return
    last = last_of_other_origins(change_log, window)
    truncated = last.get(None, ZERO)
    tables: dict[QualifiedName, Lsn] = {}
    for route in routes.routes:  # of a partition tree, one for each leaf
        name, lsn = route.target.name, max(last.get(route.relation.id, ZERO), truncated)
        if lsn > since[name]:
            tables[name] = max(lsn, tables.get(name, ZERO))
    if tables:
        names = ", ".join(map(str, sorted(tables)))
        raise SubscriberNotReady(
            f"rows of {names} cannot be repaired: the log has changes of another origin after {window.after}",
            detail="With origin: none they are not applied from the log. Rows that were written on the"
            " subscriber would return to what the publisher had made of them before.",
            hint=f"Choose a range that begins after {max(tables.values())}, or other tables with `--table`.",
            rule="R8.19",
        )


def _empty_tables(
    routes: Routes, targets: Mapping[QualifiedName, TargetTable], destination: _Destination
) -> dict[int, SubscribedTable]:
    """The tables that are to be filled; others hold what was there before the range.

    There an UPDATE that matches no row is skipped, as natively (R8.4), and one that moves a row leaves the
    row's other columns alone.
    """
    with connect(destination.dsn, purpose=f"backfill {destination.subscription.name}") as connection:
        return {
            table.index: table for table in routes.tables if not has_rows(connection, targets[table.name])
        }


def _apply(backfill: _BackfillRange, *, dry_run: bool) -> tuple[dict[str, int], Applied]:
    """The routing's counts, and what was applied or, in a dry run, would be."""
    routes, destination = backfill.routes, backfill.destination
    if not routes.routes:
        return {}, Applied()
    subscription = destination.subscription
    group = RoutingGroup(
        routes, subscription.origin, subscription.on_conflict, (), revision=backfill.revision
    )
    job = window_job(backfill.change_log, backfill.read_window, backfill.publisher.source.dsn)
    if dry_run:
        return _count(backfill, job, group)
    request = ApplyRequest(
        subscription,
        destination.dsn,
        routes.tables,
        backfill.read_window.upto,
        repairs=destination.is_subscriber,
        shared={
            table.name: backfill.shared[table.index]
            for table in routes.tables
            if table.index in backfill.shared
        },
    )
    with open_apply_session(request) as session:
        stagers = (Stager.of(session.tables, destination.dsn),)
        staged, facts = _stage(backfill, job, dataclasses.replace(group, stagers=stagers))
        _check_truncations(backfill, facts)
        failpoint("replay.after_staging")
        (tables,) = staged.staged
        if isinstance(tables, CdcReplayError):
            raise tables
        return dict(staged.facts.counts), session.apply(tables, facts.truncations)


def _count(backfill: _BackfillRange, job: WindowJob, group: RoutingGroup) -> tuple[dict[str, int], Applied]:
    (counted,) = job.stage([group])
    facts = counted.facts.window_facts()
    _check_truncations(backfill, facts)
    if facts.unsent:
        (counted,) = job.stage([dataclasses.replace(group, facts=facts)])
    net = counted.facts.net
    inserts, updates, deletes = (net[kind.value] for kind in (NetKind.INSERT, NetKind.UPDATE, NetKind.DELETE))
    return dict(counted.facts.counts), Applied(inserts, updates, deletes, len(facts.truncations))


def _check_truncations(backfill: _BackfillRange, facts: WindowFacts) -> None:
    """Check that the rows that a repeated TRUNCATE would delete cannot be those of other subscriptions.

    Raises:
        SubscriberNotReady: if they can.
    """
    names = {table.index: table.name for table in backfill.routes.tables}
    for truncation in facts.truncations:
        if (feed := backfill.shared.get(truncation.target)) is not None:
            raise SubscriberNotReady(
                f"table {names[truncation.target]} was truncated after {backfill.read_window.after}, and"
                f' subscription "{feed}" feeds it, too',
                detail="Its rows cannot be told from those that the TRUNCATE has deleted.",
                hint="Choose a range that begins after the TRUNCATE, or other tables with `--table`.",
            )


def _stage(backfill: _BackfillRange, job: WindowJob, group: RoutingGroup) -> tuple[StagedGroup, WindowFacts]:
    """What is staged of the range, with unsent values as far as they are found, and the range's facts."""
    (staged,) = job.stage([group])
    facts = staged.facts.window_facts()
    if facts.unsent:
        for history, is_last in _toast_sources(backfill, job, facts):
            nulls = NullRule(backfill.read_window, facts.unsent_targets)
            staged, unknown = stage_with_values(job, group, facts, history, nulls)
            if is_last or unknown == 0 or staged.facts.missing.rows == 0:
                break
    return staged, facts


def _toast_sources(
    backfill: _BackfillRange, job: WindowJob, facts: WindowFacts
) -> Iterator[tuple[ChangeHistory, bool]]:
    """Where to look for unsent values, and whether that is the last one."""
    sources = ToastSources(job.session, backfill.change_log.uri, backfill.routes, facts)
    yield sources.in_window(backfill.read_window), False
    fence = backfill.publisher.fences.fence_for(backfill.read_window)
    yield sources.at_fence(fence, backfill.read_window.after), False
    yield sources.at_fence_with_whole_log(fence, backfill.read_window.after), True
