"""Random tables: plain ones, partition trees of one to three levels, and inheritance.

A *family* is a plain table, a partition tree or a parent with its child. All tables of a family have the same
columns; a partition may have them in another order, and beside a dropped one (R2.12).

What a family has for a replica identity is drawn for the top and for the tables that store rows, so that they
may differ (R1.7). Not drawn is what makes a native subscriber go on without the change (R8.11, R8.12): the
key of a tree has all its partition columns, and a top with FULL over leaves without it has a key.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from conformance.random_cases.values import INT, KEY_KINDS, KINDS, PART, REGION, TEXT, Kind, quoted

SCHEMAS: Final = ("public", "s1", 'Schéma "x"')
NAMES: Final = ("orders", "Order", "user", "naïve", "a b", 'say "hi"', "select", "x.y", "日本")
COLUMN_NAMES: Final = ("note", "Größe", "from", "a b", "c3", 'd"q', "x", "Value", "group")


class Identity(enum.Enum):
    """REPLICA IDENTITY."""

    DEFAULT = "default"
    INDEX = "index"
    FULL = "full"
    NOTHING = "nothing"


IDENTITIES: Final = {
    (Identity.DEFAULT, Identity.DEFAULT): 35,
    (Identity.FULL, Identity.FULL): 35,
    (Identity.INDEX, Identity.INDEX): 12,
    (Identity.DEFAULT, Identity.FULL): 10,
    (Identity.FULL, Identity.DEFAULT): 5,
    (Identity.NOTHING, Identity.NOTHING): 3,
}
"""Replica identities of the top and of the tables below, and how often they are drawn."""

KEYLESS_IDENTITIES: Final = {
    (Identity.FULL, Identity.FULL): 85,
    (Identity.NOTHING, Identity.NOTHING): 15,
}
"""The same for tables without a primary key."""


class Layout(enum.Enum):
    """How a subscriber stores the tables."""

    SAME = "same"
    FLAT = "flat"
    """Every table by itself, with the columns in another order and a further one."""
    OTHER = "other"
    """As FLAT, but the top of a tree is partitioned, by the hash of its first column."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column; `generation` is the expression of a generated one, `storage` a word of SET STORAGE."""

    name: str
    kind: Kind
    not_null: bool = False
    generation: str | None = None
    storage: str | None = None
    is_virtual: bool = False

    @property
    def sql(self) -> str:
        """The name in SQL."""
        return quoted(self.name)

    def definition(self, *, generated: bool = True) -> str:
        """For CREATE TABLE; without `generated` a generated column is an ordinary one."""
        parts = [self.sql, self.kind.sql]
        if self.not_null:
            parts.append("not null")
        if generated and self.generation:
            how = "virtual" if self.is_virtual else "stored"
            parts.append(f"generated always as ({self.generation}) {how}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a family; `fixed` are the values that a partition allows, by column."""

    sql: str
    schema: str
    parent: str | None = None
    bound: str = ""
    partition_by: str = ""
    order: tuple[int, ...] = ()
    dropped_at: int | None = None
    fixed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    identity: Identity = Identity.DEFAULT

    @property
    def is_partitioned(self) -> bool:
        return bool(self.partition_by)


@dataclass(frozen=True, slots=True)
class Family:
    """Tables with the same columns; the first is the top. `key` and `index` are names of columns."""

    number: int
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    index: tuple[str, ...]
    tables: tuple[Table, ...]
    inherits: bool = False

    @property
    def top(self) -> Table:
        return self.tables[0]

    @property
    def leaves(self) -> tuple[Table, ...]:
        """The tables that store rows."""
        return tuple(table for table in self.tables if not table.is_partitioned)

    def below(self, table: Table) -> tuple[Table, ...]:
        """The tables that store the rows of a table: itself, or leaves."""
        if not table.is_partitioned:
            return (table,)
        children = [each for each in self.tables if each.parent == table.sql]
        return tuple(leaf for child in children for leaf in self.below(child))

    def identity_columns(self, table: Table) -> frozenset[str] | None:
        """The columns of the replica identities of all rows of a table; None: all columns."""
        names = {column.name for column in self.columns}
        for leaf in self.below(table):
            match leaf.identity:
                case Identity.DEFAULT:
                    names &= set(self.key)
                case Identity.INDEX:
                    names &= set(self.index)
                case Identity.NOTHING:
                    names = set()
                case Identity.FULL:
                    pass
        return None if all(leaf.identity is Identity.FULL for leaf in self.below(table)) else frozenset(names)

    @property
    def big(self) -> Column | None:
        """The column with values that are stored out of line."""
        return next((column for column in self.columns if column.storage), None)


# ---- drawing


@dataclass(slots=True)
class Names:
    """Hands out names, each once."""

    choose: random.Random
    used: int = 0

    def table(self) -> str:
        """An odd name with a number, so that it is unique."""
        self.used += 1
        return f"{self.choose.choice(NAMES)}{self.used}"


def random_family(choose: random.Random, number: int, schemas: Sequence[str], version: int) -> Family:
    """A family whose tables are in some of the schemas."""
    shape = choose.choices(("plain", "tree", "inheritance"), (40, 50, 10))[0]
    names = Names(choose, used=number * 100)
    strategies = choose.sample((REGION, PART, None), choose.randint(1, 3)) if shape == "tree" else []
    is_keyless = choose.random() < 0.15
    identities = _identities(choose, is_keyless=is_keyless)
    columns = _columns(choose, strategies, plain_rows=Identity.FULL in identities, version=version)
    used = [column.name for column in columns if column.kind in {REGION, PART} and column.not_null]
    key = () if is_keyless else (columns[0].name, *used)
    index = tuple(dict.fromkeys((*used, columns[0].name, "n")))
    top = Table(_placed(choose, names, schemas[:1]), schemas[0], identity=identities[0])
    family = Family(number, columns, key, index if Identity.INDEX in identities else (), (top,))
    if shape == "plain":
        return replace(family, tables=(replace(top, identity=identities[1]),))
    grow = _Growth(choose, names, schemas, identities, len(columns))
    if shape == "inheritance":
        child = replace(grow.table(), parent=top.sql)
        return replace(family, tables=(replace(top, identity=identities[1]), child), inherits=True)
    return replace(family, tables=tuple(grow.tree(top, strategies, columns[0].name)))


def _placed(choose: random.Random, names: Names, schemas: Sequence[str]) -> str:
    return f"{quoted(choose.choice(schemas))}.{quoted(names.table())}"


def _identities(choose: random.Random, *, is_keyless: bool) -> tuple[Identity, Identity]:
    """Of the top and of the leaves."""
    pairs = KEYLESS_IDENTITIES if is_keyless else IDENTITIES
    return choose.choices(tuple(pairs), tuple(pairs.values()))[0]


def _columns(
    choose: random.Random, strategies: Sequence[Kind | None], *, plain_rows: bool, version: int
) -> tuple[Column, ...]:
    """The key column, `n`, the columns that the tree is partitioned by, and some others."""
    columns = [Column("id", choose.choice(KEY_KINDS), not_null=True), Column("n", INT, not_null=True)]
    columns += [
        Column({REGION: "region", PART: "part"}[kind], kind, not_null=True) for kind in strategies if kind
    ]
    names = choose.sample(COLUMN_NAMES, choose.randint(1, 4))
    columns += [Column(name, choose.choice(KINDS)) for name in names]
    if choose.random() < 0.35:
        columns.append(Column("big", TEXT, storage="external"))
    if choose.random() < (0.05 if plain_rows else 0.3):
        is_virtual = version >= 180000 and choose.random() < 0.3
        columns.append(Column("half", INT, generation="n / 2", is_virtual=is_virtual))
    return tuple(columns)


@dataclass(slots=True)
class _Growth:
    choose: random.Random
    names: Names
    schemas: Sequence[str]
    identities: tuple[Identity, Identity]
    width: int

    def table(self) -> Table:
        """A table of the family, perhaps with another order of columns and a dropped one."""
        schema = self.choose.choice(self.schemas)
        order = list(range(self.width))
        if self.choose.random() < 0.5:
            self.choose.shuffle(order)
        dropped = self.choose.randrange(self.width) if self.choose.random() < 0.4 else None
        name = f"{quoted(schema)}.{quoted(self.names.table())}"
        return Table(name, schema, order=tuple(order), dropped_at=dropped, identity=self.identities[1])

    def tree(self, top: Table, strategies: Sequence[Kind | None], id_name: str) -> Iterator[Table]:
        """The table, partitioned by the first strategy, and what is below, parents first."""
        if not strategies:
            yield top
            return
        kind, *others = strategies
        words = {REGION: 'list ("region")', PART: 'range ("part")'}
        by = words[kind] if kind else f"hash ({quoted(id_name)})"
        yield replace(top, partition_by=by, identity=self.identities[0])
        bounds = tuple(_bounds(kind))
        deep = self.choose.randrange(len(bounds))
        for number, (bound, fixed) in enumerate(bounds):
            below = others if number == deep or self.choose.random() < 0.1 else []
            child = replace(self.table(), parent=top.sql, bound=bound, fixed=(*top.fixed, *fixed))
            yield from self.tree(child, below, id_name)


def _bounds(kind: Kind | None) -> Iterator[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]]]:
    """The bounds of the partitions of a level, each with the values that fit."""
    if kind is REGION:
        yield "for values in ('n')", (("region", ("n",)),)
        yield "for values in ('s', 'e')", (("region", ("s", "e")),)
        yield "default", (("region", ("w",)),)
    elif kind is PART:
        yield "for values from (minvalue) to (5)", (("part", ("0", "3")),)
        yield "for values from (5) to (maxvalue)", (("part", ("7", "12")),)
    else:
        for remainder in range(2):
            yield f"for values with (modulus 2, remainder {remainder})", ()


