"""Per published relation: its actions, effective row filters, and where each filter is evaluated."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from cdc_replay.filters.compile import ServerFilter, compile_filter
from cdc_replay.model.publication import PublishAction, PublisherCatalog, RowFilter, Table
from cdc_replay.publication.effective_filter import ROW_ACTIONS
from cdc_replay.publication.resolve import PublishedRelation, resolve


@dataclass(frozen=True, slots=True)
class ExplainedTable:
    """One published relation; `leaves` is the number of tables whose changes are published under its name.

    Leaves with other actions or filters are a row of their own (R2.8).

    `insert`, `update` and `delete` are the effective filters as SQL, `-` for no filter, None if the action is
    not published. `evaluated_by` names Arrow or PostgreSQL per filter, and why PostgreSQL.
    """

    table: str
    leaves: int
    actions: tuple[str, ...]
    insert: str | None
    update: str | None
    delete: str | None
    evaluated_by: tuple[str, ...]
    identity: str
    columns: tuple[str, ...]


def explain_tables(catalog: PublisherCatalog, publications: Sequence[str]) -> tuple[ExplainedTable, ...]:
    """The published relations in order of name."""
    groups: dict[Hashable, list[PublishedRelation]] = {}
    for table in sorted(catalog.tables.values(), key=lambda table: table.name):
        if table.is_partitioned:
            continue
        published = resolve(catalog, publications, table.id)
        if published is not None:
            filters = tuple(published.filters[action] for action in ROW_ACTIONS)
            groups.setdefault((published.table.name, published.actions, filters), []).append(published)
    return tuple(
        _explain(group, catalog) for group in sorted(groups.values(), key=lambda group: group[0].table.name)
    )


def _explain(leaves: Sequence[PublishedRelation], catalog: PublisherCatalog) -> ExplainedTable:
    first = leaves[0]
    filters: dict[RowFilter, None] = {}
    for row_filters in first.filters.values():
        filters.update(dict.fromkeys(row_filters or ()))
    return ExplainedTable(
        table=str(first.table.name),
        leaves=len(leaves),
        actions=tuple(action.value for action in PublishAction if action in first.actions),
        insert=_filter_sql(first, PublishAction.INSERT),
        update=_filter_sql(first, PublishAction.UPDATE),
        delete=_filter_sql(first, PublishAction.DELETE),
        evaluated_by=tuple(_evaluated_by(row_filter, first.table) for row_filter in filters),
        identity=_identity(catalog.tables[first.leaf]),
        columns=first.columns,
    )


def _filter_sql(published: PublishedRelation, action: PublishAction) -> str | None:
    if action not in published.actions:
        return None
    filters = published.filters[action]
    return "-" if filters is None else " OR ".join(row_filter.sql for row_filter in filters)


def _evaluated_by(row_filter: RowFilter, table: Table) -> str:
    compiled = compile_filter(row_filter, table)
    if isinstance(compiled, ServerFilter):
        return f"{row_filter.sql}: PostgreSQL, because {compiled.because}"
    return f"{row_filter.sql}: Arrow"


def _identity(leaf: Table) -> str:
    columns = ", ".join(leaf.key_columns)
    return f"{leaf.replica_identity.name.lower()}" + (f" ({columns})" if columns else "")
