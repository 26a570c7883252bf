"""Which columns are published, and where column lists disagree (R6.3-R6.9).

There is no union of column lists: all effective publications must publish the same columns, or PostgreSQL
refuses to decode the table. Which list equals "no list" depends on the publisher's version (R6.5):

| version | a list equals no list if its length is the number of              | no list publishes           |
|---------|-------------------------------------------------------------------|-----------------------------|
| 15      | attribute numbers, those of generated and dropped columns too     | live columns, not generated |
| 16, 17  | live columns that are not generated                               | live columns, not generated |
| 18      | (the sets of columns themselves are compared)                     | the same, and stored        |
|         |                                                                   | generated ones on request   |

The request is `publish_generated_columns = stored`, on which publications without a list must agree (R6.9).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from cdc_replay.errors import PublicationRefused
from cdc_replay.model.publication import Generated, Publication, Table

POSTGRES_16: Final = 160000
POSTGRES_18: Final = 180000


def column_list_in(publication: Publication, table: Table) -> frozenset[str] | None:
    """The publication's column list for the table itself, None for all columns (R6.3)."""
    if publication.all_tables or (membership := publication.memberships.get(table.id)) is None:
        return None
    return membership.columns


def published_columns(
    publications: Sequence[Publication], table: Table, server_version: int
) -> tuple[str, ...]:
    """The columns of `table` that all of `publications` publish, in attribute-number order.

    `publications` are the effective ones for `table`, the published relation; `server_version` is a
    `server_version_num`.

    Raises:
        PublicationRefused: if they disagree (R6.4, R6.9).
    """
    if server_version >= POSTGRES_18:
        _check_generated(publications, table)
    columns = [_columns_in(publication, table, server_version) for publication in publications]
    if any(other != columns[0] for other in columns[1:]):
        raise _disagreement("column lists", "R6.4", publications, table)
    names = columns[0] if columns and columns[0] is not None else unlisted_columns(table, generated=False)
    return in_order(table, names)


def in_order(table: Table, names: Container[str]) -> tuple[str, ...]:
    """The table's columns in `names`, in attribute-number order."""
    return tuple(column.name for column in table.columns if column.name in names)


def unlisted_columns(table: Table, *, generated: bool) -> frozenset[str]:
    """The columns published without a list, with the stored generated ones if `generated`."""
    kinds = {Generated.NO, Generated.STORED} if generated else {Generated.NO}
    return frozenset(column.name for column in table.columns if column.generated in kinds)


def _columns_in(publication: Publication, table: Table, server_version: int) -> frozenset[str] | None:
    """What PostgreSQL compares: a set of columns, or None for "no list" before 18."""
    listed = column_list_in(publication, table)
    if server_version >= POSTGRES_18:
        if listed is not None:
            return listed
        return unlisted_columns(table, generated=publication.publish_generated)
    if listed is None or len(listed) == _full_length(table, server_version):
        return None
    return listed


def _full_length(table: Table, server_version: int) -> int:
    if server_version >= POSTGRES_16:
        return len(unlisted_columns(table, generated=False))
    return len(table.columns) + table.dropped_columns


def _check_generated(publications: Sequence[Publication], table: Table) -> None:
    """Publications without a list must agree on generated columns, if the table has any (R6.9)."""
    if all(column.generated is Generated.NO for column in table.columns):
        return
    settings = {
        publication.publish_generated
        for publication in publications
        if column_list_in(publication, table) is None
    }
    if len(settings) > 1:
        raise _disagreement("values of publish_generated_columns", "R6.9", publications, table)


def _disagreement(
    subject: str, rule: str, publications: Sequence[Publication], table: Table
) -> PublicationRefused:
    """The error in PostgreSQL's words, with the columns of each publication."""
    return PublicationRefused(
        f'cannot use different {subject} for table "{table.name}" in different publications',
        detail="; ".join(_describe_columns(publication, table) for publication in publications) + ".",
        hint="Make the publications agree on the columns of this table, or subscribe to them separately.",
        rule=rule,
    )


def _describe_columns(publication: Publication, table: Table) -> str:
    listed = column_list_in(publication, table)
    if listed is not None:
        return f'publication "{publication.name}" lists ({", ".join(in_order(table, listed))})'
    if publication.publish_generated:
        return f'publication "{publication.name}" has all columns, stored generated ones included'
    return f'publication "{publication.name}" has all columns'
