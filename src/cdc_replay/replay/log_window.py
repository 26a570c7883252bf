"""A window of the log, for commands that replay it: its definitions, and its changes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.queries import LogSummary
from cdc_replay.model.lsn import Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import Relation, RelationId
from cdc_replay.replay.decode import LogReader
from cdc_replay.replay.route.routes import VersionedRelation
from cdc_replay.spark.session import count_cores, tune_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def definitions(change_log: ChangeLog, window: Window) -> tuple[VersionedRelation, ...]:
    """As `read_definitions_and_summary`, without the summary."""
    return read_definitions_and_summary(change_log, window)[0]


def read_definitions_and_summary(
    change_log: ChangeLog, window: Window
) -> tuple[tuple[VersionedRelation, ...], LogSummary]:
    """The relation versions of the window's changes, each under the catalogs in force, and a summary.

    In the order of the catalogs' numbers. A TRUNCATE has no relation version (R1.1): if its relation has no
    other change under that catalog, it gets the relation's last version.
    """
    history = catalog_history(change_log)
    log_definitions = change_log.definitions_in(window, history.positions)
    defined = versioned_relations(
        change_log, history, window, log_definitions.changes, log_definitions.truncates
    )
    return defined, log_definitions.summary


def versioned_relations(
    change_log: ChangeLog,
    history: CatalogHistory,
    window: Window,
    changes: Set[tuple[int, int]],
    truncates: Set[tuple[RelationId, int]],
) -> tuple[VersionedRelation, ...]:
    """These relation versions of the window's changes, and relations of its TRUNCATEs, each under a catalog.

    Pairs of relation version, or relation, and catalog version.
    """
    in_force = history.catalogs_of({version for _, version in (*changes, *truncates)})
    catalogs = _Catalogs(history, window, in_force)
    relations = change_log.relations()
    with_rows = [
        VersionedRelation(relations[relation], version, catalogs.catalog_for(relations[relation].id, version))
        for relation, version in sorted(changes)
    ]
    with_changes = {(versioned.relation.id, versioned.catalog_version) for versioned in with_rows}
    truncates_only = _truncates(sorted(truncates - with_changes), relations.values(), catalogs)
    defined = sorted((*with_rows, *truncates_only), key=lambda versioned: versioned.catalog_version)
    return tuple(defined)


@dataclass(frozen=True)
class _Catalogs:
    """The catalogs in force, by number, and others to search for a table."""

    history: CatalogHistory
    window: Window
    in_force: Mapping[int, PublisherCatalog]

    def catalog_for(self, relation: RelationId, version: int) -> PublisherCatalog:
        """The catalog of that number; if it lacks the table, another one that has it, if there is one.

        A table that was dropped before the publisher's catalog was read is in the version before. The rows of
        CREATE TABLE AS are written before the message about the table.
        """
        if relation in self.in_force[version].tables:
            return self.in_force[version]
        with_table = {
            nearby: catalog for nearby, catalog in self._nearby.items() if relation in catalog.tables
        }
        earlier = [nearby for nearby in with_table if nearby < version]
        if with_table:
            return with_table[max(earlier) if earlier else min(with_table)]
        older = (catalog for catalog in self.history.full_catalogs(version) if relation in catalog.tables)
        return next(older, self.in_force[version])

    @functools.cached_property
    def _nearby(self) -> Mapping[int, PublisherCatalog]:
        return self.history.within(self.window)


def _truncates(
    truncates: Iterable[tuple[RelationId, int]], relations: Iterable[Relation], catalogs: _Catalogs
) -> Iterator[VersionedRelation]:
    last = {relation.id: relation for relation in relations}
    for relation, version in truncates:
        if relation in last:
            catalog = catalogs.catalog_for(relation, version)
            yield VersionedRelation(_live_columns(catalog, last[relation]), version, catalog)


def _live_columns(catalog: PublisherCatalog, relation: Relation) -> Relation:
    """The relation, of any version, without columns that the catalog lacks."""
    if relation.id not in catalog.tables:
        return relation
    live = {column.name for column in catalog.tables[relation.id].columns}
    return dataclasses.replace(
        relation, columns=tuple(column for column in relation.columns if column.name in live)
    )


def catalog_history(change_log: ChangeLog) -> CatalogHistory:
    """The publisher's catalogs, each with the range in which it is in force."""
    return CatalogHistory(change_log.catalogs())


def log_reader(change_log: ChangeLog, window: Window, *, cores: int) -> LogReader:
    """A reader of a window of the log for that many cores."""
    groups, catalogs = change_log.segments(window), catalog_history(change_log).positions
    # Not of the whole log: each task gets them, and to serialize thousands takes longer than a small window.
    changed = change_log.relation_versions(window)
    relations = {
        version: relation for version, relation in change_log.relations().items() if version in changed
    }
    return LogReader.for_cores(groups, window, relations, catalogs, cores=cores)


def decode_window(spark: SparkSession, change_log: ChangeLog, window: Window) -> DataFrame:
    """The CHANGES of a window of the log, with Spark tuned for them."""
    reader = log_reader(change_log, window, cores=count_cores(spark))
    tune_for(spark, reader.rows, is_packed=False)
    return reader.frame(spark)
