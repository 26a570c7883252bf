"""Ages of a subscription's lag and proof."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from cdc_replay.model.lsn import Lsn
from cdc_replay.replay.progress import SubscriptionProgress


def an_hour_ago() -> datetime:
    return datetime.now(UTC) - timedelta(hours=1)


def test_nothing_missing_is_no_lag() -> None:
    assert SubscriptionProgress(Lsn(5), None, None).lag_seconds == 0


def test_lag_and_proof_grow_with_time() -> None:
    progress = SubscriptionProgress(Lsn(5), an_hour_ago(), an_hour_ago())
    assert progress.lag_seconds == pytest.approx(3600, abs=600)
    assert progress.proof_age_seconds == pytest.approx(3600, abs=600)


def test_a_subscription_that_is_not_copied_has_no_lag_yet() -> None:
    progress = SubscriptionProgress(None, an_hour_ago(), None)
    assert (progress.lag_seconds, progress.proof_age_seconds) == (None, None)


def test_a_clock_that_was_set_back_makes_no_negative_age() -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    assert SubscriptionProgress(Lsn(5), later, later).lag_seconds == 0
