"""`setup`: prepare a publisher and its change log, or print what an administrator runs for its roles.

| dry run of         | for            | prints                                                              |
|--------------------|----------------|---------------------------------------------------------------------|
| the publisher      | the publisher  | what its role lacks; capture publications, event triggers, the slot |
| one `subscription` | its subscriber | what its role lacks, the schema of the state                        |
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from cdc_replay.capture.ddl.event_triggers import is_installed
from cdc_replay.capture.setup import setup_publisher
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.commands.opening import setup_request
from cdc_replay.config import Config, PublisherConfig, SubscriptionConfig
from cdc_replay.errors import CdcReplayError, InvalidConfiguration
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import SetupResult
from cdc_replay.postgres.connection import Connection, connect, superuser
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.subscriber.grants import plan_grants, superuser_owned_tables


def setup(config: Config, publisher: str, *, dry_run: bool = False, checks_roles: bool = True) -> SetupResult:
    """Check the publisher, create its capture publications, slot and change log; idempotent.

    `checks_roles` asks all servers whether the roles are superusers. A scheduled run does without: capture
    waits for no subscriber.

    Raises:
        PublisherNotReady: listing everything that is in the way.
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
    """What an administrator of the subscriber runs once, for the role of subscription `name`.

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
    names = [each.table.name for each in synced_tables(catalog, subscription.subscription.publications)]
    as_itself = subscription.subscription.run_as_owner
    with connect(config.dsn_of(subscription), purpose=f"setup {name}") as connection:
        statements = plan_grants(connection, names, run_as_owner=as_itself)
        is_superuser = superuser(connection) is not None
        out_of_reach = () if as_itself or is_superuser else superuser_owned_tables(connection, names)
        return SetupResult(
            publisher=publisher,
            from_lsn=None,
            to_lsn=None,
            seconds=time.monotonic() - began,
            statements=tuple(each.as_string(connection) for each in statements),
            warnings=(
                *_owner_warnings(out_of_reach),
                *_superuser_warning(connection, f"subscription {name}"),
            ),
            event_trigger=event_trigger,
            dry_run=True,
        )


def script_of(result: SetupResult) -> str:
    """The statements of a dry run as a script for psql, which a superuser runs in that database."""
    warnings = (f"-- {' '.join(warning.split())}\n" for warning in result.warnings)
    if not result.statements:
        return "".join((*warnings, "-- Nothing is missing.\n"))
    return "".join((*warnings, *(f"{statement.strip()};\n" for statement in result.statements)))


def _superusers(config: Config, publisher: str) -> Iterator[str]:
    """Which of the roles are superusers; a server that does not answer is passed over."""
    endpoints: dict[str, PublisherConfig | SubscriptionConfig] = {
        f"publisher {publisher}": config.publisher(publisher)
    }
    endpoints |= {f"subscription {each.name}": each for each in config.subscriptions_of(publisher)}
    for name, endpoint in endpoints.items():
        with (
            contextlib.suppress(CdcReplayError),
            connect(config.dsn_of(endpoint), purpose="setup") as connection,
        ):
            yield from _superuser_warning(connection, name)


def _superuser_warning(connection: Connection, whose: str) -> Iterator[str]:
    if (role := superuser(connection)) is not None:
        yield (
            f'{whose}: role "{role}" is a superuser, which it need not be: use a role that may only log in,'
            " and let an administrator run what `cdc-replay setup --dry-run` prints for it"
        )


def _owner_warnings(tables: Sequence[QualifiedName]) -> Iterator[str]:
    if tables:
        names = ", ".join(map(str, tables))
        yield (
            f"tables that belong to a superuser: {names}; give them to another role, or set"
            " `run_as_owner: true` for the subscription, and run this again"
        )
