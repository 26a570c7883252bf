"""A window of the log, for commands that replay it: its definitions, and its changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdc_replay.catalog.history import CatalogHistory, catalog_from_json
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.decode import decode
from cdc_replay.model.lsn import Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import Relation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def definitions(
    change_log: ChangeLog, window: Window
) -> tuple[tuple[Relation, ...], tuple[PublisherCatalog, ...]]:
    """The relation versions that changes in the window have, and the catalogs in force at any of them."""
    known = change_log.relations()
    found = change_log.relations_in(window)
    relations = {known[version].id: known[version] for version in known}
    # A TRUNCATE has no version: where nothing else of its relation is in the window, any one stands for it.
    alone = found.truncated - {known[version].id for version in found.versions}
    chosen = [known[version] for version in sorted(found.versions)]
    # A transaction that began before the window sees the definitions of that time (R9.10).
    since = window.after if found.first_lsn is None else min(window.after, found.first_lsn)
    catalogs = catalog_history(change_log).within(Window(since, window.upto))
    chosen += [_still_there(relations[each], catalogs) for each in sorted(alone) if each in relations]
    return tuple(chosen), catalogs


def _still_there(relation: Relation, catalogs: Sequence[PublisherCatalog]) -> Relation:
    """The relation of a TRUNCATE, whatever its version, with the columns that it has throughout."""
    tables = [catalog.tables[relation.id] for catalog in catalogs if relation.id in catalog.tables]
    live = [{column.name for column in table.columns} for table in tables]
    columns = tuple(each for each in relation.columns if all(each.name in names for names in live))
    return dataclasses.replace(relation, columns=columns)


def catalog_history(change_log: ChangeLog) -> CatalogHistory:
    """The publisher's catalogs, each at the position from which it is in force."""
    return CatalogHistory(
        tuple(
            dataclasses.replace(catalog_from_json(version.text), lsn=version.from_lsn)
            for version in change_log.catalogs()
        )
    )


def decode_window(spark: SparkSession, change_log: ChangeLog, window: Window) -> DataFrame:
    """The CHANGES of a window of the log."""
    return decode(
        spark,
        change_log.segments(window),
        window,
        change_log.relations(),
        [version.from_lsn.value for version in change_log.catalogs()],
    )
