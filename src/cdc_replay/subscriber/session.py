"""A subscription opened for work: connected, state schema installed, lock held."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.errors import SubscriberNotWritable
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Ready, TableState
from cdc_replay.postgres.connection import READ_ONLY_REMEDY, Connection, connect, is_read_only
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, export_snapshot
from cdc_replay.subscriber import state_schema, subscription_lock, subscription_tables
from cdc_replay.subscriber.subscription_records import subscription_record
from cdc_replay.subscriber.subscription_tables import KnownTable
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 60
_UNLOCKED_TRIES: Final = 3

# A system identifier is that of a cluster's copies, too, and its function may be forbidden to the role.
_DATABASE: Final = """
    select pg_catalog.pg_postmaster_start_time()::text, oid::bigint from pg_catalog.pg_database
    where datname = pg_catalog.current_database()
"""


@dataclass(frozen=True, slots=True)
class SubscriptionSession:
    """A subscription that no other process can work on while this is open.

    `assumed` are the tables, by oid, that a window in progress advances, each with that window's end.
    """

    subscription: Subscription
    dsn: str = field(repr=False)
    connection: Connection
    assumed: Mapping[int, Lsn] = field(default_factory=dict)
    report: Report = field(default=unreported, repr=False)
    """What work on the subscription reports to."""

    def database(self) -> tuple[str, int]:
        """What tells the subscriber's database from others: when its server started, and its oid.

        Several DSNs may lead to it, with other roles or under other addresses.
        """
        ((started, oid),) = self.connection.execute(_DATABASE)
        return started, oid

    def known_tables(self) -> tuple[KnownTable, ...]:
        """The tables as the subscriber holds them, or will hold them after the assumed window."""
        return tuple(
            dataclasses.replace(table, state=Ready(self.assumed[table.relation]))
            if table.relation in self.assumed
            else table
            for table in subscription_tables.known_tables(self.connection, self.subscription.name)
        )

    def table_states(self) -> Mapping[QualifiedName, TableState]:
        """The states of tables that exist, by current name."""
        return {table.name: table.state for table in self.known_tables() if table.name is not None}

    def tables_are_listed(self) -> bool:
        """Whether a snapshot or refresh has listed the tables; the list may be empty."""
        return bool(self.known_tables()) or subscription_tables.tables_are_listed(
            self.connection, self.subscription.name
        )

    def as_if_applied(self, assumed: Mapping[int, Lsn]) -> SubscriptionSession:
        """The session as of the end of the window that is being applied."""
        return dataclasses.replace(self, assumed=assumed)

    def read_targets(self, names: Iterable[QualifiedName]) -> dict[QualifiedName, TargetTable]:
        """The tables of these names that exist on the subscriber."""
        run_as_owner = self.subscription.run_as_owner
        return read_target_tables(self.connection, names, run_as_owner=run_as_owner)

    def ready_tables(self) -> dict[QualifiedName, Lsn]:
        """The tables that replay can advance, each with its applied LSN."""
        return {
            name: state.applied_lsn for name, state in self.table_states().items() if isinstance(state, Ready)
        }

    def position(self) -> Lsn | None:
        """The least applied LSN of the tables that replay can advance; None before the first snapshot.

        Includes tables that were dropped on the subscriber: their changes must be reported (R8.1).
        """
        states = (table.state for table in self.known_tables())
        return min((state.applied_lsn for state in states if isinstance(state, Ready)), default=None)


@contextlib.contextmanager
def open_session(
    subscription: Subscription,
    dsn: str,
    purpose: str,
    *,
    writes: bool = True,
    installs: bool = True,
    report: Report = unreported,
) -> Iterator[SubscriptionSession]:
    """Connect to the subscriber and hold the subscription's lock until the end.

    Waits for a process that works on the subscription, such as a scheduled replay. `installs`: create the
    state schema if it is missing.

    Raises:
        SubscriberNotWritable: if it `writes` and the subscriber is read-only.
        SubscriptionInUse: if another process holds the lock for `PATIENCE_SECONDS`.
    """
    with connect(dsn, purpose=f"{purpose} {subscription.name}") as connection:
        session = SubscriptionSession(subscription, dsn, connection, report=report)
        with lock_session(session, writes=writes, installs=installs):
            yield session


@contextlib.contextmanager
def lock_session(
    session: SubscriptionSession, *, writes: bool = True, installs: bool = True
) -> Iterator[None]:
    """Hold the lock of a connected subscription, as `open_session` does.

    Raises:
        SubscriberNotWritable, SubscriptionInUse: as `open_session`.
    """
    name = session.subscription.name
    if writes:
        _check_writable(session.connection, name)
    if installs:
        state_schema.install(session.connection)
    with subscription_lock.lock(session.connection, name, patience_seconds=PATIENCE_SECONDS):
        yield


@contextlib.contextmanager
def release_subscription_lock(session: SubscriptionSession) -> Iterator[None]:
    """Release the subscription lock inside the context; on exit, wait to acquire it again.

    Raises:
        SubscriptionInUse: if another process has removed the subscription meanwhile.
    """
    name = session.subscription.name
    was_recorded = subscription_record(session.connection, name) is not None
    with subscription_lock.release(session.connection, name):
        yield
    if was_recorded and subscription_record(session.connection, name) is None:
        raise subscription_lock.state_removed(name)


@contextlib.contextmanager
def export_snapshot_unlocked(publisher_dsn: str, session: SubscriptionSession) -> Iterator[ExportedSnapshot]:
    """Export a snapshot of the publisher; the subscription is unlocked until it exists.

    Creating it waits for all open transactions of the publisher (R1.35). The subscription may be before or
    after the consistent point.

    Raises:
        PublisherNotReady, ServerUnavailable, MissingPrivilege: as `export_snapshot`.
    """
    with contextlib.ExitStack() as stack:
        with release_subscription_lock(session):
            exported = stack.enter_context(export_snapshot(publisher_dsn))
        yield exported


@contextlib.contextmanager
def export_after_applied(publisher_dsn: str, session: SubscriptionSession) -> Iterator[ExportedSnapshot]:
    """Export a snapshot at or after the position of every table, and retry if other processes pass it."""
    for _ in range(_UNLOCKED_TRIES):
        with export_snapshot_unlocked(publisher_dsn, session) as exported:
            if max(session.ready_tables().values(), default=ZERO) <= exported.consistent_point:
                yield exported
                return
        logger.info(
            "subscription %s was replayed past the fence; exporting another one", session.subscription.name
        )
    with export_snapshot(publisher_dsn) as exported:
        yield exported


@contextlib.contextmanager
def snapshot_lock(session: SubscriptionSession) -> Iterator[None]:
    """Let one process at a time copy tables of a subscription, also while the subscription lock is released.

    Raises:
        SubscriptionInUse: if another process copies tables.
    """
    with subscription_lock.lock(session.connection, subscription_lock.copy_lock(session.subscription.name)):
        yield


def _check_writable(connection: Connection, name: str) -> None:
    if is_read_only(connection):
        raise SubscriberNotWritable(
            f'the subscriber of subscription "{name}" is read-only', hint=READ_ONLY_REMEDY
        )
