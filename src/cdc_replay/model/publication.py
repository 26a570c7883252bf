"""The part of the publisher's catalog that decides what a subscription gets (spec section 2)."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.errors import PublicationMissing
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName, RelationId, ReplicaIdentity

STATE_SCHEMA: Final = "cdc_replay"
"""Schema of this project's tables in a subscriber's database."""


_UNPRINTED: Final = "(a row filter that the publisher could not print, "


class PublishAction(enum.Enum):
    """A word of the publication parameter `publish`."""

    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    TRUNCATE = "truncate"


@dataclass(frozen=True, slots=True)
class RowFilter:
    """The WHERE clause of one membership.

    `node_tree` is `pg_publication_rel.prqual` as stored: resolved operators, functions, types, collations.
    `sql` is `pg_get_expr` of it, for display and for values of constants; it is never executed. If it could
    not be had, it is `unprinted_sql`. `publication` names the publication that the filter was chosen from; it
    is not part of the filter's meaning.
    """

    node_tree: str
    sql: str
    publication: str = field(default="", compare=False)

    @property
    def is_printed(self) -> bool:
        """Whether `sql` is its text."""
        return not self.sql.startswith(_UNPRINTED)

    @property
    def unprinted_sql(self) -> str:
        """What replaces its text; different filters have different ones."""
        return f"{_UNPRINTED}{hashlib.sha256(self.node_tree.encode()).hexdigest()[:12]})"


@dataclass(frozen=True, slots=True)
class Membership:
    """A table that a publication lists; `columns` is its column list, None for all columns."""

    relation: RelationId
    row_filter: RowFilter | None
    columns: frozenset[str] | None
    is_exception: bool = False
    """19: the table and its partitions are *not* in this publication FOR ALL TABLES (R2.18)."""

    @property
    def filter_tree(self) -> str | None:
        """The node tree of the row filter; None: there is none."""
        return None if self.row_filter is None else self.row_filter.node_tree


@dataclass(frozen=True, slots=True)
class Publication:
    """One publication; `schemas` are those of FOR TABLES IN SCHEMA."""

    oid: int
    """`pg_publication.oid`; a rename does not change it."""
    name: str
    all_tables: bool
    via_root: bool
    actions: frozenset[PublishAction]
    schemas: frozenset[str]
    memberships: Mapping[RelationId, Membership]
    publish_generated: bool = False
    """18: publish_generated_columns = stored (R6.9)."""

    @property
    def exceptions(self) -> frozenset[RelationId]:
        """The tables of FOR ALL TABLES EXCEPT; for a partition tree its root (R2.18)."""
        return frozenset(
            membership.relation for membership in self.memberships.values() if membership.is_exception
        )


class Generated(enum.Enum):
    """`pg_attribute.attgenerated`."""

    NO = ""
    STORED = "s"
    VIRTUAL = "v"


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A live column; `type_sql` and `collation_sql` are DDL, schema-qualified.

    These and `generation_sql` are for display and comparison, and never executed. `generation_tree` is
    `pg_attrdef.adbin` as stored. Of a generated column both can be None: the text if its table has no row
    filter, both if the expression is long.
    """

    attnum: int
    name: str
    type_oid: int
    typmod: int
    type_sql: str
    collation_sql: str | None
    generated: Generated = Generated.NO
    generation_sql: str | None = None
    generation_tree: str | None = None

    @property
    def holds_names(self) -> bool:
        """Whether its values are names of objects, as those of `regclass`: the server has their oids."""
        return "." not in self.type_sql and self.type_sql.startswith("reg")


@dataclass(frozen=True, slots=True)
class Table:
    """A plain or partitioned table of the publisher.

    `key_columns` are the columns of the replica identity's key (primary key or index), empty if there is none
    or the identity is FULL or NOTHING. `parent` is the partitioned table of a partition.
    """

    id: RelationId
    name: QualifiedName
    is_partitioned: bool
    parent: RelationId | None
    replica_identity: ReplicaIdentity
    key_columns: tuple[str, ...]
    primary_key: tuple[str, ...]
    columns: tuple[TableColumn, ...]
    """Live columns in attribute-number order, generated ones included."""
    dropped_columns: int = 0
    """The number of dropped columns; 15 counts them (R6.5)."""
    is_publishable: bool = True
    """R2.1. False for an unlogged table in the partition tree of a permanent one."""

    def column(self, name: str) -> TableColumn:
        """The column `name`.

        Raises:
            KeyError: if it does not exist.
        """
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class PublisherCatalog:
    """All publications and publishable tables as of one WAL position, immutable."""

    lsn: Lsn
    server_version: int
    """`server_version_num`, such as 180006."""
    publications: Mapping[str, Publication]
    tables: Mapping[RelationId, Table]

    def publication(self, name: str) -> Publication:
        """The publication `name`.

        Raises:
            PublicationMissing: if it does not exist.
        """
        try:
            return self.publications[name]
        except KeyError:
            raise PublicationMissing(
                f'publication "{name}" does not exist',
                hint="Create it on the publisher, or remove it from the subscription's list.",
                rule="R1.19",
            ) from None

    def existing(self, names: Sequence[str]) -> tuple[Publication, ...]:
        """The named publications that exist, in the order of `names` (R7.11)."""
        return tuple(self.publications[name] for name in names if name in self.publications)

    def ancestors(self, relation: RelationId) -> tuple[Table, ...]:
        """The partitioned tables above `relation`, from its parent to the root."""
        return tuple(self._ancestors(relation))

    def _ancestors(self, relation: RelationId) -> Iterator[Table]:
        parent = self.tables[relation].parent
        while parent is not None:
            table = self.tables[parent]
            yield table
            parent = table.parent
