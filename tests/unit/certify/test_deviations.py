"""Which differing rows a documented deviation explains: for each there is one that it must not explain."""

from __future__ import annotations

import dataclasses

import pytest

from cdc_replay.certify.deviations import TableFacts, certify_table, columns_by_session, explain_row
from cdc_replay.certify.differing_columns import RowOnSides
from cdc_replay.compare.buckets import BucketComparison, BucketDigest
from cdc_replay.compare.comparison import Comparison, DifferenceCounts, NotCompared
from cdc_replay.compare.difference import DifferenceKind
from cdc_replay.model.certificate import Deviation, TableOutcome
from cdc_replay.model.publication import TableColumn
from fixtures.target_tables import target_column, target_table

COLUMNS = ("id", "a", "big")
FILTERED = TableFacts(may_be_unsent=frozenset({"big"}))
MISSING, UNEXPECTED, DIFFERENT = DifferenceKind.MISSING, DifferenceKind.UNEXPECTED, DifferenceKind.DIFFERENT

UNSENT = RowOnSides(COLUMNS, native=("1", "2", None), ours=("1", "2", "x"), published=("1", "2", "x"))
"""A row of R4.6: hashes of values."""


def replaced(row: RowOnSides, **sides: tuple[str | None, ...] | None) -> RowOnSides:
    present = {"native": row.native, "ours": row.ours, "published": row.published} | sides
    return RowOnSides(row.columns, present["native"], present["ours"], present["published"])


@pytest.mark.parametrize(
    ("row", "explained"),
    [
        pytest.param(UNSENT, True, id="ours is the publisher's"),
        pytest.param(replaced(UNSENT, published=None), True, id="the row is gone since"),
        pytest.param(replaced(UNSENT, published=("1", "3", "y")), True, id="the row has changed since"),
        pytest.param(replaced(UNSENT, published=("1", "2", "y")), False, id="ours is another value"),
        pytest.param(replaced(UNSENT, published=("1", "2", None)), False, id="native is right"),
        pytest.param(replaced(UNSENT, native=("1", "2", "z")), False, id="native has a value"),
        pytest.param(replaced(UNSENT, native=("1", "9", None)), False, id="another column differs, too"),
        pytest.param(replaced(UNSENT, native=None), False, id="native has no such row, or several"),
        pytest.param(
            replaced(UNSENT, native=("1", "2", "x"), ours=("1", "2", None)), False, id="ours is NULL"
        ),
    ],
)
def test_an_unsent_value(row: RowOnSides, explained: bool) -> None:
    """R4.6."""
    expected = Deviation.UNSENT_VALUE if explained else None
    assert explain_row(DIFFERENT, "h", row, FILTERED) is expected


def test_an_unsent_value_needs_a_row_filter_and_a_value_that_can_be_unsent() -> None:
    assert explain_row(DIFFERENT, "h", UNSENT, TableFacts()) is None
    assert explain_row(DIFFERENT, "h", UNSENT, TableFacts(may_be_unsent=frozenset({"a"}))) is None


def test_a_rewrite_explains_values_that_are_the_publishers() -> None:
    """R11.9."""
    row = RowOnSides(COLUMNS, ("1", "2", "x"), ("1", "200", "x"), ("1", "200", "x"))
    rewritten = TableFacts(is_rewritten=True)

    assert explain_row(DIFFERENT, "h", row, rewritten) is Deviation.TABLE_REWRITTEN
    assert explain_row(DIFFERENT, "h", row, TableFacts()) is None
    assert explain_row(DIFFERENT, "h", replaced(row, published=("1", "2", "x")), rewritten) is None
    assert explain_row(MISSING, "h", None, rewritten) is None
    assert explain_row(UNEXPECTED, "h", None, rewritten) is None


def test_the_text_of_a_session_explains_its_columns_only() -> None:
    """R1.11."""
    facts = TableFacts(by_session=frozenset({"a"}))
    row = RowOnSides(COLUMNS, ("1", "2", "x"), ("1", "3", "x"), ("1", "3", "x"))

    assert explain_row(DIFFERENT, "h", row, facts) is Deviation.TEXT_OF_SESSION
    assert explain_row(DIFFERENT, "h", replaced(row, ours=("1", "3", "y")), facts) is None


