"""Errors of Spark jobs as ours.

An exception of an executor reaches the driver as text, without its type, after the texts of its causes. Our
errors print their class name, detail and hint, so the driver can raise them again. Any other text may have
values of rows that look like one of ours: so a task raises what is not ours as `TaskFailed`
(`raise_only_ours`), and what is raised last counts.

When the JVM dies, the pending call fails without a cause, and later calls cannot connect. A Spark Connect
server that has gone is unavailable to gRPC; one that was started again does not know the session. Socket
errors of servers and stores do not get here: they have error classes of their own.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException

from cdc_replay import errors
from cdc_replay.errors import CdcReplayError, Retry, split_parts

if TYPE_CHECKING:
    import pyarrow as pa

_OURS: Final = re.compile(
    r"^cdc_replay\.(?:spark\.)?errors\.(?P<name>\w+): (?P<text>.*(?:\n(?:    |DETAIL: |HINT: ).*)*)",
    re.MULTILINE,
)
"""Every line of ours after the first is indented, or begins a part (`cdc_replay.errors`)."""

_LONGEST_DETAIL: Final = 2000
"""Characters of an error that is not ours."""

_RAISED_IN_SQL: Final = re.compile(
    r"\[USER_RAISED_EXCEPTION\] (?P<message>.*?)(?: SQLSTATE: \w+)?$", re.MULTILINE
)


_Batches = TypeVar("_Batches")


class TaskFailed(CdcReplayError):
    """A task of a Spark job ended with an error that is not ours; the driver raises `SparkJobFailed`."""

    retry = Retry.LATER


class SparkJobFailed(CdcReplayError):
    """A Spark job ended with an error that is not ours, such as a lost executor or a lack of memory."""

    retry = Retry.LATER


class SparkEnded(SparkJobFailed):
    """The JVM died while a job ran, or before it."""

    def __init__(self, action: str) -> None:
        super().__init__(
            f"Spark ended: {action} was not completed",
            detail="Its JVM was killed or crashed, most often because memory ran out.",
            hint="Check the kernel log (`dmesg`) or the container engine for an out-of-memory kill. Add"
            " memory, or let Spark use less (`spark.driver.memory`, fewer cores), then run the command again:"
            " uncommitted work is repeated.",
        )


class SparkServerUnavailable(SparkJobFailed):
    """The Spark Connect server does not answer, or was started again."""

    def __init__(self, action: str) -> None:
        super().__init__(
            f"the Spark Connect server is unavailable: {action} was not completed",
            detail="It does not answer, or has ended the session, as when it was started again.",
            hint="Start it (docs/how-to/warm-spark.md), check host and port of the connection, and whether it"
            " ended for lack of memory. Then run the command again: uncommitted work is repeated.",
        )


class SparkServerRefused(SparkJobFailed):
    """The Spark Connect server does not accept the connection's token."""

    retry = Retry.NEVER

    def __init__(self, action: str) -> None:
        super().__init__(
            f"the Spark Connect server refused the connection: {action} was not completed",
            hint="The connection's password must be the server's token (docs/security.md).",
        )


def raise_only_ours(
    function: Callable[[_Batches], Iterator[pa.RecordBatch]],
) -> Callable[[_Batches], Iterator[pa.RecordBatch]]:
    """The function of a task, with a text for every error that the driver reads as what it is.

    Raises:
        CdcReplayError: what the function raises of ours, else `TaskFailed`.
    """

    @functools.wraps(function)
    def run(batches: _Batches) -> Iterator[pa.RecordBatch]:
        try:
            yield from function(batches)
        except CdcReplayError:
            raise
        except Exception as error:
            raise TaskFailed(f"{type(error).__name__}: {error}") from error

    return run


@contextlib.contextmanager
def translated_spark_errors(action: str) -> Iterator[None]:
    """Raise the executor's own error; `action` names the job in errors that are not ours.

    Raises:
        CdcReplayError: the executor's own error, or `SparkJobFailed`.
    """
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError, EOFError) as error:
        if isinstance(error, PySparkException) and (of_server := _of_server(error, action)) is not None:
            raise of_server from error
        raise SparkEnded(action) if _has_ended(error) else _translate(action, str(error)) from error


def _of_server(error: PySparkException, action: str) -> SparkJobFailed | None:
    """What a Spark Connect client reports about its server, rather than about a job."""
    # Its exceptions import gRPC, which other sessions do not need.
    status = getattr(error, "getGrpcStatusCode", None)
    name = "" if status is None else getattr(status(), "name", "")
    if name == "UNAUTHENTICATED":
        return SparkServerRefused(action)
    if name == "UNAVAILABLE" or (error.getCondition() or "").startswith("INVALID_HANDLE."):
        return SparkServerUnavailable(action)
    return None


def _has_ended(error: Exception) -> bool:
    """Whether the JVM is gone: a living one adds its trace to a failed call."""
    if type(error) is Py4JError:
        return "Trace:" not in str(error)
    return isinstance(error, (Py4JNetworkError, ConnectionError, EOFError))


def _translate(action: str, text: str) -> CdcReplayError:
    if printed := list(_OURS.finditer(text)):
        name = printed[-1]["name"]
        message, detail, hint = split_parts(printed[-1]["text"])
        if name == TaskFailed.__name__:
            return SparkJobFailed(f"{action} failed in Spark", detail=message[:_LONGEST_DETAIL])
        kind = getattr(errors, name, SparkJobFailed)
        return kind(message, detail=detail or None, hint=hint or None)
    if match := _RAISED_IN_SQL.search(text):
        return errors.SubscriberNotReady(match["message"])
    java = "Run `cdc-replay doctor`, which checks Java." if "[JAVA_GATEWAY_EXITED]" in text else None
    return SparkJobFailed(f"{action} failed in Spark", detail=text.strip()[:_LONGEST_DETAIL], hint=java)
