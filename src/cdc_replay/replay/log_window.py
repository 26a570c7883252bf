"""A window of the log, for commands that replay it: its definitions, and its changes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
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

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def definitions(change_log: ChangeLog, window: Window) -> tuple[VersionedRelation, ...]:
    """As `read_definitions_and_summary`, without the summary."""
    return read_definitions_and_summary(change_log, window)[0]


def read_definitions_and_summary(
    change_log: ChangeLog, window: Window
) -> tuple[tuple[VersionedRelation, ...], LogSummary]:
    """The relation versions that changes in the window have, each under the catalogs in force for them.

    In the order of the catalogs' numbers. A TRUNCATE has no relation version (R1.1): where nothing else of
    its relation is under that catalog, the last one stands for it.
    """
    history = catalog_history(change_log)
    found = change_log.definitions_in(window, history.positions)
    catalogs = _Catalogs(history, window, history.catalogs_of({number for _, number in found.all}))
    known = change_log.relations()
    changes = [
        VersionedRelation(known[version], number, catalogs.of(known[version].id, number))
        for version, number in sorted(found.changes)
    ]
    taken = {(each.relation.id, each.catalog_version) for each in changes}
    alone = _truncates(sorted(found.truncates - taken), known.values(), catalogs)
    return tuple(sorted((*changes, *alone), key=lambda each: each.catalog_version)), found.summary


@dataclass(frozen=True)
class _Catalogs:
    """The catalogs in force, by number, and where else to look for a table."""

    history: CatalogHistory
    window: Window
    in_force: Mapping[int, PublisherCatalog]

    def of(self, relation: RelationId, number: int) -> PublisherCatalog:
        """The catalog of that number; where it does not know the table, one that does, if there is any.

        A table that was dropped before the publisher's catalog was read is in the version before. The rows of
        CREATE TABLE AS are written before the message that tells of the table.
        """
        if relation in self.in_force[number].tables:
            return self.in_force[number]
        knowing = {each: found for each, found in self._nearby.items() if relation in found.tables}
        earlier = [each for each in knowing if each < number]
        if knowing:
            return knowing[max(earlier) if earlier else min(knowing)]
        older = (found for found in self.history.full_catalogs(number) if relation in found.tables)
        return next(older, self.in_force[number])

    @functools.cached_property
    def _nearby(self) -> Mapping[int, PublisherCatalog]:
        return self.history.within(self.window)


def _truncates(
    truncates: Iterable[tuple[RelationId, int]], known: Iterable[Relation], catalogs: _Catalogs
) -> Iterator[VersionedRelation]:
    last = {relation.id: relation for relation in known}
    for relation, number in truncates:
        if relation in last:
            catalog = catalogs.of(relation, number)
            yield VersionedRelation(_as_in(catalog, last[relation]), number, catalog)


def _as_in(catalog: PublisherCatalog, relation: Relation) -> Relation:
    """The relation, whatever its version, without columns that the catalog does not know."""
    if relation.id not in catalog.tables:
        return relation
    live = {column.name for column in catalog.tables[relation.id].columns}
    return dataclasses.replace(
        relation, columns=tuple(column for column in relation.columns if column.name in live)
    )


def catalog_history(change_log: ChangeLog) -> CatalogHistory:
    """The publisher's catalogs, each where it is in force."""
    return CatalogHistory(change_log.catalogs())


def log_reader(change_log: ChangeLog, window: Window, *, cores: int) -> LogReader:
    """What reads a window of the log on so many cores."""
    groups, catalogs = change_log.segments(window), catalog_history(change_log).positions
    return LogReader.of(groups, window, change_log.relations(), catalogs, cores=cores)


def decode_window(spark: SparkSession, change_log: ChangeLog, window: Window) -> DataFrame:
    """The CHANGES of a window of the log."""
    return log_reader(change_log, window, cores=spark.sparkContext.defaultParallelism).frame(spark)
