"""What an application tells the task that started it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from cdc_replay.errors import ServerUnavailable
from cdc_replay.jobs.application import run
from cdc_replay.model.results import SnapshotResult
from cdc_replay.spark.job_outcome import OUTCOME_FILE, JobOutcome, read_outcome, write_outcome


def failed(name: str, retry: str = "later") -> dict[str, str]:
    return {"subscription": name, "error": f"{name} does not answer", "retry": retry}


def test_results_and_errors_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "outcome.json"
    monkeypatch.setenv(OUTCOME_FILE, str(file))
    for outcome in (
        JobOutcome(({"subscription": "nsw"},)),
        JobOutcome(error="ünlucky\nHINT: wait", application="app-1"),
    ):
        write_outcome(outcome)
        assert read_outcome(file) == outcome


def test_nothing_is_written_where_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OUTCOME_FILE, raising=False)
    write_outcome(JobOutcome(error="lost"))


@pytest.mark.parametrize("content", [None, "", '{"results": ['])
def test_a_killed_application_has_no_outcome(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "outcome.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    assert read_outcome(file) == JobOutcome()
    assert read_outcome(file).reason is None


def test_the_reason_names_the_subscriptions_that_a_retry_may_help() -> None:
    outcome = JobOutcome((failed("nsw"), failed("act", "never"), {"subscription": "vic", "error": None}))
    assert outcome.reason == 'subscription "nsw": nsw does not answer'


def test_a_reason_is_short() -> None:
    many = JobOutcome(tuple(failed(f"s{number}") for number in range(200))).reason
    assert many is not None
    assert len(many.splitlines()) == 6
    assert many.endswith("and 195 more")
    assert len(JobOutcome(error="x" * 100_000).reason or "") == 2000


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ServerUnavailable("no answer", hint="wait"), "no answer\nHINT: wait"),
        (ValueError("broken"), "ValueError: broken"),
    ],
)
def test_an_application_writes_why_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    file = tmp_path / "outcome.json"
    monkeypatch.setenv(OUTCOME_FILE, str(file))
    monkeypatch.setattr("sys.argv", ["job"])
    for name in ("set_private_umask", "end_on_sigterm", "end_with_parent"):
        monkeypatch.setattr(f"cdc_replay.jobs.application.{name}", lambda: None)

    def fail(_arguments: argparse.Namespace) -> tuple[SnapshotResult, ...]:
        raise error

    with pytest.raises((SystemExit, ValueError)):
        run(argparse.ArgumentParser(), fail)
    assert read_outcome(file).reason == reason


def test_an_application_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "outcome.json"
    monkeypatch.setenv(OUTCOME_FILE, str(file))
    monkeypatch.setattr("sys.argv", ["job"])
    for name in ("set_private_umask", "end_on_sigterm", "end_with_parent"):
        monkeypatch.setattr(f"cdc_replay.jobs.application.{name}", lambda: None)
    run(argparse.ArgumentParser(), lambda _: (SnapshotResult.nothing("nsw"),))
    (result,) = read_outcome(file).results
    assert result["subscription"] == "nsw"
