"""How far a subscription is: what sensors wait for, and what metrics show.

A transaction counts as missing only if it is in the change log: a publisher's WAL position moves without
published changes too, and no replay runs for these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.proof import subscription_proof
from cdc_replay.model.table_state import Parked, Ready
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.lag import oldest_missing
from cdc_replay.replay.log_view import LogView
from cdc_replay.subscriber.proofs import read_summaries
from cdc_replay.subscriber.subscription_tables import table_states


@dataclass(frozen=True, slots=True)
class SubscriptionProgress:
    """The state of one subscription.

    `applied_lsn` is the position of its last table; None while a table has no copy. `missing_since` is the
    commit time of the oldest captured transaction that a table lacks. `proved_at` is the time of the
    subscription's proof (`model.proof`), that of its table whose proof is oldest; None if one has none.
    `table_proofs` has that of each table.
    """

    applied_lsn: Lsn | None
    missing_since: datetime | None
    proved_at: datetime | None
    table_proofs: Mapping[str, datetime] = field(default_factory=dict)

    @property
    def lag_seconds(self) -> float | None:
        """Age of the oldest captured transaction that is not applied; None while a table has no copy."""
        return None if self.applied_lsn is None else _age(self.missing_since) or 0.0

    @property
    def proof_age_seconds(self) -> float | None:
        """Age of the proof that the subscriber is consistent."""
        return _age(self.proved_at)

    @property
    def table_proof_ages(self) -> dict[str, float]:
        """The age of the proof of each table that has one, in seconds."""
        return {table: _age(at) or 0.0 for table, at in self.table_proofs.items()}


def read_progress(connection: Connection, subscription: str, change_log: LogView) -> SubscriptionProgress:
    """The progress of a subscription, as its subscriber and the change log have it."""
    states = table_states(connection, subscription).values()
    tables = read_summaries(connection, subscription)
    proven = subscription_proof(tables.values())
    copied = [state for state in states if isinstance(state, Ready | Parked)]
    is_complete = bool(copied) and len(copied) == len(states)
    return SubscriptionProgress(
        applied_lsn=min(state.applied_lsn for state in copied) if is_complete else None,
        missing_since=oldest_missing(change_log, copied),
        proved_at=None if proven is None else proven.at,
        table_proofs={
            str(name): point.at for name, table in tables.items() if (point := table.proven) is not None
        },
    )


def holds_all(progress: SubscriptionProgress, change_log: LogView, lsn: Lsn) -> bool:
    """Whether the subscription has every transaction that the publisher committed up to `lsn`."""
    applied = progress.applied_lsn
    if applied is None or applied >= lsn:
        return applied is not None
    return change_log.end_lsn() >= lsn and change_log.log().first_commit(Window(applied, lsn)) is None


def _age(time: datetime | None) -> float | None:
    return None if time is None else max(0.0, (datetime.now(UTC) - time).total_seconds())
