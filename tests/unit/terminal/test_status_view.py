"""`status` at 80 columns: whole names, human units, what is wrong and what to do."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.problems import Bounds, find_problems
from cdc_replay.model.status import (
    CopyStatus,
    PublisherState,
    PublisherStatus,
    StatusResult,
    SubscriptionState,
    SubscriptionStatus,
    TableStatus,
    TableSync,
)
from cdc_replay.terminal.status_view import overview, status_outcome, subscription
from cdc_replay.terminal.watch import watch
from fixtures.screen import joined, screen

NOW = dt.datetime(2026, 11, 25, 14, 5, 7, tzinfo=dt.timezone(dt.timedelta(hours=1)))
SHOP = PublisherStatus(
    "shop", "cdc_replay_shop", "reserved", Lsn(0x4C4B40), Lsn(1), Lsn(0x4AC4A0),
    behind_bytes=100_000, retained_wal_bytes=50 << 20, state=PublisherState.READY,
)  # fmt: skip
NSW = SubscriptionStatus(
    "nsw", "shop", Lsn(0x4AC4A0), 100_000, 3.0, "succeeded at 0/4AC4A0", "consistent at 0/4AC4A0",
    state=SubscriptionState.READY,
    last_replay_at="2026-11-25T13:02:00+00:00",
    last_validation_at="2026-11-24T01:00:00+00:00",
)  # fmt: skip
LONG_TABLE = f"public.{'order_lines_' * 8}of_2026"


def judged(status: StatusResult) -> StatusResult:
    return replace(status, problems=find_problems(status, Bounds(), NOW))


def parked(name: str) -> SubscriptionStatus:
    reason = (
        "parked at 0/3D0900, before transaction 0/3D0A00: the row exists\nDETAIL: Key (id)=(7).\n"
        "HINT: Delete it."
    )
    return SubscriptionStatus(
        name, "shop", Lsn(0x3D0900), 900 << 20, 7503.0, "failed: the row exists", None, reason,
        state=SubscriptionState.PARKED, parked=reason, parked_transaction=Lsn(0x3D0A00),
    )  # fmt: skip


def test_overview_has_a_line_for_each_with_times_on_the_wall_and_their_age() -> None:
    shown = screen(overview(judged(StatusResult((SHOP,), (NSW,), ())), NOW))
    lines = [" ".join(line.split()) for line in shown.splitlines() if line]
    assert lines[1::2] == [
        "shop ready 98 kB 50 MB 0/4AC4A0",
        "nsw ready 3 s 98 kB 14:02, 3 min ago 24 Nov 02:00, 36 h ago",
    ]
    assert shown.rstrip().endswith("2026-11-25 14:05:07 UTC+01:00")


def test_parked_subscription_says_so_names_the_key_and_the_way_out() -> None:
    shown = joined(screen(overview(judged(StatusResult((SHOP,), (parked("vic"),), ())), NOW)))
    assert "vic parked 2 h 900 MB never never" in shown
    assert "the row exists: Key (id)=(7). → Delete it. Then `cdc-replay replay vic`" in shown
    assert "`cdc-replay resume vic --skip 0/3D0A00`" in shown


@pytest.mark.parametrize("width", [80, 60, 30])
def test_names_are_whole_and_columns_go_by_importance(width: int) -> None:
    name = "a-subscription-with-the-longest-name-that-may-be-given_0123456"
    status = StatusResult((SHOP,), (replace(NSW, subscription=name),), ())
    shown = screen(overview(judged(status), NOW), width)
    first_column = [line.partition("  ")[0].strip() for line in shown.splitlines()]
    assert name in "".join(first_column)
    assert ("…" in shown, "ready" in shown, "VALIDATED" in shown) == (False, True, False)


def test_side_that_is_down_is_shown_with_its_last_values_and_their_age() -> None:
    error = "cannot connect for status shop: refused\nHINT: Check that the server runs."
    down = replace(SHOP, state=PublisherState.DOWN, error=error, seconds_old=314.0)
    unknown = SubscriptionStatus("nsw", "shop", error="refused")
    shown = joined(screen(overview(judged(StatusResult((down,), (unknown,), ())), NOW)))
    assert "shop down 98 kB 50 MB 0/4AC4A0 5 min ago" in shown
    assert "nsw down - - never never never" in shown
    assert "publisher shop: does not answer: cannot connect for status shop: refused" in shown
    assert "→ Check that the server runs." in shown
    assert "cdc-replay doctor" in shown


def test_subscription_shows_its_tables_copies_and_notices() -> None:
    tables = (
        TableStatus("nsw", "public.orders", "replayed", "its filter has changed", applied_lsn=Lsn(0x3D0900)),
        TableStatus("nsw", LONG_TABLE, "copying", sync=TableSync.COPYING),
        TableStatus("nsw", "public.gone", "dropped on the subscriber", sync=TableSync.DROPPED),
    )
    copy = CopyStatus("nsw", LONG_TABLE, 1_234_567, 900 << 20, 2000 << 20, 1e6, 600.0, 1.0)
    shown = screen(subscription(judged(StatusResult((SHOP,), (NSW,), tables, (copy,))), NOW))
    first_column = [line.partition("  ")[0].strip() for line in shown.splitlines()]
    assert LONG_TABLE in "".join(first_column)
    told = joined(shown)
    assert "public.orders ready" in told
    assert "copying, about 45 %, 1,234,567 rows, 900 MB, 977 kB/s, about 10 min left" in told
    assert "public.orders: its filter has changed" in told
    assert "table public.gone: dropped on the subscriber" in told


def test_texts_of_servers_are_no_markup_and_move_no_cursor() -> None:
    hostile = "[red]x[/red]\x1b[2J\x9b1A\u202e"
    table = TableStatus("nsw", hostile, "replayed", f"{hostile}!")
    shown = screen(subscription(judged(StatusResult((), (NSW,), (table,))), NOW))
    assert "[red]x[/red]" in shown
    assert not set("\x1b\x9b\u202e") & set(shown)


def test_colours_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    view = overview(judged(StatusResult((SHOP,), (NSW,), ())), NOW)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mready" in screen(view, is_terminal=True)
    assert "\x1b[" not in screen(view)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in screen(view, is_terminal=True)


def test_watch_draws_until_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    drawn: list[None] = []

    def draw() -> str:
        drawn.append(None)
        return "screen"

    monkeypatch.setattr("cdc_replay.terminal.watch.time.sleep", sleep)
    watch(draw, 5.0)
    assert (slept, len(drawn)) == ([5.0] * 3, 3)


def test_check_prints_only_what_is_wrong_and_fails() -> None:
    fine = status_outcome(judged(StatusResult((SHOP,), (NSW,), ())), of_one=False, check=True, as_json=False)
    assert (fine.error, fine.view is not None and screen(fine.view)) == (None, "")
    wrong = judged(StatusResult((SHOP,), (NSW, parked("vic")), ()))
    outcome = status_outcome(wrong, of_one=False, check=True, as_json=False)
    assert outcome.error == "something is wrong with subscription vic"
    assert outcome.view is not None
    assert "nsw" not in screen(outcome.view)
