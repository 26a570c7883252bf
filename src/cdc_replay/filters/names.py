"""What the oids of a node tree are called on the server that evaluates it: one query of its catalog.

A name is only given out for what may be executed with our rights. PostgreSQL allows no more in row filters;
generation expressions may have more, and a tree of a forged change log anything.

| by oid      | is given out if                                                                            |
|-------------|--------------------------------------------------------------------------------------------|
| an operator | it is built-in, and its function immutable                                                 |
| a function  | it is built-in, immutable, and returns one value                                           |
| a type      | it is built-in; or an enum, a base type (which superusers create), or an array of these; a |
|             | domain is replaced by the type below it, so that its checks do not run                     |
| a collation | it exists: it is no code                                                                   |

Built-in is what came with the server. The oids of the first 10,000 mean the same on all servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Self, TypeAlias

from psycopg import sql

from cdc_replay.filters.node_text import Item, Node, text_datum
from cdc_replay.postgres.connection import Connection

BUILT_IN: Final = 16_384
"""`FirstNormalObjectId`: where oids of objects begin that users have created."""

SAME_EVERYWHERE: Final = 10_000
"""`FirstGenbkiObjectId`: where oids begin that each version, or server, gives out by itself."""

MOST: Final = 2**32 - 1
"""The last oid."""

_OID: Final = re.compile(r"[0-9]{1,10}")
_SCHEMAS: Final = ("pg_catalog", "information_schema")
_SYMBOL: Final = re.compile(r"[-+*/<>=~!@#%^&|`?]{1,63}")
_COMMENTS: Final = ("--", "/*")

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


_OUR_ENCODINGS: Final = ("UTF8", "SQL_ASCII")
_CONVERTED: Final = """
    select data, pg_catalog.convert_from(data, pg_catalog.getdatabaseencoding())
    from pg_catalog.unnest(%s::bytea[]) as data
"""


class NotPrintableError(Exception):
    """A part of an expression that is not written for a server; its text says which, and why."""


@dataclass(frozen=True, slots=True)
class _Named:
    """An object of the catalog.

    `may_run` is what the table above asks beside being built-in; `type_oid` is the type below a domain;
    `label` is what `pg_get_expr` writes behind the type's constants.
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
    """The objects with some oids on a server, of which those below `known_below` are known to mean the same.

    Every method raises `NotPrintableError` for what has no name to be given out.
    """

    known_below: int
    _found: Mapping[_Key, _Named] = field(repr=False)
    _characters: Mapping[bytes, str] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, connection: Connection, trees: Iterable[Node], *, known_below: int = BUILT_IN) -> Self:
        """The names of all that `trees` mention; `known_below` is `SAME_EVERYWHERE` for another server.

        Raises:
            psycopg.Error: if the server cannot be asked.
        """
        wanted = _mentioned(trees)
        rows = connection.execute(_NAMES, {name: sorted(numbers) for name, numbers in wanted.items()})
        found = {
            (kind, oid): _Named(*row)
            for kind, oid, *row in rows
            # A server has its own oids for most collations; any is good where it is that of the trees.
            if kind != "collation" or oid < known_below or known_below == BUILT_IN
        }
        # Trees are in the encoding of the publisher.
        return cls(known_below, found, _converted(connection, trees) if known_below == BUILT_IN else {})

    def with_collations_of(self, other: Names) -> Self:
        """Collations are called as there: each server has its own oids for most of them."""
        collations = {key: each for key, each in other._found.items() if key[0] == "collation"}
        return type(self)(self.known_below, {**self._found, **collations}, other._characters)

    def characters(self, data: bytes) -> str | None:
        """The text whose bytes a tree has in the encoding of its server; None if it is none."""
        try:
            return self._characters[data] if data in self._characters else data.decode()
        except UnicodeDecodeError:
            return None

    def operator(self, oid: int) -> str:
        """The symbol of an operator, which is in `pg_catalog`."""
        found = self._built_in("operator", oid)
        if not _SYMBOL.fullmatch(found.name) or any(each in found.name for each in _COMMENTS):
            raise NotPrintableError(f"operator {oid} has no symbol")
        return found.name

    def function(self, oid: int) -> sql.Identifier:
        """A function's name."""
        found = self._built_in("function", oid)
        return sql.Identifier(found.schema, found.name)

    def type(self, oid: int) -> sql.Identifier:
        """A type's name."""
        found = self._type(oid)
        return sql.Identifier(found.schema, found.name)

    def below_domains(self, oid: int) -> int:
        """The type itself, or that on which a domain is."""
        found = self._found.get(("type", oid))
        return oid if found is None else found.type_oid

    def label(self, oid: int) -> str:
        """How `pg_get_expr` calls a type."""
        return self._type(oid).label

    def collation(self, oid: int) -> sql.Identifier:
        """A collation's name."""
        found = self._get("collation", oid)
        return sql.Identifier(found.schema, found.name)

    def _type(self, oid: int) -> _Named:
        found = self._get("type", oid)
        if not found.may_run and not self._is_built_in(found.type_oid, found):
            raise NotPrintableError(f"type {found} is not built-in, and neither an enum nor a base type")
        if self.known_below < BUILT_IN and found.type_oid >= self.known_below:
            raise NotPrintableError(f"type {found} may be another one there")
        return found

    def _built_in(self, kind: str, oid: int) -> _Named:
        found = self._get(kind, oid)
        if not self._is_built_in(oid, found):
            raise NotPrintableError(f"{kind} {found} is not built-in")
        if not found.may_run:
            raise NotPrintableError(f"{kind} {found} is not immutable")
        return found

    def _is_built_in(self, oid: int, found: _Named) -> bool:
        return oid < self.known_below and found.schema in _SCHEMAS

    def _get(self, kind: str, oid: int) -> _Named:
        found = self._found.get((kind, oid))
        if found is None:
            raise NotPrintableError(f"there is no {kind} with oid {oid}")
        return found


def _converted(connection: Connection, trees: Iterable[Node]) -> dict[bytes, str]:
    """The texts of constants in the encoding of the database, where that is another one than ours."""
    if connection.info.parameter_status("server_encoding") in _OUR_ENCODINGS:
        return {}
    data = {
        text
        for tree in trees
        for node in tree.walk()
        if node.name == "CONST" and (text := text_datum(node)) is not None and not text.isascii()
    }
    return dict(connection.execute(_CONVERTED, (list(data),)).fetchall()) if data else {}


def _mentioned(trees: Iterable[Node]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {"operators": set(), "functions": set(), "collations": set(), "types": set()}
    kinds = zip(found.values(), (_OPERATORS, _FUNCTIONS, _COLLATIONS, _TYPES), strict=True)
    places = {name: numbers for numbers, names in kinds for name in names}
    for tree in trees:
        for node in tree.walk():
            for name in node.fields.keys() & places.keys():
                places[name].update(_oids(node.fields[name]))
    return found


def _oids(values: Iterable[Item]) -> Iterator[int]:
    """The oids of a field, which has one, or a list of them."""
    for value in values:
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and _OID.fullmatch(word) and 0 < int(word) <= MOST:
                yield int(word)
