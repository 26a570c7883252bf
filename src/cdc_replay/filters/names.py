"""The names of a node tree's oids on the server that evaluates it: one query of its catalog.

Only objects that may be executed with our rights have a name here. PostgreSQL allows no others in row
filters; generation expressions can have others, and a tree of a forged change log any.

| by oid      | has a name if                                                                              |
|-------------|--------------------------------------------------------------------------------------------|
| an operator | it is built-in, and its function immutable                                                 |
| a function  | it is built-in, immutable, returns one value, and evaluates nothing but its arguments      |
| a type      | it is built-in; or an enum, a base type (which superusers create), or an array of these; a |
|             | domain is replaced by the type below it, so that its checks do not run                     |
| a collation | it exists: it is no code                                                                   |

Built-in objects came with the server. Oids below 10,000 mean the same on all servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Self, TypeAlias

from psycopg import sql

from cdc_replay.filters.node_text import FieldValue, Node, text_datum
from cdc_replay.postgres.connection import Connection

BUILT_IN: Final = 16_384
"""`FirstNormalObjectId`: the first oid of objects that users create."""

SAME_EVERYWHERE: Final = 10_000
"""`FirstGenbkiObjectId`: the first oid that each version, or server, assigns itself."""

MAX_OID: Final = 2**32 - 1

_OID: Final = re.compile(r"[0-9]{1,10}")
_SCHEMAS: Final = ("pg_catalog", "information_schema")
_SYMBOL: Final = re.compile(r"[-+*/<>=~!@#%^&|`?]{1,63}")
_COMMENTS: Final = ("--", "/*")

_EVALUATES_MORE: Final = frozenset({"satisfies_hash_partition"})
"""Immutable, but it evaluates the partition key of any table, which is code of that table's owner."""

_OPERATORS: Final = frozenset({"opno", "opnos"})
_FUNCTIONS: Final = frozenset({"funcid"})
_COLLATIONS: Final = frozenset({"collOid", "varcollid"})
_TYPES: Final = frozenset(
    {"vartype", "consttype", "resulttype", "array_typeid", "funcresulttype", "row_typeid", "type"}
)

_NAMES: Final = """
    with recursive wanted_type as (
        select t.oid as wanted, t.oid as found from pg_catalog.pg_type t where t.oid = any (%(types)s::oid[])
        union all
        select w.wanted, d.typbasetype from wanted_type w
        join pg_catalog.pg_type d on d.oid = w.found and d.typtype = 'd'
    )
    select 'operator', o.oid::bigint, n.nspname, o.oprname, p.provolatile = 'i', 0, ''
    from pg_catalog.pg_operator o
    join pg_catalog.pg_namespace n on n.oid = o.oprnamespace
    join pg_catalog.pg_proc p on p.oid = o.oprcode
    where o.oid = any (%(operators)s::oid[])
    union all
    select 'function', p.oid::bigint, n.nspname, p.proname,
        p.provolatile = 'i' and p.prokind = 'f' and not p.proretset, 0, ''
    from pg_catalog.pg_proc p
    join pg_catalog.pg_namespace n on n.oid = p.pronamespace
    where p.oid = any (%(functions)s::oid[])
    union all
    select 'collation', c.oid::bigint, n.nspname, c.collname, true, 0, ''
    from pg_catalog.pg_collation c
    join pg_catalog.pg_namespace n on n.oid = c.collnamespace
    where c.oid = any (%(collations)s::oid[])
    union all
    select 'type', w.wanted::bigint, n.nspname, t.typname,
        t.typtype in ('b', 'e') and (t.typelem = 0 or e.typtype in ('b', 'e')), t.oid::bigint,
        pg_catalog.format_type(t.oid, -1)
    from wanted_type w
    join pg_catalog.pg_type t on t.oid = w.found and t.typtype <> 'd'
    join pg_catalog.pg_namespace n on n.oid = t.typnamespace
    left join pg_catalog.pg_type e on e.oid = t.typelem
"""


_READABLE_ENCODINGS: Final = ("UTF8", "SQL_ASCII")
_CONVERTED: Final = """
    select data, pg_catalog.convert_from(data, pg_catalog.getdatabaseencoding())
    from pg_catalog.unnest(%s::bytea[]) as data
"""


class NotPrintableError(Exception):
    """A part of an expression cannot be printed for a server; the text says which, and why.

    `hint` is set if a server can have stored such an expression.
    """

    def __init__(self, reason: str, *, hint: str | None = None) -> None:
        super().__init__(reason)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class _CatalogObject:
    """An object of the catalog.

    `may_run` is the condition of the table above apart from being built-in; `type_oid` is the type below a
    domain; `label` is what `pg_get_expr` prints after the type's constants.
    """

    schema: str
    name: str
    may_run: bool
    type_oid: int
    label: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


