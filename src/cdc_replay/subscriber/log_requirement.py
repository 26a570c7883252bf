"""What a subscription still needs of its publisher's change log.

| a table of the subscription is | it needs what commits after                                       |
|--------------------------------|-------------------------------------------------------------------|
| ready, or parked               | its applied LSN                                                   |
| being copied                   | the consistent point of its snapshot                              |
| waiting for its snapshot       | that snapshot, taken at the log's end or later; unknown if a      |
|                                | running job may have taken it already                             |
| ready, and being copied again  | the consistent point of that snapshot: unknown, as its state      |
|                                | stays until then, unless a table that is `Copying` needs as much  |
| before the log's start         | its next snapshot                                                 |
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from cdc_replay.errors import AnotherPublisher, PruneLimitUnknown, SubscriptionInUse
from cdc_replay.model.log_requirement import LogExtent, LogRequirement
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready, TableState
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber import state_schema, subscription_lock, subscription_records, subscription_tables
from cdc_replay.subscriber.subscription_tables import KnownTable

logger = logging.getLogger(__name__)


def read_log_requirement(connection: Connection, subscription: str, log: LogExtent) -> LogRequirement:
    """What the subscription, whose subscriber is connected, needs of the log.

    Raises:
        PruneLimitUnknown: if its rows come from another publisher, or one of its jobs copies tables again, or
            may be about to copy some.
    """
    state_schema.upgrade(connection)
    _check_publisher(connection, subscription, log)
    is_busy = _is_busy(connection, subscription)
    # Before the states: a copy that begins from now on has a snapshot after the log's end.
    copier = subscription_lock.lock_holder(connection, subscription_lock.copy_lock(subscription))
    states = _states_in_need(subscription_tables.known_tables(connection, subscription))
    if copier is not None and not any(
        isinstance(table_state, Copying) and table_state.consistent_point >= log.start_lsn
        for table_state in states
    ):
        raise PruneLimitUnknown(
            f'subscription "{subscription}" is being copied, so nothing is pruned',
            detail=f"Its tables return to the snapshot of the copy, whose position is not known. {copier}",
            hint="Run the command again when the copy has ended.",
        )
    if is_busy and (not states or any(isinstance(table_state, Pending) for table_state in states)):
        raise PruneLimitUnknown(
            f'subscription "{subscription}" may be about to copy tables, so nothing is pruned',
            detail="One of its jobs is running, and it has tables that wait for their snapshot.",
            hint="Run the command again when the job has ended.",
        )
    return LogRequirement(subscription, _needed_lsn(subscription, states, log), is_busy)


def _states_in_need(tables: Iterable[KnownTable]) -> list[TableState]:
    """The states that keep changes in the log.

    Replay stops at the next change of a Ready table that was dropped on the subscriber (R8.1).
    """
    return [table.state for table in tables if table.name is not None or isinstance(table.state, Ready)]


def _check_publisher(connection: Connection, subscription: str, log: LogExtent) -> None:
    try:
        subscription_records.check_publisher(connection, subscription, log.system_identifier, log.database)
    except AnotherPublisher as error:
        raise PruneLimitUnknown(
            f"{error.message}, so nothing is pruned", detail=error.detail, hint="Correct the configuration."
        ) from error


def _is_busy(connection: Connection, subscription: str) -> bool:
    try:
        with subscription_lock.lock(connection, subscription):
            return False
    except SubscriptionInUse:
        return True


def _needed_lsn(subscription: str, states: Iterable[TableState], log: LogExtent) -> Lsn:
    positions = []
    for table_state in states:
        match table_state:
            case Ready(lsn) | Parked(lsn, _) | Copying(lsn):
                positions.append(lsn)
            case Pending():
                continue
    if before_start := [lsn for lsn in positions if lsn < log.start_lsn]:
        logger.warning(
            "%d tables of subscription %s end before the change log starts: they need a snapshot",
            len(before_start),
            subscription,
        )
    return min((lsn for lsn in positions if lsn >= log.start_lsn), default=log.end_lsn)
