"""`status`: slots, change logs and subscriptions, each as its own server says.

A server that does not answer is a line of the report, not its end: with what it said last, where the caller
keeps `Answers`. All are asked side by side, and together are waited for a few seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.config import Config, PublisherConfig, SubscriptionConfig
from cdc_replay.errors import CdcReplayError, ChangeLogMissing, ReplayFailed, SlotMissing, SubscriptionParked
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import Json, Result, to_json
from cdc_replay.model.table_state import Ready, describe
from cdc_replay.postgres.answers import Answer, Answers
from cdc_replay.postgres.connection import Connection, connect, connect_with_deadline
from cdc_replay.postgres.slot import slot_status
from cdc_replay.publication.capture_coverage import capture_warnings
from cdc_replay.replay.definition_drift import definition_drifts
from cdc_replay.replay.lag import Lag, lag_of, oldest_missing, unanswered, utc_text
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.table_rewrites import rewritten_tables
from cdc_replay.subscriber import recorded_results, subscription_records, subscription_tables
from cdc_replay.subscriber.copy_progress import read_progress
from cdc_replay.subscriber.subscription_tables import KnownTable
from cdc_replay.subscriber.target_tables import read_target_tables

_POSITION = "select pg_current_wal_flush_lsn()::text"


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """A publisher's slot and log, which goes from `log_start` to `log_end`.

    `behind_bytes` is WAL that the log does not hold yet.
    """

    publisher: str
    slot: str
    slot_state: str
    position: Lsn | None = None
    log_start: Lsn | None = None
    log_end: Lsn | None = None
    behind_bytes: int | None = None
    retained_wal_bytes: int | None = None
    safe_wal_size_bytes: int | None = None
    error: str | None = None
    seconds_old: float | None = None
    """Set where the publisher does not answer: how long ago it said the rest."""


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A subscribed table and its state.

    `notice` is set if a changed filter may have left rows (R9.12), or a rewrite values (R11.9).
    """

    subscription: str
    table: str
    state: str
    notice: str | None = None
    seconds_old: float | None = None


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """A subscription's position; lag is what the publisher's position is ahead of it.

    `lag_seconds` is the age of the oldest captured transaction that is not applied, 0 if there is none;
    `behind_since` is when that was committed, `behind_reason` why it is not applied (`replay.lag`). Why a
    subscription is parked is its `error`, or what it does not get though it needs it.
    """

    subscription: str
    publisher: str
    applied_lsn: Lsn | None = None
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    last_replay: str | None = None
    last_validation: str | None = None
    error: str | None = None
    behind_since: str | None = None
    behind_reason: str | None = None
    seconds_old: float | None = None
    """Set where the subscriber does not answer: how long ago it said the rest."""


@dataclass(frozen=True, slots=True)
class CopyStatus:
    """How far the copy of a table is.

    `bytes` are COPY text; `expected_bytes`, the table's size on the publisher's disk, is a guess of what they
    will be, and `seconds_left` one of what that takes. A copy whose process was killed stands still:
    `reported_seconds_ago` grows.
    """

    subscription: str
    table: str
    rows: int
    bytes: int
    expected_bytes: int
    bytes_per_second: float
    seconds_left: float | None
    reported_seconds_ago: float


