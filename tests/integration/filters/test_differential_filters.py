"""Every exact rule against PostgreSQL: random filters over random values.

A difference names the filter, a row's values and both answers. The seed stands in the test, so a failure
repeats.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from cdc_replay.filters.arrow_eval import filter_answers, is_computable
from cdc_replay.filters.compile import SparkFilter, compile_filter
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
from cdc_replay.filters.spark_eval import filter_column
from cdc_replay.spark.session import SMALL_WINDOW_ROWS, tune_for
from fixtures.postgres import Database
from fixtures.stored_filters import FilteredTable
from integration.filters.generated_filters import Source, condition, systematic
from integration.filters.generated_values import create_table

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession

    from cdc_replay.model.publication import Table

pytestmark = pytest.mark.spark

FILTERS_PER_JOB: Final = 32
DEPTHS: Final = (0, 1, 0, 2, 1, 3)

Thing: TypeAlias = tuple[str, object]
"""Something that is exact: what it is, and which one."""

Answers: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int8]]
"""Rows by filters: 1, 0, and -1 for NULL."""


@dataclass(frozen=True)
class Generated:
    """A table of random values, as PostgreSQL has it and as a frame of its texts."""

    filtered: FilteredTable
    table: Table
    frame: DataFrame
    texts: pa.Table
    """The same, by id."""
    rows: int

    @classmethod
    def create(cls, database: Database, spark: SparkSession, *, rows: int, seed: int) -> Generated:
        create_table(database, rows, seed)
        filtered = FilteredTable(database)
        table = filtered.table()
        names = [column.name for column in table.columns]
        columns = zip(*filtered.rows(names), strict=True)
        texts = pa.table([pa.array(column, pa.string()) for column in columns], names=names)
        frame = spark.createDataFrame(texts).repartition(2).persist()
        return cls(filtered, table, frame, texts, rows)

    def in_spark(self, filters: Sequence[SparkFilter]) -> Answers:
        columns = [filter_column(each, self._value_of).alias(f"f{n}") for n, each in enumerate(filters)]
        found = self.frame.select(F.col("id").cast("int").alias("id"), *columns).toArrow().sort_by("id")
        answers = [
            column.combine_chunks().cast(pa.int8()).fill_null(-1).to_numpy() for column in found.columns[1:]
        ]
        return np.stack(answers, axis=1)

    def in_arrow(self, each: SparkFilter) -> Answers:
        texts = {column.attnum: self.texts[column.name].combine_chunks() for column in each.columns}
        found = filter_answers(each.expression, texts, self.rows)
        answers: Answers = found.cast(pa.int8()).fill_null(-1).to_numpy()
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

    def row(self, number: int) -> dict[str, str | None]:
        """The values of a row, for the report of a difference."""
        return self.frame.where(F.col("id") == str(number)).collect()[0].asDict()

    @staticmethod
    def _value_of(name: str) -> SparkColumn:
        return F.col(name)


def compare(generated: Generated, filters: Sequence[str]) -> None:
    """Fail on the first filter that has another answer for some row, in Spark or where Arrow computes it."""
    stored = generated.filtered.store(filters)
    compiled = [compile_filter(each, generated.table) for each in stored]
    left_out = {
        text: each.because
        for text, each in zip(filters, compiled, strict=True)
        if not isinstance(each, SparkFilter)
    }
    assert left_out == {}, "the generator makes only filters that are exact in Spark"
    exact = [each for each in compiled if isinstance(each, SparkFilter)]
    theirs = generated.in_postgresql(filters)
    computed = theirs.copy()
    for number, each in enumerate(exact):
        if is_computable(each.expression):
            computed[:, number] = generated.in_arrow(each)
    for ours in (generated.in_spark(exact), computed):
        fail_on_difference(generated, filters, ours, theirs)


def fail_on_difference(generated: Generated, filters: Sequence[str], ours: Answers, theirs: Answers) -> None:
    different = np.argwhere(ours != theirs)
    if len(different):
        row, number = different[0]
        pytest.fail(
            f"{filters[number]}\nours: {ours[row, number]}, PostgreSQL's: {theirs[row, number]}\n"
            f"{generated.row(row)}\n{len(different)} differences"
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
                    ("element", each.type_oid) for each in children(array) if isinstance(each, Constant)
                )
            case _:
                pass


def exact_things() -> set[Thing]:
    """What the rules say is exact in Spark."""
    exact = {signature for signature, rule in RULES.items() if isinstance(rule, Exact)}
    expressions = {kind.__name__ for kind in get_args(Expression)} - {"Unmodelled"}
    things: set[Thing] = {("expression", name) for name in expressions}
    things |= {("operation", each) for each in exact | {FUNCTIONS[oid] for oid in FOLDS}}
    things |= {("cast", each) for each in RELABELS}
    things |= {(what, each) for what in ("Column", "Constant") for each in FORMS}
    things |= {("element", each) for each in FORMS if each != Type.VARCHAR}
    things |= {(what, symbol) for what in ("any", "all") for symbol in COMPARISON_SYMBOLS}
    return things


def generated_filters(database: Database, seed: int, count: int) -> list[str]:
    [(orders_utf8,)] = database.rows("select exists (select from pg_collation where oid = 962)")
    source = Source(random.Random(seed), orders_utf8)
    return [condition(source, DEPTHS[number % len(DEPTHS)]) for number in range(count)]


def systematic_filters() -> list[str]:
    return systematic(Source(random.Random(7)))


def run(database: Database, spark: SparkSession, filters: Sequence[str], *, rows: int, seed: int) -> int:
    """Compare all filters over a table of its own, and return how many evaluations that were."""
    generated = Generated.create(database, spark, rows=rows, seed=seed)
    for number, start in enumerate(range(0, len(filters), FILTERS_PER_JOB)):
        # Small windows are interpreted, large ones compiled: both must be exact.
        tune_for(spark, 0 if number % 2 else SMALL_WINDOW_ROWS)
        compare(generated, filters[start : start + FILTERS_PER_JOB])
    generated.frame.unpersist()
    return rows * len(filters)


def test_a_fixed_share_of_random_filters_has_postgresqls_answers(
    publisher: Database, spark: SparkSession
) -> None:
    """R3.1, R3.16, R5.4."""
    assert run(publisher, spark, generated_filters(publisher, 20, 96), rows=2000, seed=20) == 192_000


@pytest.mark.slow
def test_every_operation_on_every_pair_of_types_has_postgresqls_answers(
    publisher: Database, spark: SparkSession
) -> None:
    """R3.1, R3.16, R5.4."""
    assert run(publisher, spark, systematic_filters(), rows=2000, seed=1) > 500_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1008))
def test_five_million_evaluations_have_postgresqls_answers(
    publisher: Database, spark: SparkSession, seed: int
) -> None:
    """R3.1, R3.16, R5.4: eight times 640,000 evaluations, none of which differs."""
    assert run(publisher, spark, generated_filters(publisher, seed, 160), rows=4000, seed=seed) == 640_000


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
