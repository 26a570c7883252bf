"""Errors of Spark jobs as ours.

An exception that an executor raises reaches the driver as text: its type and cause are lost. Our errors print
their class's name and everything that they have to say, so the driver can raise them again.

A JVM that is gone says nothing any more: the call that it leaves unanswered fails without a cause, those
after it find nobody to connect to. Other errors of sockets do not come out of a Spark job: what servers and
stores are asked is told by errors of their own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException

from cdc_replay import errors
from cdc_replay.errors import CdcReplayError, Retry

_OURS: Final = re.compile(
    r"^cdc_replay\.errors\.(?P<name>\w+): (?P<message>.*?)"
    r"(?:\nDETAIL: (?P<detail>.*?))?(?:\nHINT: (?P<hint>.*?))?(?=\n\n|\n\s*$|\Z|\nDriver stacktrace|\n\tat )",
    re.DOTALL | re.MULTILINE,
)
_RAISED_IN_SQL: Final = re.compile(
    r"\[USER_RAISED_EXCEPTION\] (?P<message>.*?)(?: SQLSTATE: \w+)?$", re.MULTILINE
)


class SparkJobFailed(CdcReplayError):
    """A Spark job ended with an error that is not one of ours.

    It may be an executor that was lost, or memory that another job took.
    """

    retry = Retry.LATER


class SparkEnded(SparkJobFailed):
    """The JVM is gone while a job ran, or before it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"Spark ended: {what} was not completed",
            detail="Its JVM was killed, or has crashed. Most often memory has run out.",
            hint="Ask the kernel (`dmesg`) or the container's engine whether it was killed for want of"
            " memory. Give it more, or let Spark take less (`spark.driver.memory`, fewer cores); then run the"
            " command again: what is not committed is done anew.",
        )


@contextlib.contextmanager
def translated_spark_errors(what: str) -> Iterator[None]:
    """Raise what an executor raised; `what` names the job for errors that are not ours.

    Raises:
        CdcReplayError: the executor's own error, or `SparkJobFailed`.
    """
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError, EOFError) as error:
        raise SparkEnded(what) if _has_ended(error) else _translate(what, str(error)) from error


def _has_ended(error: Exception) -> bool:
    """Whether there is no JVM to say what happened; where there is one, a failed call has its trace."""
    if type(error) is Py4JError:
        return "Trace:" not in str(error)
    return isinstance(error, (Py4JNetworkError, ConnectionError, EOFError))


def _translate(what: str, text: str) -> CdcReplayError:
    if found := _OURS.search(text):
        kind = getattr(errors, found["name"], SparkJobFailed)
        return kind(found["message"].strip(), detail=found["detail"], hint=found["hint"])
    if found := _RAISED_IN_SQL.search(text):
        return errors.SubscriberNotReady(found["message"])
    return SparkJobFailed(f"{what} failed in Spark", detail=text.strip()[:2000])
