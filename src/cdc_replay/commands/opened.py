"""A subscription opened for work: its subscriber connected, its state schema there, its lock held."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cdc_replay.config import Config, SubscriptionConfig
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Ready, TableState
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import state


@dataclass(frozen=True, slots=True)
class Opened:
    """A subscription that no other process can work on while this is open."""

    config: SubscriptionConfig
    dsn: str
    connection: Connection

    @property
    def subscription(self) -> Subscription:
        """What is subscribed to."""
        return self.config.subscription

    def table_states(self) -> Mapping[QualifiedName, TableState]:
        """The states of its tables, as the subscriber holds them."""
        return state.table_states(self.connection, self.subscription.name)

    def ready_tables(self) -> dict[QualifiedName, Lsn]:
        """The tables that replay can advance, each with its applied LSN."""
        return {
            name: found.applied_lsn for name, found in self.table_states().items() if isinstance(found, Ready)
        }


@contextlib.contextmanager
def opened(config: Config, name: str, purpose: str) -> Iterator[Opened]:
    """Connect to the subscriber of `name` and hold its lock until the end.

    Raises:
        InvalidConfiguration: if there is no such subscription.
        SubscriptionBusy: if another process holds the lock.
    """
    subscription = config.subscription(name)
    dsn = config.dsn_of(subscription)
    with connect(dsn, purpose=f"{purpose} {name}") as connection:
        state.install(connection)
        with state.lock(connection, name):
            yield Opened(subscription, dsn, connection)
