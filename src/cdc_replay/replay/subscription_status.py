"""The state of a subscription, by its subscriber and by the change log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from cdc_replay.errors import (
    CdcReplayError,
    ChangeLogMissing,
    InvalidLsn,
    ReplayFailed,
    SubscriptionParked,
    join_parts,
    text_of_error,
)
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proof import ProofSummary, subscription_proof
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import Json, ValidationOutcome, to_json
from cdc_replay.model.status import (
    CopyStatus,
    PublisherStatus,
    SubscriberStatus,
    SubscriptionState,
    SubscriptionStatus,
    TableStatus,
    TableSync,
)
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready, TableState, describe
from cdc_replay.postgres.answers import Answer
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.capture_coverage import capture_warnings
from cdc_replay.replay.definition_drift import definition_drifts
from cdc_replay.replay.lag import Lag, lag_of, oldest_missing, unanswered, utc_text
from cdc_replay.replay.log_view import LogView
from cdc_replay.replay.table_notice import TableNotice, join_notices
from cdc_replay.replay.table_rewrites import rewritten_tables
from cdc_replay.subscriber import (
    recorded_results,
    subscription_lock,
    subscription_records,
    subscription_tables,
)
from cdc_replay.subscriber.copy_progress import read_progress
from cdc_replay.subscriber.proofs import read_summaries
from cdc_replay.subscriber.recorded_results import RecordedResult
from cdc_replay.subscriber.subscription_records import SubscriptionRecord
from cdc_replay.subscriber.subscription_tables import KnownTable
from cdc_replay.subscriber.target_tables import read_target_tables

_T = TypeVar("_T")


def read_subscriber_status(
    connection: Connection, subscription: Subscription, change_log: LogView
) -> SubscriberStatus:
    """What the subscriber holds, and what it lacks of the log.

    An unreadable log costs the notices only: the publisher's status has its error.

    Raises:
        CdcReplayError, psycopg.Error: if the subscriber does not answer.
    """
    name = subscription.name
    tables = subscription_tables.known_tables(connection, name)
    record = subscription_records.subscription_record(connection, name)
    replayed = recorded_results.last_result(connection, name, "replay")
    validated = recorded_results.last_result(connection, name, "validate")
    proofs = read_summaries(connection, name)
    proven = subscription_proof(proofs.values())
    notices = _notices(connection, subscription, change_log)
    states = {table.name: table.state for table in tables if table.name is not None}
    ready = [state for state in states.values() if isinstance(state, Ready)]
    lag_seconds, lag, error = _read_lag(connection, name, change_log, ready)
    copies = _read_copies(connection, name)
    dropped = _dropped_tables(connection, name, tables)
    applied = (table.state.applied_lsn for table in tables if isinstance(table.state, Ready))
    status = SubscriptionStatus(
        subscription=name,
        publisher=subscription.publisher,
        applied_lsn=min(applied, default=None),
        lag_seconds=lag_seconds,
        last_replay=None if replayed is None else _describe_replay(replayed),
        last_validation=None if validated is None else _describe_validation(validated),
        error=_parked_reason(record)
        or error
        or _missing_changes(subscription, change_log, states)
        or _missing_copies(connection, name, states),
        behind_since=None if lag is None or lag.since is None else utc_text(lag.since),
        behind_reason=None if lag is None else lag.reason,
        state=_state(record, tables, replayed),
        parked=_parked_reason(record),
        parked_transaction=None if record is None else record.parked_transaction,
        last_replay_at=None if replayed is None else utc_text(replayed.finished),
        last_replay_failed=replayed is not None and replayed.has_failed,
        last_validation_at=None if validated is None else utc_text(validated.finished),
        last_validation_lsn=None if validated is None else _validated_lsn(validated),
        last_validation_outcome=None if validated is None else _validation_outcome(validated),
        proven_through=None if proven is None else proven.lsn,
        proven_at=None if proven is None else utc_text(proven.at),
    )
    present = [
        _with_proof(_table_status(name, table, state, notices.get(table)), proofs.get(table))
        for table, state in states.items()
    ]
    return SubscriberStatus(status, (*present, *dropped), copies)


def subscriber_status(name: str, answer: Answer[_T], publisher: PublisherStatus) -> SubscriberStatus:
    """The status of subscription `name` by the present or last answer of its subscriber."""
    known = answer.value if isinstance(answer.value, SubscriberStatus) else None
    last = add_lag_bytes(
        known or SubscriberStatus(SubscriptionStatus(name, publisher.publisher)), publisher.position
    )
    return last if answer.error is None else as_unanswered(last, answer.error, answer.seconds_old)


def add_lag_bytes(status: SubscriberStatus, position: Lsn | None) -> SubscriberStatus:
    """The status with its distance to the publisher's `position`."""
    applied = status.subscription.applied_lsn
    lag = None if position is None or applied is None else max(0, position.value - applied.value)
    return replace(status, subscription=replace(status.subscription, lag_bytes=lag))


