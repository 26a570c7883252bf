"""Other subscriptions that feed the table: the row of the subscriber may be one of theirs.

It is if it is outside of the row filters of the asked subscription, and another one's filter passes it, as in
a comparison (`compare.other_feeds`). A row that the subscription itself should have removed passes its own
filters, and is never excused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psycopg
from psycopg import sql

from cdc_replay.compare.other_feeds import LogState, claims_by_feed
from cdc_replay.compare.table_pair import outside_filter
from cdc_replay.errors import CdcReplayError
from cdc_replay.explain_row.present_rows import read_conditions
from cdc_replay.explain_row.row_key import RowKey
from cdc_replay.filters.names import NotPrintableError
from cdc_replay.filters.printed import print_for_subscriber
from cdc_replay.model.relation import RelationId
from cdc_replay.model.subscription import Subscription
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.subscriber.target_tables import TargetTable


@dataclass(frozen=True, slots=True)
class OtherOwners:
    """Other subscriptions that the row is of, and those that feed the table with rows nobody can tell."""

    owners: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A table of the subscription on both sides; `relation` is the published one's."""

    subscription: Subscription
    connection: Connection
    relation: RelationId
    target: TargetTable

    def owners(self, log_state: LogState, publisher: Connection, key: RowKey) -> OtherOwners:
        """Whose the rows under the key may be, if they are not the subscription's."""
        claims, unknown = claims_by_feed(self, log_state, self.target.name)
        outside = self._outside(log_state, publisher) if claims else None
        if outside is None:
            return OtherOwners(unknown=unknown)
        return OtherOwners(self._claiming(claims, outside, key), unknown)

    def _outside(self, log_state: LogState, publisher: Connection) -> sql.Composed | None:
        """The condition for rows outside of the row filters; None if there are none, or nobody can tell."""
        listed = {
            synced.table.id: synced
            for synced in synced_tables(log_state.catalog, self.subscription.publications)
        }
        synced = listed.get(self.relation)
        if synced is None or synced.filters is None:
            return None
        try:
            return outside_filter(
                print_for_subscriber(self.connection, publisher, synced.table, synced.filters)
            )
        except NotPrintableError:
            return None

    def _claiming(
        self, claims: Mapping[str, sql.Composed], outside: sql.Composed, key: RowKey
    ) -> tuple[str, ...]:
        conditions = [sql.SQL("({} and {})").format(outside, claim) for claim in claims.values()]
        try:
            holds = read_conditions(self.connection, self.target, key, conditions)
        except (CdcReplayError, psycopg.Error):
            return ()  # a filter cannot be evaluated, or reads a column that the subscriber lacks
        return tuple(name for name, is_claimed in zip(claims, holds, strict=True) if is_claimed)
