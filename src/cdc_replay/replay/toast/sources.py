"""Rows that enter a subscription with values that were not sent (R4.6): where the values are looked for.

| history                         | who has the value                                                    |
|---------------------------------|----------------------------------------------------------------------|
| the window                      | an earlier change of the row in it                                   |
| up to a fence F, and F's rows   | the publisher, if nothing has changed the value up to F              |
| the same, with the window to F  | a change after the window, which is part of it then; replay only     |
| the whole log up to F           | an earlier change of the row, of any age                             |

They are tried in this order, until no row would be inserted without a value. What is missing after the last
one is NULL where it cannot matter any more, and otherwise what the subscription says (`unchanged_toast`).

A fence is a snapshot of the publisher and the log that has led to it, up to F (`replay.publisher_fence`):
together they tell whether a row of the publisher is still the one that entered, and its value still the same
(`fill`).

Nothing is written to the subscriber before all of this is done.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdc_replay.catalog.ddl_change import REWRITE_PREFIX, parse_rewrite
from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublishAction, PublisherCatalog, Table
from cdc_replay.model.relation import Relation, RelationId
from cdc_replay.publication.capture_coverage import is_captured
from cdc_replay.replay.compact import WindowFacts
from cdc_replay.replay.log_window import catalog_history, decode_window, definitions
from cdc_replay.replay.publisher_fence import PublisherFence
from cdc_replay.replay.route.routes import Routes, VersionedRelation
from cdc_replay.replay.toast import ChangeHistory, Shape, TrackedLeaf, TupleColumn, tuple_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_IDENTIFYING: Final = (PublishAction.INSERT, PublishAction.UPDATE)
"""What must be in the log of a leaf, so that a row is never taken for another one with the same key."""


@dataclass(frozen=True, slots=True)
class ToastSources:
    """The rows of one routed window that enter without a value, and where its values may be."""

    change_log: str
    """Its URI."""
    routes: Routes
    found: WindowFacts

    def in_window(self, changes: DataFrame, window: Window) -> ChangeHistory:
        """The window itself; `changes` may hold more than it."""
        change_log = ChangeLog.open(self.change_log)
        inside = changes.where(changes["commit_lsn"] > window.after.value)
        return ChangeHistory(inside, self._leaves(change_log, window))

    def at_fence(self, session: SparkSession, fence: PublisherFence, after: Lsn) -> ChangeHistory:
        """The log after `after` that has led to the fence, and the publisher there."""
        change_log = ChangeLog.open(self.change_log)
        window = Window(after, fence.upto)
        changes = _seen_changes(session, change_log, window, fence)
        return ChangeHistory(changes, self._leaves(change_log, window), fence.snapshot)

    def at_fence_with_whole_log(
        self, session: SparkSession, fence: PublisherFence, after: Lsn
    ) -> ChangeHistory:
        """As `at_fence`, with all that the log has.

        A leaf whose rows can be followed after `after` only, as it was not captured before, or had another
        replica identity, is followed from there.
        """
        change_log = ChangeLog.open(self.change_log)
        window = Window(change_log.start_lsn, fence.upto)
        late = {leaf.id: leaf for leaf in self._leaves(change_log, Window(after, fence.upto))}
        leaves = tuple(
            dataclasses.replace(late[leaf.id], begins=after) if not leaf.key and leaf.id in late else leaf
            for leaf in self._leaves(change_log, window)
        )
        return ChangeHistory(_seen_changes(session, change_log, window, fence), leaves, fence.snapshot)

    def _leaves(self, change_log: ChangeLog, window: Window) -> tuple[TrackedLeaf, ...]:
        entered = {target for target, _, _ in self.found.unsent}
        wanted: dict[RelationId, set[str]] = {}
        for route in self.routes.routes:
            if route.target.index in entered:
                wanted.setdefault(route.relation.id, set()).update(route.target.columns)
        history = catalog_history(change_log)
        catalogs = history.within(window)
        versions = _versions(change_log, window)
        columns = _columns(definitions(change_log, window), _uncertain(history, catalogs, wanted))
        rewrites = _rewrites(change_log, window)
        leaves = (
            TrackedLeaf.of(versions[leaf], columns.get(leaf, {}), frozenset(names))
            for leaf, names in wanted.items()
            if leaf in versions
        )
        return tuple(
            dataclasses.replace(
                leaf,
                key=leaf.key if all(_is_identified(each, leaf.id) for each in catalogs.values()) else (),
                rewrites=tuple(sorted(rewrites.get(leaf.id, ()))),
            )
            for leaf in leaves
        )


def _seen_changes(
    session: SparkSession, change_log: ChangeLog, window: Window, fence: PublisherFence
) -> DataFrame:
    """The changes of the window that the fence's snapshot has."""
    changes = decode_window(session, change_log, window)
    if not fence.unseen:
        return changes
    return changes.where(~changes["commit_lsn"].isin([lsn.value for lsn in fence.unseen]))


