"""`explain`: per table what is published, how it is filtered, and where the filter is evaluated."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from cdc_replay.capture.ddl.event_triggers import is_installed
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError, ChangeLogMissing
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.results import Result
from cdc_replay.model.subscription import Subscription
from cdc_replay.postgres.connection import connect
from cdc_replay.publication.capture_coverage import uncaptured_leaves
from cdc_replay.publication.explain import ExplainedTable, explain_tables
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.publication.restrictions import check_publications, warnings_for
from cdc_replay.replay.definition_drift import definition_drifts
from cdc_replay.replay.log_view import LogView
from cdc_replay.replay.table_rewrites import rewritten_tables

BY_POSITION: Final = "exact by position: the publisher has the event triggers"
BY_PULL: Final = "as each pull finds them: the publisher has no event triggers"


@dataclass(frozen=True, slots=True)
class ExplainResult(Result):
    """What the publisher publishes to a subscription as of `to_lsn`.

    `definitions` says from which position of the stream a changed definition is in force (R9.10, R9.11).
    `warnings` also names tables whose rows were copied with another row filter (R9.12), or rewritten since
    (R11.9).
    """

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    publications: tuple[str, ...]
    definitions: str
    tables: tuple[ExplainedTable, ...]
    warnings: tuple[str, ...]


def explain(config: Config, subscription: str) -> ExplainResult:
    """Read the publisher's definitions and explain what they mean for the subscription.

    Raises:
        PublicationRefused: if PostgreSQL refuses to decode for these publications.
    """
    began = time.monotonic()
    target = config.subscription(subscription).subscription
    publisher = config.publisher(target.publisher)
    with connect(config.dsn_of(publisher), purpose=f"explain {subscription}") as connection:
        catalog = read_catalog(connection)
        is_exact = is_installed(connection, publisher.slot)
    check_publications(catalog, target.publications)
    return ExplainResult(
        subscription=subscription,
        from_lsn=catalog.lsn,
        to_lsn=catalog.lsn,
        seconds=time.monotonic() - began,
        publications=target.publications,
        definitions=BY_POSITION if is_exact else BY_PULL,
        tables=explain_tables(catalog, target.publications),
        warnings=(
            *warnings_for(catalog, target.publications),
            *_capture_warning(catalog, target),
            *_drift_warnings(config, subscription, catalog),
        ),
    )


def _capture_warning(catalog: PublisherCatalog, subscription: Subscription) -> tuple[str, ...]:
    leaves = uncaptured_leaves(catalog, subscription, synced_tables(catalog, subscription.publications))
    if not leaves:
        return ()
    return (f"not captured: {', '.join(leaves)}; run `cdc-replay setup {subscription.publisher}` [R2.3]",)


def _drift_warnings(config: Config, subscription: str, catalog: PublisherCatalog) -> tuple[str, ...]:
    """Changed row filters and rewrites; one warning if the subscriber does not answer."""
    target = config.subscription(subscription)
    change_log = config.publisher(target.subscription.publisher).change_log
    try:
        with connect(config.dsn_of(target), purpose=f"explain {subscription}") as connection:
            rewrites = rewritten_tables(connection, subscription)
            drifts = definition_drifts(connection, target.subscription, LogView(change_log), catalog)
    except ChangeLogMissing:
        return ()
    except CdcReplayError as error:
        return (f"whether row filters have changed since the copy is unknown: {error.message}",)
    return tuple(map(str, (*drifts.values(), *rewrites.values())))
