"""`setup`: prepare a publisher and its change log."""

from __future__ import annotations

import time

from cdc_replay.capture.setup import SetupRequest, setup_publisher
from cdc_replay.commands.results import SetupResult
from cdc_replay.config import Config, PublisherConfig


def setup(config: Config, publisher: str, *, dry_run: bool = False) -> SetupResult:
    """Check the publisher, create its capture publications, slot and change log; idempotent.

    Raises:
        PublisherNotReady: listing everything that is in the way.
        PublicationMissing: if a subscription names a publication that does not exist.
    """
    began = time.monotonic()
    outcome = setup_publisher(setup_request(config, config.publisher(publisher)), dry_run=dry_run)
    return SetupResult(
        publisher=publisher,
        from_lsn=outcome.from_lsn,
        to_lsn=outcome.from_lsn,
        seconds=time.monotonic() - began,
        statements=outcome.statements,
        warnings=outcome.warnings,
        event_trigger=outcome.event_trigger,
        dry_run=dry_run,
    )


def setup_request(config: Config, publisher: PublisherConfig) -> SetupRequest:
    """What the configuration wants of a publisher: the union of its subscriptions' publications."""
    wanted = dict.fromkeys(
        publication
        for each in config.subscriptions_of(publisher.name)
        for publication in each.subscription.publications
    )
    return SetupRequest(
        publisher=publisher.name,
        dsn=config.dsn_of(publisher),
        slot=publisher.slot,
        change_log=publisher.change_log,
        publications=tuple(wanted),
        two_phase=publisher.two_phase,
        origin_none=config.wants_origin_none(publisher.name),
        event_trigger=publisher.event_trigger,
    )
