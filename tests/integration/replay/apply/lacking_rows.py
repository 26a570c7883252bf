"""Random changes of few keys for a subscriber that lacks some of the rows and has others of its own.

Each table is one case. The generator follows a native worker, so that it draws no change at which one would
stop (R8.5); the expected rows come from the servers.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

IDS: Final = range(1, 9)
REGIONS: Final = ("a", "b", "c")
FILTER_ABOVE: Final = 5
"""Rows with a greater id do not pass the filter of a filtered table."""


class Row(NamedTuple):
    """A row of any of the tables."""

    id: int
    r: str
    v: str

    def sql(self) -> str:
        """As VALUES has it; `j` has no equality."""
        return f"({self.id}, '{self.r}', '{self.v}', '[\"{self.v}\"]')"


Identity: TypeAlias = Callable[[Row], tuple[object, ...]]


def _leaf(row: Row) -> tuple[object, ...]:
    """Leaf `a` has a primary key, `b` a replica identity of two columns, `c` neither."""
    return {"a": ("a", row.id), "b": ("b", row.id, row.r), "c": ("c", *row)}[row.r]


@dataclass(frozen=True)
class Shape:
    """How a table is made on both sides, and by what the subscriber's rows are found."""

    publisher: str
    subscriber: str
    identity: Identity
    is_unique: bool = True
    is_filtered: bool = False
    is_split: bool = False
    """UPDATEs that change `r` arrive as DELETE and INSERT."""


_KEYED: Final = "create table {0} (id int primary key, r text, v text, j json)"
_BARE: Final = "create table {0} (id int, r text, v text, j text); alter table {0} replica identity full"
_WHOLE: Final = (
    "create table {0} (id int primary key, r text, v text, j json); alter table {0} replica identity full"
)
_TREE: Final = (
    "create table {0} (id int, r text, v text, j json, primary key (id, r)) partition by list (r);"
    " create table {0}_a partition of {0} for values in ('a');"
    " create table {0}_rest partition of {0} default"
)

SHAPES: Final[Mapping[str, Shape]] = {
    "keyed": Shape(_KEYED, _KEYED, lambda row: (row.id,)),
    "bare": Shape(_BARE, "create table {0} (id int, r text, v text, j text)", tuple, is_unique=False),
    "filtered": Shape(_KEYED, _KEYED, lambda row: (row.id,), is_filtered=True),
    "tree": Shape(
        _TREE,
        "create table {0} (v text, id int, r text, j json, primary key (r, id))",
        lambda row: (row.id, row.r),
        is_split=True,
    ),
    "leaves": Shape(
        _WHOLE,
        "create table {0} (id int, r text, v text, j json) partition by list (r);"
        " create table {0}_a partition of {0} (primary key (id)) for values in ('a');"
        " create table {0}_bc partition of {0} for values in ('b', 'c') partition by list (r);"
        " create table {0}_b (j json, r text not null, v text, id int not null);"
        " create unique index {0}_key on {0}_b (id, r);"
        " alter table {0}_b replica identity using index {0}_key;"
        " alter table {0}_bc attach partition {0}_b for values in ('b');"
        " create table {0}_c partition of {0}_bc (primary key (id)) for values in ('c')",
        lambda row: (row.r, row.id),
    ),
    "mixed": Shape(
        _BARE + "; alter table {0} alter j type text",
        "create table {0} (id int, r text, v text, j text) partition by list (r);"
        " create table {0}_a partition of {0} (primary key (id)) for values in ('a');"
        " create table {0}_b partition of {0} (primary key (id, r)) for values in ('b');"
        " create table {0}_rest partition of {0} default",
        _leaf,
    ),
}


