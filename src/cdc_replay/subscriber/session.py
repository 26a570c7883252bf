"""A subscription opened for work: its subscriber connected, its state schema there, its lock held."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.errors import SubscriberNotWritable, SubscriptionInUse
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Ready, TableState
from cdc_replay.postgres.connection import READ_ONLY_REMEDY, Connection, connect, is_read_only
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, export_snapshot
from cdc_replay.subscriber import state_schema, subscription_lock, subscription_tables
from cdc_replay.subscriber.subscription_tables import KnownTable

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 60
PAUSE_SECONDS: Final = 0.2
_TRIES_BESIDE_OTHERS: Final = 3


@dataclass(frozen=True, slots=True)
class SubscriptionSession:
    """A subscription that no other process can work on while this is open.

    `assumed` are tables, by oid, that a window advances which is being applied, each with that window's end.
    """

    subscription: Subscription
    dsn: str = field(repr=False)
    connection: Connection
    assumed: Mapping[int, Lsn] = field(default_factory=dict)

    def known_tables(self) -> tuple[KnownTable, ...]:
        """Its tables as the subscriber holds them; will hold them, where that is assumed."""
        return tuple(
            dataclasses.replace(each, state=Ready(self.assumed[each.relation]))
            if each.relation in self.assumed
            else each
            for each in subscription_tables.known_tables(self.connection, self.subscription.name)
        )

    def table_states(self) -> Mapping[QualifiedName, TableState]:
        """The states of its tables that are there, by the names that they have now."""
        return {each.name: each.state for each in self.known_tables() if each.name is not None}

    def tables_are_listed(self) -> bool:
        """Whether a snapshot or refresh has found out which tables it has, be it none."""
        return bool(self.known_tables()) or subscription_tables.tables_are_listed(
            self.connection, self.subscription.name
        )

    def as_if_applied(self, assumed: Mapping[int, Lsn]) -> SubscriptionSession:
        """As it is once the window that is being applied is applied."""
        return dataclasses.replace(self, assumed=assumed)

    def ready_tables(self) -> dict[QualifiedName, Lsn]:
        """The tables that replay can advance, each with its applied LSN."""
        return {
            name: found.applied_lsn for name, found in self.table_states().items() if isinstance(found, Ready)
        }

    def position(self) -> Lsn | None:
        """What replay has reached with all tables that it can advance; None before the first snapshot.

        A table that was dropped on the subscriber counts: what comes for it must be seen (R8.1).
        """
        states = (each.state for each in self.known_tables())
        return min((found.applied_lsn for found in states if isinstance(found, Ready)), default=None)


@contextlib.contextmanager
def open_session(
    subscription: Subscription, dsn: str, purpose: str, *, writes: bool = True, installs: bool = True
) -> Iterator[SubscriptionSession]:
    """Connect to the subscriber of a subscription and hold the subscription's lock until the end.

    A process that works on the subscription now, such as a scheduled replay, is waited for. `installs`: the
    state schema is created where it is missing.

    Raises:
        SubscriberNotWritable: if it `writes` and the subscriber is read-only.
        SubscriptionBusy: if another process holds the lock for `PATIENCE_SECONDS`.
    """
    name = subscription.name
    with connect(dsn, purpose=f"{purpose} {name}") as connection:
        if writes:
            _check_writable(connection, name)
        if installs:
            state_schema.install(connection)
        with contextlib.ExitStack() as stack:
            _wait_for_lock(stack, connection, name)
            yield SubscriptionSession(subscription, dsn, connection)


@contextlib.contextmanager
def release_subscription_lock(session: SubscriptionSession) -> Iterator[None]:
    """Let go of the subscription until the context ends; who works on it then is waited for."""
    with subscription_lock.release(session.connection, session.subscription.name):
        yield


@contextlib.contextmanager
def export_snapshot_unlocked(publisher_dsn: str, session: SubscriptionSession) -> Iterator[ExportedSnapshot]:
    """A snapshot of the publisher; others may work on the subscription until it is there.

    It waits for all transactions that are open on the publisher (R1.35). The subscription may be behind its
    consistent point or before it.

    Raises:
        PublisherNotReady, ServerUnavailable, MissingPrivilege: as `export_snapshot`.
    """
    with contextlib.ExitStack() as stack:
        with release_subscription_lock(session):
            exported = stack.enter_context(export_snapshot(publisher_dsn))
        yield exported


@contextlib.contextmanager
def export_after_applied(publisher_dsn: str, session: SubscriptionSession) -> Iterator[ExportedSnapshot]:
    """The same, at or behind the position of every table: where others go past it, it is taken anew."""
    for _ in range(_TRIES_BESIDE_OTHERS):
        with export_snapshot_unlocked(publisher_dsn, session) as exported:
            if max(session.ready_tables().values(), default=ZERO) <= exported.consistent_point:
                yield exported
                return
        logger.info(
            "subscription %s was replayed past the fence, which is taken anew", session.subscription.name
        )
    with export_snapshot(publisher_dsn) as exported:
        yield exported


@contextlib.contextmanager
def snapshot_lock(session: SubscriptionSession) -> Iterator[None]:
    """One process at a time copies tables of a subscription, also where it lets others work on it.

    Raises:
        SubscriptionBusy: if another one does.
    """
    with subscription_lock.lock(session.connection, f"{session.subscription.name} (snapshot)"):
        yield


def _check_writable(connection: Connection, name: str) -> None:
    if is_read_only(connection):
        raise SubscriberNotWritable(
            f'the subscriber of subscription "{name}" is read-only', hint=READ_ONLY_REMEDY
        )


def _wait_for_lock(stack: contextlib.ExitStack, connection: Connection, name: str) -> None:
    began = time.monotonic()
    is_announced = False
    while True:
        try:
            stack.enter_context(subscription_lock.lock(connection, name))
        except SubscriptionInUse as busy:
            if time.monotonic() > began + PATIENCE_SECONDS:
                raise
            if not is_announced:
                logger.info("subscription %s is busy, waiting: %s", name, busy.detail)
                is_announced = True
            time.sleep(PAUSE_SECONDS)
        else:
            return
