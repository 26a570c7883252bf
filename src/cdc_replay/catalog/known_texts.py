"""Texts of expressions that could not be read, from a catalog that has them for the same trees.

The server prints no expression of a table that somebody else has locked. That changes no definition, so it
must not look like a change.
"""

from __future__ import annotations

from dataclasses import replace

from cdc_replay.model.publication import Membership, Publication, PublisherCatalog, Table
from cdc_replay.model.relation import RelationId


def with_known_texts(catalog: PublisherCatalog, known: PublisherCatalog) -> PublisherCatalog:
    """The catalog with the texts of `known` where it has none, of tables with an equal row filter."""
    former = {publication.oid: publication for publication in known.publications.values()}
    unprinted = {name: _unprinted(publication) for name, publication in catalog.publications.items()}
    if not any(unprinted.values()):
        return catalog
    publications = {
        name: _with_known_filters(publication, unprinted[name], former.get(publication.oid))
        for name, publication in catalog.publications.items()
    }
    tables = dict(catalog.tables)
    for relation in {relation for memberships in unprinted.values() for relation in memberships}:
        if relation in tables and relation in known.tables:
            tables[relation] = _with_known_columns(tables[relation], known.tables[relation])
    return replace(catalog, publications=publications, tables=tables)


def _unprinted(publication: Publication) -> dict[RelationId, Membership]:
    return {
        relation: membership
        for relation, membership in publication.memberships.items()
        if membership.row_filter is not None and not membership.row_filter.is_printed
    }


def _with_known_filters(
    publication: Publication, unprinted: dict[RelationId, Membership], former: Publication | None
) -> Publication:
    if not unprinted or former is None:
        return publication
    known = {
        relation: replace(membership, row_filter=former.memberships[relation].row_filter)
        for relation, membership in unprinted.items()
        if relation in former.memberships
        and former.memberships[relation].filter_tree == membership.filter_tree
    }
    return replace(publication, memberships={**publication.memberships, **known})


def _with_known_columns(table: Table, known: Table) -> Table:
    texts = {column.generation_tree: column.generation_sql for column in known.columns}
    columns = tuple(
        replace(column, generation_sql=texts.get(column.generation_tree))
        if column.generation_sql is None and column.generation_tree is not None
        else column
        for column in table.columns
    )
    return replace(table, columns=columns)
