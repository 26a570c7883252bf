"""Other feeds of a subscription's tables: which rows of the subscriber they may have brought.

A native REFRESH PUBLICATION deletes no row (R7.13). `refresh --reconcile` does, so it must not take the rows
of another subscription for surplus ones.

| the same table of the subscriber is fed by      | its rows are                                      |
|-------------------------------------------------|---------------------------------------------------|
| another subscription of this project, to the    | those that its row filters let through: they stay |
| same publisher, by a row filter                 |                                                   |
| one without a row filter, or whose filter has   | not known: the table is refused                   |
| changed since rows came by it, or is not exact  |                                                   |
| on the subscriber                               |                                                   |
| one of another publisher, or not configured     | not known: the table is refused                   |
| a native subscription                           | not known: the table is refused                   |
| any of them, by another table of the same       | not known: the table is refused                   |
| partition tree                                  |                                                   |

The filter is that of the publisher's catalog. It is evaluated on the subscriber only if its meaning depends
on nothing but the values of the columns (`filters.compile`), these columns are published to the other
subscription, and the subscriber's columns have the same types and collations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.catalog.versions import CatalogHistory
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.opened import Opened
from cdc_replay.config import Config
from cdc_replay.errors import PublicationRefused, ReconcileRefused
from cdc_replay.filters.compile import SparkFilter, compile_any
from cdc_replay.model.lsn import Window
from cdc_replay.model.publication import PublisherCatalog, RowFilter, TableColumn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Pending
from cdc_replay.publication.effective_filter import ROW_ACTIONS
from cdc_replay.publication.resolve import SyncedTable, resolve, synced_tables
from cdc_replay.subscriber import state
from cdc_replay.subscriber.brought import brought
from cdc_replay.subscriber.tables import TargetColumn, TargetTable, read_target_tables

_TREES: Final = """
    with wanted as (
        select class.oid, namespace.nspname as schema_name, class.relname as table_name
        from unnest(%s::text[], %s::text[]) as given (schema_name, table_name)
        join pg_namespace as namespace on namespace.nspname = given.schema_name
        join pg_class as class on class.relnamespace = namespace.oid and class.relname = given.table_name
    )
    select schema_name, table_name, oid, oid from wanted
    union
    select schema_name, table_name, oid, relid::oid from wanted, pg_partition_ancestors(oid) as relid
    union
    select schema_name, table_name, oid, relid::oid from wanted, pg_partition_tree(oid)
"""
"""The wanted tables, each with every table of its partition tree, itself among them."""

_SUBSCRIPTIONS: Final = """
    select class.oid, held.subscription, held.schema_name, held.table_name
    from pg_class as class
    join pg_namespace as namespace on namespace.oid = class.relnamespace
    join cdc_replay.subscription_table as held
        on held.relation = class.oid
        or held.relation is null and held.schema_name = namespace.nspname and held.table_name = class.relname
    where class.oid = any(%s) and held.subscription <> %s
    order by held.subscription, held.schema_name, held.table_name
"""

_NATIVE: Final = """
    select srrelid, native.subname
    from pg_subscription_rel join pg_subscription as native on native.oid = srsubid
    where srrelid = any(%s)
        and native.subdbid = (select oid from pg_database where datname = current_database())
    order by native.subname
"""

_WIDER: Final[Mapping[str, frozenset[str]]] = {
    "smallint": frozenset({"integer", "bigint"}),
    "integer": frozenset({"bigint"}),
    "character varying": frozenset({"text"}),
}
"""Types of the publisher's columns: types of the subscriber's that hold the same values, compared alike."""


@dataclass(frozen=True, slots=True)
class _Feed:
    """Subscription `name` brings rows of the publisher's table `table` into our `target`, or beside it."""

    target: QualifiedName
    name: str
    table: QualifiedName
    is_same_table: bool


class _NotKnownError(Exception):
    """Which rows of a feed there are cannot be known, for this reason."""


