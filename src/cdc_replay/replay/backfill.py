"""`backfill`: replay a past range of the log again.

| into             | the range is               | and ends with                                              |
|------------------|----------------------------|------------------------------------------------------------|
| the subscriber   | repaired: every row that   | those rows as of the subscriber's applied LSN: no row      |
|                  | it changes is applied      | goes back in time                                          |
| another database | applied as it was          | the state at its end, if the tables held the state at its  |
|                  |                            | start; empty tables get the rows of the range              |

An existing row is overwritten and counted as a conflict; a missing whole row is inserted. Unsent values
(R4.6) are looked for as in a replay, but the range is never extended; if nothing has them, nothing is
applied. A table without a key can go into another database only: its rows cannot be told apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import InvalidConfiguration, InvalidLsn, SubscriberNotReady
from cdc_replay.failpoints import failpoint
from cdc_replay.model.frames import NetKind
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import BackfillResult
from cdc_replay.model.subscription import ConflictPolicy, SubscribedTable, Subscription
from cdc_replay.model.timestamp import parse_timestamp_us
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.replay.apply.session import Applied, ApplyRequest, apply_window
from cdc_replay.replay.compact import (
    WindowFacts,
    as_repair,
    as_upsert,
    fold_frame,
    has_missing_values,
    scan_window,
    without_marks,
)
from cdc_replay.replay.engine import replay_sessions
from cdc_replay.replay.log_window import decode_window, definitions
from cdc_replay.replay.publisher_fence import open_fences
from cdc_replay.replay.route.routes import Route, Routes, Target, plan_routes
from cdc_replay.replay.route.spark_router import Routed, route
from cdc_replay.replay.table_rewrites import rewrites_in
from cdc_replay.replay.toast import ChangeHistory, resolve_values
from cdc_replay.replay.toast.sources import ToastSources
from cdc_replay.replay.toast.window import PublisherAccess
from cdc_replay.replay.unsubscribed_tables import tables_renamed_to
from cdc_replay.spark.errors import translated_spark_errors
from cdc_replay.spark.progress import report_tasks
from cdc_replay.spark.session import spark_session, tune_for
from cdc_replay.subscriber import state_schema, subscription_lock, subscription_records
from cdc_replay.subscriber.as_owner import has_rows
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.target_checks import check_targets
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_SLOT_OF_LOG: Final = """
    select from pg_replication_slots, pg_control_system()
    where slot_name = %s and database = current_database() and system_identifier::text = %s
"""


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where the range goes; its progress is kept under the subscription's name meanwhile."""

    subscription: Subscription
    dsn: str


@dataclass(frozen=True, slots=True)
class _BackfillRange:
    """A range to apply: `read_window` of the log, and the `wanted` part of it whose rows are applied.

    A row of the tables in `whole` is inserted if an UPDATE has all of it and matches none.
    """

    change_log: ChangeLog
    read_window: Window
    wanted: Window
    routes: Routes
    whole: tuple[SubscribedTable, ...]
    destination: _Destination
    publisher: PublisherAccess
    is_repair: bool


def backfill_range(
    source: CaptureSource,
    session: SubscriptionSession,
    wanted: Window,
    *,
    into: str | None = None,
    dry_run: bool = False,
) -> BackfillResult:
    """Apply the transactions of a range again; with `dry_run` only count what would be applied.

    Args:
        source: the publisher.
        session: the subscription, whose publications select the changes.
        wanted: the range, which the log holds.
        into: DSN of another database; default: the subscriber.
        dry_run: read and compact the range, write nothing.

    Raises:
        InvalidConfiguration: if the range is not applied yet.
        SubscriberNotReady: if a table or column is missing at the destination.
        UnchangedToastLost: if a row of the range lacks a value that nothing has any more (R4.6).
    """
    began = time.monotonic()
    change_log = ChangeLog.open(source.change_log)
    is_repair = into is None
    name = session.subscription.name
    read = Window(wanted.after, _common_applied_lsn(source, session, wanted)) if is_repair else wanted
    with _open_destination(session, change_log, into) as destination, open_fences(source) as fences:
        routes, targets = _plan_routes(change_log, session, destination, read)
        whole = _tables_to_upsert(routes, targets, destination, is_repair=is_repair)
        publisher = PublisherAccess(source, fences)
        backfill = _BackfillRange(change_log, read, wanted, routes, whole, destination, publisher, is_repair)
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
        raise InvalidConfiguration(f"the range {window} is empty", hint="`--from` must be before `--to`.")
    change_log.check_holds(window)
    if window.after < whole.after or window.upto > whole.upto:
        raise InvalidConfiguration(
            f"the range {window} is not in the change log", detail=f"The log holds {whole}."
        )
    return window


