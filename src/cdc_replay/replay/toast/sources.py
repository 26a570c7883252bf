"""Rows that enter a subscription with unsent values (R4.6): where the values are looked for.

| history                         | who has the value                                                    |
|---------------------------------|----------------------------------------------------------------------|
| the window                      | an earlier change of the row in it                                   |
| up to a fence F, and F's rows   | the publisher, if nothing has changed the value up to F              |
| the same, with the window to F  | a later change, which is part of the window then; replay only        |
| the whole log up to F           | an earlier change of the row, of any age                             |

They are tried in this order, until no row would be inserted without a value. A value that is missing after
the last one is NULL if it is given up, and otherwise subject to the subscription's `unchanged_toast`.

A fence is a snapshot of the publisher and the log up to it, at F (`replay.publisher_fence`): together they
tell whether a row of the publisher is still the one that entered, and its value still the same
(`replay.toast`).

Nothing is written to the subscriber until all sources are read.
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
"""Must be in the log of a leaf, to tell a row from a later one with the same key."""


@dataclass(frozen=True, slots=True)
class ToastSources:
    """The rows of a routed window that enter without a value, and the histories that may have it."""

    session: SparkSession
    change_log: str
    """Its URI."""
    routes: Routes
    facts: WindowFacts

    def in_window(self, window: Window) -> ChangeHistory:
        """The window itself."""
        change_log = ChangeLog.open(self.change_log)
        changes = decode_window(self.session, change_log, window)
        return ChangeHistory(changes, self._leaves(change_log, window))

    def at_fence(self, fence: PublisherFence, after: Lsn) -> ChangeHistory:
        """The log from `after` to the fence, and the publisher's rows there."""
        change_log = ChangeLog.open(self.change_log)
        window = Window(after, fence.upto)
        changes = self._visible_changes(change_log, window, fence)
        return ChangeHistory(changes, self._leaves(change_log, window), fence.snapshot)

    def at_fence_with_whole_log(self, fence: PublisherFence, after: Lsn) -> ChangeHistory:
        """As `at_fence`, with the whole log.

        A leaf whose rows can be tracked after `after` only, because it was not captured before or had another
        replica identity, is tracked from there.
        """
        change_log = ChangeLog.open(self.change_log)
        window = Window(change_log.start_lsn, fence.upto)
        lately_tracked = {leaf.id: leaf for leaf in self._leaves(change_log, Window(after, fence.upto))}
        leaves = tuple(
            dataclasses.replace(lately_tracked[leaf.id], valid_after=after)
            if not leaf.key and leaf.id in lately_tracked
            else leaf
            for leaf in self._leaves(change_log, window)
        )
        changes = self._visible_changes(change_log, window, fence)
        return ChangeHistory(changes, leaves, fence.snapshot)

    def _visible_changes(self, change_log: ChangeLog, window: Window, fence: PublisherFence) -> DataFrame:
        """The changes of the window that the fence's snapshot sees."""
        changes = decode_window(self.session, change_log, window)
        if not fence.unseen:
            return changes
        return changes.where(~changes["commit_lsn"].isin([lsn.value for lsn in fence.unseen]))

    def _leaves(self, change_log: ChangeLog, window: Window) -> tuple[TrackedLeaf, ...]:
        entered = {target for target, _, _ in self.facts.unsent}
        columns_by_leaf: dict[RelationId, set[str]] = {}
        for route in self.routes.routes:
            if route.target.index in entered:
                columns_by_leaf.setdefault(route.relation.id, set()).update(route.target.columns)
        history = catalog_history(change_log)
        catalogs = history.within(window)
        versions = _versions(change_log, window)
        columns = _columns(
            definitions(change_log, window), _ambiguous_names(history, catalogs, columns_by_leaf)
        )
        rewrites = _rewrites(change_log, window)
        leaves = (
            TrackedLeaf.from_versions(versions[leaf], columns.get(leaf, {}), frozenset(names))
            for leaf, names in columns_by_leaf.items()
            if leaf in versions
        )
        return tuple(
            dataclasses.replace(
                leaf,
                key=leaf.key
                if all(_is_identified(catalog, leaf.id) for catalog in catalogs.values())
                else (),
                rewrites=tuple(sorted(rewrites.get(leaf.id, ()))),
            )
            for leaf in leaves
        )


def _versions(change_log: ChangeLog, window: Window) -> dict[RelationId, list[Relation]]:
    relations = change_log.relations()
    versions: dict[RelationId, list[Relation]] = {}
    for version in sorted(change_log.relation_versions(window)):
        versions.setdefault(relations[version].id, []).append(relations[version])
    return versions


def _rewrites(change_log: ChangeLog, window: Window) -> dict[RelationId, set[int]]:
    """The commits of the window in which the publisher rewrote tables, by table (R11.9)."""
    commits: dict[RelationId, set[int]] = {}
    logical = change_log.summary(window).logical
    for message in () if logical is None else change_log.logical_messages(logical, REWRITE_PREFIX):
        # Every role may emit messages with this prefix; planning has logged that.
        with contextlib.suppress(InvalidMessage):
            for relation in parse_rewrite(message.content):
                commits.setdefault(relation, set()).add(message.commit_lsn.value)
    return commits


def _columns(
    defined: Iterable[VersionedRelation], ambiguous: Mapping[RelationId, frozenset[str]]
) -> dict[RelationId, dict[Shape, tuple[TupleColumn | None, ...]]]:
    columns_by_shape: dict[RelationId, dict[Shape, tuple[TupleColumn | None, ...]]] = {}
    for versioned in defined:
        relation, table = versioned.relation, versioned.catalog.tables.get(versioned.relation.id)
        columns = tuple_columns(relation, table, ambiguous.get(relation.id, frozenset()))
        columns_by_shape.setdefault(relation.id, {})[relation.version, versioned.catalog_version] = columns
    return columns_by_shape


def _ambiguous_names(
    history: CatalogHistory, catalogs: Mapping[int, PublisherCatalog], leaves: Iterable[RelationId]
) -> dict[RelationId, frozenset[str]]:
    """Column names that a catalog read later, in whole, gives to other columns.

    Without event triggers it is in force from the start of the pull that finds it, and with it the names
    (R9.10): changes before a rename would be attributed to the other column.
    """
    names_by_leaf: dict[RelationId, set[str]] = {leaf: set() for leaf in leaves}
    for (_, before), (version, after) in itertools.pairwise(sorted(catalogs.items())):
        if not history.is_full_catalog(version):
            continue
        for leaf, names in names_by_leaf.items():
            if leaf in before.tables and leaf in after.tables:
                names.update(_renamed(before.tables[leaf], after.tables[leaf]))
    return {leaf: frozenset(names) for leaf, names in names_by_leaf.items()}


def _renamed(before: Table, after: Table) -> set[str]:
    """Names that moved to another column, and names of columns that were renamed."""
    named_columns = {(column.attnum, column.name) for table in (before, after) for column in table.columns}
    counts_by_attnum, names = (
        collections.Counter(pair[position] for pair in named_columns) for position in (0, 1)
    )
    return {name for attnum, name in named_columns if counts_by_attnum[attnum] > 1 or names[name] > 1}


def _is_identified(catalog: PublisherCatalog, leaf: RelationId) -> bool:
    """Whether the log has every change that gives a row of the leaf a key."""
    table = catalog.tables.get(leaf)
    return table is None or all(is_captured(catalog, table, action) for action in _IDENTIFYING)
