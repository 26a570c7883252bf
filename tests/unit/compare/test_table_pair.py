"""What a comparison asks the servers for each of thousands of tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self, cast

import pytest

from cdc_replay.compare.table_pair import conversions
from fixtures.catalogs import table
from fixtures.target_tables import target_column, target_table

TIMESTAMP = 1114
WITH_ZONE = "timestamp with time zone"


@dataclass
class Server:
    """Answers every statement with one value."""

    answer: object
    statements: list[str] = field(default_factory=list)

    def execute(self, query: str, _values: object = ()) -> Self:
        self.statements.append(query)
        return self

    def fetchall(self) -> list[tuple[object]]:
        return [(self.answer,)]

    def __iter__(self) -> Iterator[tuple[object]]:
        return iter(self.fetchall())


@pytest.mark.parametrize(
    ("type_oid", "type_sql", "target_type", "asked", "converted"),
    [
        (23, "integer", "integer", (0, 0), None),
        (23, "integer", "bigint", (1, 0), "::bigint"),
        (TIMESTAMP, "timestamp without time zone", WITH_ZONE, (1, 1), "at time zone 'Asia/Tokyo'"),
    ],
)
def test_only_what_a_conversion_needs_is_asked(
    type_oid: int, type_sql: str, target_type: str, asked: tuple[int, int], converted: str | None
) -> None:
    publisher, subscriber = Server(True), Server("Asia/Tokyo")
    source = table(1, "s.t", "a")
    column = dataclasses.replace(source.columns[0], type_oid=type_oid, type_sql=type_sql)

    expressions = conversions(
        cast("Any", publisher),
        cast("Any", subscriber),
        dataclasses.replace(source, columns=(column,)),
        target_table("t", target_column("a", target_type)),
        ["a"],
    )

    assert (len(publisher.statements), len(subscriber.statements)) == asked
    assert set(expressions) == ({"a"} if converted else set())
    assert converted is None or converted in expressions["a"].as_string(None)
