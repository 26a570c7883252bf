"""Errors of Spark jobs as ours.

An exception that an executor raises reaches the driver as text: its type and cause are lost. Our errors print
their class's name and everything that they have to say, so the driver can raise them again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from py4j.protocol import Py4JError
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


@contextlib.contextmanager
def translated_spark_errors(what: str) -> Iterator[None]:
    """Raise what an executor raised; `what` names the job for errors that are not ours.

    Raises:
        CdcReplayError: the executor's own error, or `SparkJobFailed`.
    """
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise _translate(what, str(error)) from error


def _translate(what: str, text: str) -> CdcReplayError:
    if found := _OURS.search(text):
        kind = getattr(errors, found["name"], SparkJobFailed)
        return kind(found["message"].strip(), detail=found["detail"], hint=found["hint"])
    if found := _RAISED_IN_SQL.search(text):
        return errors.SubscriberNotReady(found["message"])
    return SparkJobFailed(f"{what} failed in Spark", detail=text.strip()[:2000])