@dataclass
class Case:
    """One table: what the publisher has, and what a native subscriber has after the same changes."""

    name: str
    shape: Shape
    random: random.Random
    published: dict[int, Row] = field(default_factory=dict)
    subscriber: list[Row] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=lambda: {"update_missing": 0, "delete_missing": 0})
    _drawn: int = 0

    def start(self) -> str:
        """The statement that fills the publisher's table."""
        for number in IDS[:6]:
            self.published[number] = Row(number, self.random.choice(REGIONS), f"v{number}")
        self.subscriber = [row for row in self.published.values() if self._passes(row)]
        return f"insert into {self.name} values {', '.join(row.sql() for row in self.published.values())}"

    def damage(self) -> Iterator[str]:
        """Statements for both subscribers that delete, change and insert rows."""
        for row in [*self.subscriber]:
            fate = self.random.random()
            same = f"where id = {row.id} and r = '{row.r}' and v = '{row.v}'"
            if fate < 0.35:
                self.subscriber.remove(row)
                yield f"delete from {self.name} {same}"
            elif fate < 0.5:
                changed = row._replace(v="own")
                self.subscriber[self.subscriber.index(row)] = changed
                yield f"update {self.name} set v = 'own' {same}"
        for number in IDS:
            if self.random.random() < 0.4:
                row = Row(number, self.random.choice(REGIONS), f"v{number}")
                if self._has_room(row):
                    self.subscriber.append(row)
                    yield f"insert into {self.name} (id, r, v, j) values {row.sql()}"

    def changes(self, count: int) -> Iterator[str]:
        """This many statements for the publisher, and transactions around some of them."""
        is_open = False
        while count:
            if self.random.random() < 0.3:
                yield "commit" if is_open else "begin"
                is_open = not is_open
            if (statement := self._change()) is not None:
                count -= 1
                yield statement
        if is_open:
            yield "commit"

    def _change(self) -> str | None:
        """A statement at which no worker stops; None if the drawn one would stop it."""
        self._drawn += 1
        free = [number for number in IDS if number not in self.published]
        kind = self.random.choice(["value", "value", "move", "move", "move", "region", "delete", "insert"])
        if not (free if kind in {"insert", "move"} else self.published):
            return None
        if kind == "insert":
            return self._insertion(Row(self.random.choice(free), self._region(), f"n{self._drawn}"))
        if not self.published:
            return None
        old = self.published[self.random.choice([*self.published])]
        if kind == "delete":
            self._delete(old)
            del self.published[old.id]
            return f"delete from {self.name} where id = {old.id}"
        value = self.random.choice([f"n{self._drawn}", f"v{old.id}"])
        new = {
            "value": old._replace(v=value),
            "move": old._replace(id=self.random.choice(free or [0])),
            "region": old._replace(r=self._region()),
        }
        return self._updating(old, new[kind])

    def _region(self) -> str:
        return self.random.choice(REGIONS)

    def _insertion(self, row: Row) -> str | None:
        if not self._insert(row):
            return None
        self.published[row.id] = row
        return f"insert into {self.name} values {row.sql()}"

    def _updating(self, old: Row, new: Row) -> str | None:
        if not self._update(old, new):
            return None
        del self.published[old.id]
        self.published[new.id] = new
        columns = f"id = {new.id}, r = '{new.r}', v = '{new.v}'"
        return f"update {self.name} set {columns}, j = '[\"{new.v}\"]' where id = {old.id}"

    # --- what a native worker does; False, and nothing done, where it would stop

    def _passes(self, row: Row) -> bool:
        return not self.shape.is_filtered or row.id <= FILTER_ABOVE

    def _find_row(self, row: Row) -> Row | None:
        identity_wanted = self.shape.identity(row)
        return next((row for row in self.subscriber if self.shape.identity(row) == identity_wanted), None)

    def _has_room(self, row: Row) -> bool:
        is_full_leaf = self.shape.identity is _leaf and row.r == "c"
        return not self.shape.is_unique or is_full_leaf or self._find_row(row) is None

    def _insert(self, row: Row) -> bool:
        if not self._passes(row):
            return True
        if not self._has_room(row):
            return False
        self.subscriber.append(row)
        return True

    def _delete(self, row: Row) -> None:
        if not self._passes(row):
            return
        if (row_found := self._find_row(row)) is None:
            self.missing["delete_missing"] += 1
        else:
            self.subscriber.remove(row_found)

    def _update(self, old: Row, new: Row) -> bool:
        before, after = self._passes(old), self._passes(new)
        if not before:
            return not after or self._insert(new)
        if not after or (self.shape.is_split and ("a" in {old.r, new.r}) and old.r != new.r):
            remaining = dataclasses.replace(self, subscriber=[*self.subscriber], missing={**self.missing})
            self._delete(old)
            if after and not self._insert(new):
                self.subscriber, self.missing = remaining.subscriber, remaining.missing
                return False
            return True
        if (row_found := self._find_row(old)) is None:
            self.missing["update_missing"] += 1
            return True
        self.subscriber.remove(row_found)
        if not self._has_room(new):
            self.subscriber.append(row_found)
            return False
        self.subscriber.append(new)
        return True
