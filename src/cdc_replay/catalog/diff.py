"""The differences of two catalogs that affect replication; printed texts are ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TypeVar

from cdc_replay.model.publication import Publication, PublisherCatalog, Table

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def differences(a: PublisherCatalog, b: PublisherCatalog) -> tuple[str, ...]:
    """The publications and tables that differ, in order of name."""
    publications = _unequal_values(
        {name: _without_texts(publication) for name, publication in a.publications.items()},
        {name: _without_texts(publication) for name, publication in b.publications.items()},
    )
    tables = _unequal_values(
        {relation: _table_without_texts(table) for relation, table in a.tables.items()},
        {relation: _table_without_texts(table) for relation, table in b.tables.items()},
    )
    return (
        *sorted({f'publication "{publication.name}"' for publication in publications}),
        *sorted({f"table {table.name}" for table in tables}),
    )


def _unequal_values(a: Mapping[_Key, _Value], b: Mapping[_Key, _Value]) -> Iterator[_Value]:
    for key in {**a, **b}:
        left, right = a.get(key), b.get(key)
        if left != right:
            yield from (value for value in (left, right) if value is not None)


def _without_texts(publication: Publication) -> Publication:
    """The publication without the printed form of its filters, and without its oid."""
    memberships = {
        relation: dataclasses.replace(
            membership,
            row_filter=membership.row_filter and dataclasses.replace(membership.row_filter, sql=""),
        )
        for relation, membership in publication.memberships.items()
    }
    return dataclasses.replace(publication, memberships=memberships, oid=0)


def _table_without_texts(table: Table) -> Table:
    columns = tuple(
        dataclasses.replace(column, type_sql="", generation_sql=None, generation_tree=None)
        for column in table.columns
    )
    return dataclasses.replace(table, columns=columns)
