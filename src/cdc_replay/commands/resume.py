"""`resume`: let a parked subscription, or parked tables, be replayed again; with or without what parked them.

Replay has parked them before a transaction that the subscriber refuses, with everything before it applied
(`replay.parking`). So to skip the transaction is to say that it is applied: whole, and named by the
position of its end, so that no other one is skipped by mistake, as ALTER SUBSCRIPTION … SKIP does it.

What is parked for a value that nobody has (R4.6) can go on with NULL in its place: that is accepted up to the
transaction, for the tables that go on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.opening import open_subscription
from cdc_replay.config import Config
from cdc_replay.errors import InvalidConfiguration, NotParked
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ResumeResult
from cdc_replay.model.table_state import Parked, Ready
from cdc_replay.replay.table_rewrites import rewrites_in
from cdc_replay.subscriber import null_acceptance, recorded_results, subscription_records, subscription_tables
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.subscription_tables import KnownTable

UNKNOWN_VALUE_RULE: Final = "R4.6"
"""The rule that the reason of a subscription or table names which is parked for an unsent value."""


def resume(
    config: Config,
    subscription: str,
    *,
    tables: Sequence[QualifiedName] = (),
    skip: Lsn | None = None,
    accept_null: bool = False,
) -> ResumeResult:
    """Resume the subscription, or those of its tables; `skip` is the transaction that they are parked before.

    With `accept_null` that one goes in with NULL for values that nobody has. Nothing is applied: the next
    replay does that.

    Raises:
        NotParked: if one of them is not parked, waits for a copy, is parked before another transaction, or is
            to accept NULL and is parked for another reason.
        InvalidConfiguration: if the transaction is to be skipped and accepted.
    """
    if accept_null and skip is not None:
        raise InvalidConfiguration("give --skip or --accept-null, not both")
    began = time.monotonic()
    with open_subscription(config, subscription, "resume") as session, session.connection.transaction():
        if tables:
            _resume_tables(session, tables, skip, accept_null=accept_null)
            resumed: Sequence[QualifiedName] = tuple(dict.fromkeys(tables))
        else:
            resumed = _resume_subscription(session, skip, accept_null=accept_null)
        if skip is not None:
            _mark_rewritten(config, session, resumed, skip)
        seconds = time.monotonic() - began
        result = ResumeResult(subscription, skip, skip, seconds, tuple(map(str, resumed)))
        recorded_results.record_result(session.connection, subscription, "resume", result.to_dict())
        failpoint("resume.before_commit")
    failpoint("resume.after_commit")
    return result


def _resume_subscription(
    session: SubscriptionSession, skip: Lsn | None, *, accept_null: bool
) -> Sequence[QualifiedName]:
    """Its tables that go on behind the skipped transaction."""
    name = session.subscription.name
    record = subscription_records.subscription_record(session.connection, name)
    if record is None or record.parked_at is None:
        raise NotParked(f'subscription "{name}" is not parked', hint=_how(name, session.table_states()))
    behind: list[KnownTable] = []
    if accept_null:
        what = f'subscription "{name}"'
        accepted = _transaction_without_value(what, record.parked_transaction, record.parked_reason or "")
        null_acceptance.accept_null(session.connection, name, accepted)
    if skip is not None:
        _check_transaction(f'subscription "{name}"', record.parked_transaction, skip)
        behind = [
            each
            for each in session.known_tables()
            if isinstance(each.state, Ready) and each.state.applied_lsn < skip
        ]
        subscription_tables.advance_tables(session.connection, name, [each.relation for each in behind], skip)
    subscription_records.unpark(session.connection, name)
    return [each.name for each in behind if each.name is not None]


def _resume_tables(
    session: SubscriptionSession, tables: Sequence[QualifiedName], skip: Lsn | None, *, accept_null: bool
) -> None:
    states = session.table_states()
    name = session.subscription.name
    for table in tables:
        found = states.get(table)
        if not isinstance(found, Parked) or found.transaction is None:
            raise NotParked(
                f'table {table} of subscription "{name}" is not parked before a transaction',
                detail=found.reason if isinstance(found, Parked) else None,
                hint=_how(name, states),
            )
        if accept_null:
            accepted = _transaction_without_value(f"table {table}", found.transaction, found.reason)
            null_acceptance.accept_null(session.connection, name, accepted, [table])
        if skip is not None:
            _check_transaction(f"table {table}", found.transaction, skip)
        ready = Ready(found.applied_lsn if skip is None else skip)
        subscription_tables.set_table_state(session.connection, name, table, ready)


def _transaction_without_value(what: str, transaction: Lsn | None, reason: str) -> Lsn:
    """The transaction that it is parked before for an unsent value."""
    if transaction is None or UNKNOWN_VALUE_RULE not in reason:
        raise NotParked(
            f"{what} is not parked for a value that was not sent",
            detail=reason,
            hint="NULL can be accepted for such values only.",
            rule=UNKNOWN_VALUE_RULE,
        )
    return transaction


def _mark_rewritten(
    config: Config, session: SubscriptionSession, tables: Sequence[QualifiedName], skip: Lsn
) -> None:
    """What the skipped transaction has rewritten is compared later all the same (R11.9)."""
    subscription = session.subscription
    change_log = ChangeLog.open(config.publisher(subscription.publisher).change_log)
    window = Window(Lsn(skip.value - 1), skip)
    rewritten = rewrites_in(change_log, window, change_log.summary(window)).published(
        subscription.publications
    )
    marked = [table for table in tables if table in rewritten]
    subscription_tables.mark_rewritten(session.connection, subscription.name, marked, skip)


def _check_transaction(what: str, parked: Lsn | None, skip: Lsn) -> None:
    """The transaction that is to be skipped is the one in the way, as it is natively."""
    if parked == skip:
        return
    raise NotParked(
        f"{what} is not parked before transaction {skip}",
        detail=f"It is parked before transaction {parked}." if parked else None,
        hint=f"Give the position that it is parked before: `--skip {parked}`."
        if parked
        else "Leave --skip out: the next replay tells the transaction.",
    )


def _how(name: str, states: Mapping[QualifiedName, object]) -> str:
    refused = [
        str(table) for table, found in states.items() if isinstance(found, Parked) and found.transaction
    ]
    copied = [
        str(table) for table, found in states.items() if isinstance(found, Parked) and not found.transaction
    ]
    parts = [f"`cdc-replay status` shows what subscription {name} waits for."]
    if refused:
        parts.append(f"Parked before a transaction: {', '.join(refused)}; name them with `--table`.")
    if copied:
        parts.append(f"To be copied again by `cdc-replay snapshot`: {', '.join(copied)}.")
    return " ".join(parts)