def _parse_position(change_log: ChangeLog, text: str, before_all: Lsn) -> Lsn:
    try:
        return Lsn.parse(text)
    except InvalidLsn:
        time_us = parse_timestamp_us(text)
    whole = Window(change_log.start_lsn, change_log.end_lsn)
    before = (commit.commit_lsn for commit in change_log.commits(whole) if commit.commit_time <= time_us)
    return max(before, default=before_all)


def _common_applied_lsn(source: CaptureSource, session: SubscriptionSession, wanted: Window) -> Lsn:
    """The applied LSN of all tables, after a replay if they differ."""
    applied_lsns = set(session.ready_tables().values())
    if len(applied_lsns) > 1:
        (result,) = replay_sessions(source, [session])
        if result.error is not None:
            raise SubscriberNotReady(
                f'subscription "{session.subscription.name}" cannot be replayed', detail=result.error
            )
        applied_lsns = set(session.ready_tables().values())
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


@contextlib.contextmanager
def _open_destination(
    session: SubscriptionSession, change_log: ChangeLog, into: str | None
) -> Iterator[_Destination]:
    """The subscriber, or another database with temporary state of its own."""
    policy = dataclasses.replace(session.subscription, on_conflict=ConflictPolicy.OVERWRITE)
    if into is None:
        yield _Destination(policy, session.dsn)
        return
    name = f"{session.subscription.name} backfill"
    with connect(into, purpose=f"backfill {session.subscription.name}") as connection:
        if subscription_records.subscription_record(connection, session.subscription.name) is not None:
            raise InvalidConfiguration(
                f'the destination is the subscriber of subscription "{session.subscription.name}"',
                hint="Leave out `--into` to repair it.",
            )
        identifier = change_log.header.system_identifier
        if _is_publisher(connection, change_log.header):
            raise InvalidConfiguration(
                f'the destination is the publisher "{session.subscription.publisher}" itself',
                detail="Its rows would go back in time, and that would be captured for all subscriptions.",
                hint="Give another database.",
            )
        state_schema.install(connection)
        with subscription_lock.lock(connection, name):
            database = change_log.header.database
            subscription_records.bind_subscription(
                connection, name, identifier, policy.publications, database
            )
            failpoint("backfill.after_state")
            try:
                yield _Destination(dataclasses.replace(policy, name=name), into)
            finally:
                subscription_records.remove_subscription(connection, name)


def _is_publisher(connection: Connection, header: LogHeader) -> bool:
    slots = connection.execute(_SLOT_OF_LOG, (header.slot, header.system_identifier)).fetchall()
    return bool(slots)


def _plan_routes(
    change_log: ChangeLog, session: SubscriptionSession, destination: _Destination, window: Window
) -> tuple[Routes, dict[QualifiedName, TargetTable]]:
    defined = definitions(change_log, window)
    _check_not_rewritten(change_log, session, window)
    names = tuple(session.ready_tables())
    with connect(destination.dsn, purpose=f"backfill {session.subscription.name}") as connection:
        run_as_owner = session.subscription.run_as_owner
        targets = read_target_tables(connection, names, run_as_owner=run_as_owner)
    wanted = {name: Target.from_table(targets.get(name), window.after) for name in names}
    renamed = tables_renamed_to(change_log, window.after, names)
    routes = plan_routes(defined, session.subscription.publications, wanted, renamed)
    check_targets({table.name: table.columns for table in routes.tables}, targets)
    return routes, targets


