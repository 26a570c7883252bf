"""Let a parked subscription, or parked tables, be replayed again, with or without what parked them.

Replay parks before a transaction that the subscriber rejects; everything before it is applied
(`replay.parking`). To skip the transaction is therefore to record it as applied. It is skipped whole, and
named by its end position as in ALTER SUBSCRIPTION … SKIP, so that no other one is skipped by mistake.

A subscription or table that is parked for a value that exists nowhere (R4.6) can continue with NULL instead:
NULL is accepted up to that transaction, for the resumed tables.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import InvalidConfiguration, NotParked
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ResumeResult
from cdc_replay.model.table_state import Parked, Ready
from cdc_replay.replay.table_rewrites import rewrites_in
from cdc_replay.subscriber import null_acceptance, recorded_results, subscription_records, subscription_tables
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.subscription_records import SubscriptionRecord
from cdc_replay.subscriber.subscription_tables import KnownTable

UNKNOWN_VALUE_RULE: Final = "R4.6"
"""Part of the reason of a subscription or table that is parked for an unsent value."""


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """What to resume: the subscription, or these of its tables.

    `skip` is the transaction that they are parked before. With `accept_null` that transaction is applied with
    NULL for values that exist nowhere.
    """

    tables: Sequence[QualifiedName] = ()
    skip: Lsn | None = None
    accept_null: bool = False

    def __post_init__(self) -> None:
        if self.accept_null and self.skip is not None:
            raise InvalidConfiguration("give --skip or --accept-null, not both")


def resume_subscription(
    request: ResumeRequest, session: SubscriptionSession, change_log: str
) -> ResumeResult:
    """Resume what the request names. Nothing is applied: the next replay does that.

    Raises:
        NotParked: if something named is not parked, waits for a copy, is parked before another transaction,
            has not reached the one to skip, or is to accept NULL and is parked for another reason.
    """
    began = time.monotonic()
    name, skip = session.subscription.name, request.skip
    with session.connection.transaction():
        if request.tables:
            _resume_tables(session, request)
            resumed: Sequence[QualifiedName] = tuple(dict.fromkeys(request.tables))
        else:
            resumed = _resume_whole(session, skip, accept_null=request.accept_null)
        if skip is not None:
            _mark_rewritten(session, change_log, resumed, skip)
        result = ResumeResult(name, skip, skip, time.monotonic() - began, tuple(map(str, resumed)))
        recorded_results.record_result(session.connection, name, "resume", result.to_dict())
        failpoint("resume.before_commit")
    failpoint("resume.after_commit")
    return result


def _resume_whole(
    session: SubscriptionSession, skip: Lsn | None, *, accept_null: bool
) -> Sequence[QualifiedName]:
    """Unpark the subscription; returns its tables that advance over the skipped transaction."""
    name = session.subscription.name
    subject = f'subscription "{name}"'
    record = subscription_records.subscription_record(session.connection, name)
    if record is None or record.parked_transaction is None:
        raise NotParked(f"{subject} is not parked", hint=_remedy(name, session.table_states()))
    skipping: list[KnownTable] = []
    if accept_null:
        _check_accepted(subject, record.parked_reason or "")
        null_acceptance.accept_null(session.connection, name, record.parked_transaction)
    if skip is not None:
        _check_transaction(subject, record.parked_transaction, skip)
        skipping = [
            table
            for table in session.known_tables()
            if isinstance(table.state, Ready) and table.state.applied_lsn < skip
        ]
        _check_reached(name, skipping, record)
        subscription_tables.advance_tables(
            session.connection, name, [table.relation for table in skipping], skip
        )
    subscription_records.unpark(session.connection, name)
    return [table.name for table in skipping if table.name is not None]


def _resume_tables(session: SubscriptionSession, request: ResumeRequest) -> None:
    states = session.table_states()
    name, skip = session.subscription.name, request.skip
    for table in request.tables:
        parked = states.get(table)
        if not isinstance(parked, Parked):
            raise NotParked(
                f'table {table} of subscription "{name}" is not parked before a transaction',
                hint=_remedy(name, states),
            )
        if request.accept_null:
            _check_accepted(f"table {table}", parked.reason)
            null_acceptance.accept_null(session.connection, name, parked.transaction, [table])
        if skip is not None:
            _check_transaction(f"table {table}", parked.transaction, skip)
        ready = Ready(parked.applied_lsn if skip is None else skip)
        subscription_tables.set_table_state(session.connection, name, table, ready)


def _check_accepted(subject: str, reason: str) -> None:
    """NULL can be accepted only where the transaction has an unsent value that nobody knows (R4.6)."""
    if UNKNOWN_VALUE_RULE not in reason:
        raise NotParked(
            f"{subject} is not parked for a value that was not sent",
            detail=reason,
            hint="NULL can be accepted for such values only.",
            rule=UNKNOWN_VALUE_RULE,
        )


def _mark_rewritten(
    session: SubscriptionSession, change_log: str, tables: Sequence[QualifiedName], skip: Lsn
) -> None:
    """Tables that the skipped transaction has rewritten are compared later all the same (R11.9)."""
    subscription = session.subscription
    log = ChangeLog.open(change_log)
    window = Window(Lsn(skip.value - 1), skip)
    rewrites = rewrites_in(log, window, log.summary(window)).published(subscription.publications)
    marked = [table for table in tables if table in rewrites]
    subscription_tables.mark_rewritten(session.connection, subscription.name, marked, skip)


def _check_transaction(subject: str, parked_before: Lsn, skip: Lsn) -> None:
    """As in ALTER SUBSCRIPTION … SKIP, only the transaction that replay stopped at can be skipped."""
    if parked_before == skip:
        return
    raise NotParked(
        f"{subject} is not parked before transaction {skip}",
        detail=f"It is parked before transaction {parked_before}.",
        hint=f"Give the position that it is parked before: `--skip {parked_before}`.",
    )


def _check_reached(subscription: str, tables: Sequence[KnownTable], record: SubscriptionRecord) -> None:
    """A table that was resumed, and not replayed since, lacks changes from before the transaction."""
    at = record.parked_at or ZERO
    lagging = [table for table in tables if isinstance(table.state, Ready) and table.state.applied_lsn < at]
    if not lagging:
        return
    names = ", ".join(str(table.name or table.recorded_name) for table in lagging)
    raise NotParked(
        f"table {names} has not reached transaction {record.parked_transaction}",
        detail=f'Without it, changes before {at} would be left out, too, which subscription "{subscription}"'
        " has applied to its other tables.",
        hint=f"Run `cdc-replay replay {subscription}`, which applies them and parks again. Then skip it.",
    )


def _remedy(name: str, states: Mapping[QualifiedName, object]) -> str:
    parked = [str(table) for table, state in states.items() if isinstance(state, Parked)]
    parts = [f"`cdc-replay status` shows what subscription {name} waits for."]
    if parked:
        parts.append(f"Parked before a transaction: {', '.join(parked)}; name them with `--table`.")
    return " ".join(parts)
