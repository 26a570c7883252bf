"""`explain` at 80 columns: tables in full, filters whole."""

from __future__ import annotations

from cdc_replay.commands.explain import ExplainResult
from cdc_replay.model.lsn import Lsn
from cdc_replay.publication.explain import ExplainedTable
from cdc_replay.terminal.explain_view import explained
from fixtures.screen import joined, screen

ACTIONS = ("insert", "update", "delete")
FILTER = " OR ".join(f"(region = 'R{number}'::text)" for number in range(20))


def shown(*tables: ExplainedTable) -> str:
    result = ExplainResult("nsw", Lsn(1), Lsn(1), 0.1, ("p", "q"), "exact", tables, ("two publications",))
    return joined(screen(explained(result)))


def test_one_filter_of_all_actions_is_shown_once_and_whole() -> None:
    evaluated = (f"{FILTER}: PostgreSQL, because it says: so",)
    table = ExplainedTable(
        "public.orders", 12, ACTIONS, FILTER, FILTER, FILTER, evaluated, "default (id)", ("id", "region")
    )
    text = shown(table)
    assert text.count(FILTER) == 1
    assert "public.orders 12 tables published insert, update, delete rows (region" in text
    assert "evaluated by PostgreSQL, because it says: so identity default (id) columns id, region" in text
    assert "warning: two publications" in text


def test_filters_that_differ_are_shown_by_action() -> None:
    evaluated = ("(a > 5): Arrow", "(b > 5): Arrow")
    table = ExplainedTable("s.t", 1, ACTIONS, "(a > 5) OR (b > 5)", "-", None, evaluated, "full", ("a", "b"))
    text = shown(table)
    assert "rows, insert (a > 5) OR (b > 5) rows, update all rows rows, delete not published" in text
    assert "evaluated by (a > 5): Arrow evaluated by (b > 5): Arrow" in text
