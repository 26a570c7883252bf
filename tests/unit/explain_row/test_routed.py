"""Single changes go through the routes and row filters of replay; no server is asked."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cdc_replay.catalog.json_form import catalog_to_json
from cdc_replay.explain_row.routed import RoutedChange, RowRouter
from cdc_replay.model.explained_row import Answer
from cdc_replay.model.lsn import ZERO
from cdc_replay.model.publication import Publication, PublisherCatalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import OriginPolicy, Subscription
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.route.routes import Target
from fixtures.catalogs import catalog, publication, table
from unit.changelog.small_log import EVERYTHING, TRUNCATE, SmallLog, insert, message_rows
from unit.explain_row.log_rows import LEAF, delete, find, update, update_full
from unit.replay.route.changes import filtered, greater

S_T = QualifiedName("s", "t")
T = table(LEAF, "s.t", "id a")
BIG = publication("big", filtered(T, greater(T, "a", 5)))
HUGE = publication("huge", filtered(T, greater(T, "a", 100)), publish="insert, update")


def of(*publications: Publication) -> PublisherCatalog:
    return catalog(T, publications=publications, lsn=90)


def routed(
    folder: Path, messages: list[bytes], *publications: Publication, key: str = "5", **more: Any
) -> list[RoutedChange]:
    """What a subscription to the publications makes of the messages about a row."""
    log = SmallLog.create(folder, catalog_to_json(of(*publications)))
    origin = more.pop("row_origin", None)
    log.pull(200, message_rows(110, list(enumerate(messages)), origin=origin))
    names = tuple(publication.name for publication in publications)
    targets = more.pop("targets", {S_T: Target(("id",), ZERO)})
    router = RowRouter(Subscription("nsw", "shop", names, **more), "host=nowhere", targets, {})
    changes = find(log, key).changes
    with contextlib.closing(router):
        router.define(log.log, catalog_history(log.log), EVERYTHING, changes)
        return [router.route(change) for change in changes]


@pytest.mark.parametrize(
    ("old", "new", "outcome", "answers"),
    [
        ("3", "4", "nothing", (Answer.FALSE, Answer.FALSE)),
        ("3", "9", "INSERT", (Answer.FALSE, Answer.TRUE)),
        ("9", "3", "DELETE", (Answer.TRUE, Answer.FALSE)),
        ("9", "8", "UPDATE", (Answer.TRUE, Answer.TRUE)),
        ("9", None, "DELETE", (Answer.TRUE, Answer.NULL)),
    ],
)
def test_the_four_cases_of_an_update(
    tmp_path: Path, old: str, new: str | None, outcome: str, answers: tuple[Answer, Answer]
) -> None:
    """R4.4; a filter that is NULL does not pass (R3.1)."""
    (change,) = routed(tmp_path, [update_full(("5", old), ("5", new))], BIG, HUGE)
    assert (change.outcome, change.published_as) == (outcome, S_T)
    assert (change.clauses[0].old, change.clauses[0].new) == answers
    assert "(R4.4)" in (change.case or "")


def test_without_an_old_row_the_new_one_answers_for_both(tmp_path: Path) -> None:
    (change,) = routed(tmp_path, [update("5", "9")], BIG)
    assert (change.outcome, change.clauses[0].old) == ("UPDATE", Answer.NO_ROW)
    assert "its answer holds for both" in (change.case or "")


def test_what_stops_a_change_has_its_rule(tmp_path: Path) -> None:
    messages = [insert(5), delete("5"), TRUNCATE]
    inserts = publication("inserts", dataclasses.replace(filtered(T, greater(T, "a", 5)), row_filter=None))
    inserts = dataclasses.replace(inserts, actions=HUGE.actions)
    seen = [(change.outcome, change.rule) for change in routed(tmp_path / "a", messages, inserts)]
    assert seen == [("INSERT", "R3.4"), ("nothing", "R2.7"), ("nothing", "R2.7")]
    local = routed(tmp_path / "b", messages, inserts, row_origin="x", origin=OriginPolicy.NONE)
    assert [change.rule for change in local] == ["R8.19"] * 3
    unlisted = routed(tmp_path / "c", messages, publication("nothing"))
    assert [(change.outcome, change.rule) for change in unlisted] == [("nothing", "R2.2")] * 3
    unsubscribed = routed(tmp_path / "d", messages, inserts, targets={})
    assert [(change.outcome, change.rule) for change in unsubscribed] == [("nothing", "R7.12")] * 3


def test_publications_that_postgresql_refuses_stop_the_change(tmp_path: Path) -> None:
    """R6.4: column lists that differ."""
    narrow = publication("narrow", filtered(T, greater(T, "id", 5), columns="id"))
    (change,) = routed(tmp_path, [insert(5)], BIG, narrow)
    assert (change.outcome, change.rule) == ("refused", "R6.4")


def test_a_present_row_is_judged_by_the_definitions_of_any_time() -> None:
    router = RowRouter(Subscription("nsw", "shop", ("big", "huge")), "host=nowhere", {}, {})
    answers = [
        [clause.new for clause in router.present_row(of(BIG, HUGE), LEAF, {"id": "5", "a": a})]
        for a in ("4", "50", "101", None)
    ]
    assert answers == [
        [Answer.FALSE, Answer.FALSE],
        [Answer.TRUE, Answer.FALSE],
        [Answer.TRUE, Answer.TRUE],
        [Answer.NULL, Answer.NULL],
    ]
