"""`plan` at 80 columns, with names, filters and errors of servers as they may be."""

from __future__ import annotations

import dataclasses

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proposed_change import (
    FailingStatement,
    PlannedTable,
    PlanResult,
    ProposalRefused,
    RowsOfTable,
    SentChanges,
    Transition,
    UnknownOldValues,
)
from cdc_replay.terminal.plan_view import planned
from fixtures.screen import joined, screen

HOSTILE = "\x1b[2J[red]x[/red]\u202e"

TABLE = PlannedTable(
    table="public.orders",
    membership="stays",
    rows=RowsOfTable(now=100, then=130, enter=40, leave=10),
    now=SentChanges(changes=50, bytes=5000, update=50),
    then=SentChanges(changes=60, bytes=6000, update=40, insert=15, delete=5),
    transitions=(
        Transition("UPDATE", "UPDATE", "INSERT", 15),
        Transition("UPDATE", None, "DELETE", 5),
        Transition("INSERT", None, "INSERT", 7),
        Transition("DELETE", "DELETE", None, 3),
    ),
    removed_columns=("note",),
    filters_now={"insert": "(a > 1)", "update": "(a > 1)", "delete": "(a > 1)", "truncate": "all rows"},
    filters_then={
        "insert": "(a > 2)",
        "update": "(a > 2)",
        "delete": "not published",
        "truncate": "all rows",
    },
    evaluated_by=("(a > 2): Arrow",),
    unknown_old_values=(UnknownOldValues("public.leaf", ("a",), 9),),
)
RESULT = PlanResult(
    subscription="shop",
    from_lsn=Lsn(100),
    to_lsn=Lsn(200),
    seconds=1.0,
    publications=("p",),
    parsed_by="the publisher",
    because=None,
    days=0.5,
    tables=(TABLE,),
)


def test_a_sentence_then_what_is_not_zero() -> None:
    text = screen(planned(RESULT))
    assert text.startswith("The proposal changes 1 table of subscription shop: 40 rows would enter, 10 would")
    heading, row = text.splitlines()[3:5]
    assert heading.split() == ["table", "enter", "leave", "→INSERT", "→DELETE", "appear", "vanish", "changes"]
    assert row.split() == ["public.orders", "40", "10", "15", "5", "7", "3", "100", "→", "120"]
    sentences = joined(text)
    assert "changes and bytes, per day: now → then" in sentences
    assert "then insert, update: (a > 2)" in sentences
    assert "then delete: not published" in sentences
    assert "9 UPDATEs and DELETEs of the range" in sentences
    assert "cdc-replay refresh shop --reconcile" in sentences


def test_columns_without_a_count_are_left_out() -> None:
    table = dataclasses.replace(
        TABLE, rows=None, transitions=(), now=SentChanges(), then=SentChanges(), membership="new"
    )
    heading, row = screen(planned(dataclasses.replace(RESULT, tables=(table,)))).splitlines()[3:5]
    assert (heading.split(), row.split()) == (["table"], ["public.orders", "new"])


def test_rows_that_could_not_be_counted_are_no_zero() -> None:
    """A row filter that fails for one row says nothing of the others."""
    failed = dataclasses.replace(TABLE, table="public.failed", rows=RowsOfTable(error="division by zero"))
    text = joined(screen(planned(dataclasses.replace(RESULT, tables=(TABLE, failed)))))
    assert (
        "2 tables of subscription shop: 40 rows would enter, 10 would leave; of 1 table that is unknown."
        in text
    )
    assert "not counted: division by zero" in text


def test_a_short_range_has_no_rate() -> None:
    text = joined(screen(planned(dataclasses.replace(RESULT, days=0.01))))
    assert "50 → 60" in text
    assert "per day" not in text


def test_a_refusal_is_all_there_is() -> None:
    refused = ProposalRefused(HOSTILE, 3, "detail " + HOSTILE, "hint", "R5.3")
    text = screen(planned(dataclasses.replace(RESULT, tables=(), refused=refused)))
    assert text.startswith("PostgreSQL would refuse the proposal for subscription shop.")
    assert "line 3:" in text
    assert "[R5.3]" in text
    assert "\x1b" not in text


def test_changes_that_are_not_captured_are_not_counted() -> None:
    table = dataclasses.replace(TABLE, now=SentChanges(), then=SentChanges(), uncaptured=True)
    text = joined(screen(planned(dataclasses.replace(RESULT, tables=(table,)))))
    assert "0 → ?" in text
    assert "not captured yet: the log does not have them" in text


def test_failing_statements_and_warnings_are_said() -> None:
    failing = FailingStatement("public.t", "update", "p", 'cannot update table "t"', "Column used.", "R5.6")
    result = dataclasses.replace(
        RESULT, failing=(failing,), warnings=("mind it",), log_error="no log", because="it is read-only"
    )
    text = joined(screen(planned(result)))
    assert 'Every UPDATE of public.t would fail on the publisher, because of publication "p"' in text
    assert "warning: mind it" in text
    assert "changes were not counted: no log" in text
    assert "because it is read-only; privileges were not checked" in text


def test_nothing_changes() -> None:
    text = screen(planned(dataclasses.replace(RESULT, tables=())))
    assert text.startswith("The proposal changes nothing for subscription shop.")


def test_hostile_texts_are_printed_as_text() -> None:
    table = dataclasses.replace(
        TABLE,
        table=HOSTILE,
        rows=RowsOfTable(error=HOSTILE),
        filters_then={"insert": HOSTILE},
        evaluated_by=(HOSTILE,),
        added_columns=(HOSTILE,),
    )
    text = screen(planned(dataclasses.replace(RESULT, tables=(table,), warnings=(HOSTILE,))))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]" in text
