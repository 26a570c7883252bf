"""`replay`: apply the change log to subscribers, one transaction per subscription and window.

Several subscriptions share one read and one decode of the log. What one of them cannot apply stops that one
only: its error is in its result and in its state, its rows and its LSN are as they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
from pyspark import StorageLevel

from cdc_replay.apply.window import Applied, ApplyRequest, advance_only, apply_window
from cdc_replay.catalog.history import CatalogHistory, catalog_from_json
from cdc_replay.changelog.log import ChangeLog, LogSummary
from cdc_replay.commands.opened import Opened, opened
from cdc_replay.commands.results import ReplayResult
from cdc_replay.commands.spark_errors import translated_spark_errors
from cdc_replay.compact import net_changes, survey
from cdc_replay.config import Config, PublisherConfig
from cdc_replay.decode import decode
from cdc_replay.errors import CdcReplayError, ChangeLogMissing, InvalidConfiguration, SubscriberNotReady
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName, Relation
from cdc_replay.postgres.connection import Connection
from cdc_replay.route.router import Routed, route
from cdc_replay.route.routes import Routes, Target, plan_routes
from cdc_replay.spark_session import spark_session, tune_for
from cdc_replay.subscriber import state
from cdc_replay.subscriber.tables import check_targets, read_target_tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)


def replay(
    config: Config, subscriptions: Sequence[str], *, to_lsn: Lsn | None = None
) -> tuple[ReplayResult, ...]:
    """Apply the log up to `to_lsn` (default: its end); one result per subscription, in the given order.

    Raises:
        InvalidConfiguration: if the subscriptions have different publishers.
        ChangeLogMissing: if there is no log, or it ends before `to_lsn`.
    """
    publisher = common_publisher(config, subscriptions)
    results: dict[str, ReplayResult] = {}
    with contextlib.ExitStack() as stack:
        at_work: list[Opened] = []
        for name in subscriptions:
            try:
                at_work.append(stack.enter_context(opened(config, name, "replay")))
            except CdcReplayError as error:
                log.warning("subscription %s is left out: %s", name, error)
                results[name] = ReplayResult(name, Lsn(0), Lsn(0), 0.0, error=str(error))
        found = replay_opened(config, publisher, at_work, to_lsn)
        results |= {result.subscription: result for result in found}
    return tuple(results[name] for name in subscriptions)


def common_publisher(config: Config, subscriptions: Sequence[str]) -> PublisherConfig:
    """The publisher of all these subscriptions.

    Raises:
        InvalidConfiguration: if there is none, or more than one.
    """
    names = {config.subscription(name).subscription.publisher for name in subscriptions}
    if len(names) != 1:
        raise InvalidConfiguration(
            "the subscriptions must have one publisher",
            detail=f"Given: {', '.join(subscriptions) or 'none'}; their publishers: "
            f"{', '.join(sorted(names)) or 'none'}.",
        )
    return config.publisher(names.pop())


@dataclass(frozen=True, slots=True)
class _Content:
    """What the log says of a window without decoding it."""

    relations: tuple[Relation, ...]
    catalogs: tuple[PublisherCatalog, ...]
    summary: LogSummary


@dataclass(frozen=True, slots=True)
class _Plan:
    """The window of one subscription: what is known before any row is read."""

    opened: Opened
    window: Window
    behind: tuple[QualifiedName, ...]
    """The tables that the window advances; one that was copied since is ahead, and stays there."""
    routes: Routes
    began: float
    messages: int
    transactions: int


def replay_opened(
    config: Config, publisher: PublisherConfig, subscriptions: Sequence[Opened], to_lsn: Lsn | None = None
) -> tuple[ReplayResult, ...]:
    """`replay` for subscriptions whose locks the caller holds."""
    change_log = ChangeLog.open(publisher.change_log)
    upto = to_lsn or change_log.end_lsn
    if upto > change_log.end_lsn:
        raise ChangeLogMissing(
            f'the change log of publisher "{publisher.name}" ends at {change_log.end_lsn}, before {upto}',
            hint=f"Run `cdc-replay capture {publisher.name}` first.",
        )
    # Subscriptions that stand at one position share what the log says of the window.
    content_of = functools.cache(functools.partial(_content, change_log))
    results = {}
    plans = []
    for each in subscriptions:
        try:
            plans.append(_plan(change_log, content_of, each, upto))
        except (CdcReplayError, psycopg.Error) as error:
            results[each.subscription.name] = _failed(each, Window(upto, upto), time.monotonic(), error)
    dsn = config.dsn_of(publisher)
    with _decoded(change_log, plans) as changes:
        for plan in plans:
            results[plan.opened.subscription.name] = _replay_one(plan, changes, dsn)
    return tuple(results[each.subscription.name] for each in subscriptions)


def _content(change_log: ChangeLog, window: Window) -> _Content:
    return _Content(*definitions(change_log, window), change_log.summary(window))


def _plan(
    change_log: ChangeLog, content_of: Callable[[Window], _Content], at_work: Opened, upto: Lsn
) -> _Plan:
    began = time.monotonic()
    if not at_work.table_states():
        raise SubscriberNotReady(
            f'subscription "{at_work.subscription.name}" has no tables yet',
            hint=f"Run `cdc-replay snapshot {at_work.subscription.name}` first.",
        )
    behind = {name: lsn for name, lsn in at_work.ready_tables().items() if lsn < upto}
    _check_no_gap(change_log, at_work.subscription.name, behind)
    window = Window(min(behind.values(), default=upto), upto)
    content = content_of(window)
    targets = read_target_tables(at_work.connection, tuple(behind))
    wanted = {
        name: Target(targets[name].identity if name in targets else (), lsn) for name, lsn in behind.items()
    }
    publications = at_work.subscription.publications
    routes = plan_routes(content.relations, content.catalogs, publications, wanted)
    check_targets({table.name: table.columns for table in routes.tables}, targets)
    summary = content.summary
    return _Plan(at_work, window, tuple(behind), routes, began, summary.messages, summary.transactions)


def _check_no_gap(change_log: ChangeLog, subscription: str, behind: Mapping[QualifiedName, Lsn]) -> None:
    start = change_log.header.start_lsn
    stale = [str(name) for name, lsn in behind.items() if lsn < start]
    if stale:
        raise SubscriberNotReady(
            f'subscription "{subscription}" needs changes from before the change log',
            detail=f"The log starts at {start}; these tables end before it: {', '.join(stale)}.",
            hint="Copy them again: `cdc-replay snapshot {} {}`.".format(
                subscription, " ".join(f"--table {name}" for name in stale)
            ),
            rule="R1.33",
        )


def definitions(
    change_log: ChangeLog, window: Window
) -> tuple[tuple[Relation, ...], tuple[PublisherCatalog, ...]]:
    """The relation versions that changes in the window have, and the catalogs in force at any of them."""
    known = change_log.relations()
    found = change_log.relations_in(window)
    relations = {known[version].id: known[version] for version in known}
    # A TRUNCATE has no version: where nothing else of its relation is in the window, any one stands for it.
    alone = found.truncated - {known[version].id for version in found.versions}
    chosen = [known[version] for version in sorted(found.versions)]
    chosen += [relations[relation] for relation in sorted(alone) if relation in relations]
    # A transaction that began before the window sees the definitions of that time (R9.10).
    since = window.after if found.first_lsn is None else min(window.after, found.first_lsn)
    return tuple(chosen), catalog_history(change_log).within(Window(since, window.upto))


def catalog_history(change_log: ChangeLog) -> CatalogHistory:
    """The publisher's catalogs, each at the position from which it is in force."""
    return CatalogHistory(
        tuple(
            dataclasses.replace(catalog_from_json(version.text), lsn=version.from_lsn)
            for version in change_log.catalogs()
        )
    )


