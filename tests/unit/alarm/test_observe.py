"""What a status is as alarms, and what it leaves unknown."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest

from cdc_replay.alarm.observe import AlarmBounds, observe
from cdc_replay.model.alarm import Alarm, AlarmKey, Observed, Severity
from cdc_replay.model.check import Check, Verdict
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.problems import Bounds
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

NOW = dt.datetime(2026, 1, 10, tzinfo=dt.UTC)
SHOP = PublisherStatus("shop", "slot_of_shop", "reserved", Lsn(9), Lsn(1), Lsn(9), state=PublisherState.READY)
NSW = SubscriptionStatus(
    "nsw", "shop", Lsn(9), lag_bytes=0, lag_seconds=0.0, last_replay="succeeded at 0/9",
    last_validation="consistent at 0/9", last_validation_at="2026-01-09T12:00:00+00:00",
    proven_at="2026-01-09T12:00:00+00:00",
    state=SubscriptionState.READY,
)  # fmt: skip
TIGHT = AlarmBounds({"nsw": Bounds(dt.timedelta(minutes=1), 100, dt.timedelta(days=1))}, {"shop": 1000})


def look(
    publisher: PublisherStatus = SHOP,
    subscription: SubscriptionStatus = NSW,
    tables: tuple[TableStatus, ...] = (),
    checks: dict[str, Check] | None = None,
) -> Observed:
    return observe(StatusResult((publisher,), (subscription,), tables), TIGHT, NOW, checks)


def kinds(observed: Observed) -> list[tuple[str, Severity]]:
    return [(alarm.key.kind, alarm.severity) for alarm in observed.alarms]


def is_unknown(observed: Observed, subject: str, kind: str) -> bool:
    return observed.is_unknown(AlarmKey(subject, kind))


def test_a_good_status_has_no_alarm_and_nothing_unknown() -> None:
    assert look() == Observed(())


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (PublisherState.DOWN, "no answer"),
        (PublisherState.LOG_UNREADABLE, "log not readable"),
        (PublisherState.NO_SLOT, "slot"),
        (PublisherState.LOST, "slot"),
    ],
)
def test_a_publisher_without_its_slot_hides_what_it_retains(state: PublisherState, kind: str) -> None:
    seen = look(replace(SHOP, state=state, error="broken\nHINT: mend it", retained_wal_bytes=5000))
    assert kinds(seen) == [(kind, Severity.CRITICAL)]
    assert is_unknown(seen, "publisher shop", "retained WAL")
    is_readable = state in {PublisherState.NO_SLOT, PublisherState.LOST}
    assert is_unknown(seen, "subscription nsw", "lag") is not is_readable


def test_a_publisher_that_is_not_set_up_is_no_alarm() -> None:
    assert look(PublisherStatus("shop", "s", "missing", state=PublisherState.NO_SLOT)).alarms == ()


def test_retained_wal_is_critical_when_the_slot_is_near_lost() -> None:
    over = replace(SHOP, retained_wal_bytes=1001)
    assert kinds(look(over)) == [("retained WAL", Severity.WARNING)]
    assert kinds(look(replace(over, retained_wal_bytes=1000))) == []
    near = look(replace(over, state=PublisherState.NEAR_LOST))
    assert kinds(near) == [("retained WAL", Severity.CRITICAL)]
    assert near.alarms[0].message.endswith("at most 1000 bytes are allowed; it is near lost")


def test_wal_beyond_the_log_is_an_alarm_if_no_capture_comes_for_longer_than_a_lag_may() -> None:
    behind = replace(SHOP, position=Lsn(10))
    (alarm,) = look(behind).alarms
    assert alarm.key == AlarmKey("publisher shop", "no capture", "0/9")
    assert (alarm.severity, alarm.told_after_seconds) == (Severity.CRITICAL, 11 * 60.0)
    statuses = StatusResult((behind,), (NSW, replace(NSW, subscription="vic")), ())
    bounds = {"nsw": Bounds(dt.timedelta(minutes=5)), "vic": Bounds(dt.timedelta(minutes=2))}
    (alarm,) = observe(statuses, AlarmBounds(bounds), NOW).alarms
    assert alarm.told_after_seconds == 12 * 60.0
    assert observe(statuses, AlarmBounds({"nsw": Bounds(lag_bytes=9)}), NOW).alarms == ()
    for state in (PublisherState.DOWN, PublisherState.LOG_UNREADABLE, PublisherState.LOST):
        assert is_unknown(look(replace(behind, state=state)), "publisher shop", "no capture")


def test_a_log_without_room_or_right_to_write() -> None:
    full = Check("publisher shop", Verdict.FAILED, "change log /log is writable, 90 MB free", "Free some.")
    (alarm,) = look(checks={"shop": full}).alarms
    assert (alarm.key.kind, alarm.message) == (
        "log not writable",
        "change log /log has no room left: 90 MB free",
    )
    assert look(checks={"shop": replace(full, verdict=Verdict.WARNING)}).alarms == ()


def test_lag_and_proof_are_critical_beyond_four_times_the_bound() -> None:
    assert kinds(look(subscription=replace(NSW, lag_seconds=61.0))) == [("lag", Severity.WARNING)]
    assert kinds(look(subscription=replace(NSW, lag_bytes=401))) == [("lag", Severity.CRITICAL)]
    for days, severity in (("08", Severity.WARNING), ("02", Severity.CRITICAL)):
        old = replace(NSW, proven_at=f"2026-01-{days}T00:00:00+00:00")
        assert kinds(look(subscription=old)) == [("proof age", severity)]
    never = replace(NSW, last_validation=None, last_validation_at=None, proven_at=None)
    assert kinds(look(subscription=never)) == [("proof age", Severity.WARNING)]


def test_a_difference_stays_an_alarm_until_its_rows_are_compared_again() -> None:
    difference = [("not consistent", Severity.CRITICAL)]
    wrong = replace(NSW, last_validation_outcome=ValidationOutcome.NOT_CONSISTENT, proven_at=None)
    assert kinds(look(subscription=wrong)) == difference
    assert is_unknown(look(subscription=wrong), "subscription nsw", "proof age")
    seen = look(tables=(TableStatus("nsw", "public.t", "ready", differing_buckets=1),))
    assert kinds(seen) == difference
    assert seen.alarms[0].message == "an earlier validation found a difference"


def test_both_lags_are_one_alarm_with_the_worse_severity() -> None:
    """Its key is the same: the memory would keep the last one only."""
    seen = look(subscription=replace(NSW, lag_seconds=61.0, lag_bytes=401))
    assert kinds(seen) == [("lag", Severity.CRITICAL)]


def test_an_unknown_lag_is_unknown() -> None:
    seen = look(subscription=replace(NSW, lag_seconds=None))
    assert (seen.alarms, is_unknown(seen, "subscription nsw", "lag")) == ((), True)


@pytest.mark.parametrize(
    "kind", ["parked", "lag", "proof age", "replay failed", "not consistent", "not captured"]
)
def test_a_subscriber_that_is_down_hides_everything_else(kind: str) -> None:
    seen = look(subscription=replace(NSW, state=SubscriptionState.DOWN, error="no route", parked="parked"))
    assert kinds(seen) == [("no answer", Severity.CRITICAL)]
    assert is_unknown(seen, "subscription nsw", kind)


def test_a_parked_subscription_hides_its_lag() -> None:
    error = "parked at 0/9: Mary\nDETAIL: Key (name)=(Mary)\nHINT: Delete it."
    parked = replace(
        NSW, state=SubscriptionState.PARKED, parked=error, error=error, parked_transaction=Lsn(10),
        last_replay="failed: Mary", last_replay_failed=True, lag_seconds=1e6,
    )  # fmt: skip
    seen = look(subscription=parked)
    (alarm,) = seen.alarms
    assert (alarm.key.kind, alarm.severity, alarm.lsn) == ("parked", Severity.CRITICAL, Lsn(10))
    assert "Mary" not in str(alarm)
    assert alarm.hint.startswith("Delete it. Then `cdc-replay replay nsw`")
    assert is_unknown(seen, "subscription nsw", "lag")


@pytest.mark.parametrize("error", ["x\nHINT:  Mary", "x: Mary", "HINT: Mary", "x\nHINT: Mary\nHINT:  Mary"])
def test_the_hint_of_a_server_is_left_out(error: str) -> None:
    failed = replace(NSW, last_replay=f"failed: {error}", last_replay_failed=True)
    seen = look(subscription=replace(failed, state=SubscriptionState.FAILED))
    (alarm,) = seen.alarms
    assert (alarm.key.kind, alarm.hint) == ("replay failed", "Run `cdc-replay replay nsw`.")
    assert "Mary" not in str(alarm)


def test_tables_that_are_parked_or_dropped_have_their_own_alarms() -> None:
    tables = (
        TableStatus(
            "nsw", "public.t", "parked at 0/9: Mary", sync=TableSync.PARKED, parked_transaction=Lsn(10)
        ),
        TableStatus("nsw", "public.u", "dropped on the subscriber", sync=TableSync.DROPPED),
        TableStatus("nsw", "public.v", "replayed up to 0/9"),
        TableStatus(
            "other", "public.w", "parked at 0/9: x", sync=TableSync.PARKED, parked_transaction=Lsn(10)
        ),
    )
    seen = look(subscription=replace(NSW, state=SubscriptionState.PARKED), tables=tables)
    assert [(alarm.key.kind, alarm.key.part) for alarm in seen.alarms] == [
        ("parked", "public.t"),
        ("table dropped", "public.u"),
    ]
    assert "Mary" not in str(seen)


def test_changes_that_are_not_captured() -> None:
    seen: tuple[Alarm, ...] = look(subscription=replace(NSW, error="changes of public.t are missing")).alarms
    assert [alarm.key.kind for alarm in seen] == ["not captured"]