_Key: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Names:
    """The objects with some oids on a server; oids below `same_below` mean the same there.

    Every method raises `NotPrintableError` for an object without a name here.
    """

    same_below: int
    _objects: Mapping[_Key, _CatalogObject] = field(repr=False)
    _characters: Mapping[bytes, str] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, connection: Connection, trees: Iterable[Node], *, same_below: int = BUILT_IN) -> Self:
        """The objects that `trees` mention; `same_below` is `SAME_EVERYWHERE` for another server.

        Raises:
            psycopg.Error: if the query fails.
        """
        oids_by_kind = _collect_oids(trees)
        rows = connection.execute(_NAMES, {kind: sorted(oids) for kind, oids in oids_by_kind.items()})
        objects = {
            (kind, oid): _CatalogObject(*row)
            for kind, oid, *row in rows
            # A server has its own oids for most collations; all are right on the server of the trees.
            if kind != "collation" or oid < same_below or same_below == BUILT_IN
        }
        # Trees are in the encoding of the publisher.
        return cls(same_below, objects, _convert_texts(connection, trees) if same_below == BUILT_IN else {})

    def with_collations_of(self, other: Names) -> Self:
        """With the collations of `other`: each server has its own oids for most of them."""
        collations = {key: entry for key, entry in other._objects.items() if key[0] == "collation"}
        return type(self)(self.same_below, {**self._objects, **collations}, other._characters)

    def characters(self, data: bytes) -> str | None:
        """The text of bytes in the encoding of the tree's server; None if they are not valid."""
        try:
            return self._characters[data] if data in self._characters else data.decode()
        except UnicodeDecodeError:
            return None

    def operator(self, oid: int) -> str:
        """The symbol of an operator, which is in `pg_catalog`."""
        entry = self._built_in("operator", oid)
        if not _SYMBOL.fullmatch(entry.name) or any(comment in entry.name for comment in _COMMENTS):
            raise NotPrintableError(f"operator {oid} has no symbol")
        return entry.name

    def function(self, oid: int) -> sql.Identifier:
        """A function's name."""
        entry = self._built_in("function", oid)
        if entry.name in _EVALUATES_MORE:
            raise NotPrintableError(
                f"function {entry} evaluates the partition key of another table, with our rights",
                hint="Use another function in the row filter, such as hashint8.",
            )
        return sql.Identifier(entry.schema, entry.name)

    def type(self, oid: int) -> sql.Identifier:
        """A type's name."""
        entry = self._type(oid)
        return sql.Identifier(entry.schema, entry.name)

    def below_domains(self, oid: int) -> int:
        """The type itself, or the base type of a domain."""
        entry = self._objects.get(("type", oid))
        return oid if entry is None else entry.type_oid

    def label(self, oid: int) -> str:
        """The type's name as `pg_get_expr` prints it."""
        return self._type(oid).label

    def collation(self, oid: int) -> sql.Identifier:
        """A collation's name."""
        entry = self._get("collation", oid)
        return sql.Identifier(entry.schema, entry.name)

    def _type(self, oid: int) -> _CatalogObject:
        entry = self._get("type", oid)
        if not entry.may_run and not self._is_built_in(entry.type_oid, entry):
            raise NotPrintableError(f"type {entry} is not built-in, and neither an enum nor a base type")
        if self.same_below < BUILT_IN and entry.type_oid >= self.same_below:
            raise NotPrintableError(f"type {entry} may be another one there")
        return entry

    def _built_in(self, kind: str, oid: int) -> _CatalogObject:
        entry = self._get(kind, oid)
        if not self._is_built_in(oid, entry):
            raise NotPrintableError(f"{kind} {entry} is not built-in")
        if not entry.may_run:
            raise NotPrintableError(f"{kind} {entry} is not immutable")
        return entry

    def _is_built_in(self, oid: int, entry: _CatalogObject) -> bool:
        return oid < self.same_below and entry.schema in _SCHEMAS

    def _get(self, kind: str, oid: int) -> _CatalogObject:
        entry = self._objects.get((kind, oid))
        if entry is None:
            raise NotPrintableError(f"there is no {kind} with oid {oid}")
        return entry


def _convert_texts(connection: Connection, trees: Iterable[Node]) -> dict[bytes, str]:
    """The texts of constants by their bytes, if the database's encoding is not ours."""
    if connection.info.parameter_status("server_encoding") in _READABLE_ENCODINGS:
        return {}
    data = {
        text
        for tree in trees
        for node in tree.walk()
        if node.name == "CONST" and (text := text_datum(node)) is not None and not text.isascii()
    }
    return dict(connection.execute(_CONVERTED, (list(data),)).fetchall()) if data else {}


def _collect_oids(trees: Iterable[Node]) -> dict[str, set[int]]:
    oids: dict[str, set[int]] = {"operators": set(), "functions": set(), "collations": set(), "types": set()}
    kinds = zip(oids.values(), (_OPERATORS, _FUNCTIONS, _COLLATIONS, _TYPES), strict=True)
    by_field = {field_name: kind_oids for kind_oids, field_names in kinds for field_name in field_names}
    for tree in trees:
        for node in tree.walk():
            for field_name in node.fields.keys() & by_field.keys():
                by_field[field_name].update(_oids(node.fields[field_name]))
    return oids


def _oids(values: Iterable[FieldValue]) -> Iterator[int]:
    """The oids of a field, which has one, or a list of them."""
    for value in values:
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and _OID.fullmatch(word) and 0 < int(word) <= MAX_OID:
                yield int(word)
