"""Answers of servers kept for a later command: private, without values of rows, never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_replay.last_answers import Value, read_answers, state_file, write_answers
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.status import (
    LogRange,
    PublisherState,
    PublisherStatus,
    SubscriberStatus,
    SubscriptionState,
    SubscriptionStatus,
    TableStatus,
)

SECRET = "Key (name)=(Mary)"
ANSWERS: dict[str, tuple[Value, float]] = {
    "publisher shop": (PublisherStatus("shop", "slot", "reserved", Lsn(7), state=PublisherState.READY), 10.0),
    "log shop": (LogRange(Lsn(1), Lsn(7)), 10.0),
    "subscription nsw": (
        SubscriberStatus(
            SubscriptionStatus(
                "nsw", "shop", Lsn(5), 2, 3.0, f"failed: {SECRET}", None, f"parked at 0/5: {SECRET}", None,
                SECRET, state=SubscriptionState.PARKED, parked=SECRET,
            ),
            (TableStatus("nsw", "public.t", f"parked at 0/5: {SECRET}", SECRET),),
        ),
        20.0,
    ),
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = state_file(Path("/etc/cdc_replay.yaml"))
    assert file.parent == tmp_path / "cdc_replay"
    return file


def test_answers_are_read_with_their_kind_and_age(file: Path) -> None:
    write_answers(file, ANSWERS)
    kept = read_answers(file)
    for key in ("publisher shop", "log shop"):
        assert kept[key][0] == ANSWERS[key][0]
        assert kept[key][1] >= 10.0
    subscriber = kept["subscription nsw"][0]
    assert isinstance(subscriber, SubscriberStatus)
    assert (subscriber.subscription.applied_lsn, subscriber.subscription.state) == (
        Lsn(5),
        SubscriptionState.PARKED,
    )
    assert [table.table for table in subscriber.tables] == ["public.t"]


def test_file_is_private_and_has_no_values_of_rows(file: Path) -> None:
    write_answers(file, ANSWERS)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert "Mary" not in file.read_text()
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b"\xff"])
def test_damaged_file_has_no_answers(file: Path, content: bytes) -> None:
    assert read_answers(file) == {}
    file.parent.mkdir()
    file.write_bytes(content)
    assert read_answers(file) == {}


def test_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_answers(tmp_path / "file" / "cdc_replay" / "status.json", ANSWERS)