def as_unanswered(status: SubscriberStatus, error: Exception, age: float | None) -> SubscriberStatus:
    """An earlier status, `age` seconds old, of a subscriber that does not answer now."""
    return SubscriberStatus(
        replace(
            status.subscription,
            error=text_of_error(error),
            behind_reason=unanswered(error).reason,
            seconds_old=age,
            state=SubscriptionState.DOWN,
        ),
        tuple(replace(table, seconds_old=age) for table in status.tables),
        tuple(
            replace(copy, reported_seconds_ago=copy.reported_seconds_ago + (age or 0))
            for copy in status.copies
        ),
    )


def last_replay_result(connection: Connection, subscription: str) -> dict[str, Json]:
    """The subscription's last replay, as its subscriber recorded it.

    Raises:
        SubscriptionParked: if it failed, and the subscription is parked.
        ReplayFailed: if it failed otherwise.
        ChangeLogMissing: if there was none yet.
    """
    last = recorded_results.last_result(connection, subscription, "replay")
    record = subscription_records.subscription_record(connection, subscription)
    if last is None:
        raise ChangeLogMissing(f'subscription "{subscription}" was never replayed')
    if error := last.result.get("error"):
        is_parked = record is not None and record.parked_at is not None
        error_class = SubscriptionParked if is_parked else ReplayFailed
        raise error_class(f'the last replay of subscription "{subscription}" failed: {error}')
    form = to_json(last.result)
    return form if isinstance(form, dict) else {}


def _state(
    record: SubscriptionRecord | None, tables: Sequence[KnownTable], replayed: RecordedResult | None
) -> SubscriptionState:
    states = [table.state for table in tables]
    if (record is not None and record.parked_at is not None) or any(
        isinstance(state, Parked) for state in states
    ):
        return SubscriptionState.PARKED
    if not tables:
        return SubscriptionState.NEW
    if replayed is not None and replayed.has_failed:
        return SubscriptionState.FAILED
    is_copying = any(isinstance(state, Pending | Copying) for state in states)
    return SubscriptionState.COPYING if is_copying else SubscriptionState.READY


_SYNC: Final[Mapping[type[TableState], TableSync]] = {
    Pending: TableSync.WAITING,
    Copying: TableSync.COPYING,
    Ready: TableSync.READY,
    Parked: TableSync.PARKED,
}


def _table_status(
    subscription: str, table: QualifiedName, state: TableState, notice: str | None
) -> TableStatus:
    return TableStatus(
        subscription,
        str(table),
        describe(state),
        notice,
        sync=_SYNC[type(state)],
        applied_lsn=state.applied_lsn if isinstance(state, Ready | Parked) else None,
        parked_transaction=state.transaction if isinstance(state, Parked) else None,
    )


def _with_proof(table: TableStatus, proof: ProofSummary | None) -> TableStatus:
    if proof is None:
        return table
    proven = proof.proven
    return replace(
        table,
        proof=proof.describe(),
        proven_through=None if proven is None else proven.lsn,
        proven_at=None if proven is None else utc_text(proven.at),
        differing_buckets=proof.differing,
    )


def _parked_reason(record: SubscriptionRecord | None) -> str | None:
    if record is None or record.parked_at is None:
        return None
    position = f"{record.parked_at}, before transaction {record.parked_transaction}"
    return f"parked at {position}: {record.parked_reason}"