@pytest.mark.parametrize("kind", [MISSING, UNEXPECTED, DIFFERENT])
@pytest.mark.parametrize(
    "history", [Deviation.FILTER_CHANGED, Deviation.ACTIONS_NOT_PUBLISHED, Deviation.NOT_COPIED]
)
def test_history_explains_the_keys_that_differed_at_the_start(
    kind: DifferenceKind, history: Deviation
) -> None:
    facts = TableFacts(history=history, differed_at_start=frozenset({"old"}))

    assert explain_row(kind, "old", None, facts) is history
    assert explain_row(kind, "new", None, facts) is None
    assert explain_row(kind, "old", None, dataclasses.replace(facts, history=None)) is None


@pytest.mark.parametrize(
    ("published", "own", "by_session"),
    [
        ("timestamp with time zone", "text", True),
        ("timestamp(3) with time zone", "text", True),
        ("bytea", "text", True),
        ("bytea[]", "text", True),
        ("timestamp with time zone", "timestamp with time zone", False),
        ("timestamp without time zone", "text", False),
        ("integer", "text", False),
        ("regclass", "regclass", True),
        ("regional.status", "regional.status", False),
    ],
)
def test_columns_whose_text_depends_on_the_session(published: str, own: str, by_session: bool) -> None:
    target = target_table("t", target_column("c", own))
    source = TableColumn(1, "c", 0, -1, published, None)

    assert (columns_by_session([source], target) == {"c"}) is by_session


def compared(counts: DifferenceCounts) -> Comparison:
    bucket = BucketComparison(BucketDigest(0, 7, 0, b"1\t2"), BucketDigest(0, 8, 0, b"1\t3"))
    return Comparison((bucket,), ("id",), COLUMNS, counts, None, None)


def counted(limit: int, *rows: tuple[DifferenceKind, int, str, str]) -> DifferenceCounts:
    counts = DifferenceCounts(limit)
    for kind, count, key, key_hash in rows:
        counts.add(kind, count, key, key_hash)
    return counts


def test_one_row_without_a_reason_refuses_the_table_and_is_named() -> None:
    facts = TableFacts(history=Deviation.FILTER_CHANGED, differed_at_start=frozenset({"h1"}))
    counts = counted(10, (UNEXPECTED, 1, "id=1", "h1"), (UNEXPECTED, 1, "id=2", "h2"))

    table = certify_table("s.t", compared(counts), {}, facts)

    assert table.outcome is TableOutcome.DIFFERS
    assert (table.differences, table.keys) == ({"unexpected": 1}, ("unexpected id=2",))
    [explained] = table.deviations
    assert (explained.rows, explained.keys) == (1, ("id=1",))
    assert (table.native_rows, table.our_rows) == (7, 8)


def test_differences_that_were_not_listed_are_not_explained() -> None:
    facts = TableFacts(history=Deviation.FILTER_CHANGED, differed_at_start=frozenset({"h1", "h2"}))
    counts = counted(1, (MISSING, 1, "id=1", "h1"), (MISSING, 1, "id=2", "h2"))
    assert certify_table("s.t", compared(counts), {}, facts).differences == {"missing": 1}

    counts = counted(10, (MISSING, 1, "id=1", "h1"))
    counts.exact = False
    assert certify_table("s.t", compared(counts), {}, facts).outcome is TableOutcome.DIFFERS


def test_equal_rows_without_a_key_are_explained_together() -> None:
    facts = TableFacts(history=Deviation.ACTIONS_NOT_PUBLISHED, differed_at_start=frozenset({"h1"}))
    table = certify_table("s.t", compared(counted(10, (UNEXPECTED, 3, "(1,x)", "h1"))), {}, facts)
    assert (table.outcome, table.differences) == (TableOutcome.DEVIATES, {})


def test_a_table_that_is_equal_or_could_not_be_compared() -> None:
    assert certify_table("s.t", compared(counted(10)), {}, TableFacts()).outcome is TableOutcome.EQUAL
    failed = certify_table("s.t", NotCompared("it is parked"), {}, TableFacts())
    assert (failed.outcome, failed.outcome.fails, failed.reason) == (
        TableOutcome.NOT_COMPARED,
        True,
        "it is parked",
    )
