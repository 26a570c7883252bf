"""Random publications of random tables, and subscriptions to sets of them.

Row filters and column lists keep to what lets the publisher's statements pass: for UPDATE and DELETE they
read, and list, the replica identity (R5.6, R6.6). What is refused all the same is left out by the run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from conformance.random_cases.tables import Column, Family, Layout, Table
from conformance.random_cases.values import KEY_KINDS, quoted

ACTIONS: Final = ("insert", "update", "delete", "truncate")
POSTGRES_18: Final = 180000


@dataclass(frozen=True, slots=True)
class Member:
    """A table of a publication; `table` and `family` say which, `clause` how it is written."""

    family: int
    table: str
    clause: str


@dataclass(frozen=True, slots=True)
class Publication:
    """One publication, as CREATE PUBLICATION writes it."""

    name: str
    members: tuple[Member, ...]
    schemas: tuple[str, ...]
    all_tables: bool
    actions: tuple[str, ...]
    via_root: bool
    publish_generated: bool

    @property
    def sql(self) -> str:
        """CREATE PUBLICATION."""
        objects = [f"table {member.clause}" for member in self.members]
        objects += [f"tables in schema {quoted(schema)}" for schema in self.schemas]
        target = " for all tables" if self.all_tables else f" for {', '.join(objects)}" if objects else ""
        options = [f"publish = '{', '.join(self.actions)}'"]
        if self.via_root:
            options.append("publish_via_partition_root = true")
        if self.publish_generated:
            options.append("publish_generated_columns = stored")
        return f"create publication {quoted(self.name)}{target} with ({', '.join(options)})"


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A subscription: its publications in order, how its subscriber stores the tables, and copy_data."""

    name: str
    publications: tuple[str, ...]
    layout: Layout
    copy_data: bool


@dataclass(frozen=True, slots=True)
class Style:
    """What all publications of a case have in common.

    With `steady`, most publish every action, so that a key that is used again is not a conflict (R8.5).
    `lists` are the column lists by family: of one family there are seldom several, which would be refused
    (R6.4).
    """

    steady: bool
    generated: bool
    lists: Mapping[int, tuple[str, ...]]


def random_style(choose: random.Random, families: Sequence[Family], version: int) -> Style:
    return Style(
        steady=choose.random() < 0.5,
        generated=version >= POSTGRES_18 and choose.random() < 0.2,
        lists={family.number: _list(choose, family) for family in families if choose.random() < 0.12},
    )


def _list(choose: random.Random, family: Family) -> tuple[str, ...]:
    ordinary = [column.name for column in family.columns if not column.generation]
    wanted = {*family.key, *family.index, *choose.sample(ordinary, choose.randint(1, len(ordinary)))}
    return tuple(choose.sample(sorted(wanted), len(wanted)))


def random_publication(
    choose: random.Random, name: str, families: Sequence[Family], style: Style
) -> Publication:
    actions: tuple[str, ...] = ACTIONS
    if choose.random() < (0.15 if style.steady else 0.5):
        actions = tuple(choose.sample(ACTIONS, choose.randint(1, 3)))
    scope = choose.choices(("tables", "all", "schema", "both"), (74, 6, 10, 10))[0]
    via_root = choose.random() < 0.55
    drawn = Members(choose, actions, via_root, style, lists=scope == "tables")
    schemas = sorted({table.schema for family in families for table in family.tables})
    return Publication(
        name=name,
        members=tuple(drawn.members(families)) if scope in {"tables", "both"} else (),
        schemas=tuple(choose.sample(schemas, 1)) if scope in {"schema", "both"} else (),
        all_tables=scope == "all",
        actions=actions,
        via_root=via_root,
        publish_generated=style.generated,
    )


@dataclass(frozen=True, slots=True)
class Members:
    """Draws the tables of a publication; with `lists` some have column lists."""

    choose: random.Random
    actions: Sequence[str]
    via_root: bool
    style: Style
    lists: bool = True

    def members(self, families: Sequence[Family]) -> Iterator[Member]:
        """Some tables, each once, and no child beside its parent by inheritance (R5.5)."""
        for family in families:
            if self.choose.random() < 0.15 and len(families) > 1:
                continue
            if family.inherits:
                chosen = [self.choose.choice(family.tables)]
            else:
                chosen = self.choose.sample(family.tables, self.choose.randint(1, min(2, len(family.tables))))
                if family.top not in chosen and self.choose.random() < 0.65:
                    chosen = [family.top]
            for table in chosen:
                only = "only " if self.choose.random() < 0.2 else ""
                clause = f"{only}{table.sql}{self._listed(family, table)}{self._where(family, table)}"
                yield Member(family.number, table.sql, clause)

    def _listed(self, family: Family, table: Table) -> str:
        names = self.style.lists.get(family.number)
        if names is None or not self.lists or self._is_refused(table) or self.choose.random() < 0.15:
            return ""
        if self._needs_identity() and family.identity_columns(table) is None:
            return ""
        return f" ({', '.join(map(quoted, names))})"

    def _where(self, family: Family, table: Table) -> str:
        readable = self._readable(family, table)
        if not readable or self._is_refused(table) or self.choose.random() < 0.35:
            return ""
        return f" where ({condition(self.choose, readable)})"

    def _is_refused(self, table: Table) -> bool:
        """Filters and lists of a partitioned table need via root (R3.3, R6.2)."""
        return table.is_partitioned and not self.via_root

    def _needs_identity(self) -> bool:
        return not {"update", "delete"}.isdisjoint(self.actions)

    def _readable(self, family: Family, table: Table) -> list[Column]:
        identity = family.identity_columns(table)
        return [
            column
            for column in family.columns
            if column.kind.filters
            and (
                not self._needs_identity()
                or (identity is None and not column.generation)
                or (identity is not None and column.name in identity)
                or self.choose.random() < 0.002
            )
        ]


def condition(choose: random.Random, columns: Sequence[Column]) -> str:
    """A row filter over some of the columns."""
    parts = []
    for _ in range(choose.choices((1, 2, 3), (60, 30, 10))[0]):
        # Keys let rows cross the filter under every replica identity.
        column = choose.choice([each for each in columns if each.kind in KEY_KINDS] or columns)
        if choose.random() < 0.6:
            column = choose.choice(columns)
        test = choose.choice(column.kind.filters).format(c=column.sql)
        parts.append(f"not ({test})" if choose.random() < 0.1 else f"({test})")
    return choose.choice((" and ", " or ")).join(parts)


def random_subscription(
    choose: random.Random, number: int, publications: Sequence[Publication]
) -> Subscribed:
    """One to three publications in any order."""
    names = [publication.name for publication in publications]
    count = min(len(names), choose.choices((1, 2, 3), (20, 45, 35))[0])
    return Subscribed(
        name=f"s{number}",
        publications=tuple(choose.sample(names, count)),
        layout=choose.choices(tuple(Layout), (60, 25, 15))[0],
        copy_data=choose.random() < 0.85,
    )
