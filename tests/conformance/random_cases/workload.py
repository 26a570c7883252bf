"""Random transactions over random tables.

Keys are counting numbers. A case either draws them anew from a few, so that keys are deleted and inserted
again, or takes a fresh one each time. INSERT does nothing where the key is there; what the publisher refuses
(a taken key, no partition for a row, R5.6) is rolled back to a savepoint and left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from conformance.random_cases.definitions import Definitions
from conformance.random_cases.publications import condition
from conformance.random_cases.tables import Column, Family, Table
from conformance.random_cases.values import KEY_KINDS, literal, quoted

SHARE_OF_DEFINITIONS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement and the families that it is about."""

    families: tuple[int, ...]
    sql: str


@dataclass(frozen=True, slots=True)
class Part:
    """Statements of a transaction; they are rolled back to a savepoint unless `kept`."""

    statements: tuple[Statement, ...]
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction that ends in COMMIT, or in ROLLBACK."""

    parts: tuple[Part, ...]
    commits: bool = True


@dataclass(slots=True)
class Workload:
    """Draws statements, with `definitions` also such that change them; remembers which keys it has used."""

    choose: random.Random
    families: Sequence[Family]
    reuses_keys: bool
    definitions: Definitions | None = None
    last: int = 0
    used: list[int] = field(default_factory=lambda: [1])

    def transactions(self, count: int) -> Iterator[Transaction]:
        for _ in range(count):
            parts = [self._part() for _ in range(self.choose.choices((1, 2, 3), (60, 30, 10))[0])]
            yield Transaction(tuple(parts), commits=self.choose.random() < 0.93)

    def filling(self) -> Iterator[Transaction]:
        """Some rows in every family."""
        for family in self.families:
            rows = tuple(self._insert(family, family.top, rows=6) for _ in range(2))
            yield Transaction((Part(tuple(Statement((family.number,), each) for each in rows)),))

    def _part(self) -> Part:
        count = self.choose.randint(1, 5)
        statements = tuple(self._statement() for _ in range(count))
        return Part(statements, kept=self.choose.random() < 0.85)

    def _statement(self) -> Statement:
        family = self.choose.choice(self.families)
        table = family.top if self.choose.random() < 0.6 else self.choose.choice(family.tables)
        if self.definitions is not None and self.choose.random() < SHARE_OF_DEFINITIONS:
            return Statement((family.number,), self.definitions.change(family, table))
        if self.choose.random() < 0.02:
            return self._truncate(family, table)
        draw = self.choose.choices(tuple(STATEMENTS), tuple(STATEMENTS.values()))[0]
        return Statement((family.number,), draw(self, family, table))

    # ---- values

    def _key(self) -> int:
        if self.reuses_keys:
            key = self.choose.randint(1, 24)
        else:
            self.last += 1
            key = self.last
        self.used.append(key)
        return key

    def _value(self, column: Column, table: Table | None = None) -> str:
        if column.kind in KEY_KINDS and column.name == "id":
            return literal(str(self._key()))
        fitting = dict(table.fixed).get(column.name) if table else None
        if column.storage and self.choose.random() < 0.6:
            return self._long()
        if not column.not_null and self.choose.random() < 0.25:
            return "null"
        return literal(self.choose.choice(fitting or column.kind.literals))

    def _long(self) -> str:
        """A value that is stored out of line, unlike any other."""
        self.last += 1
        return f"repeat('v{self.last} ', 700)"

    def _ordinary(self, family: Family) -> list[Column]:
        return [column for column in family.columns if not column.generation]

    # ---- conditions

    def _one(self, family: Family) -> str:
        key = self.choose.choice(self.used[-40:])
        return f" where {family.columns[0].sql} = '{key}'"

    def _some(self, family: Family) -> str:
        drawn = self.choose.random()
        if drawn < 0.6:
            return self._one(family)
        if drawn < 0.75:
            keys = ", ".join(f"'{key}'" for key in self.choose.choices(self.used[-40:], k=4))
            return f" where {family.columns[0].sql} in ({keys})"
        tested = [column for column in family.columns if column.kind.filters and not column.generation]
        if drawn < 0.98:
            return f" where {condition(self.choose, tested)}"
        return ""

    # ---- statements

    def some_rows(self, family: Family, table: Table) -> str:
        return self._insert(family, table, rows=self.choose.choice((1, 1, 2, 5)))

    def _insert(self, family: Family, table: Table, *, rows: int) -> str:
        columns = self._ordinary(family)
        given = ", ".join(
            f"({', '.join(self._value(column, table) for column in columns)})" for _ in range(rows)
        )
        names = ", ".join(column.sql for column in columns)
        return f"insert into {table.sql} ({names}) values {given} on conflict do nothing"

    def update(self, family: Family, table: Table) -> str:
        free = [each for each in self._ordinary(family)[1:] if each.name not in {"region", "part"}]
        chosen = self.choose.sample(free, min(len(free), self.choose.randint(1, 2)))
        sets = ", ".join(f"{column.sql} = {self._value(column)}" for column in chosen)
        return f"update {table.sql} set {sets}{self._some(family)}"

    def rekey(self, family: Family, table: Table) -> str:
        return f"update {table.sql} set {family.columns[0].sql} = '{self._key()}'{self._one(family)}"

    def delete(self, family: Family, table: Table) -> str:
        return f"delete from {table.sql}{self._some(family)}"

    def move(self, family: Family, table: Table) -> str:
        """To another partition, if the family has any."""
        keys = [each for each in family.columns if each.name in {"region", "part"}]
        if not keys:
            return self.update(family, table)
        column = self.choose.choice(keys)
        value = literal(self.choose.choice(column.kind.literals))
        return f"update {family.top.sql} set {column.sql} = {value}{self._some(family)}"

    def upsert(self, family: Family, table: Table) -> str:
        if not family.key:
            return self._insert(family, table, rows=1)
        target = ", ".join(map(quoted, family.key))
        inserted = self._insert(family, table, rows=1).removesuffix(" on conflict do nothing")
        return f'{inserted} on conflict ({target}) do update set "n" = excluded."n"'

    def copy(self, family: Family, table: Table) -> str:
        """COPY of two rows, from a program of the server, so that it is one statement."""
        columns = [column for column in self._ordinary(family) if column.not_null]
        fixed = dict(table.fixed)
        lines = []
        for _ in range(2):
            values = [
                str(self._key())
                if column.name == "id"
                else self.choose.choice(fixed.get(column.name, column.kind.literals))
                for column in columns
            ]
            lines.append("\\t".join(values) + "\\n")
        names = ", ".join(column.sql for column in columns)
        return f"copy {table.sql} ({names}) from program $$printf '{''.join(lines)}'$$"

    def big(self, family: Family, table: Table) -> str:
        if family.big is None:
            return self.update(family, table)
        return f"update {table.sql} set {family.big.sql} = {self._long()}{self._one(family)}"

    def _truncate(self, family: Family, table: Table) -> Statement:
        other = self.choose.choice(self.families)
        if other is not family and self.choose.random() < 0.3:
            both = f"truncate {table.sql}, {other.top.sql}"
            return Statement((family.number, other.number), both)
        only = "only " if self.choose.random() < 0.2 else ""
        return Statement((family.number,), f"truncate {only}{table.sql}")


STATEMENTS: Final[Mapping[Callable[[Workload, Family, Table], str], int]] = {
    Workload.some_rows: 30,
    Workload.update: 24,
    Workload.rekey: 12,
    Workload.move: 8,
    Workload.delete: 12,
    Workload.upsert: 5,
    Workload.copy: 4,
    Workload.big: 6,
}
"""Statements that change rows, and how often they are drawn."""
