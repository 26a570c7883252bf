"""The record of each subscription on its subscriber: its publisher, and whether it is parked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cdc_replay.errors import AnotherPublisher
from cdc_replay.failpoints import failpoint
from cdc_replay.model.database import Database
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import DROPPED_MEANWHILE, Connection
from cdc_replay.subscriber.replication_origin import drop_origins
from cdc_replay.subscriber.state_schema import drop, is_installed, lock

_REMEMBER: Final = """
    insert into cdc_replay.subscription (
        name, publisher_system_identifier, publications, publisher_database_oid, publisher_database_name
    )
    values (%s, %s, %s, %s, %s)
    on conflict (name) do update set publications = excluded.publications
"""


_SET_DATABASE: Final = """
    update cdc_replay.subscription set publisher_database_oid = %s, publisher_database_name = %s
    where name = %s
"""


@dataclass(frozen=True, slots=True)
class SubscriptionRecord:
    """A subscription's record; `parked_at`, `parked_reason` and `parked_transaction` are set together.

    `parked_transaction` is the commit LSN of the transaction that the subscriber refuses.
    """

    name: str
    publisher_system_identifier: str
    publications: tuple[str, ...]
    parked_at: Lsn | None
    parked_reason: str | None
    parked_transaction: Lsn | None
    publisher_database: Database

    def is_bound_to(self, publisher_system_identifier: str, database: Database) -> bool:
        """Whether the subscription is bound to that database."""
        bound_to = (self.publisher_system_identifier, self.publisher_database.oid)
        return bound_to == (publisher_system_identifier, database.oid)


def bind_subscription(
    connection: Connection,
    subscription: str,
    publisher_system_identifier: str,
    publications: Iterable[str],
    database: Database,
) -> None:
    """Bind the subscription to its publisher, or update its list of publications.

    Raises:
        AnotherPublisher: if the subscription is bound to another cluster or another database.
    """
    check_publisher(connection, subscription, publisher_system_identifier, database)
    values = (subscription, publisher_system_identifier, list(publications), database.oid, database.name)
    connection.execute(_REMEMBER, values)


def check_publisher(
    connection: Connection, subscription: str, publisher_system_identifier: str, database: Database
) -> None:
    """Check that the subscription, if it is recorded, is bound to that database of that cluster.

    Updates the recorded oid and name of the database.

    Raises:
        AnotherPublisher: if it is bound to another cluster or another database.
    """
    record = subscription_record(connection, subscription)
    if record is None:
        return
    if not record.is_bound_to(publisher_system_identifier, database):
        raise _another_publisher(record, publisher_system_identifier, database)
    if record.publisher_database != database:
        connection.execute(_SET_DATABASE, (database.oid, database.name, subscription))


def _another_publisher(
    record: SubscriptionRecord, system_identifier: str, database: Database
) -> AnotherPublisher:
    return AnotherPublisher(
        f'subscription "{record.name}" belongs to another publisher',
        detail="The subscriber's rows come from"
        f" {_describe_database(record.publisher_system_identifier, record.publisher_database)};"
        " the configured change log was captured from"
        f" {_describe_database(system_identifier, database)}.",
        hint="Correct the configuration: subscriptions of two deployments on one subscriber need different"
        f" names. To replicate from another database, run `cdc-replay teardown {record.name}`, truncate its"
        " tables, and start again.",
    )


def _describe_database(system_identifier: str, database: Database) -> str:
    return f"database {database} of the cluster with system identifier {system_identifier}"


def subscription_record(connection: Connection, subscription: str) -> SubscriptionRecord | None:
    """The record of the subscription; None if there is none."""
    if not is_installed(connection):
        return None
    row = connection.execute(
        "select name, publisher_system_identifier, publications, parked_at::text, parked_reason,"
        " parked_transaction::text, publisher_database_oid, publisher_database_name"
        " from cdc_replay.subscription where name = %s",
        (subscription,),
    ).fetchone()
    if row is None:
        return None
    name, system_identifier, publications, parked_at, parked_reason, transaction, *database = row
    return SubscriptionRecord(
        name,
        system_identifier,
        tuple(publications),
        None if parked_at is None else Lsn.parse(parked_at),
        parked_reason,
        None if transaction is None else Lsn.parse(transaction),
        Database(*database),
    )


def park(connection: Connection, subscription: str, at: Lsn, reason: str, transaction: Lsn) -> None:
    """Park the subscription (PostgreSQL: disable) at position `at`, which replay could not pass.

    `transaction` is the commit LSN of the refused transaction, which replay retries.
    """
    connection.execute(
        "update cdc_replay.subscription set parked_at = %s, parked_reason = %s, parked_transaction = %s"
        " where name = %s",
        (str(at), reason, str(transaction), subscription),
    )


def unpark(connection: Connection, subscription: str) -> None:
    """Let replay continue with the subscription."""
    connection.execute(
        "update cdc_replay.subscription"
        " set parked_at = null, parked_reason = null, parked_transaction = null where name = %s",
        (subscription,),
    )


def remove_subscription(connection: Connection, subscription: str) -> None:
    """Delete the subscription's state and replication origins, and with the last subscription the schema.

    The rows of the subscribed tables stay.
    """
    if not is_installed(connection):
        return
    # Another session may remove the last subscription meanwhile, and anybody create the schema.
    with contextlib.suppress(*DROPPED_MEANWHILE), connection.transaction():
        lock(connection)
        if is_installed(connection):
            _delete(connection, subscription)
    failpoint("teardown.after_state")
    drop_origins(connection, subscription)


def _delete(connection: Connection, subscription: str) -> None:
    connection.execute("delete from cdc_replay.subscription where name = %s", (subscription,))
    ((has_others,),) = connection.execute("select exists (select from cdc_replay.subscription)")
    if not has_others:
        drop(connection)