def _dropped_tables(
    connection: Connection, subscription: str, tables: Sequence[KnownTable]
) -> list[TableStatus]:
    """The subscribed tables that the subscriber has dropped, by the names that they had."""
    names = dict.fromkeys(table.recorded_name for table in tables if table.name is None)
    if not names:
        return []
    present = {table.name for table in tables}
    replaced = {name for name in read_target_tables(connection, names) if name not in present}
    return [
        TableStatus(
            subscription,
            str(name),
            "dropped on the subscriber; a new table has its name and is not subscribed to: its changes are"
            f" skipped until `cdc-replay refresh {subscription}` adds it"
            if name in replaced
            else "dropped on the subscriber: replay stops at a change that is published under that name",
            sync=TableSync.DROPPED,
        )
        for name in names
    ]


def _read_copies(connection: Connection, subscription: str) -> tuple[CopyStatus, ...]:
    return tuple(
        CopyStatus(
            subscription=subscription,
            table=str(report.progress.table),
            rows=report.progress.rows,
            bytes=report.progress.bytes,
            expected_bytes=report.progress.expected_bytes,
            bytes_per_second=report.progress.bytes_per_second,
            seconds_left=report.progress.seconds_left,
            reported_seconds_ago=report.seconds_ago,
        )
        for report in read_progress(connection, subscription)
    )


def _notices(
    connection: Connection, subscription: Subscription, change_log: LogView
) -> Mapping[QualifiedName, str]:
    """By table: that it was rewritten, or that its filter has changed according to the log."""
    drifts: dict[QualifiedName, TableNotice] = {}
    with contextlib.suppress(CdcReplayError):
        drifts = definition_drifts(connection, subscription, change_log)
    return join_notices(rewritten_tables(connection, subscription.name), drifts)


def _missing_changes(
    subscription: Subscription, change_log: LogView, tables: Collection[QualifiedName]
) -> str | None:
    """Which published changes do not reach the subscription, according to the log."""
    try:
        catalog = change_log.catalogs().at(change_log.end_lsn())
    except CdcReplayError:
        return None
    return join_parts("; ".join(capture_warnings(catalog, subscription, tables))) or None


def _missing_copies(
    connection: Connection, subscription: str, tables: Mapping[QualifiedName, TableState]
) -> str | None:
    """Which tables wait for a copy that no process makes: it failed, or was killed."""
    waiting = [str(name) for name, state in tables.items() if isinstance(state, Pending | Copying)]
    locks = (subscription, subscription_lock.copy_lock(subscription))
    if not waiting or any(subscription_lock.lock_holder(connection, lock) for lock in locks):
        return None
    return join_parts(
        f"no process copies what waits for its copy: {', '.join(waiting)}",
        hint=f"Run `cdc-replay snapshot {subscription}`, which goes on with it or says what is in the way.",
    )


def _describe_replay(replayed: RecordedResult) -> str:
    if replayed.has_failed:
        return f"failed: {replayed.result['error']}"
    return f"succeeded at {replayed.result.get('to_lsn')}"


def _describe_validation(validated: RecordedResult) -> str:
    outcome, is_partial = _validation_outcome(validated), bool(validated.result.get("is_partial"))
    words = "unknown outcome" if outcome is None else outcome.in_words(is_partial=is_partial)
    return f"{words} at {validated.result.get('to_lsn')}"


def _validation_outcome(validated: RecordedResult) -> ValidationOutcome | None:
    """None if the subscriber's record has another one than ours."""
    if (outcome := validated.result.get("outcome")) is None:  # as in results of earlier releases
        has_succeeded = validated.result.get("success")
        return ValidationOutcome.CONSISTENT if has_succeeded else ValidationOutcome.NOT_CONSISTENT
    return next((known for known in ValidationOutcome if known.value == outcome), None)


def _validated_lsn(validated: RecordedResult) -> Lsn | None:
    with contextlib.suppress(InvalidLsn):
        return Lsn.parse(str(validated.result.get("to_lsn")))
    return None


def _read_lag(
    connection: Connection, subscription: str, change_log: LogView, ready: Sequence[Ready]
) -> tuple[float | None, Lag | None, str | None]:
    """Seconds of lag of the replayed tables, the reason of the lag, and why the log cannot answer."""
    try:
        lag = lag_of(connection, subscription, change_log)
        if not ready:
            return None, lag, None
        since = oldest_missing(change_log, ready)
    except CdcReplayError as error:
        return None, None, str(error) if ready else None
    return (0.0 if since is None else max(0.0, time.time() - since.timestamp())), lag, None
