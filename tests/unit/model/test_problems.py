"""What counts as wrong, and the command that puts it right."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.problems import Bounds, find_problems
from cdc_replay.model.status import (
    PublisherState,
    PublisherStatus,
    StatusResult,
    SubscriptionState,
    SubscriptionStatus,
    TableStatus,
    TableSync,
)

NOW = dt.datetime(2026, 11, 25, 12, tzinfo=dt.UTC)
SHOP = PublisherStatus("shop", "slot", "reserved", log_end=Lsn(1), state=PublisherState.READY)
NSW = SubscriptionStatus(
    "nsw", "shop", lag_bytes=2 << 20, lag_seconds=600.0, state=SubscriptionState.READY,
    last_validation_at="2026-11-24T12:00:00+00:00",
)  # fmt: skip


def told(
    publisher: PublisherStatus = SHOP,
    subscription: SubscriptionStatus = NSW,
    *tables: TableStatus,
    bounds: Bounds | None = None,
) -> str:
    found = find_problems(StatusResult((publisher,), (subscription,), tables), bounds or Bounds(), NOW)
    return "\n".join(f"{problem.subject}: {problem.message} {problem.remedy}" for problem in found)


def test_nothing_is_wrong_without_a_bound() -> None:
    assert told() == ""


@pytest.mark.parametrize(
    ("publisher", "remedy"),
    [
        (
            replace(SHOP, state=PublisherState.NO_SLOT, log_end=None),
            "Run `cdc-replay setup shop`",
        ),
        (replace(SHOP, state=PublisherState.NO_SLOT, error="gone\nHINT: Copy."), "gone Copy."),
        (replace(SHOP, state=PublisherState.LOST), "slot is lost Run `cdc-replay capture shop`"),
        (replace(SHOP, state=PublisherState.NEAR_LOST), "near lost"),
        (
            replace(SHOP, state=PublisherState.LOG_UNREADABLE, error="damaged"),
            "Run `cdc-replay doctor`",
        ),
        (replace(SHOP, state=PublisherState.DOWN, error="refused"), "does not answer: refused"),
    ],
)
def test_publisher(publisher: PublisherStatus, remedy: str) -> None:
    assert remedy in told(publisher)
    assert told(publisher).startswith("publisher shop: ")


@pytest.mark.parametrize(
    ("subscription", "remedy"),
    [
        (replace(NSW, state=SubscriptionState.NEW), "Run `cdc-replay sync nsw`"),
        (replace(NSW, state=SubscriptionState.DOWN, error="refused"), "does not answer: refused"),
        (
            replace(NSW, state=SubscriptionState.FAILED, last_replay="failed: full"),
            "replay failed: full",
        ),
        (replace(NSW, error="not captured: public.t"), "not captured: public.t"),
        (replace(NSW, last_validation="not consistent at 0/1"), "cdc-replay refresh nsw --reconcile"),
    ],
)
def test_subscription(subscription: SubscriptionStatus, remedy: str) -> None:
    assert remedy in told(SHOP, subscription)


def test_parked_table_continues_by_resume_or_by_a_copy() -> None:
    state = replace(NSW, state=SubscriptionState.PARKED)
    refused = TableStatus("nsw", "s.t", "parked: x", sync=TableSync.PARKED, parked_transaction=Lsn(16))
    assert "`cdc-replay resume nsw --table s.t --skip 0/10`" in told(SHOP, state, refused)
    rewritten = replace(refused, parked_transaction=None)
    assert "`cdc-replay snapshot nsw --table s.t`" in told(SHOP, state, rewritten)
    own_remedy = replace(refused, state="lost\nHINT: Run `cdc-replay resume nsw --accept-null`.")
    assert told(SHOP, state, own_remedy).endswith("lost Run `cdc-replay resume nsw --accept-null`.")


@pytest.mark.parametrize(
    ("max_lag", "max_age", "wrong"),
    [
        ("9m", None, "it lags by 10 min, at most 9 min are allowed"),
        ("11min", None, ""),
        ("1MB", None, "it lags by 2048 kB, at most 1024 kB are allowed"),
        ("2MB", None, ""),
        (None, "23h", "it was validated 24 h ago, at most 23 h are allowed"),
        (None, "1d", ""),
    ],
)
def test_bounds(max_lag: str | None, max_age: str | None, wrong: str) -> None:
    found = told(bounds=Bounds.parse(max_lag, max_age))
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_what_is_not_known_exceeds_each_bound() -> None:
    unknown = replace(NSW, lag_seconds=None, lag_bytes=None, last_validation_at=None)
    bounds = Bounds(dt.timedelta(hours=1), 1 << 30, dt.timedelta(days=1))
    found = told(SHOP, unknown, bounds=bounds)
    assert found.count("the lag is unknown") == 2
    assert "it was never validated" in found


@pytest.mark.parametrize(("max_lag", "max_age"), [("soon", None), (None, "1GB"), ("1.5h", None)])
def test_bounds_of_another_form_are_refused(max_lag: str | None, max_age: str | None) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        Bounds.parse(max_lag, max_age)
