"""`setup`: prepare a publisher and its change log, or print what an administrator runs for its roles.

| dry run of         | prints                                                                            |
|--------------------|-----------------------------------------------------------------------------------|
| the publisher      | missing grants of its role; capture publications, event triggers, the slot        |
| one `subscription` | missing grants of its role on the subscriber, the schema of the state             |
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from cdc_replay.capture.ddl.event_triggers import is_installed
from cdc_replay.capture.setup import setup_publisher
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.config import Config, PublisherConfig, SubscriptionConfig
from cdc_replay.doctor.server import setup_script
from cdc_replay.errors import CdcReplayError, InvalidConfiguration
from cdc_replay.model.results import SetupResult
from cdc_replay.opening import setup_request
from cdc_replay.postgres.connection import connect, superuser_warnings
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.subscriber.grants import plan_role_script


def setup(config: Config, publisher: str, *, dry_run: bool = False, checks_roles: bool = True) -> SetupResult:
    """Check the publisher, create its capture publications, slot and change log; idempotent.

    `checks_roles` asks all servers whether the roles are superusers. A scheduled run omits this: capture must
    wait for no subscriber.

    Raises:
        PublisherNotReady: listing every obstacle.
        PublicationMissing: if a subscription names a publication that does not exist.
    """
    began = time.monotonic()
    outcome = setup_publisher(setup_request(config, publisher), dry_run=dry_run)
    return SetupResult(
        publisher=publisher,
        from_lsn=outcome.from_lsn,
        to_lsn=outcome.from_lsn,
        seconds=time.monotonic() - began,
        statements=outcome.statements,
        warnings=(*outcome.warnings, *(_superusers(config, publisher) if checks_roles else ())),
        event_trigger=outcome.event_trigger,
        dry_run=dry_run,
    )


def subscriber_script(config: Config, publisher: str, name: str) -> SetupResult:
    """The grants that an administrator of the subscriber runs once, for the role of subscription `name`.

    Raises:
        InvalidConfiguration: if the subscription is not one of the publisher.
        ServerUnavailable, MissingPrivilege: if a side cannot be asked.
    """
    began = time.monotonic()
    subscription = config.subscription(name)
    if subscription.subscription.publisher != publisher:
        raise InvalidConfiguration(
            f'subscription "{name}" is not one of publisher "{publisher}"',
            hint=f"Give its own: {subscription.subscription.publisher}.",
        )
    with connect(config.dsn_of(config.publisher(publisher)), purpose=f"setup {publisher}") as connection:
        catalog = read_catalog(connection, texts=False)
        event_trigger = is_installed(connection, config.publisher(publisher).slot)
    names = [table.table.name for table in synced_tables(catalog, subscription.subscription.publications)]
    run_as_owner = subscription.subscription.run_as_owner
    with connect(config.dsn_of(subscription), purpose=f"setup {name}") as connection:
        statements, warnings = plan_role_script(connection, names, run_as_owner=run_as_owner)
        superusers = tuple(
            superuser_warnings(connection, f"subscription {name}", setup_script(publisher, name))
        )
    return SetupResult(
        publisher=publisher,
        from_lsn=None,
        to_lsn=None,
        seconds=time.monotonic() - began,
        statements=statements,
        warnings=(*warnings, *superusers),
        event_trigger=event_trigger,
        dry_run=True,
    )


def _superusers(config: Config, publisher: str) -> Iterator[str]:
    """Warnings of roles that are superusers; a server that does not answer is skipped."""
    endpoints: list[tuple[str, PublisherConfig | SubscriptionConfig, str]] = [
        (f"publisher {publisher}", config.publisher(publisher), setup_script(publisher))
    ]
    for subscription in config.subscriptions_of(publisher):
        script = setup_script(publisher, subscription.name)
        endpoints.append((f"subscription {subscription.name}", subscription, script))
    for name, endpoint, script in endpoints:
        with (
            contextlib.suppress(CdcReplayError),
            connect(config.dsn_of(endpoint), purpose="setup") as connection,
        ):
            yield from superuser_warnings(connection, name, script)