def _check_not_rewritten(change_log: ChangeLog, session: SubscriptionSession, window: Window) -> None:
    rewrites = rewrites_in(change_log, window, change_log.summary(window))
    tables = sorted(set(rewrites.published(session.subscription.publications)) & set(session.table_states()))
    if tables:
        raise SubscriberNotReady(
            f"the publisher has rewritten {', '.join(map(str, tables))} in that range",
            detail="A rewrite sends no changes: the log does not have the rows' new values.",
            hint="Choose a range that ends before it, or copy the tables again with"
            f" `cdc-replay snapshot {session.subscription.name} --table`.",
            rule="R11.9",
        )


def _tables_to_upsert(
    routes: Routes,
    targets: Mapping[QualifiedName, TargetTable],
    destination: _Destination,
    *,
    is_repair: bool,
) -> tuple[SubscribedTable, ...]:
    """The tables where an UPDATE that was sent proves that the row exists, or that are to be filled.

    If UPDATEs of rows are published whose INSERT is not (another filter, or another publish action), an
    UPDATE that matches no row is skipped, as natively (R3.5, R8.4).

    Raises:
        SubscriberNotReady: if a table that is to be repaired has no key.
    """
    keyless = [str(table.name) for table in routes.tables if not table.has_own_key]
    if is_repair and keyless:
        raise SubscriberNotReady(
            f"rows without a key cannot be repaired: {', '.join(keyless)}",
            hint="Copy these tables again with `cdc-replay snapshot --table`.",
        )
    unproven = {route.target.index for route in routes.routes if not _updates_prove_rows(route)}
    if is_repair or not unproven:
        return tuple(table for table in routes.tables if table.index not in unproven)
    with connect(destination.dsn, purpose=f"backfill {destination.subscription.name}") as connection:
        return tuple(
            table
            for table in routes.tables
            if table.index not in unproven or not has_rows(connection, targets[table.name])
        )


def _updates_prove_rows(planned_route: Route) -> bool:
    published = planned_route.published
    insert_filters = published.filters[PublishAction.INSERT]
    is_as_wide = insert_filters is None or insert_filters == published.filters[PublishAction.UPDATE]
    return PublishAction.INSERT in published.actions and is_as_wide


def _apply(backfill: _BackfillRange, *, dry_run: bool) -> tuple[dict[str, int], Applied]:
    """The routing's counts, and what was applied or, in a dry run, would be."""
    if not backfill.routes.routes:
        return {}, Applied()
    spark = spark_session("cdc-replay")
    tune_for(spark, backfill.change_log.summary(backfill.read_window).messages)
    changes = decode_window(spark, backfill.change_log, backfill.read_window)
    routed_range = _route_range(backfill, changes)
    if not routed_range.facts.unsent or dry_run:
        return _apply_routed(backfill, routed_range, dry_run=dry_run)
    for history, is_last in _toast_sources(backfill, changes, routed_range.facts):
        entries = [(commit_lsn, seq) for _, commit_lsn, seq in routed_range.facts.unsent]
        with resolve_values(history, entries) as values:
            completed = _route_range(backfill, values.merge_into(changes))
            if is_last or values.unknown == 0 or not has_missing_values(completed.net):
                return _apply_routed(backfill, completed, dry_run=False)
    raise AssertionError("the last history is the last")


