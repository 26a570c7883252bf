"""Both sides at one WAL position, while the publisher continues to write.

| step | who          | what                                                              |
|------|--------------|-------------------------------------------------------------------|
| 1    | command      | exports a snapshot of the publisher at consistent point L (R1.34) |
| 2    | command      | captures and replays up to L, holding the subscription's lock     |
| 3    | `open_fence` | imports that snapshot, and opens one of the subscriber            |

After step 2 the subscriber is the filtered publisher at L and no other process applies to it, so the two
snapshots of step 3 hold the same state. The tables' states are read inside the subscriber's snapshot: a table
that is not at L is reported, not compared.

Both transactions are read only, so a crash leaves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Ready, TableState, describe
from cdc_replay.postgres.connection import Connection, open_snapshot
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, import_snapshot
from cdc_replay.subscriber.subscription_tables import table_states


@dataclass(frozen=True, slots=True)
class ComparisonFence:
    """A repeatable-read transaction on each side, both as of `lsn`.

    `states` are the states of the subscription's tables in the subscriber's transaction.
    """

    lsn: Lsn
    publisher: Connection
    subscriber: Connection
    states: Mapping[QualifiedName, TableState]

    def why_not_at_fence(self, table: QualifiedName) -> str | None:
        """None if the subscriber's table is exactly at the fence, else the reason."""
        match self.states.get(table):
            case None:
                return "the table is not part of the subscription yet; run `cdc-replay refresh`"
            case Ready(applied_lsn) if applied_lsn == self.lsn:
                return None
            case state:
                return f"the table is not at the fence {self.lsn}: {describe(state)}"


@contextlib.contextmanager
def open_fence(
    snapshot: ExportedSnapshot, subscriber_dsn: str, subscription: str, *, has_tables_of_others: bool = False
) -> Iterator[ComparisonFence]:
    """Open both sides at the snapshot's consistent point; the context closes them.

    If the subscriber `has_tables_of_others`, functions that read as their owner are created there and rolled
    back.

    The caller has replayed the subscription up to that point and holds its lock.

    Raises:
        PublisherNotReady: if the snapshot is no longer exported.
        ServerUnavailable, MissingPrivilege: if a server cannot be reached, or refuses the role.
    """
    purpose = f"validate {subscription}"
    with (
        contextlib.closing(import_snapshot(snapshot, purpose=purpose)) as publisher,
        open_subscriber(subscriber_dsn, purpose, read_only=not has_tables_of_others) as subscriber,
    ):
        yield ComparisonFence(
            snapshot.consistent_point, publisher, subscriber, table_states(subscriber, subscription)
        )


@contextlib.contextmanager
def open_subscriber(dsn: str, purpose: str, *, read_only: bool) -> Iterator[Connection]:
    """A repeatable-read transaction of the subscriber, whose snapshot is taken now.

    Raises:
        ServerUnavailable, MissingPrivilege: as `connect`.
    """
    with open_snapshot(dsn, purpose=purpose, read_only=read_only) as connection:
        connection.execute("select")
        yield connection