# ---- SQL


def created(family: Family, layout: Layout = Layout.SAME, *, generated: bool = True) -> Iterator[str]:
    """The statements that create the tables of a family.

    Without `generated`, generated columns are ordinary ones, so that they can be sent to (R6.10).
    """
    for number, table in enumerate(family.tables):
        if layout is Layout.SAME:
            yield from _as_published(family, table, number, generated=generated)
        else:
            by_hash = layout is Layout.OTHER and table.is_partitioned and table is family.top
            yield from _standing_alone(family, table, number, by_hash=by_hash, generated=generated)


def _as_published(family: Family, table: Table, number: int, *, generated: bool) -> Iterator[str]:
    order = table.order or range(len(family.columns))
    definitions = [family.columns[at].definition(generated=generated) for at in order]
    if family.inherits and table.parent:
        yield from _created(family, table.sql, [], f" inherits ({table.parent})")
    else:
        if table.dropped_at is not None:
            definitions.insert(table.dropped_at, '"gone" text')
        suffix = f" partition by {table.partition_by}" if table.is_partitioned else ""
        yield from _created(family, table.sql, definitions, suffix)
        if table.dropped_at is not None:
            yield f'alter table {table.sql} drop column "gone"'
    yield from _identity(family, table, number)
    if table.bound:
        yield f"alter table {table.parent} attach partition {table.sql} {table.bound}"