@contextlib.contextmanager
def _decoded(change_log: ChangeLog, plans: Sequence[_Plan]) -> Iterator[DataFrame | None]:
    """The changes of all the plans' windows, decoded once; None if no plan has a route for any."""
    routed = [plan for plan in plans if plan.routes.routes]
    if not routed:
        yield None
        return
    window = Window(min(plan.window.after for plan in routed), routed[0].window.upto)
    session = spark_session("cdc-replay")
    tune_for(session, max(plan.messages for plan in routed))
    changes = decode_window(session, change_log, window)
    if len(routed) > 1:
        changes = changes.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield changes
    finally:
        if len(routed) > 1:
            changes.unpersist()


def decode_window(spark: SparkSession, change_log: ChangeLog, window: Window) -> DataFrame:
    """The CHANGES of a window of the log."""
    return decode(
        spark,
        change_log.segments(window),
        window,
        change_log.relations(),
        [version.from_lsn.value for version in change_log.catalogs()],
    )


def _replay_one(plan: _Plan, changes: DataFrame | None, publisher_dsn: str) -> ReplayResult:
    name = plan.opened.subscription.name
    try:
        with translated_spark_errors(f'replay of subscription "{name}"'):
            result = _flow(plan, changes, publisher_dsn)
    except (CdcReplayError, psycopg.Error) as error:
        return _failed(plan.opened, plan.window, plan.began, error)
    log.info(
        "subscription %s: window %s, %d changes read, %d filtered out, applied %s, conflicts %s, %.2f s",
        name,
        plan.window,
        result.changes_read,
        result.filtered_out,
        " ".join(f"{kind}={count}" for kind, count in result.applied.items()),
        dict(result.conflicts) or "none",
        result.seconds,
    )
    return result


