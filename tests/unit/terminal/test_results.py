"""Results as a person reads them on 80 columns: a sentence, what is not zero, what comes next."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cdc_replay.errors import SubscriptionParked
from cdc_replay.model import results
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.results import Result
from cdc_replay.terminal.output import outcome_of_all
from cdc_replay.terminal.results import summarize

A, B = Lsn(0x1A2B3C), Lsn(0x2A2B3C)
COPIED = results.TableCopied("public.flights", 336_776, 42 << 20, 11.0, chunks_read=3)
SMALL = results.TableCopied("public.airlines", 16, 512, 0.1, chunks_staged_before=1)
SNAPSHOT = results.SnapshotResult("nsw", A, A, 12.14, 336_792, 42 << 20, (COPIED, SMALL))
CAPTURE = results.CaptureResult("shop", A, B, 2.1, 2, 16, 1204, 3 << 20)
APPLIED = {"insert": 1100, "update": 90, "delete": 0, "truncate": 0}
REPLAY = results.ReplayResult("nsw", A, B, 2.1, 1204, 16, 4, 3, 0, APPLIED)
UNUSUAL = results.ReplayResult(
    "nsw", A, B, 200.0, 1, 1, conflicts={"update_missing": 2},
    conflict_keys={"update_missing": ("public.t (id)=(4)", "public.t (id)=(5)")},
    unsent_nulls=1, parked=("public.u",), passed_over=("public.new",),
)  # fmt: skip
PRUNED = results.PruneResult(
    "shop", A, B, 0.1, B, "nsw", 3, 12, 4 << 20, "2026-01-01 10:00:00+00:00", "2026-01-02 10:00:00+00:00",
    files=0, merged=2, dry_run=False,
)  # fmt: skip


def parked() -> results.ReplayResult:
    error = SubscriptionParked('subscription "nsw" is parked', hint="Correct the row.")
    error.commit_lsn = B.value
    return REPLAY.failed_with(error)


def validated(*, success: bool) -> results.ValidateResult:
    tables = tuple(
        {"table": name, "success": is_equal, "publisher_rows": 10, "subscriber_rows": 10, "notes": notes}
        for name, is_equal, notes in (
            ("public.t", True, ["for information only: its DELETEs are not published"]),
            ("public.u", success, ["a difference"] if not success else []),
        )
    )
    report = Path("/srv/a/long/path/of/expectations/gx/uncommitted/reports/nsw/0-2A2B3C.html")
    outcome = results.ValidationOutcome.CONSISTENT if success else results.ValidationOutcome.NOT_CONSISTENT
    result = results.ValidateResult("nsw", A, B, 3.0, success, tables, report, report, None)  # type: ignore[arg-type]
    return dataclasses.replace(result, outcome=outcome)


def validated_in_part(**values: Any) -> results.ValidateResult:
    left = {
        "reason": "not due",
        "table": "public.big",
        "proof": "proven through 0/1",
        "proven_at": "2026-11-01",
    }
    left_out = (left, {**left, "reason": "not reached"})
    made = dataclasses.replace(
        validated(success=True), is_partial=True, left_out=left_out, not_reached=("public.big",)
    )
    return dataclasses.replace(made, **values)


SCREENS: dict[str, tuple[Result, str]] = {
    "capture": (
        CAPTURE,
        "captured shop up to 0/2A2B3C: 1,204 changes of 16 transactions, 3072 kB in 2.1 s\n",
    ),
    "nothing to capture": (
        results.CaptureResult("shop", B, B, 0.1, 0, 0, 0, 0),
        "captured shop up to 0/2A2B3C: no new changes in 0.1 s\n",
    ),
    "snapshot": (
        SNAPSHOT,
        (
            "copied 2 tables of nsw as of 0/1A2B3C: 336,792 rows, 42 MB in 12.1 s\n"
            "  public.flights   336,776 rows, 42 MB\n"
            "  public.airlines  16 rows, 512 bytes, 1 chunk staged before\n"
        ),
    ),
    "nothing to copy": (results.SnapshotResult.nothing("nsw"), "nsw: no table needs a copy\n"),
    "replay": (
        REPLAY,
        (
            "replayed nsw up to 0/2A2B3C: 1,204 changes of 16 transactions in 2.1 s\n"
            "  rows              1,100 inserted, 90 updated\n"
            "  filtered out      4\n"
            "  UPDATE to INSERT  3\n"
        ),
    ),
    "unusual": (
        UNUSUAL,
        (
            "replayed nsw up to 0/2A2B3C: 1 change of 1 transaction in 3 min\n"
            "  update_missing         2, such as public.t (id)=(4), public.t (id)=(5)\n"
            "  stored as NULL (R4.6)  1\n"
            "  parked table           public.u\n"
            "  not subscribed         public.new; `cdc-replay refresh nsw` adds it\n"
        ),
    ),
    "parked": (
        parked(),
        (
            "stopped replaying nsw before 0/2A2B3C: 1,204 changes of 16 transactions in 2.1 s\n"
            "  rows              1,100 inserted, 90 updated\n"
            "  filtered out      4\n"
            "  UPDATE to INSERT  3\n"
            "  parked            before the transaction that committed at 0/2A2B3C\n"
        ),
    ),
    "not replayed": (
        results.ReplayResult("nsw", ZERO, ZERO, 0.0).failed_with(OSError("down")),
        "nsw was not replayed\n",
    ),
    "parked in a sync": (
        results.SyncResult(
            "nsw",
            A,
            B,
            15.0,
            results.SnapshotResult.nothing("nsw"),
            CAPTURE,
            dataclasses.replace(parked(), changes_read=0, filtered_out=0, updates_to_insert=0, applied={}),
        ),
        (
            "stopped syncing nsw before 0/2A2B3C: no changes in 15.0 s\n"
            "  parked  before the transaction that committed at 0/2A2B3C\n"
        ),
    ),
    "sync whose copy failed": (
        results.SyncResult(
            "nsw",
            A,
            B,
            15.0,
            results.SnapshotResult.nothing("nsw"),
            CAPTURE,
            results.ReplayResult("nsw", A, B, 0.1).failed_with(OSError("down")),
        ),
        "stopped syncing nsw: no changes in 15.0 s\n",
    ),
    "sync": (
        results.SyncResult("nsw", A, B, 15.0, SNAPSHOT, CAPTURE, REPLAY),
        (
            "synced nsw up to 0/2A2B3C: 2 tables with 336,792 rows copied, 1,204 changes of\n"
            "  16 transactions replayed in 15.0 s\n"
            "  public.flights    336,776 rows, 42 MB\n"
            "  public.airlines   16 rows, 512 bytes, 1 chunk staged before\n"
            "  rows              1,100 inserted, 90 updated\n"
            "  filtered out      4\n"
            "  UPDATE to INSERT  3\n"
        ),
    ),
    "backfill": (
        results.BackfillResult(
            "nsw", A, B, 2.1, 7, 2, applied={"update": 7}, dry_run=True, tables=("public.t",)
        ),
        (
            "would apply (0/1A2B3C, 0/2A2B3C] again for nsw: 7 changes of 2 transactions in\n"
            "  2.1 s\n"
            "  table  public.t\n"
            "  rows   7 updated\n"
        ),
    ),
    "refresh": (
        results.RefreshResult(
            "nsw", A, B, 0.5, ("public.new",), (), results.SnapshotResult.nothing("nsw"), warnings=("mind",)
        ),
        "refreshed nsw in 0.5 s\n  table added  public.new\n  warning      mind\n",
    ),
    "refreshed nothing": (
        results.RefreshResult("nsw", A, B, 0.5, (), (), results.SnapshotResult.nothing("nsw")),
        "refreshed nsw; its tables are as published in 0.5 s\n",
    ),
    "resume": (
        results.ResumeResult("nsw", None, None, 0.1, ()),
        (
            "nsw is no longer parked\n"
            "Nothing is applied yet: run `cdc-replay replay nsw`. A transaction that is\n"
            "  refused again parks it again.\n"
        ),
    ),
    "skip": (
        results.ResumeResult("nsw", B, B, 0.1, ("public.t",)),
        (
            "nsw continues after the transaction that committed at 0/2A2B3C; its changes of\n"
            "  public.t are left out\n"
            "Nothing is applied yet: run `cdc-replay replay nsw`.\n"
        ),
    ),
    "validate": (
        validated(success=True),
        (
            "nsw is consistent at 0/2A2B3C: 2 tables, 20 rows, 3.0 s\n"
            "  public.t  for information only: its DELETEs are not published\n"
            "  report    /srv/a/long/path/of/expectations/gx/uncommitted/reports/nsw/0-2A2B3C.html\n"
        ),
    ),
    "not consistent": (
        validated(success=False),
        (
            "nsw is NOT consistent at 0/2A2B3C: 1 of 2 tables differs, 3.0 s\n"
            "  public.t  for information only: its DELETEs are not published\n"
            "  report    /srv/a/long/path/of/expectations/gx/uncommitted/reports/nsw/0-2A2B3C.html\n"
            "`cdc-replay validate nsw --repair --dry-run` counts what makes them equal.\n"
        ),
    ),
    "dry run of a repair": (
        dataclasses.replace(
            validated(success=False),
            report=Path("/srv/nsw/1.html"),
            dry_run=True,
            repaired=(results.TableReconciled("public.t", 0, 1, 0, 2, 99, 0.1, updated_keys=("(id)=(8)",)),),
        ),
        (
            "nsw is NOT consistent at 0/2A2B3C: 1 of 2 tables differs, 3.0 s\n"
            "  public.t  1 would be updated, such as (id)=(8)\n"
            "  public.t  for information only: its DELETEs are not published\n"
            "  report    /srv/nsw/1.html\n"
            "`cdc-replay validate nsw --repair` makes them equal.\n"
        ),
    ),
    "not all could be repaired": (
        dataclasses.replace(
            validated(success=False),
            report=Path("/srv/nsw/2.html"),
            first_report=Path("/srv/nsw/1.html"),
            not_repaired=("public.t: its DELETEs are not published",),
        ),
        (
            "nsw is NOT consistent at 0/2A2B3C: 1 of 2 tables differs, 3.0 s\n"
            "  not repaired              public.t: its DELETEs are not published\n"
            "  public.t                  for information only: its DELETEs are not published\n"
            "  report                    /srv/nsw/2.html\n"
            "  report before the repair  /srv/nsw/1.html\n"
        ),
    ),
    "no difference in a part": (
        validated_in_part(),
        (
            "nsw has no difference at 0/2A2B3C in what was compared: 2 tables, 20 rows, 3.0 s\n"
            "  public.t     for information only: its DELETEs are not published\n"
            "  not reached  public.big\n"
            "  not due      public.big: proven through 0/1, at 2026-11-01\n"
            "  report       /srv/a/long/path/of/expectations/gx/uncommitted/reports/nsw/0-2A2B3C.html\n"
        ),
    ),
    "nothing due": (
        validated_in_part(tables=(), not_reached=(), left_out=()),
        (
            "nsw has nothing to compare at 0/2A2B3C, 3.0 s\n"
            "  report  /srv/a/long/path/of/expectations/gx/uncommitted/reports/nsw/0-2A2B3C.html\n"
        ),
    ),
    "not judged": (
        dataclasses.replace(
            validated(success=True),
            outcome=results.ValidationOutcome.ERROR,
            tables=(
                {
                    "success": False,
                    "publisher_rows": None,
                    "has_error": True,
                    "table": "public.t",
                    "notes": [],
                },
            ),
        ),
        (
            "nsw could not be judged at 0/2A2B3C: 1 of 1 table could not be compared, 3.0 s\n"
            "  report  /srv/a/long/path/of/expectations/gx/uncommitted/reports/nsw/0-2A2B3C.html\n"
        ),
    ),
    "verify-log": (
        results.VerifyLogResult("shop", A, B, 1.0, 3, 1204, 16, 3 << 20, 0),
        (
            "the change log of shop is sound: (0/1A2B3C, 0/2A2B3C], 3 segments, 1,204 changes\n"
            "  of 16 transactions, 3072 kB in 1.0 s\n"
        ),
    ),
    "prune": (
        PRUNED,
        (
            "dropped 3 segments, 4096 kB of the change log of shop, which now starts at\n"
            "  0/2A2B3C\n"
            "  committed        2026-01-01 10:00:00+00:00 to 2026-01-02 10:00:00+00:00\n"
            "  needed           from 0/2A2B3C on, by nsw\n"
            "  segments merged  2\n"
            "A job is reading the log: a later run deletes the files of the dropped segments.\n"
        ),
    ),
    "teardown": (
        results.TeardownResult(
            "shop", None, B, B, 0.2, ("replication slot s", "publication p", "publication q")
        ),
        (
            "removed from publisher shop\n"
            "  replication slot  s\n"
            "  publication       p, q\n"
            "The change log and the subscribers' rows stay. To capture again, move the change\n"
            "  log away, then run `cdc-replay setup shop`, and `cdc-replay snapshot` for each\n"
            "  subscription.\n"
        ),
    ),
    "nothing to tear down": (
        results.TeardownResult(None, "nsw", None, None, 0.2, ()),
        "subscription nsw: there was nothing to remove\n",
    ),
}


@pytest.mark.parametrize("name", SCREENS)
def test_result_on_80_columns(name: str) -> None:
    result, expected = SCREENS[name]
    summary = summarize(result)
    assert summary is not None
    assert summary.to_text(80) == expected


def test_names_cannot_move_the_cursor() -> None:
    summary = summarize(results.ResumeResult("nsw", None, None, 0.1, ("public.\x1b[2J",)))
    assert summary is not None
    assert "\x1b" not in summary.to_text(80)


def test_several_results_are_said_one_after_another_and_json_is_whole() -> None:
    outcome = outcome_of_all([REPLAY, parked()], as_json=False)
    assert outcome.text is not None
    assert [outcome.text.count(f"{done} nsw") for done in ("replayed", "stopped replaying")] == [1, 1]
    assert outcome.error == 'nsw: subscription "nsw" is parked\nHINT: Correct the row.'
    assert len(outcome.result["results"]) == 2  # type: ignore[arg-type]
    assert parked().to_dict()["parked_before"] == "0/2A2B3C"
