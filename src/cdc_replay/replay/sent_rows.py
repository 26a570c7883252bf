"""Tables of which the subscriber was sent every row before an UPDATE of it.

An UPDATE that matches no row is skipped (R8.4): natively because the row was never sent. Where that cannot be
the reason, the subscriber has lost the row, and a repair may insert it. A row may never have been sent

| if, since the table was copied,                      | because                                        |
|------------------------------------------------------|------------------------------------------------|
| its row filter has changed                           | that sends no rows (R9.12)                     |
| it, or a partition, has come to be published         | nor does that (R7.12, R11.6)                   |
| a column that it had is not published any more       | the row is inserted without its value (R6.3)   |
| INSERTs or UPDATEs were published not at all, or     | rows enter, or change their keys, and this is  |
| with another filter than the copy had                | not sent (R3.5, R7.5)                          |
| it was rewritten                                     | rows may have other keys (R11.9)               |
| and if it was not copied, or `origin` is `none`      | R7.11, R8.19                                   |

The definitions since the copy are in the log, however long before a window that is.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import PublicationRefused
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublishAction, PublisherCatalog, RowFilter, Table
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.model.subscription import OriginPolicy, Subscription
from cdc_replay.publication.resolve import SyncedTable, resolve, synced_tables
from cdc_replay.replay.definition_drift import filters_differ
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.route.routes import Routes
from cdc_replay.replay.table_rewrites import first_rewrites, rewrites_in
from cdc_replay.replay.unsubscribed_tables import tables_renamed_to
from cdc_replay.subscriber.copy_definitions import CopyDefinition

_Trees: TypeAlias = frozenset[str] | None
"""The node trees of row filters to OR: their texts change when a column is renamed. None: no filter."""

_WRITING: Final = (PublishAction.INSERT, PublishAction.UPDATE)


def tables_with_every_row(
    change_log: ChangeLog,
    subscription: Subscription,
    routes: Routes,
    copied: Mapping[QualifiedName, CopyDefinition],
    names: Collection[QualifiedName],
    upto: Lsn,
) -> frozenset[int]:
    """The targets of `routes` to which, up to `upto`, every row was sent before an UPDATE of it.

    `copied` are the definitions with which tables were copied, `names` all tables of the subscription.
    """
    tables = {table.name: table.index for table in routes.tables if table.name in copied}
    if not tables or not subscription.copy_data or subscription.origin is OriginPolicy.NONE:
        return frozenset()
    since = Window(min(copied[name].lsn for name in tables), upto)
    renamed = tables_renamed_to(change_log, since.after, names)
    rewrites = rewrites_in(change_log, since, change_log.summary(since))
    copy_lsns = {name: copied[name].lsn for name in tables}
    rewritten = first_rewrites(copy_lsns, rewrites, subscription.publications, renamed)
    history = catalog_history(change_log)
    leaves: dict[int, set[RelationId]] = {index: set() for index in tables.values()}
    for route in routes.routes:
        leaves.setdefault(route.target.index, set()).add(route.published.leaf)
    since_copies = {
        lsn: _Published(subscription.publications, tuple(history.within(Window(lsn, upto)).values()), renamed)
        for lsn in set(copy_lsns.values())
    }
    return frozenset(
        tables[name]
        for name in tables.keys() - rewritten.keys()
        if since_copies[copy_lsns[name]].sends_every_row(name, copied[name], leaves[tables[name]])
    )


class _Sent(NamedTuple):
    """Row filters of INSERTs and UPDATEs, and the columns of the copy that they do not have."""

    insert: _Trees
    update: _Trees
    withheld: frozenset[str]


@dataclass(frozen=True)
class _Published:
    """What is published by the catalogs since a copy; the first one is that of the copy."""

    publications: Sequence[str]
    catalogs: Sequence[PublisherCatalog]
    renamed: Mapping[RelationId, QualifiedName]

    def sends_every_row(
        self, name: QualifiedName, copied: CopyDefinition, leaves: Iterable[RelationId]
    ) -> bool:
        """Whether the copy of the table, and the changes of these leaves, have sent all rows of theirs."""
        synced = self._copied.get(name)
        if synced is None or filters_differ(synced, copied.definition.filters):
            return False
        try:
            return all(self._leaf_sends_every_row(synced, copied, leaf) for leaf in leaves)
        except PublicationRefused:
            return False

    @functools.cached_property
    def _copied(self) -> Mapping[QualifiedName, SyncedTable]:
        """The tables that the subscription listed, by their present names."""
        try:
            listed = synced_tables(self.catalogs[0], self.publications)
        except PublicationRefused:
            return {}
        return {self._name_of(synced.table): synced for synced in listed}

    def _leaf_sends_every_row(self, synced: SyncedTable, copied: CopyDefinition, leaf: RelationId) -> bool:
        """Whether a leaf was published as the table, in one way, since the copy or its creation."""
        name, columns = self._name_of(synced.table), copied.definition.columns
        present = (catalog for catalog in self.catalogs if leaf in catalog.tables)
        sent = [self._sent(name, catalog, leaf, columns) for catalog in present]
        while sent and sent[-1] is None:
            sent.pop()  # it has left: its later changes are not sent
        if len(set(sent)) != 1 or (since := sent[0]) is None or since.withheld:
            return False
        return {since.insert, _trees(synced.filters)} <= {None, since.update}

    def _sent(
        self, name: QualifiedName, catalog: PublisherCatalog, leaf: RelationId, columns: frozenset[str]
    ) -> _Sent | None:
        """What is sent of a leaf; None if its INSERTs or UPDATEs are not published as the table's."""
        published = resolve(catalog, self.publications, leaf)
        if (
            published is None
            or self._name_of(published.table) != name
            or not published.actions.issuperset(_WRITING)
        ):
            return None
        existing = {column.name for column in published.table.columns}
        insert, update = (_trees(published.filters[action]) for action in _WRITING)
        return _Sent(insert, update, columns & existing - set(published.columns))

    def _name_of(self, table: Table) -> QualifiedName:
        return self.renamed.get(table.id, table.name)


def _trees(filters: Iterable[RowFilter] | None) -> _Trees:
    return None if filters is None else frozenset(row_filter.node_tree for row_filter in filters)