def _standing_alone(
    family: Family, table: Table, number: int, *, by_hash: bool, generated: bool
) -> Iterator[str]:
    definitions = [column.definition(generated=generated) for column in reversed(family.columns)]
    if family.key:
        # Not without a key: there native does not find any row that has a value in it (R8.9).
        definitions.append('"extra" int default 7')
    yield from _created(
        family, table.sql, definitions, f" partition by hash ({family.columns[0].sql})" if by_hash else ""
    )
    if by_hash:
        for remainder in range(2):
            yield (
                f'create table "h{family.number}_{remainder}" partition of {table.sql}'
                f" for values with (modulus 2, remainder {remainder})"
            )
    yield from _identity(family, table, number)


def _created(family: Family, name: str, definitions: Sequence[str], suffix: str) -> Iterator[str]:
    key = [f"primary key ({', '.join(map(quoted, family.key))})"] if family.key else []
    yield f"create table {name} ({', '.join([*definitions, *key])}){suffix}"
    for column in family.columns:
        if column.storage:
            yield f"alter table {name} alter {column.sql} set storage {column.storage}"


def _identity(family: Family, table: Table, number: int) -> Iterator[str]:
    match table.identity:
        case Identity.INDEX:
            index = f"ri_{family.number}_{number}"
            columns = ", ".join(map(quoted, family.index))
            yield f"create unique index {index} on {table.sql} ({columns})"
            yield f"alter table {table.sql} replica identity using index {index}"
        case Identity.FULL | Identity.NOTHING:
            yield f"alter table {table.sql} replica identity {table.identity.value}"
        case Identity.DEFAULT:
            pass


def schemas_of(families: Sequence[Family]) -> list[str]:
    """The schemas to create, in a fixed order."""
    used = {table.schema for table in itertools.chain.from_iterable(each.tables for each in families)}
    return [schema for schema in SCHEMAS if schema in used and schema != "public"]
