"""What a run compares: tables by name, samples, intervals and budgets."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import pytest

from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proof import BUCKETS, Evidence, TableProof
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.validation_scope import TablePlan, ValidationPlan, ValidationScope, parse_share
from cdc_replay.validate.selection import MOST_STEPS, STEP_BYTES, ChosenTable, match_tables, select_tables
from cdc_replay.validate.verdict import LeftReason

NOW = dt.datetime(2026, 11, 25, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)
A, B, C = (QualifiedName("public", name) for name in "abc")


def table(name: QualifiedName) -> Any:  # noqa: ANN401 - as much of a table as is looked at
    return SimpleNamespace(table=SimpleNamespace(table=SimpleNamespace(name=name)))


TABLES = [table(name) for name in (A, B, C)]


def proof(days_ago: float, owed: int = 0) -> TableProof:
    at = NOW - days_ago * DAY
    return TableProof.nothing().add(
        Evidence("d", 1, Lsn(1), at, frozenset(range(BUCKETS)), frozenset(), owed)
    )


def chosen(
    proofs: dict[QualifiedName, TableProof], plan: ValidationPlan | None = None, **scope: Any
) -> dict[str, int]:
    """The chosen tables in order, each with the number of its buckets."""
    selection = select_tables(TABLES, proofs, plan or ValidationPlan(), ValidationScope(**scope), NOW)
    return {table.name.name: len(table.buckets) for table in selection.chosen}


def test_everything_by_default_and_tables_and_samples_on_request() -> None:
    assert chosen({}) == {"a": 256, "b": 256, "c": 256}
    assert chosen({}, tables=("public.b", "public.a")) == {"a": 256, "b": 256}
    assert chosen({}, tables=("public.b, public.c",), sample=0.05) == {"b": 13, "c": 13}


def test_what_is_due_follows_the_plan() -> None:
    plan = ValidationPlan(
        TablePlan(every=DAY), {"public.b": TablePlan(every=7 * DAY, sample=0.05), "public.c": TablePlan()}
    )
    proofs = {A: proof(0.5), B: proof(6), C: proof(0)}
    assert chosen(proofs, plan, is_due=True) == {"c": 256}
    assert chosen({A: proof(1), B: proof(7)}, plan, is_due=True) == {"a": 256, "b": 13, "c": 256}
    # Some seconds early is not a day late.
    assert "a" in chosen({A: proof(0.99), B: proof(0)}, plan, is_due=True)
    left = select_tables(TABLES, proofs, plan, ValidationScope(is_due=True), NOW).left
    assert {entry.name.name: entry.reason for entry in left} == dict.fromkeys("ab", LeftReason.NOT_DUE)


def test_a_comparison_of_the_years_to_come_is_due() -> None:
    """The clock was set back since."""
    plan = ValidationPlan(TablePlan(every=dt.timedelta(days=1)))
    assert chosen({A: proof(-1500), B: proof(-0.01), C: proof(0)}, plan, is_due=True) == {"a": 256}


def test_what_was_not_reached_is_due_and_comes_first() -> None:
    plan = ValidationPlan(TablePlan(every=DAY), max_seconds=60)
    proofs = {A: proof(3), B: proof(9), C: proof(0, owed=40)}
    assert list(chosen(proofs, plan, is_due=True).items()) == [("c", 40), ("b", 256), ("a", 256)]


def test_tables_never_compared_come_before_others_within_a_budget() -> None:
    assert list(chosen({A: proof(1), B: proof(2)}, max_bytes=1)) == ["c", "b", "a"]


def test_names_with_dots_commas_and_quotes() -> None:
    strange = [QualifiedName("a.b", "c"), QualifiedName("s", 'x, "y".z'), QualifiedName("s", "x")]
    assert match_tables(['"a.b".c'], strange) == (strange[0],)
    assert match_tables(['s.x, "y".z'], strange) == (strange[1],)
    assert match_tables(['s.x,"a.b".c'], strange) == (strange[2], strange[0])


@pytest.mark.parametrize("text", ["public.d", "public.a,public.d", "a", "", "public.a,"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidConfiguration, match="not a"):
        match_tables([text], [A, B])


def test_a_name_that_is_no_table_of_the_subscription_is_told() -> None:
    plan = ValidationPlan(tables={"public.a": TablePlan(), "public.gone": TablePlan()})
    assert select_tables(TABLES, {}, plan, ValidationScope(), NOW).unknown == ("public.gone",)


@pytest.mark.parametrize(
    ("size", "buckets", "has_budget", "steps"),
    [
        (10 * STEP_BYTES, 256, False, [256]),
        (STEP_BYTES, 256, True, [256]),
        (3 * STEP_BYTES, 256, True, [86, 86, 84]),
        (99 * STEP_BYTES, 256, True, [32] * MOST_STEPS),
        (99 * STEP_BYTES, 3, True, [1, 1, 1]),
    ],
)
def test_steps_of_a_table(size: int, buckets: int, has_budget: bool, steps: list[int]) -> None:
    chosen_table = ChosenTable(table(A), tuple(range(buckets)))
    made = chosen_table.steps(size, has_budget=has_budget)
    assert [len(step) for step in made] == steps
    assert [index for step in made for index in step] == list(range(buckets))


def test_shares() -> None:
    assert [parse_share(text) for text in ("5%", "0.5 %", "100%")] == [0.05, 0.005, 1.0]
    for text in ("0%", "101%", "5", "-1%", "x%", ""):
        with pytest.raises(ValueError, match="not a share"):
            parse_share(text)