def rows_of_other_feeds(
    config: Config, at_work: Opened, catalog: PublisherCatalog, tables: Iterable[QualifiedName]
) -> dict[QualifiedName, tuple[RowFilter, ...]]:
    """By table, the row filters of its other feeds: rows of the subscriber that pass one may be theirs.

    `catalog` is the publisher's as of now.

    Raises:
        ReconcileRefused: naming every table with another feed whose rows are not known.
    """
    trees = _trees(at_work, tables)
    reasons = [
        f'table "{target}": native subscription "{name}" feeds it too, and its rows are not known here'
        for relation, name in at_work.connection.execute(_NATIVE, (list(trees),))
        for target in trees[relation]
    ]
    claims: dict[QualifiedName, tuple[RowFilter, ...]] = {}
    for feed in _feeds(at_work, trees):
        try:
            found = _Other(config, at_work, catalog, feed).claims()
        except _NotKnownError as reason:
            reasons.append(f'table "{feed.target}": subscription "{feed.name}" feeds it too, {reason}')
        else:
            claims[feed.target] = tuple(dict.fromkeys((*claims.get(feed.target, ()), *found)))
    if reasons:
        raise ReconcileRefused(
            f'subscription "{at_work.subscription.name}" cannot be reconciled: it could delete rows of other'
            " subscriptions",
            detail="\n".join(reasons),
            hint="Nothing was changed. Rows of another subscription of this database stay if its row filter"
            " tells them: give it one that compares columns with constants, or feed the table by one"
            " subscription only.",
            rule="R7.13",
        )
    return claims


def _trees(at_work: Opened, tables: Iterable[QualifiedName]) -> Mapping[int, Mapping[QualifiedName, bool]]:
    """By oid, every table in whose partition trees are some of `tables`, each with whether it is that one."""
    names = list(tables)
    wanted = ([name.schema for name in names], [name.name for name in names])
    trees: dict[int, dict[QualifiedName, bool]] = {}
    for schema, name, oid, relation in at_work.connection.execute(_TREES, wanted):
        trees.setdefault(relation, {})[QualifiedName(schema, name)] = oid == relation
    return trees


def _feeds(at_work: Opened, trees: Mapping[int, Mapping[QualifiedName, bool]]) -> list[_Feed]:
    if not state.is_installed(at_work.connection):
        return []
    held = at_work.connection.execute(_SUBSCRIPTIONS, (list(trees), at_work.subscription.name))
    return [
        _Feed(target, name, QualifiedName(schema, table), is_same)
        for relation, name, schema, table in held
        for target, is_same in trees[relation].items()
    ]


