"""Which tables feed which: the tables of a publisher, those of a subscription, and their servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.config import Config, PublisherConfig
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import connect_with_deadline
from cdc_replay.postgres.server_address import ServerAddress, server_address
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.subscriber.subscription_tables import known_tables


@dataclass(frozen=True, slots=True)
class TableFeed:
    """A published table, and the subscriber's table that it feeds; they differ while one is renamed."""

    published: QualifiedName
    target: QualifiedName


@dataclass(frozen=True, slots=True)
class SubscriptionFeeds:
    """The tables of a subscription on both sides."""

    publisher: ServerAddress
    subscriber: ServerAddress
    tables: tuple[TableFeed, ...]


def subscription_feeds(
    config: Config, subscriptions: Sequence[str], *, into_conn_id: str | None = None
) -> Iterator[SubscriptionFeeds]:
    """The tables that the subscribers record; `into_conn_id` is another database that gets their changes.

    A server is connected once, as a group may have hundreds of subscriptions.

    Raises:
        CdcReplayError: if a subscriber does not answer.
    """
    names_by_dsn: dict[str, list[str]] = {}
    for name in subscriptions:
        names_by_dsn.setdefault(config.dsn_of(config.subscription(name)), []).append(name)
    for dsn, names in names_by_dsn.items():
        with connect_with_deadline(dsn, purpose="lineage", seconds=_seconds(config)) as connection:
            tables = {name: known_tables(connection, name) for name in names}
        target = config.dsn_of_connection(into_conn_id) if into_conn_id else dsn
        for name in names:
            publisher = config.publisher(config.subscription(name).subscription.publisher)
            yield SubscriptionFeeds(
                address(config, publisher),
                server_address(target),
                tuple(
                    TableFeed(table.recorded_name, table.recorded_name if into_conn_id else table.name)
                    for table in tables[name]
                    if table.name is not None
                ),
            )


def published_tables(config: Config, publisher: str) -> tuple[QualifiedName, ...]:
    """The tables that the publisher's subscriptions list, in order of name.

    Raises:
        CdcReplayError: if the publisher does not answer.
    """
    source = config.publisher(publisher)
    with connect_with_deadline(
        config.dsn_of(source), purpose=f"lineage {publisher}", seconds=_seconds(config)
    ) as connection:
        catalog = read_catalog(connection)
    subscriptions = (configured.subscription for configured in config.subscriptions_of(publisher))
    return tuple(
        sorted(
            {
                synced.table.name
                for subscription in subscriptions
                for synced in synced_tables(catalog, subscription.publications)
            }
        )
    )


def address(config: Config, publisher: PublisherConfig) -> ServerAddress:
    """Where a publisher is."""
    return server_address(config.dsn_of(publisher))


def _seconds(config: Config) -> float:
    return config.timeouts.answer.total_seconds()