def _versions(change_log: ChangeLog, window: Window) -> dict[RelationId, list[Relation]]:
    known = change_log.relations()
    versions: dict[RelationId, list[Relation]] = {}
    for version in sorted(change_log.relation_versions(window)):
        versions.setdefault(known[version].id, []).append(known[version])
    return versions


def _rewrites(change_log: ChangeLog, window: Window) -> dict[RelationId, set[int]]:
    """In which commits of the window the publisher has rewritten tables, by table (R11.9)."""
    found: dict[RelationId, set[int]] = {}
    logical = change_log.summary(window).logical
    for message in () if logical is None else change_log.logical_messages(logical, REWRITE_PREFIX):
        # Whoever may emit messages may give them any prefix; planning has told of that.
        with contextlib.suppress(InvalidMessage):
            for relation in parse_rewrite(message.content):
                found.setdefault(relation, set()).add(message.commit_lsn.value)
    return found


def _columns(
    defined: Iterable[VersionedRelation], uncertain: Mapping[RelationId, frozenset[str]]
) -> dict[RelationId, dict[Shape, tuple[TupleColumn | None, ...]]]:
    """What the columns of tuples are, by leaf and shape."""
    found: dict[RelationId, dict[Shape, tuple[TupleColumn | None, ...]]] = {}
    for each in defined:
        relation, table = each.relation, each.catalog.tables.get(each.relation.id)
        columns = tuple_columns(relation, table, uncertain.get(relation.id, frozenset()))
        found.setdefault(relation.id, {})[relation.version, each.catalog_version] = columns
    return found


def _uncertain(
    history: CatalogHistory, catalogs: Mapping[int, PublisherCatalog], leaves: Iterable[RelationId]
) -> dict[RelationId, frozenset[str]]:
    """The columns of which a catalog that was read afterwards says that their names are others'.

    Without event triggers it is in force from the beginning of the pull that finds it, and with it the names
    (R9.10): changes before the rename would be taken for those of the other column.
    """
    found: dict[RelationId, set[str]] = {leaf: set() for leaf in leaves}
    for (_, before), (number, after) in itertools.pairwise(sorted(catalogs.items())):
        if not history.is_full_catalog(number):
            continue
        for leaf, names in found.items():
            if leaf in before.tables and leaf in after.tables:
                names.update(_renamed(before.tables[leaf], after.tables[leaf]))
    return {leaf: frozenset(names) for leaf, names in found.items()}


def _renamed(before: Table, after: Table) -> set[str]:
    """The names that are those of other columns now, as far as both have columns of that name or number."""
    known = {(column.attnum, column.name) for table in (before, after) for column in table.columns}
    numbers, names = (collections.Counter(each[part] for each in known) for part in (0, 1))
    return {name for number, name in known if numbers[number] > 1 or names[name] > 1}


def _is_identified(catalog: PublisherCatalog, leaf: RelationId) -> bool:
    """Whether the log has everything by which a row of the leaf comes to a key."""
    table = catalog.tables.get(leaf)
    return table is None or all(is_captured(catalog, table, action) for action in _IDENTIFYING)