@dataclass(frozen=True, slots=True)
class _Other:
    """One feed, seen from the subscription that is to be reconciled."""

    config: Config
    at_work: Opened
    catalog: PublisherCatalog
    feed: _Feed

    def claims(self) -> tuple[RowFilter, ...]:
        """The row filters by which its rows came.

        Raises:
            _NotKnownError: if they do not tell its rows.
        """
        feed = self.feed
        if not feed.is_same_table:
            raise _NotKnownError(f'by table "{feed.table}" of the same partition tree')
        change_log = ChangeLog.open(self.config.publisher(self.at_work.subscription.publisher).change_log)
        publications = self._publications(change_log.header.system_identifier)
        synced, filters = _synced_and_filters(self.catalog, publications, feed.table)
        if synced is None:
            if isinstance(self._state, Pending):
                return ()
            raise _NotKnownError(
                "and its publications do not have the table any more;"
                f" `cdc-replay refresh {feed.name}` lets it forget the table"
            )
        if filters is None:
            raise _NotKnownError("and has no row filter for it, so that every row may be its own")
        self._check_brought(change_log, publications, filters)
        self._check_evaluation(synced, filters)
        return filters

    def _publications(self, system_identifier: str) -> tuple[str, ...]:
        """Those by which its rows came, and those that are configured for it."""
        name = self.feed.name
        record = state.subscription_record(self.at_work.connection, name)
        configured = self.config.subscriptions.get(name)
        if configured is None or record is None:
            raise _NotKnownError("and is not in the configuration")
        is_same = configured.subscription.publisher == self.at_work.subscription.publisher
        if not is_same or record.publisher_system_identifier != system_identifier:
            raise _NotKnownError("and has another publisher")
        return tuple(dict.fromkeys((*record.publications, *configured.subscription.publications)))

    @property
    def _state(self) -> object:
        return state.table_states(self.at_work.connection, self.feed.name).get(self.feed.table)

    def _check_brought(
        self, change_log: ChangeLog, publications: Sequence[str], filters: Sequence[RowFilter]
    ) -> None:
        """All its rows came by `filters`, or by some of them (R9.12)."""
        known = brought(self.at_work.connection, self.feed.name).get(self.feed.table)
        if known is None:
            if isinstance(self._state, Pending):
                return
            raise _NotKnownError("and it is not known by which row filter its rows came")
        present = {each.sql for each in filters}
        former: list[Iterable[str] | None] = [known.definition.filters]
        if known.lsn < change_log.end_lsn:
            history = CatalogHistory(change_log.catalogs())
            for catalog in history.within(Window(known.lsn, change_log.end_lsn)).values():
                synced, found = _synced_and_filters(catalog, publications, self.feed.table)
                if synced is not None:
                    former.append(None if found is None else [each.sql for each in found])
        if any(each is None or not present.issuperset(each) for each in former):
            raise _NotKnownError(
                f"and its row filter has changed since its rows were brought at {known.lsn};"
                f" `cdc-replay refresh {self.feed.name} --reconcile` settles that"
            )

    def _check_evaluation(self, synced: SyncedTable, filters: Sequence[RowFilter]) -> None:
        """The subscriber's answers are those of the publisher."""
        compiled = compile_any(filters, synced.table)
        if not isinstance(compiled, SparkFilter):
            raise _NotKnownError(f"and the subscriber cannot evaluate its row filter: {compiled.because}")
        ((_, target),) = read_target_tables(self.at_work.connection, [self.feed.target]).items()
        for column in compiled.columns:
            if column.name not in synced.columns or not _is_alike(column, target):
                raise _NotKnownError(
                    f'and the subscriber cannot evaluate its row filter: column "{column.name}" is not'
                    " published, or has another type or collation there"
                )


def _synced_and_filters(
    catalog: PublisherCatalog, publications: Sequence[str], name: QualifiedName
) -> tuple[SyncedTable | None, tuple[RowFilter, ...] | None]:
    """The table as the publications list it, and every filter by which a row can come; None: any row."""
    try:
        listed = {each.table.name: each for each in synced_tables(catalog, publications)}
        synced = listed.get(name)
        found = [] if synced is None else [synced.filters, *_stream_filters(catalog, publications, synced)]
    except PublicationRefused as error:
        raise _NotKnownError("and PostgreSQL refuses its publications") from error
    filters: dict[RowFilter, None] = {}
    for each in found:
        if each is None:
            return synced, None
        filters |= dict.fromkeys(each)
    return synced, tuple(filters)


def _stream_filters(
    catalog: PublisherCatalog, publications: Sequence[str], synced: SyncedTable
) -> Iterator[tuple[RowFilter, ...] | None]:
    """Those of the change stream, which can differ from those of the initial copy (R7.5)."""
    for leaf in synced.leaves:
        published = resolve(catalog, publications, leaf.id)
        if published is not None and published.table.name == synced.table.name:
            yield from (published.filters[action] for action in ROW_ACTIONS if action in published.actions)


def _is_alike(column: TableColumn, table: TargetTable) -> bool:
    """Whether the subscriber's column holds the publisher's values and compares them alike."""
    target = next((each for each in table.columns if each.name == column.name), None)
    if target is None or not _has_same_values(column.type_sql, target.base_type_sql):
        return False
    return _collation_of(column) == _collation_in(target)


def _has_same_values(here: str, there: str) -> bool:
    without_length, _, rest = here.partition("(")
    _, _, suffix = rest.partition(")")
    unlimited = without_length + suffix
    return there in {here, unlimited} or there in _WIDER.get(unlimited, ())


def _collation_of(column: TableColumn) -> str | None:
    """None: that of the database, or none at all."""
    return None if column.collation_sql is None else column.collation_sql.replace('"', "")


def _collation_in(target: TargetColumn) -> str | None:
    if target.collation is None or target.collation == ("pg_catalog", "default"):
        return None
    return ".".join(target.collation)