@dataclass(frozen=True, slots=True)
class StatusResult(Result):
    """Everything that the configuration names; `copies` are those that run now."""

    publishers: tuple[PublisherStatus, ...]
    subscriptions: tuple[SubscriptionStatus, ...]
    tables: tuple[TableStatus, ...]
    copies: tuple[CopyStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class SubscriberStatus:
    """What one subscriber says of one subscription."""

    subscription: SubscriptionStatus
    tables: tuple[TableStatus, ...] = ()
    copies: tuple[CopyStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class LogRange:
    """What a change log holds; None if there is none."""

    start: Lsn | None = None
    end: Lsn | None = None


ServerAnswers: TypeAlias = Answers[PublisherStatus | LogRange | SubscriberStatus]
ServerAnswer: TypeAlias = Answer[PublisherStatus | LogRange | SubscriberStatus]


def status(config: Config) -> StatusResult:
    """The state of every publisher and subscription of the configuration."""
    with ServerAnswers(config.timeouts.answer.total_seconds()) as answers:
        return status_of(config, answers, config.publishers, config.subscriptions)


def status_of(
    config: Config, answers: ServerAnswers, publishers: Collection[str], subscriptions: Collection[str]
) -> StatusResult:
    """The state of these publishers and subscriptions, by what their servers answer now or said last."""
    members = {name: config.subscription(name) for name in subscriptions}
    asked = dict.fromkeys([*publishers, *(each.subscription.publisher for each in members.values())])
    sources = {name: config.publisher(name) for name in asked}
    seconds = answers.seconds
    told = answers.ask(
        {f"publisher {name}": partial(_publisher, config, each, seconds) for name, each in sources.items()}
        | {f"log {name}": partial(_log_range, each) for name, each in sources.items()}
        | {
            f"subscription {name}": partial(_subscriber, config, each, seconds)
            for name, each in members.items()
        }
    )
    known = {
        name: _known_publisher(each, told[f"publisher {name}"], told[f"log {name}"])
        for name, each in sources.items()
    }
    said = [
        _known_subscriber(each, told[f"subscription {name}"], known[each.subscription.publisher])
        for name, each in members.items()
    ]
    return StatusResult(
        tuple(known[name] for name in publishers),
        tuple(each.subscription for each in said),
        tuple(table for each in said for table in each.tables),
        tuple(copy for each in said for copy in each.copies),
    )


def subscription_result(config: Config, subscription: str) -> dict[str, Json]:
    """The subscription's last replay, as its subscriber recorded it.

    Raises:
        SubscriptionParked: if it failed, and the subscription is parked.
        ReplayFailed: if it failed otherwise.
        ChangeLogMissing: if there was none yet.
    """
    found = config.subscription(subscription)
    with connect(config.dsn_of(found), purpose=f"status {subscription}") as connection:
        last = recorded_results.last_result(connection, subscription, "replay")
        record = subscription_records.subscription_record(connection, subscription)
    if last is None:
        raise ChangeLogMissing(f'subscription "{subscription}" was never replayed')
    if error := last.result.get("error"):
        is_parked = record is not None and record.parked_at is not None
        kind = SubscriptionParked if is_parked else ReplayFailed
        raise kind(f'the last replay of subscription "{subscription}" failed: {error}')
    form = to_json(last.result)
    return form if isinstance(form, dict) else {}


def _publisher(config: Config, found: PublisherConfig, seconds: float) -> PublisherStatus:
    """What the publisher says.

    Raises:
        CdcReplayError, psycopg.Error: if it does not answer.
    """
    dsn = config.dsn_of(found)
    with connect_with_deadline(dsn, purpose=f"status {found.name}", seconds=seconds) as connection:
        ((text,),) = connection.execute(_POSITION).fetchall()
        position = Lsn.parse(text)
        try:
            slot = slot_status(connection, found.slot)
        except SlotMissing as missing:
            return PublisherStatus(found.name, found.slot, "missing", position, error=str(missing))
    return PublisherStatus(
        publisher=found.name,
        slot=found.slot,
        slot_state=slot.wal_status or "unknown",
        position=position,
        retained_wal_bytes=slot.retained_wal_bytes,
        safe_wal_size_bytes=slot.safe_wal_size_bytes,
    )


def _log_range(found: PublisherConfig) -> LogRange:
    """What the log holds.

    Raises:
        CdcReplayError: if it cannot be read.
    """
    try:
        change_log = ChangeLog.open(found.change_log)
    except ChangeLogMissing:
        return LogRange()
    return LogRange(change_log.start_lsn, change_log.end_lsn)


def _known_publisher(found: PublisherConfig, server: ServerAnswer, log: ServerAnswer) -> PublisherStatus:
    said = server.value
    if not isinstance(said, PublisherStatus):
        said = PublisherStatus(found.name, found.slot, "unknown")
    held = log.value if isinstance(log.value, LogRange) else LogRange()
    said = replace(said, log_start=held.start, log_end=held.end)
    if said.position is not None and held.end is not None:
        said = replace(said, behind_bytes=max(0, said.position.value - held.end.value))
    if server.error is not None:
        return replace(said, error=str(server.error), seconds_old=server.seconds_old)
    return said if log.error is None else replace(said, error=str(log.error), seconds_old=log.seconds_old)


def _subscriber(config: Config, found: SubscriptionConfig, seconds: float) -> SubscriberStatus:
    """What the subscriber says, and the log of what it lacks.

    Raises:
        CdcReplayError, psycopg.Error: if the subscriber does not answer.
    """
    name = found.name
    publisher = config.publisher(found.subscription.publisher)
    with connect_with_deadline(config.dsn_of(found), purpose=f"status {name}", seconds=seconds) as connection:
        known = subscription_tables.known_tables(connection, name)
        record = subscription_records.subscription_record(connection, name)
        replayed = recorded_results.last_result(connection, name, "replay")
        validated = recorded_results.last_result(connection, name, "validate")
        notices = _notices(config, found, connection)
        lag_seconds, lag, error = _lag(publisher, connection, name)
        copies = _copies(connection, name)
        dropped = _dropped(connection, name, known)
    states = {each.name: each.state for each in known if each.name is not None}
    reached = (each.state.applied_lsn for each in known if isinstance(each.state, Ready))
    applied = min(reached, default=None)
    error = error or _left_out(config, found, states)
    if record is not None and record.parked_at is not None:
        before = (
            "" if record.parked_transaction is None else f", before transaction {record.parked_transaction}"
        )
        error = f"parked at {record.parked_at}{before}: {record.parked_reason}"
    status = SubscriptionStatus(
        subscription=name,
        publisher=publisher.name,
        applied_lsn=applied,
        lag_seconds=lag_seconds,
        last_replay=None if replayed is None else _in_words(replayed.result),
        last_validation=None if validated is None else _in_words(validated.result),
        error=error,
        behind_since=None if lag is None or lag.since is None else utc_text(lag.since),
        behind_reason=None if lag is None else lag.reason,
    )
    tables = [
        TableStatus(name, str(table), describe(each), notices.get(table)) for table, each in states.items()
    ]
    return SubscriberStatus(status, (*tables, *dropped), copies)


def _known_subscriber(
    found: SubscriptionConfig,
    answer: ServerAnswer,
    publisher: PublisherStatus,
) -> SubscriberStatus:
    said = answer.value
    if not isinstance(said, SubscriberStatus):
        said = SubscriberStatus(SubscriptionStatus(found.name, publisher.publisher))
    lag_bytes = _lag_bytes(publisher.position, said.subscription.applied_lsn)
    subscription = replace(said.subscription, lag_bytes=lag_bytes)
    if answer.error is None:
        return replace(said, subscription=subscription)
    age = answer.seconds_old
    subscription = replace(
        subscription,
        error=str(answer.error),
        behind_reason=unanswered(answer.error).reason,
        seconds_old=age,
    )
    return SubscriberStatus(
        subscription,
        tuple(replace(table, seconds_old=age) for table in said.tables),
        tuple(
            replace(copy, reported_seconds_ago=copy.reported_seconds_ago + (age or 0)) for copy in said.copies
        ),
    )


def _dropped(connection: Connection, subscription: str, known: Sequence[KnownTable]) -> list[TableStatus]:
    """The subscribed tables that the subscriber has dropped, by the names that they had."""
    names = dict.fromkeys(each.recorded_name for each in known if each.name is None)
    present = {each.name for each in known}
    replaced = {name for name in read_target_tables(connection, names) if name not in present}
    return [
        TableStatus(
            subscription,
            str(name),
            "dropped on the subscriber; the table of its name is another one, and is not subscribed to: its"
            f" changes are passed over until `cdc-replay refresh {subscription}` takes it in"
            if name in replaced
            else "dropped on the subscriber: replay stops at a change that is published under that name",
        )
        for name in names
    ]


def _copies(connection: Connection, subscription: str) -> tuple[CopyStatus, ...]:
    """The copies of the subscription that run now."""
    return tuple(
        CopyStatus(
            subscription=subscription,
            table=str(each.progress.table),
            rows=each.progress.rows,
            bytes=each.progress.bytes,
            expected_bytes=each.progress.expected_bytes,
            bytes_per_second=each.progress.bytes_per_second,
            seconds_left=each.progress.seconds_left,
            reported_seconds_ago=each.seconds_ago,
        )
        for each in read_progress(connection, subscription)
    )


def _notices(
    config: Config, found: SubscriptionConfig, connection: Connection
) -> Mapping[QualifiedName, str]:
    """What there is to say about tables that were rewritten, or whose filter has changed as the log tells."""
    subscription = found.subscription
    change_log = config.publisher(subscription.publisher).change_log
    notices = {table: each.notice for table, each in rewritten_tables(connection, subscription.name).items()}
    # The publisher's line says what is wrong with its log.
    with contextlib.suppress(CdcReplayError):
        for table, changed in definition_drifts(connection, subscription, change_log).items():
            notices[table] = "; ".join([*filter(None, [notices.get(table)]), changed.notice])
    return notices


def _left_out(config: Config, found: SubscriptionConfig, tables: Collection[QualifiedName]) -> str | None:
    """What does not come to the subscription, as far as the log tells."""
    subscription = found.subscription
    try:
        change_log = ChangeLog.open(config.publisher(subscription.publisher).change_log)
        catalog = catalog_history(change_log).at(change_log.end_lsn)
    except CdcReplayError:
        return None  # the publisher's line says what is wrong with its log
    return "; ".join(capture_warnings(catalog, subscription, tables)) or None


def _in_words(result: Mapping[str, object]) -> str:
    if "success" in result:
        return f"{'consistent' if result['success'] else 'not consistent'} at {result.get('to_lsn')}"
    if result.get("error"):
        return f"failed: {result['error']}"
    return f"succeeded at {result.get('to_lsn')}"


def _lag_bytes(position: Lsn | None, applied: Lsn | None) -> int | None:
    return None if position is None or applied is None else max(0, position.value - applied.value)


def _lag(
    found: PublisherConfig, connection: Connection, subscription: str
) -> tuple[float | None, Lag | None, str | None]:
    """Seconds of lag of the tables that are replayed, why they lag, or why the log cannot tell it."""
    tables = [
        table
        for table in subscription_tables.table_states(connection, subscription).values()
        if isinstance(table, Ready)
    ]
    try:
        lag = lag_of(connection, subscription, found.change_log)
        if not tables:
            return None, lag, None
        since = oldest_missing(ChangeLog.open(found.change_log), tables)
    except CdcReplayError as error:
        return None, None, str(error) if tables else None
    return (0.0 if since is None else max(0.0, time.time() - since.timestamp())), lag, None
