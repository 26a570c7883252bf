"""`resume`: let a parked subscription, or parked tables, be replayed again; with or without what parked them.

Replay has parked them before a transaction that the subscriber refuses, with everything before it applied
(`commands.parking`). So to skip the transaction is to say that it is applied: whole, and named by the
position of its end, so that no other one is skipped by mistake, as ALTER SUBSCRIPTION … SKIP does it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from cdc_replay.commands.opened import Opened, opened
from cdc_replay.commands.results import ResumeResult
from cdc_replay.config import Config
from cdc_replay.errors import NotParked
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Parked, Ready
from cdc_replay.subscriber import state
from cdc_replay.subscriber.state import KnownTable


def resume(
    config: Config, subscription: str, *, tables: Sequence[QualifiedName] = (), skip: Lsn | None = None
) -> ResumeResult:
    """Resume the subscription, or those of its tables; `skip` is the transaction that they are parked before.

    Nothing is applied: the next replay does that.

    Raises:
        NotParked: if one of them is not parked, waits for a copy, or is parked before another transaction.
    """
    began = time.monotonic()
    with opened(config, subscription, "resume") as at_work, at_work.connection.transaction():
        if tables:
            _resume_tables(at_work, tables, skip)
            resumed: Sequence[QualifiedName] = tuple(dict.fromkeys(tables))
        else:
            resumed = _resume_subscription(at_work, skip)
        seconds = time.monotonic() - began
        result = ResumeResult(subscription, skip, skip, seconds, tuple(map(str, resumed)))
        state.record_result(at_work.connection, subscription, "resume", result.to_dict())
    return result


def _resume_subscription(at_work: Opened, skip: Lsn | None) -> Sequence[QualifiedName]:
    """Its tables that go on behind the skipped transaction."""
    name = at_work.subscription.name
    record = state.subscription_record(at_work.connection, name)
    if record is None or record.parked_at is None:
        raise NotParked(f'subscription "{name}" is not parked', hint=_how(name, at_work.table_states()))
    behind: list[KnownTable] = []
    if skip is not None:
        _check_transaction(f'subscription "{name}"', record.parked_transaction, skip)
        behind = [
            each
            for each in at_work.known_tables()
            if isinstance(each.state, Ready) and each.state.applied_lsn < skip
        ]
        state.advance_tables(at_work.connection, name, [each.relation for each in behind], skip)
    state.unpark(at_work.connection, name)
    return [each.name for each in behind if each.name is not None]


def _resume_tables(at_work: Opened, tables: Sequence[QualifiedName], skip: Lsn | None) -> None:
    states = at_work.table_states()
    name = at_work.subscription.name
    for table in tables:
        found = states.get(table)
        if not isinstance(found, Parked) or found.transaction is None:
            raise NotParked(
                f'table {table} of subscription "{name}" is not parked before a transaction',
                detail=found.reason if isinstance(found, Parked) else None,
                hint=_how(name, states),
            )
        if skip is not None:
            _check_transaction(f"table {table}", found.transaction, skip)
        ready = Ready(found.applied_lsn if skip is None else skip)
        state.set_table_state(at_work.connection, name, table, ready)


def _check_transaction(what: str, parked: Lsn | None, skip: Lsn) -> None:
    """The transaction that is to be skipped is the one in the way, as it is natively."""
    if parked == skip:
        return
    before = "for a value that nobody has" if parked is None else f"before transaction {parked}"
    raise NotParked(
        f"{what} is not parked before transaction {skip}",
        detail=f"It is parked {before}.",
        hint="Copy the table again: `cdc-replay snapshot SUBSCRIPTION --table …`."
        if parked is None
        else f"Give the position that it is parked before: `--skip {parked}`.",
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