def _toast_sources(
    backfill: _BackfillRange, changes: DataFrame, facts: WindowFacts
) -> Iterator[tuple[ChangeHistory, bool]]:
    """Where to look for unsent values, and whether that is the last one."""
    sources, spark = ToastSources(backfill.change_log.uri, backfill.routes, facts), changes.sparkSession
    yield sources.in_window(changes, backfill.read_window), False
    fence = backfill.publisher.fences.fence_for(backfill.read_window)
    yield sources.at_fence(spark, fence, backfill.read_window.after), False
    yield sources.at_fence_with_whole_log(spark, fence, backfill.read_window.after), True


@dataclass(frozen=True, slots=True)
class _RoutedRange:
    routed: Routed
    facts: WindowFacts
    net: DataFrame


def _route_range(backfill: _BackfillRange, changes: DataFrame) -> _RoutedRange:
    subscription = backfill.destination.subscription
    routed = route(
        changes, backfill.routes, origin=subscription.origin, publisher_dsn=backfill.publisher.source.dsn
    )
    touched = _changes_of_touched_rows(routed.changes, backfill.wanted, backfill.read_window)
    facts = scan_window(touched)
    net = fold_frame(
        touched, facts, backfill.routes.tables, backfill.read_window, policy=subscription.on_conflict
    )
    net = without_marks(net)
    if backfill.is_repair:
        net = as_repair(net, _keys(touched), backfill.routes.tables, backfill.whole)
    else:
        net = as_upsert(net, backfill.whole)
    return _RoutedRange(routed, facts, net)


def _apply_routed(
    backfill: _BackfillRange, routed_range: _RoutedRange, *, dry_run: bool
) -> tuple[dict[str, int], Applied]:
    truncations = routed_range.facts.truncations
    if dry_run:
        applied = _count_changes(routed_range.net, len(truncations))
        return routed_range.routed.counts.get, applied
    destination = backfill.destination
    request = ApplyRequest(
        destination.subscription, destination.dsn, backfill.routes.tables, backfill.read_window.upto
    )
    applied = apply_window(routed_range.net, request, truncations)
    return routed_range.routed.counts.get, applied


def _changes_of_touched_rows(routed: DataFrame, wanted: Window, read: Window) -> DataFrame:
    """All changes of the rows that the wanted part of the range touches, under any of their keys.

    A later TRUNCATE has emptied the table since: then everything after it belongs to the range.
    """
    if read == wanted:
        return routed
    later = F.col("commit_lsn") > wanted.upto.value
    keys = _keys(routed.where(~later))
    truncated = routed.where(later & (F.col("kind") == "T")).select("target").distinct()
    while True:
        touched = _with_keys(routed, keys)
        more = _keys(touched)
        if more.count() == keys.count():
            break
        keys = more.localCheckpoint()
    emptied = F.broadcast(truncated.withColumnRenamed("target", "emptied"))
    truncated_changes = routed.join(emptied, F.col("target") == F.col("emptied"), "left_semi")
    unaffected = touched.join(emptied, F.col("target") == F.col("emptied"), "left_anti")
    return unaffected.unionByName(truncated_changes)


def _keys(changes: DataFrame) -> DataFrame:
    both = F.explode(F.array_compact(F.array("search_key", "new_key")))
    return changes.select("target", both.alias("key")).distinct()


def _with_keys(routed: DataFrame, keys: DataFrame) -> DataFrame:
    selected = keys.select(F.col("target").alias("known_target"), F.col("key").alias("known_key"))
    same = (F.col("target") == F.col("known_target")) & (
        (F.col("search_key") == F.col("known_key")) | (F.col("new_key") == F.col("known_key"))
    )
    rows = routed.where(F.col("kind") != "T").join(selected, same, "left_semi")
    return rows.unionByName(routed.where(F.col("kind") == "T"))


def _count_changes(net: DataFrame, truncations: int) -> Applied:
    counts = {row["kind"]: row["count"] for row in net.groupBy("kind").count().collect()}
    return Applied(
        insert=counts.get(NetKind.INSERT.value, 0),
        update=counts.get(NetKind.UPDATE.value, 0),
        delete=counts.get(NetKind.DELETE.value, 0),
        truncate=truncations,
    )
