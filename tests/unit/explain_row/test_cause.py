"""The sentence follows from what is known of a row, without any server."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cdc_replay.explain_row.cause import find_cause
from cdc_replay.explain_row.facts import Facts
from cdc_replay.explain_row.other_owners import OtherOwners
from cdc_replay.explain_row.progress import Progress
from cdc_replay.model.explained_row import (
    Cause,
    EventKind,
    ExplainedChange,
    Fate,
    PresentRow,
    TableEvent,
    WindowOfChange,
)
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.subscription import ConflictPolicy, Subscription
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready

ROW = {"id": "1", "a": "5"}


def change(lsn: int, kind: str, outcome: str | None = None, **more: Any) -> ExplainedChange:
    """An applied change of the row, with its values."""
    outcome = kind if outcome is None else outcome
    has_row = kind in {"INSERT", "UPDATE"}
    values: dict[str, Any] = {
        "commit_lsn": Lsn(lsn),
        "lsn": Lsn(lsn),
        "seq": 0,
        "xid": lsn,
        "committed": "",
        "origin": None,
        "kind": kind,
        "leaf": "s.t",
        "published_as": "s.t",
        "why_published_as": "",
        "clauses": (),
        "outcome": outcome,
        "case": None,
        "reason": "for a reason",
        "rule": "R3.5",
        "fate": Fate.NOT_SEEN if outcome == "nothing" else Fate.APPLIED,
        "key": {"id": "1"} if has_row else None,
        "values": ROW if has_row else None,
    }
    return ExplainedChange(**(values | more))


def event(lsn: int, kind: EventKind, gained: tuple[str, ...] = ()) -> TableEvent:
    return TableEvent(Lsn(lsn), kind, "something else", gained)


def facts(*changes: ExplainedChange, on_publisher: bool = True, holds: bool = True, **more: Any) -> Facts:
    """A table that was copied at 100, in a log from 50 to 1000; both sides hold `ROW` unless said."""
    values: dict[str, Any] = {
        "subscription": Subscription("nsw", "shop", ("p",)),
        "table": "s.t",
        "key": {"id": "1"},
        "log_start": Lsn(50),
        "log_end": Lsn(1000),
        "changes": changes,
        "events": (event(100, EventKind.COPY),),
        "progress": Progress(Ready(Lsn(900)), copied_at=Lsn(100)),
        "publisher": PresentRow("s.t", Lsn(1000), int(on_publisher), is_published=on_publisher or None),
        "subscriber": PresentRow("s.t", Lsn(900), int(holds)),
        "published_values": ROW if on_publisher else {},
        "held_values": ROW if holds else {},
        "columns": frozenset(ROW),
        "comparable": frozenset(ROW),
    }
    values |= more
    values.setdefault("converted_values", values["published_values"])
    return Facts(**values)


OTHER = {"id": "1", "a": "6"}
UNPUBLISHED = PresentRow("s.t", Lsn(1000), 1, is_published=False)
NOT_COPIED = Progress(Ready(Lsn(900)), copied_at=Lsn(100), is_copied=False)


@pytest.mark.parametrize(
    ("known", "cause", "words"),
    [
        (facts(), Cause.SAME, "same row"),
        (facts(holds=False, publisher=UNPUBLISHED), Cause.FILTERED_OUT, "not published"),
        (facts(on_publisher=False, holds=False), Cause.ABSENT, "no change of one"),
        (facts(change(200, "DELETE"), on_publisher=False, holds=False), Cause.ABSENT, "the DELETE at 0/C8"),
        (facts(is_published=False), Cause.NOT_PUBLISHED, "No publication"),
        (facts(progress=Progress()), Cause.NOT_SUBSCRIBED, "cdc-replay refresh nsw"),
        (facts(progress=Progress(Pending())), Cause.NOT_COPIED, "waits for its copy"),
        (facts(progress=Progress(Copying(Lsn(5)))), Cause.NOT_COPIED, "is being copied"),
        (facts(progress=Progress(Ready(Lsn(5)), exists=False)), Cause.TARGET_MISSING, "dropped"),
        (
            facts(subscriber=PresentRow("s.t", None, None, error="no privilege")),
            Cause.UNKNOWN,
            "subscriber's row could not be read: no privilege",
        ),
        (
            facts(on_publisher=False, others=OtherOwners(("vic",), ("native",))),
            Cause.OTHER_SUBSCRIPTION,
            "ask `cdc-replay why vic`",
        ),
        (
            facts(change(200, "DELETE"), publisher=UNPUBLISHED, others=OtherOwners(("vic",))),
            Cause.OTHER_SUBSCRIPTION,
            "not of subscription nsw, whose row filter does not pass it, but of vic",
        ),
        (
            facts(change(200, "DELETE"), on_publisher=False, others=OtherOwners((), ("native",))),
            Cause.CHANGED_LOCALLY,
            "It may be of native, which also feeds the table",
        ),
        (
            facts(subscriber=PresentRow("s.t", Lsn(900), 2)),
            Cause.UNKNOWN,
            "Several rows of the subscriber have this key",
        ),
        (
            facts(
                publisher=PresentRow("s.t", Lsn(1000), 2, is_published=True),
                subscriber=PresentRow("s.t", Lsn(900), 2),
                held_values={"id": "1", "a": "6"},
            ),
            Cause.UNKNOWN,
            "Several rows of the publisher and the subscriber have this key",
        ),
        (
            facts(held_values={"id": "1", "a": "6"}, others=OtherOwners(("vic",))),
            Cause.CHANGED_LOCALLY,
            "updated on the subscriber",
        ),
        (
            facts(change(950, "INSERT", fate=Fate.PENDING), holds=False),
            Cause.NOT_APPLIED,
            "cdc-replay replay nsw",
        ),
        (
            facts(
                change(950, "INSERT", fate=Fate.PARKED),
                holds=False,
                progress=Progress(Parked(Lsn(900), "too long\nDETAIL: x", Lsn(950))),
            ),
            Cause.PARKED,
            "Table s.t is parked before transaction 0/3B6, so the INSERT at 0/3B6 is not applied: too long.",
        ),
        (
            facts(
                change(200, "INSERT"),
                holds=False,
                published_values=OTHER,
                publisher=PresentRow("s.t", Lsn(1001), 1, is_published=True),
            ),
            Cause.NOT_CAPTURED_YET,
            "the log ends at 0/3E8",
        ),
        (
            facts(change(200, "INSERT"), published_values=OTHER, uncaptured=("s.t (update)",)),
            Cause.NOT_CAPTURED,
            "cdc-replay setup shop",
        ),
        (
            facts(change(200, "DELETE"), holds=False),
            Cause.NOT_CAPTURED,
            "complete up to 0/3E8, lacks",
        ),
        (
            facts(change(200, "INSERT", fate=Fate.SKIPPED), holds=False),
            Cause.SKIPPED,
            "The INSERT at 0/C8 was left out",
        ),
        (
            facts(
                change(200, "INSERT", window=WindowOfChange(Lsn(1), Lsn(2), "", 1, ("insert_exists",))),
                held_values=OTHER,
                subscription=Subscription("nsw", "shop", ("p",), on_conflict=ConflictPolicy.SKIP),
            ),
            Cause.CONFLICT,
            "insert_exists",
        ),
        (
            facts(
                change(200, "UPDATE", "INSERT", unsent=("a",), values={"id": "1"}),
                held_values={"id": "1", "a": None},
            ),
            Cause.UNSENT_VALUE,
            "NULL was stored",
        ),
        (
            facts(change(200, "INSERT"), holds=False),
            Cause.CHANGED_LOCALLY,
            "deleted on the subscriber, after the INSERT at 0/C8",
        ),
        (
            facts(change(200, "DELETE"), on_publisher=False),
            Cause.CHANGED_LOCALLY,
            "inserted on the subscriber",
        ),
        (
            facts(change(200, "INSERT"), held_values=OTHER),
            Cause.CHANGED_LOCALLY,
            "a differs from what the INSERT",
        ),
        (facts(held_values=OTHER), Cause.CHANGED_LOCALLY, "since the copy at 0/64"),
        (
            facts(change(200, "INSERT", "nothing", rule="R8.19"), holds=False),
            Cause.ORIGIN,
            "for a reason (R8.19)",
        ),
        (
            facts(change(200, "DELETE", "nothing", rule="R2.7"), on_publisher=False),
            Cause.ACTION_NOT_PUBLISHED,
            "was not sent",
        ),
        (
            facts(on_publisher=False, actions=frozenset({PublishAction.INSERT})),
            Cause.ACTION_NOT_PUBLISHED,
            "do not publish delete",
        ),
        (
            facts(held_values=OTHER, events=(event(200, EventKind.DEFINITION, ("a",)),)),
            Cause.COLUMNS_CHANGED,
            "a is published since 0/C8 only",
        ),
        (
            facts(
                holds=False,
                events=(event(200, EventKind.DEFINITION), event(300, EventKind.DEFINITION)),
                passed_before={Lsn(200): False, Lsn(300): True},
            ),
            Cause.FILTER_CHANGED,
            "changed at 0/C8, which lets the row in",
        ),
        (
            facts(
                publisher=UNPUBLISHED,
                events=(event(200, EventKind.DEFINITION),),
                passed_before={Lsn(200): True},
            ),
            Cause.FILTER_CHANGED,
            "which shuts the row out",
        ),
        (
            facts(
                change(300, "DELETE", "nothing"),
                on_publisher=False,
                events=(event(200, EventKind.DEFINITION),),
            ),
            Cause.FILTER_CHANGED,
            "changed at 0/C8",
        ),
        (
            facts(held_values=OTHER, events=(event(200, EventKind.REWRITE),)),
            Cause.REWRITTEN,
            "rewrote the table at 0/C8",
        ),
        (facts(holds=False, progress=NOT_COPIED), Cause.NEVER_COPIED, "copy_data: false"),
        (facts(held_values=OTHER, log_start=Lsn(500)), Cause.OLDER_THAN_LOG, "starts at 0/1F4"),
    ],
)
def test_each_cause_has_its_sentence(known: Facts, cause: Cause, words: str) -> None:
    found = find_cause(known)
    assert (found.cause, words in found.explanation) == (cause, True), found


def test_a_value_differs_only_if_the_subscribers_type_prints_it_otherwise() -> None:
    published = {"id": "1", "a": "5"}
    known = facts(published_values=published, converted_values=published | {"a": "5.00"})
    held = {**known.held_values, "a": "5.00"}
    assert dataclasses.replace(known, held_values=held).differing == ()
    assert dataclasses.replace(known, held_values={**held, "a": "5.01"}).differing == ("a",)


def test_a_definition_that_does_not_concern_the_row_explains_nothing() -> None:
    changed = event(200, EventKind.DEFINITION)
    known = facts(holds=False, events=(changed,), passed_before={changed.lsn: True})
    assert find_cause(known).cause is Cause.CHANGED_LOCALLY


def test_a_later_insert_makes_up_for_a_skipped_transaction() -> None:
    known = facts(change(200, "INSERT", fate=Fate.SKIPPED), change(300, "INSERT"), holds=False)
    assert find_cause(known).cause is Cause.CHANGED_LOCALLY


def test_the_row_that_moved_away_is_not_expected_under_its_old_key() -> None:
    moved = change(300, "UPDATE", key={"id": "2"}, old_key={"id": "1"})
    later = change(400, "UPDATE", key={"id": "2"})
    known = facts(change(200, "INSERT"), moved, later, on_publisher=False, holds=False)
    assert find_cause(known).cause is Cause.KEY_MOVED
    assert (
        find_cause(dataclasses.replace(known, subscriber=PresentRow("s.t", Lsn(900), 1))).cause
        is Cause.CHANGED_LOCALLY
    )


def test_the_row_that_came_from_another_key_has_its_earlier_changes() -> None:
    inserted = change(200, "INSERT", key={"id": "2"}, values={"id": "2", "a": "5"})
    moved = change(300, "UPDATE", old_key={"id": "2"})
    assert find_cause(facts(inserted, moved, holds=False)).cause is Cause.CHANGED_LOCALLY
    assert find_cause(facts(inserted, moved)).cause is Cause.SAME


@pytest.mark.parametrize(
    ("commit", "is_seen", "fate"),
    [
        (90, True, Fate.COPIED),
        (200, True, Fate.APPLIED),
        (200, False, Fate.NOT_SEEN),
        (300, True, Fate.SKIPPED),
        (950, True, Fate.PENDING),
        (970, True, Fate.PARKED),
        (980, True, Fate.PARKED),
    ],
)
def test_fate_by_position(commit: int, is_seen: bool, fate: Fate) -> None:
    progress = Progress(
        Ready(Lsn(900)), copied_at=Lsn(100), skipped=frozenset({Lsn(300)}), parked_transaction=Lsn(970)
    )
    assert progress.fate(Lsn(commit), is_seen=is_seen) is fate
