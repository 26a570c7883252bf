"""Rows that enter a subscription with values that were not sent (R4.6): where the values are looked for.

| history                         | who has the value                                                    |
|---------------------------------|----------------------------------------------------------------------|
| the window                      | an earlier change of the row in it                                   |
| up to a fence F, and F's rows   | the publisher, if nothing has changed the value up to F              |
| the same, with the window to F  | a change after the window, which is part of it then; replay only     |
| the whole log up to F           | an earlier change of the row, of any age                             |

They are tried in this order, until no row would be inserted without a value. A fence is a snapshot of the
publisher, exported at F, and the log captured up to F: together they tell whether a row of the publisher is
still the one that entered, and its value still the same (`fill`).

Nothing is written to the subscriber before all of this is done.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import captured_up_to
from cdc_replay.commands.captured import is_captured
from cdc_replay.commands.rewritten import rewrites_in
from cdc_replay.commands.window import catalog_history, decode_window
from cdc_replay.compact import Survey
from cdc_replay.config import Config, PublisherConfig
from cdc_replay.failpoints import failpoint
from cdc_replay.fill import FollowedLeaf, History
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.publication import PublishAction, PublisherCatalog
from cdc_replay.model.relation import Relation, RelationId
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, export_snapshot
from cdc_replay.route.routes import Routes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

Fence: TypeAlias = Callable[[], ExportedSnapshot]
"""Gives the fence; the first call exports the snapshot and captures up to its consistent point."""

_IDENTIFYING = (PublishAction.INSERT, PublishAction.UPDATE)
"""What must be in the log of a leaf, so that a row is never taken for another one with the same key."""


@contextlib.contextmanager
def fence_of(
    config: Config, publisher: PublisherConfig, opened: ExportedSnapshot | None = None
) -> Iterator[Fence]:
    """The fence for as long as the context is open: one for all who need it, none if nobody does.

    Where the caller has opened one already, it is that one.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def fence() -> ExportedSnapshot:
            log.info("publisher %s: opening a fence to read values that were not sent", publisher.name)
            exported = opened or stack.enter_context(export_snapshot(config.dsn_of(publisher)))
            captured_up_to(config, publisher.name, exported.consistent_point)
            failpoint("fill.after_fence")
            return exported

        yield fence


@dataclass(frozen=True, slots=True)
class Unsent:
    """The rows of one routed window that enter without a value, and where its values may be."""

    publisher: PublisherConfig
    routes: Routes
    found: Survey
    fence: Fence

    def in_window(self, changes: DataFrame, window: Window) -> History:
        """The window itself; `changes` may hold more than it."""
        change_log = ChangeLog.open(self.publisher.change_log)
        inside = changes.where(changes["commit_lsn"] > window.after.value)
        return History(inside, self._leaves(change_log, window))

    def at_fence(self, session: SparkSession, after: Lsn) -> History:
        """The log after `after` up to the fence, and the publisher there."""
        exported = self.fence()
        change_log = ChangeLog.open(self.publisher.change_log)
        window = Window(after, exported.consistent_point)
        changes = decode_window(session, change_log, window)
        return History(changes, self._leaves(change_log, window), exported)

    def at_fence_with_whole_log(self, session: SparkSession) -> History:
        """As `at_fence`, with all that the log has."""
        return self.at_fence(session, ChangeLog.open(self.publisher.change_log).start_lsn)

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
