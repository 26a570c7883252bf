"""Every exact rule against PostgreSQL: random filters over random values.

A difference names the filter, a row's values and both answers. The seed stands in the test, so a failure
repeats.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pytest

from cdc_replay.filters.arrow_eval import evaluate_filter
from cdc_replay.filters.compile import ArrowFilter, compile_filter
from cdc_replay.filters.constant_folding import FOLDS
from cdc_replay.filters.expression import (
    ArrayComparison,
    Column,
    Constant,
    Distinct,
    Expression,
    Function,
    NullIf,
    Operator,
    Relabel,
    Type,
    children,
    walk,
)
from cdc_replay.filters.node_tree import parse
from cdc_replay.filters.operators import COMPARISON_SYMBOLS, FUNCTIONS, OPERATORS
from cdc_replay.filters.rules import RELABELS, RULES, Exact
from cdc_replay.filters.sortable_forms import FORMS
from cdc_replay.model.publication import Table
from fixtures.postgres import Database
from fixtures.stored_filters import FilteredTable
from integration.filters.generated_filters import Source, condition, systematic
from integration.filters.generated_values import create_table

FILTERS_PER_QUERY: Final = 32
DEPTHS: Final = (0, 1, 0, 2, 1, 3)

Thing: TypeAlias = tuple[str, object]
"""Something that is exact: what it is, and which one."""

Answers: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int8]]
"""Rows by filters: 1, 0, and -1 for NULL."""


@dataclass(frozen=True)
class Generated:
    """A table of random values, as PostgreSQL has it and as texts by id."""

    filtered: FilteredTable
    table: Table
    texts: pa.Table
    rows: int

    @classmethod
    def create(cls, database: Database, *, rows: int, seed: int) -> Generated:
        create_table(database, rows, seed)
        filtered = FilteredTable(database)
        table = filtered.table()
        names = [column.name for column in table.columns]
        columns = zip(*filtered.rows(names), strict=True)
        texts = pa.table([pa.array(column, pa.string()) for column in columns], names=names)
        return cls(filtered, table, texts, rows)

    def in_arrow(self, filters: Sequence[ArrowFilter]) -> Answers:
        return np.stack([self._answers(compiled) for compiled in filters], axis=1)

    def _answers(self, compiled: ArrowFilter) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
        texts = {column.attnum: self.texts[column.name].combine_chunks() for column in compiled.columns}
        answers: np.ndarray[tuple[int], np.dtype[np.int8]] = (
            evaluate_filter(compiled.expression, texts, self.rows).cast(pa.int8()).fill_null(-1).to_numpy()
        )
        return answers

    def in_postgresql(self, texts: Sequence[str]) -> Answers:
        query = f"copy (select {', '.join(texts)} from t order by id) to stdout (null 'n')"
        with (
            self.filtered.database.connect() as connection,
            connection.cursor() as cursor,
            cursor.copy(query.encode()) as copy,
        ):
            letters = np.frombuffer(b"".join(copy), np.uint8).reshape(self.rows, -1)[:, ::2]
        return np.select([letters == ord("t"), letters == ord("f")], [1, 0], -1).astype(np.int8)

    def row(self, index: int) -> dict[str, str | None]:
        """The values of a row, for the report of a difference."""
        values: dict[str, str | None] = self.texts.slice(index, 1).to_pylist()[0]
        return values


def compare(generated: Generated, filters: Sequence[str]) -> None:
    """Fail on the first filter that has another answer for some row."""
    stored = generated.filtered.store(filters)
    compiled = [compile_filter(row_filter, generated.table) for row_filter in stored]
    on_server = {
        text: result.because
        for text, result in zip(filters, compiled, strict=True)
        if not isinstance(result, ArrowFilter)
    }
    assert on_server == {}, "the generator makes only filters that are exact in Arrow"
    exact = [result for result in compiled if isinstance(result, ArrowFilter)]
    fail_on_difference(generated, filters, generated.in_arrow(exact), generated.in_postgresql(filters))


def fail_on_difference(generated: Generated, filters: Sequence[str], ours: Answers, theirs: Answers) -> None:
    different = np.argwhere(ours != theirs)
    if len(different):
        row, column = different[0]
        pytest.fail(
            f"{filters[column]}\nours: {ours[row, column]}, PostgreSQL's: {theirs[row, column]}\n"
            f"{generated.row(int(row))}\n{len(different)} differences"
        )


def things_in(expression: Expression) -> Iterator[Thing]:
    """What of the rules a stored filter exercises."""
    for node in walk(expression):
        yield "expression", type(node).__name__
        match node:
            case Column(type_oid=type_oid) | Constant(type_oid=type_oid):
                yield type(node).__name__, type_oid
            case Relabel(source_type=source, type_oid=target):
                yield "cast", (source, target)
            case Function(function=oid):
                yield "operation", FUNCTIONS.get(oid)
            case Operator(operator=oid) | Distinct(operator=oid) | NullIf(operator=oid):
                yield "operation", OPERATORS.get(oid)
            case ArrayComparison(is_any=is_any, operator=oid, array=array):
                yield "any" if is_any else "all", OPERATORS.get(oid, ("",))[0]
                yield "expression", type(array).__name__
                yield from (
                    ("element", element.type_oid)
                    for element in children(array)
                    if isinstance(element, Constant)
                )
            case _:
                pass


def exact_things() -> set[Thing]:
    """What the rules say is exact in Arrow."""
    exact = {signature for signature, rule in RULES.items() if isinstance(rule, Exact)}
    expressions = {kind.__name__ for kind in get_args(Expression)} - {"Unmodelled"}
    things: set[Thing] = {("expression", name) for name in expressions}
    things |= {("operation", signature) for signature in exact | {FUNCTIONS[oid] for oid in FOLDS}}
    things |= {("cast", types) for types in RELABELS}
    things |= {(node, type_oid) for node in ("Column", "Constant") for type_oid in FORMS}
    things |= {("element", type_oid) for type_oid in FORMS if type_oid != Type.VARCHAR}
    things |= {(quantifier, symbol) for quantifier in ("any", "all") for symbol in COMPARISON_SYMBOLS}
    return things


def generated_filters(database: Database, seed: int, count: int) -> list[str]:
    [(orders_utf8,)] = database.rows("select exists (select from pg_collation where oid = 962)")
    source = Source(random.Random(seed), orders_utf8)
    return [condition(source, DEPTHS[position % len(DEPTHS)]) for position in range(count)]


def systematic_filters() -> list[str]:
    return systematic(Source(random.Random(7)))


def run(database: Database, filters: Sequence[str], *, rows: int, seed: int) -> int:
    """Compare all filters over a table of their own, and return the number of evaluations."""
    generated = Generated.create(database, rows=rows, seed=seed)
    for start in range(0, len(filters), FILTERS_PER_QUERY):
        compare(generated, filters[start : start + FILTERS_PER_QUERY])
    return rows * len(filters)


def test_random_filters_have_postgresqls_answers(publisher: Database) -> None:
    """R3.1, R3.16, R5.4."""
    assert run(publisher, generated_filters(publisher, 20, 96), rows=2000, seed=20) == 192_000


def test_every_operation_on_every_pair_of_types_has_postgresqls_answers(publisher: Database) -> None:
    """R3.1, R3.16, R5.4."""
    assert run(publisher, systematic_filters(), rows=2000, seed=1) > 500_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1008))
def test_five_million_evaluations_have_postgresqls_answers(publisher: Database, seed: int) -> None:
    """R3.1, R3.16, R5.4: eight times 640,000 evaluations, none of which differs."""
    assert run(publisher, generated_filters(publisher, seed, 160), rows=4000, seed=seed) == 640_000


def test_every_exact_rule_is_exercised(publisher: Database) -> None:
    """A rule that the generator never reaches would be believed without evidence."""
    create_table(publisher, rows=0, seed=0)
    filtered = FilteredTable(publisher)
    texts = systematic_filters()
    for seed in (1000, 1001):
        texts += generated_filters(publisher, seed, 160)
    exercised: set[Thing] = set()
    for stored in filtered.store(texts):
        exercised.update(things_in(parse(stored.node_tree)))

    assert exact_things() - exercised == set()
