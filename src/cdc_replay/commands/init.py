"""`init`: ask both databases what there is, and write a first configuration file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cdc_replay.capture.publications import OUR_PUBLICATIONS
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.config_draft import ConfigDraft, Endpoint
from cdc_replay.config_file import has_reference
from cdc_replay.errors import InvalidConfiguration, PublicationMissing
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.results import Result
from cdc_replay.model.suggestion import did_you_mean
from cdc_replay.postgres.connection import connect
from cdc_replay.private_files import FILE_MODE
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.subscriber.target_tables import read_target_tables


@dataclass(frozen=True, slots=True)
class InitResult(Result):
    """The file that was written, and what it says."""

    config: Path
    publisher: str
    subscription: str
    publications: tuple[str, ...]
    tables: tuple[str, ...]
    missing_tables: tuple[str, ...]
    next_commands: tuple[str, ...]


def read_publications(publisher_dsn: str) -> PublisherCatalog:
    """The publisher's catalog.

    Raises:
        PublicationMissing: if there is no publication that can be subscribed to.
    """
    with connect(publisher_dsn, purpose="init") as connection:
        catalog = read_catalog(connection)
    if not publication_names(catalog):
        raise PublicationMissing(
            f'database "{connection.info.dbname}" has no publication',
            hint="Create one there, such as `create publication p for table orders where (region = 'NSW')`.",
        )
    return catalog


def publication_names(catalog: PublisherCatalog) -> tuple[str, ...]:
    """The publications that can be subscribed to, in order."""
    return tuple(name for name in sorted(catalog.publications) if name not in OUR_PUBLICATIONS)


def draft(
    catalog: PublisherCatalog,
    publisher: Endpoint,
    subscription: Endpoint,
    subscriber_dsn: str,
    publications: tuple[str, ...],
) -> ConfigDraft:
    """The configuration of a subscription to these publications, with what the subscriber has.

    Raises:
        PublicationMissing: if the publisher lacks one of them.
        InvalidConfiguration: if a name would be read as a reference to the environment.
    """
    known = publication_names(catalog)
    for name in publications:
        if name not in known:
            detail = f"The publisher has: {', '.join(known)}."
            hint = did_you_mean(name, known)
            raise PublicationMissing(f'publication "{name}" does not exist', detail=detail, hint=hint)
        if has_reference(name):
            raise InvalidConfiguration(
                f'publication "{name}" cannot be named in a configuration file',
                detail="Its name would be replaced by a variable of the environment.",
                hint="Name the others with --publication, or rename it on the publisher.",
            )
    names = [table.table.name for table in synced_tables(catalog, publications)]
    with connect(subscriber_dsn, purpose="init") as connection:
        existing = read_target_tables(connection, names)
    return ConfigDraft(publisher, subscription, publications, {name: name in existing for name in names})


def write(file: Path, drafted: ConfigDraft, *, overwrite: bool) -> InitResult:
    """Write the file, for this user only; an existing one is kept unless `overwrite`.

    Raises:
        InvalidConfiguration: if it exists.
    """
    how = os.O_TRUNC if overwrite else os.O_EXCL
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | how, FILE_MODE)
    except FileExistsError:
        hint = "Give --overwrite to replace it, or --config with another path."
        raise InvalidConfiguration(f'"{file}" exists already', hint=hint) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(drafted.to_yaml())
    return InitResult(
        file,
        drafted.publisher.name,
        drafted.subscription.name,
        drafted.publications,
        tuple(map(str, drafted.tables)),
        drafted.missing_tables,
        drafted.next_commands,
    )
