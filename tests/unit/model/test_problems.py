"""What counts as wrong, and the command that puts it right."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import pytest

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.problems import Bounds, find_problems
from cdc_replay.model.results import ValidationOutcome
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
    last_validation_at="2026-11-25T10:00:00+00:00", proven_at="2026-11-24T12:00:00+00:00",
)  # fmt: skip


def validated(outcome: ValidationOutcome) -> SubscriptionStatus:
    return replace(NSW, last_validation=f"{outcome.value} at 0/1", last_validation_outcome=outcome)


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
            replace(SHOP, log_end=None),
            "its change log is missing Run `cdc-replay setup shop`, which creates a first one",
        ),
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
        (validated(ValidationOutcome.NOT_CONSISTENT), "cdc-replay refresh nsw --reconcile"),
        (validated(ValidationOutcome.ERROR), "the last validation: error at 0/1"),
    ],
)
def test_subscription(subscription: SubscriptionStatus, remedy: str) -> None:
    assert remedy in told(SHOP, subscription)


@pytest.mark.parametrize(("minutes", "is_wrong"), [(14, False), (16, True)])
def test_wal_that_nothing_captures_is_wrong_after_the_bound_of_a_lag_and_a_pause(
    minutes: int, is_wrong: bool
) -> None:
    publisher = replace(SHOP, uncaptured_seconds=60.0 * minutes)
    message = "publisher shop: nothing was captured for 16 min, and it has written WAL since Run `cdc-replay"
    assert told(publisher, bounds=Bounds.of_lag("5min")).startswith(message) is is_wrong
    assert "captured" not in told(publisher)


def test_parked_table_continues_by_resume() -> None:
    state = replace(NSW, state=SubscriptionState.PARKED)
    refused = TableStatus("nsw", "s.t", "parked: x", sync=TableSync.PARKED, parked_transaction=Lsn(16))
    assert "`cdc-replay resume nsw --table s.t --skip 0/10`" in told(SHOP, state, refused)
    own_remedy = replace(refused, state="lost\nHINT: Run `cdc-replay resume nsw --accept-null`.")
    assert told(SHOP, state, own_remedy).endswith("lost Run `cdc-replay resume nsw --accept-null`.")


@pytest.mark.parametrize(
    ("bounds", "wrong"),
    [
        (Bounds.of_lag("9m"), "it lags by 10 min, at most 9 min are allowed"),
        (Bounds.of_lag("11min"), ""),
        (Bounds.of_lag("1MB"), "it lags by 2048 kB, at most 1024 kB are allowed"),
        (Bounds.of_lag("2MB"), ""),
        (Bounds(proof_age=dt.timedelta(hours=23)), "its proof is 24 h old, at most 23 h are allowed"),
        (Bounds(proof_age=dt.timedelta(days=1)), ""),
    ],
)
def test_bounds(bounds: Bounds, wrong: str) -> None:
    found = told(bounds=bounds)
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_what_is_not_known_exceeds_each_bound() -> None:
    unknown = replace(NSW, lag_seconds=None, lag_bytes=None, last_validation_at=None, proven_at=None)
    bounds = Bounds(dt.timedelta(hours=1), 1 << 30, dt.timedelta(days=1))
    found = told(SHOP, unknown, bounds=bounds)
    assert found.count("the lag is unknown") == 2
    assert "it was never validated" in found


def test_a_validation_of_a_part_is_no_proof_of_the_rest() -> None:
    recent = replace(NSW, proven_at=None, last_validation="no difference in what was compared at 0/1")
    assert "not all of its rows are proven" in told(
        SHOP, recent, bounds=Bounds(proof_age=dt.timedelta(days=1))
    )


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ({"proven_at": "2026-11-25T11:00:00+00:00"}, ""),
        ({"proven_at": "2026-11-23T12:00:00+00:00"}, "table public.t: its proof is 2 days old, at most 24 h"),
        ({"proof": "not proven: 9 of 256 buckets were never compared"}, "public.t: not proven: 9 of 256"),
        ({}, "table public.t: never validated, at most 24 h are allowed"),
    ],
)
def test_tables_have_bounds_of_their_own(table: dict[str, Any], wrong: str) -> None:
    status = replace(TableStatus("nsw", "public.t", "replayed"), max_proof_age_seconds=86400.0, **table)
    found = told(SHOP, NSW, status)
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_a_difference_stays_wrong_although_the_last_validation_looked_elsewhere() -> None:
    table = TableStatus(
        "nsw", "public.t", "replayed", proof="not proven: 2 of 256 buckets differ", differing_buckets=2
    )
    recent = replace(NSW, last_validation="no difference in what was compared at 0/1")
    assert "2 of 256 buckets differ" in told(SHOP, recent, table)
    assert "--tables public.t --repair" in told(SHOP, recent, table)


@pytest.mark.parametrize("text", ["soon", "1.5h", "5"])
def test_a_lag_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        Bounds.of_lag(text)
