"""Rows that enter a subscription with values that were not sent (R4.6): where the values are looked for.

| history                         | who has the value                                                    |
|---------------------------------|----------------------------------------------------------------------|
| the window                      | an earlier change of the row in it                                   |
| up to a fence F, and F's rows   | the publisher, if nothing has changed the value up to F              |
| the same, with the window to F  | a change after the window, which is part of it then; replay only     |
| the whole log up to F           | an earlier change of the row, of any age                             |

They are tried in this order, until no row would be inserted without a value. A fence is a snapshot of the
publisher and the log that has led to it, up to F (`commands.fences`): together they tell whether a row of the
publisher is still the one that entered, and its value still the same (`fill`).

Nothing is written to the subscriber before all of this is done.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.captured import is_captured
from cdc_replay.commands.fences import Fence
from cdc_replay.commands.rewritten import rewrites_in
from cdc_replay.commands.window import catalog_history, decode_window
from cdc_replay.compact import Survey
from cdc_replay.config import PublisherConfig
from cdc_replay.fill import FollowedLeaf, History
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.publication import PublishAction, PublisherCatalog
from cdc_replay.model.relation import Relation, RelationId
from cdc_replay.route.routes import Routes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_IDENTIFYING: Final = (PublishAction.INSERT, PublishAction.UPDATE)
"""What must be in the log of a leaf, so that a row is never taken for another one with the same key."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """The rows of one routed window that enter without a value, and where its values may be."""

    publisher: PublisherConfig
    routes: Routes
    found: Survey

    def in_window(self, changes: DataFrame, window: Window) -> History:
        """The window itself; `changes` may hold more than it."""
        change_log = ChangeLog.open(self.publisher.change_log)
        inside = changes.where(changes["commit_lsn"] > window.after.value)
        return History(inside, self._leaves(change_log, window))

    def at_fence(self, session: SparkSession, fence: Fence, after: Lsn) -> History:
        """The log after `after` that has led to the fence, and the publisher there."""
        change_log = ChangeLog.open(self.publisher.change_log)
        window = Window(after, fence.upto)
        changes = decode_window(session, change_log, window)
        if fence.unseen:
            changes = changes.where(~changes["commit_lsn"].isin([lsn.value for lsn in fence.unseen]))
        return History(changes, self._leaves(change_log, window), fence.snapshot)

    def at_fence_with_whole_log(self, session: SparkSession, fence: Fence) -> History:
        """As `at_fence`, with all that the log has."""
        return self.at_fence(session, fence, ChangeLog.open(self.publisher.change_log).start_lsn)

    def _leaves(self, change_log: ChangeLog, window: Window) -> tuple[FollowedLeaf, ...]:
        entered = {target for target, _, _ in self.found.unsent}
        wanted: dict[RelationId, set[str]] = {}
        for route in self.routes.routes:
            if route.target.index in entered:
                wanted.setdefault(route.relation.id, set()).update(route.target.columns)
        catalogs = catalog_history(change_log).within(window)
        versions = _versions(change_log, window)
        rewritten = rewrites_in(change_log, window, change_log.summary(window)).last
        leaves = (
            FollowedLeaf.of(versions[leaf], frozenset(columns))
            for leaf, columns in wanted.items()
            if leaf in versions and all(_is_identified(catalog, leaf) for catalog in catalogs.values())
        )
        return tuple(
            dataclasses.replace(
                leaf,
                renamed=_renamed_columns(catalogs.values(), leaf.id),
                since=rewritten.get(leaf.id, ZERO),
            )
            for leaf in leaves
            if leaf is not None
        )


def _versions(change_log: ChangeLog, window: Window) -> dict[RelationId, list[Relation]]:
    known = change_log.relations()
    versions: dict[RelationId, list[Relation]] = {}
    for version in sorted(change_log.relation_versions(window)):
        versions.setdefault(known[version].id, []).append(known[version])
    return versions


def _renamed_columns(catalogs: Iterable[PublisherCatalog], leaf: RelationId) -> frozenset[str]:
    """The names that were not always those of the same columns, as far as the catalogs know."""
    tables = [catalog.tables[leaf] for catalog in catalogs if leaf in catalog.tables]
    known = {(column.attnum, column.name) for table in tables for column in table.columns}
    numbers, names = (collections.Counter(each[part] for each in known) for part in (0, 1))
    return frozenset(name for number, name in known if numbers[number] > 1 or names[name] > 1)


def _is_identified(catalog: PublisherCatalog, leaf: RelationId) -> bool:
    """Whether the log has everything by which a row of the leaf comes to a key."""
    table = catalog.tables.get(leaf)
    return table is None or all(is_captured(catalog, table, action) for action in _IDENTIFYING)
