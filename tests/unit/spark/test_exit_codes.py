"""Exit codes of jobs."""

from __future__ import annotations

import pytest

from cdc_replay.errors import CdcReplayError, Retry, ServerUnavailable, TargetMismatch, retry_of
from cdc_replay.spark.errors import SparkJobFailed
from cdc_replay.spark.exit_codes import ExitCode, errors_as_exit_codes


@pytest.mark.parametrize(
    ("error", "code"), [(TargetMismatch("no column", hint="add it"), 65), (ServerUnavailable("gone"), 75)]
)
def test_exit_code_is_that_of_the_class_and_the_error_is_printed(
    error: CdcReplayError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, errors_as_exit_codes():
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err == f"{error}\n"


def test_foreign_error_is_left_to_python() -> None:
    with pytest.raises(ZeroDivisionError), errors_as_exit_codes():
        raise ZeroDivisionError


@pytest.mark.parametrize("error", [ServerUnavailable("gone"), ZeroDivisionError()], ids=["ours", "another"])
def test_error_after_sigterm_is_no_failure(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_replay.spark.exit_codes.is_asked_to_end", lambda: True)
    with pytest.raises(SystemExit) as ended, errors_as_exit_codes():
        raise error
    assert (ended.value.code, capsys.readouterr().err) == (143, "")


def test_each_retry_value_has_an_exit_code() -> None:
    assert {code.name for code in ExitCode} == {retry.name for retry in Retry}


def test_unknown_error_is_retried_later() -> None:
    assert retry_of(ZeroDivisionError()) is Retry.LATER
    assert retry_of(SparkJobFailed("an executor was lost")) is Retry.LATER
    assert retry_of(TargetMismatch("no column")) is Retry.NEVER
