"""What two catalogs say differently, of what decides: texts for display and for DDL are left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TypeVar

from cdc_replay.model.publication import Publication, PublisherCatalog, Table

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def differences(a: PublisherCatalog, b: PublisherCatalog) -> tuple[str, ...]:
    """The publications and tables that are not the same in both, in order of name."""
    publications = _different(
        {name: _deciding(each) for name, each in a.publications.items()},
        {name: _deciding(each) for name, each in b.publications.items()},
    )
    tables = _different(
        {relation: _deciding_of_table(each) for relation, each in a.tables.items()},
        {relation: _deciding_of_table(each) for relation, each in b.tables.items()},
    )
    return (
        *sorted({f'publication "{each.name}"' for each in publications}),
        *sorted({f"table {each.name}" for each in tables}),
    )


def _different(a: Mapping[_Key, _Value], b: Mapping[_Key, _Value]) -> Iterator[_Value]:
    for key in {**a, **b}:
        left, right = a.get(key), b.get(key)
        if left != right:
            yield from (each for each in (left, right) if each is not None)


def _deciding(publication: Publication) -> Publication:
    """The publication without the printed form of its filters, and without its oid."""
    memberships = {
        relation: dataclasses.replace(
            each, row_filter=each.row_filter and dataclasses.replace(each.row_filter, sql="")
        )
        for relation, each in publication.memberships.items()
    }
    return dataclasses.replace(publication, memberships=memberships, oid=0)


def _deciding_of_table(table: Table) -> Table:
    columns = tuple(
        dataclasses.replace(column, type_sql="", generation_sql=None, generation_tree=None)
        for column in table.columns
    )
    return dataclasses.replace(table, columns=columns)
