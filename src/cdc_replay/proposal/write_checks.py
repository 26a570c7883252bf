"""UPDATEs and DELETEs that would fail on the publisher, because of a publication (R5.6, R6.6, R6.10, R2.17).

CREATE and ALTER PUBLICATION do not check this: the server does at each UPDATE and DELETE of a table, whatever
the statement says, over all publications of the database that publish the action for the table:

| order | the statement fails if                                                                 | rule  |
|-------|----------------------------------------------------------------------------------------|-------|
| 1     | the row filter reads a column outside of the leaf's replica identity                    | R5.6  |
| 2     | the column list lacks a column of it; any list, if it is FULL                           | R6.6  |
| 3     | 18: a generated column of it is not published                                           | R6.10 |
| 4     | there is none                                                                           | R2.17 |

Filter and list are those of the relation as which the publication publishes the leaf; columns are matched by
name (`RelationBuildPublicationDesc`, `CheckCmdReplicaIdentity`).
"""

from __future__ import annotations

from collections.abc import Iterator

from cdc_replay.filters.node_text import attnums_in, read_node
from cdc_replay.model.proposed_change import FailingStatement
from cdc_replay.model.publication import (
    Generated,
    Publication,
    PublishAction,
    PublisherCatalog,
    RowFilter,
    Table,
)
from cdc_replay.model.relation import ReplicaIdentity
from cdc_replay.publication.column_list import POSTGRES_18, column_list_in
from cdc_replay.publication.effective_filter import filter_in
from cdc_replay.publication.partition_root import partition_root

SEARCHING = (PublishAction.UPDATE, PublishAction.DELETE)
"""The actions that have to send an old row."""


def failing_statements(present: PublisherCatalog, proposed: PublisherCatalog) -> tuple[FailingStatement, ...]:
    """Those that fail under the proposed definitions and not now, in order of table."""
    now = {(entry.table, entry.action) for entry in _failures(present)}
    return tuple(entry for entry in _failures(proposed) if (entry.table, entry.action) not in now)


def _failures(catalog: PublisherCatalog) -> list[FailingStatement]:
    failures = []
    for leaf in sorted(catalog.tables.values(), key=lambda table: table.name):
        if leaf.is_partitioned or not leaf.is_publishable:
            continue
        for action in SEARCHING:
            reasons = [
                (order, publication.name, *reason)
                for publication in catalog.publications.values()
                if action in publication.actions
                for order, reason in enumerate(_reasons(catalog, publication, leaf))
                if reason is not None
            ]
            if reasons:
                _, publication_name, detail, rule = min(reasons)
                verb = "update" if action is PublishAction.UPDATE else "delete from"
                failures.append(
                    FailingStatement(
                        table=str(leaf.name),
                        action=action.value,
                        publication=publication_name,
                        message=f'cannot {verb} table "{leaf.name.name}"',
                        detail=detail,
                        rule=rule,
                    )
                )
    return failures


def _reasons(
    catalog: PublisherCatalog, publication: Publication, leaf: Table
) -> Iterator[tuple[str, str] | None]:
    """Detail and rule, or None, for each of the four checks."""
    published = partition_root(catalog, (publication,), leaf.id)
    if published is None:
        return
    yield _filter_reason(filter_in(publication, published.table), published.table, leaf)
    yield _list_reason(column_list_in(publication, published.table), leaf)
    yield _generated_reason(catalog, publication, published.table, leaf)
    if leaf.replica_identity is ReplicaIdentity.FULL or leaf.key_columns:
        yield None
    else:
        yield "It does not have a replica identity, and the publication publishes the action.", "R2.17"


def _filter_reason(row_filter: RowFilter | None, table: Table, leaf: Table) -> tuple[str, str] | None:
    missing = () if row_filter is None else outside_identity(row_filter, table, leaf)
    if not missing:
        return None
    return (
        (
            "Column used in the publication WHERE expression is not part of the replica identity:"
            f" {', '.join(missing)}."
        ),
        "R5.6",
    )


def outside_identity(row_filter: RowFilter, table: Table, leaf: Table) -> tuple[str, ...]:
    """The columns that a filter of `table` reads, and that old rows of the leaf do not have."""
    if leaf.replica_identity is ReplicaIdentity.FULL:
        return ()
    read = attnums_in(read_node(row_filter.node_tree))
    return tuple(
        column.name
        for column in table.columns
        if column.attnum in read and column.name not in leaf.key_columns
    )


def _list_reason(listed: frozenset[str] | None, leaf: Table) -> tuple[str, str] | None:
    if listed is None:
        return None
    if leaf.replica_identity is ReplicaIdentity.FULL:
        return "Column list used by the publication does not cover the replica identity: it is FULL.", "R6.6"
    missing = [name for name in leaf.key_columns if name not in listed]
    if not missing:
        return None
    return (
        (
            "Column list used by the publication does not cover the replica identity:"
            f" {', '.join(missing)} is missing."
        ),
        "R6.6",
    )


def _generated_reason(
    catalog: PublisherCatalog, publication: Publication, table: Table, leaf: Table
) -> tuple[str, str] | None:
    if catalog.server_version < POSTGRES_18:
        return None
    is_full = leaf.replica_identity is ReplicaIdentity.FULL
    identity = [column for column in leaf.columns if is_full or column.name in leaf.key_columns]
    listed = column_list_in(publication, table)
    unpublished = [
        column.name
        for column in identity
        if column.generated is Generated.VIRTUAL
        or (column.generated is Generated.STORED and not publication.publish_generated and listed is None)
    ]
    if not unpublished:
        return None
    return (
        f"Replica identity must not contain unpublished generated columns: {', '.join(unpublished)}.",
        "R6.10",
    )