def _flow(plan: _Plan, changes: DataFrame | None, publisher_dsn: str) -> ReplayResult:
    subscription = plan.opened.subscription
    results: list[ReplayResult] = []

    def record(connection: Connection, applied: Applied) -> None:
        # Tables without a change in the window have reached its end too.
        state.advance_tables(connection, subscription.name, plan.behind, plan.window.upto)
        results.append(_result(plan, routed, applied))
        state.record_result(connection, subscription.name, "replay", results[-1].to_dict())

    request = ApplyRequest(subscription, plan.opened.dsn, plan.routes.tables, (), plan.window.upto)
    if changes is None or not plan.routes.routes:
        routed = None
        advance_only(request, before_commit=record)
        return results[0]
    routed = route(changes, plan.routes, origin=subscription.origin, publisher_dsn=publisher_dsn)
    found = survey(routed.changes)
    net = net_changes(routed.changes, found, plan.routes.tables, policy=subscription.on_conflict)
    request = dataclasses.replace(request, truncations=found.truncations)
    apply_window(net, request, before_commit=record)
    return results[0]


def _result(plan: _Plan, routed: Routed | None, applied: Applied) -> ReplayResult:
    counts = routed.counts.get if routed is not None else {}
    return ReplayResult(
        subscription=plan.opened.subscription.name,
        from_lsn=plan.window.after,
        to_lsn=plan.window.upto,
        seconds=time.monotonic() - plan.began,
        changes_read=plan.messages,
        transactions=plan.transactions,
        filtered_out=counts.get("filtered_out", 0),
        updates_to_insert=counts.get("updates_to_insert", 0),
        updates_to_delete=counts.get("updates_to_delete", 0),
        applied=applied.counts,
        conflicts=dict(applied.conflicts),
    )


def _failed(at_work: Opened, window: Window, began: float, error: Exception) -> ReplayResult:
    """The result of a window that was not applied, recorded where `status` and Airflow read it."""
    name = at_work.subscription.name
    log.warning("subscription %s: window %s was not applied: %s", name, window, error)
    result = ReplayResult(name, window.after, window.upto, time.monotonic() - began, error=str(error).strip())
    with contextlib.suppress(psycopg.Error):
        state.record_result(at_work.connection, name, "replay", result.to_dict())
    return result


def applied_lsn(at_work: Opened) -> Lsn | None:
    """The position that all ready tables have reached; None before the first snapshot."""
    return min(at_work.ready_tables().values(), default=None)
