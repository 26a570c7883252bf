"""`doctor`: whether the commands can run here, and what to do where they cannot. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.config import Config, PublisherConfig, load_config
from cdc_replay.doctor.change_log import check_change_log
from cdc_replay.doctor.machine import check_machine
from cdc_replay.doctor.publisher import check_publisher
from cdc_replay.doctor.subscriber import check_subscriber
from cdc_replay.errors import CdcReplayError, InvalidConfiguration
from cdc_replay.model.check import Check, DoctorResult, Verdict, failed_check
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.opening import setup_request
from cdc_replay.postgres.connection import connect_with_deadline
from cdc_replay.publication.resolve import synced_tables


def doctor(path: Path | None = None) -> DoctorResult:
    """All checks; a configuration that cannot be read is one that failed."""
    checks = tuple(_checks(path))
    failed = dict.fromkeys(check.subject for check in checks if check.verdict is Verdict.FAILED)
    return DoctorResult(checks, f"checks failed for {', '.join(failed)}" if failed else None)


def _checks(path: Path | None) -> Iterator[Check]:
    yield from check_machine()
    try:
        config = load_config(path)
    except InvalidConfiguration as error:
        yield failed_check("configuration", error)
        return
    yield Check("configuration", Verdict.OK, f"{config.path} is valid")
    catalogs: dict[str, PublisherCatalog] = {}
    for publisher in config.publishers.values():
        yield from _publisher(config, publisher, catalogs)
    for name in config.subscriptions:
        yield from _subscriber(config, name, catalogs)


def _publisher(
    config: Config, publisher: PublisherConfig, catalogs: dict[str, PublisherCatalog]
) -> Iterator[Check]:
    subject = f"publisher {publisher.name}"
    yield from check_change_log(subject, publisher.change_log)
    seconds = config.timeouts.answer.total_seconds()
    try:
        request = setup_request(config, publisher.name)
        yield from check_publisher(request, seconds, publisher.max_retained_wal)
        with connect_with_deadline(request.dsn, purpose=subject, seconds=seconds) as connection:
            catalogs[publisher.name] = read_catalog(connection, texts=False)
    except InvalidConfiguration as error:
        yield failed_check(subject, error)
    except (CdcReplayError, psycopg.Error):
        return  # `check_publisher` has said so


def _subscriber(config: Config, name: str, catalogs: Mapping[str, PublisherCatalog]) -> Iterator[Check]:
    configured = config.subscription(name)
    subscription = configured.subscription
    catalog = catalogs.get(subscription.publisher)
    columns = None
    if catalog is not None:
        tables = synced_tables(catalog, subscription.publications)
        columns = {table.table.name: table.columns for table in tables}
    try:
        dsn = config.dsn_of(configured)
    except InvalidConfiguration as error:
        yield failed_check(f"subscription {name}", error)
        return
    yield from check_subscriber(subscription, dsn, columns, config.timeouts.answer.total_seconds())
