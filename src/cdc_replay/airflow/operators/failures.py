"""What a task's exception says, and whether the task is retried.

A permanent error (`Retry.NEVER`) fails the task at once; other errors, also those of other packages, are
retried with growing delays. A Spark application reports the kind by its exit code
(`cdc_replay.spark.exit_codes`) and the reason as its outcome (`cdc_replay.spark.job_outcome`). Both arrive
only in deploy mode client; without the code every failure is retried.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from typing import Final

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from cdc_replay.errors import CdcReplayError, Retry
from cdc_replay.spark.exit_codes import ExitCode
from cdc_replay.spark.job_outcome import JobOutcome

EXIT_CODE: Final = re.compile(r"Error code is: (-?\d+)\.(.*)", re.DOTALL)
"""In the error of the Spark provider's hook, which has the exit code of `spark-submit` nowhere else. The end
of the output follows."""

SIGNALLED: Final = 128
"""An exit code above is this and the number of a signal."""


@contextlib.contextmanager
def fail_fast_on_permanent_error() -> Iterator[None]:
    """Fail the task without retries on a permanent error."""
    try:
        yield
    except CdcReplayError as error:
        if error.retry is Retry.NEVER:
            raise AirflowFailException(str(error)) from error
        raise


def job_failure(error: AirflowException, outcome: JobOutcome) -> AirflowException | None:
    """The exception of a task whose application failed, for the hook's, which starts with the command.

    An alert carries its text, so that begins with the reason. None if the hook's error has another cause.
    """
    matched = EXIT_CODE.search(str(error))
    if matched is None:
        return None
    code, output = int(matched[1]), matched[2]
    text = outcome.reason or f"the Spark application ended with {_describe(code)}{output}"
    return AirflowFailException(text) if code == ExitCode.NEVER else AirflowException(text)


def _describe(code: int) -> str:
    signal_number = -code if code < 0 else code - SIGNALLED
    try:
        return f"exit code {code} ({signal.Signals(signal_number).name})"
    except ValueError:
        return f"exit code {code}"
