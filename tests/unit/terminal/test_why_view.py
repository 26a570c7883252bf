"""`why` at 80 columns, with texts of the log and of servers as they may be."""

from __future__ import annotations

from cdc_replay.model.explained_row import (
    Answer,
    Cause,
    Clause,
    ClauseRole,
    EventKind,
    ExplainedChange,
    Fate,
    PresentRow,
    TableEvent,
    WhyResult,
    WindowOfChange,
)
from cdc_replay.model.lsn import Lsn
from cdc_replay.terminal.why_view import row_explained
from fixtures.screen import joined, screen

HOSTILE = "\x1b[2J[red]x[/red]\u202e"

CHANGE = ExplainedChange(
    commit_lsn=Lsn(200),
    lsn=Lsn(190),
    seq=0,
    xid=77,
    committed="2026-01-31T12:00:00+00:00",
    origin=HOSTILE,
    kind="UPDATE",
    leaf="s.t",
    published_as="s.t",
    why_published_as=HOSTILE,
    clauses=(
        Clause("p", ClauseRole.FILTER, "(a > 5)", Answer.TRUE, Answer.NULL),
        Clause("q", ClauseRole.FILTER, HOSTILE, Answer.NO_ROW, Answer.ERROR, HOSTILE),
        Clause(HOSTILE, ClauseRole.NOT_LISTED),
    ),
    outcome="DELETE",
    case="the old row passes, the new one does not pass: DELETE (R4.4)",
    reason=HOSTILE,
    rule="R3.5",
    fate=Fate.APPLIED,
    key={"id": HOSTILE},
    old_key={"id": "1"},
    unsent=(HOSTILE,),
    values={"id": HOSTILE, "a": "y" * 500},
    old_values={"id": None},
    window=WindowOfChange(Lsn(100), Lsn(300), "2026-01-31T12:00:05+00:00", 3, ("update_missing",)),
)

RESULT = WhyResult(
    subscription="nsw",
    from_lsn=Lsn(1),
    to_lsn=Lsn(400),
    seconds=0.1,
    table="s.t",
    key={"id": HOSTILE},
    changes_found=5,
    changes=(CHANGE,),
    events=(
        TableEvent(Lsn(150), EventKind.DEFINITION, HOSTILE),
        TableEvent(Lsn(250), EventKind.REWRITE, "r"),
    ),
    publisher=PresentRow("s.t", Lsn(400), 1, True, CHANGE.clauses[:1], {"id": HOSTILE}),
    subscriber=PresentRow(None, None, None, error=HOSTILE),
    differs=True,
    differing=(HOSTILE,),
    cause=Cause.UNKNOWN,
    explanation=HOSTILE,
)


def test_nothing_of_the_log_or_of_a_server_is_printed_as_it_is() -> None:
    for is_terminal in (False, True):
        text = screen(row_explained(RESULT), is_terminal=is_terminal)
        assert "\x1b[2J" not in text
        assert "\u202e" not in text
    plain = joined(screen(row_explained(RESULT)))
    assert r"\x1b[2J[red]x[/red]\u202e" in plain


def test_changes_and_events_are_in_the_order_of_the_log() -> None:
    text = joined(screen(row_explained(RESULT)))
    parts = [
        "changes 5, the last 1 are shown",
        "0/96 definition",
        "0/C8 UPDATE → DELETE applied 2026-01-31T12:00:00+00:00, transaction 77",
        '"p" (a > 5) old row: true, new row: null',
        "does not publish the table",
        "UPDATE the old row passes, the new one does not pass: DELETE (R4.4)",
        "window (0/64, 0/12C], applied 2026-01-31T12:00:05+00:00, 3 conflicts; this row: update_missing",
        "0/FA rewrite r",
        "publisher s.t: one row, as of 0/190",
        "subscriber no table",
    ]
    at = [text.index(part) for part in parts]
    assert at == sorted(at)
    assert "y" * 500 not in text.replace(" ", "")
