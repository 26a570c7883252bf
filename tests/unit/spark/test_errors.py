"""Errors of Spark as our errors."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pytest
from grpc import StatusCode
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.connect import SparkConnectGrpcException

from cdc_replay.errors import Retry, TargetMismatch
from cdc_replay.spark.errors import (
    SparkEnded,
    SparkJobFailed,
    SparkServerRefused,
    SparkServerUnavailable,
    TaskFailed,
    raise_only_ours,
    translated_spark_errors,
)

if TYPE_CHECKING:
    import pyarrow as pa


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "Connection refused"),
        ConnectionResetError(104, "Connection reset by peer"),
        EOFError(),
        Py4JNetworkError("Answer from Java side is empty"),
        Py4JError("An error occurred while calling o41.collectToPython"),
    ],
)
def test_dead_jvm_raises_spark_ended(error: Exception) -> None:
    with pytest.raises(SparkEnded) as raised, translated_spark_errors('replay of subscription "s"'):
        raise error
    assert str(raised.value).startswith('Spark ended: replay of subscription "s"')
    assert "memory" in str(raised.value)
    assert "Errno" not in str(raised.value)
    assert raised.value.retry is Retry.LATER


@pytest.mark.parametrize(
    "error",
    [
        PySparkException("[JOB_FAILED] lost"),
        Py4JError(
            "An error occurred while calling o1.f. Trace:\npy4j.Py4JException: Method f does not exist"
        ),
    ],
)
def test_error_of_the_jvm_raises_spark_job_failed(error: Exception) -> None:
    with pytest.raises(SparkJobFailed) as raised, translated_spark_errors("replay"):
        raise error
    assert not isinstance(raised.value, SparkEnded)


def test_our_error_is_raised_again() -> None:
    text = "job failed\ncdc_replay.errors.TargetMismatch: no column\nHINT: add it\n\n\tat org.apache"
    with pytest.raises(TargetMismatch, match="no column"), translated_spark_errors("replay"):
        raise PySparkException(text)


FORGED = "no\n\ncdc_replay.errors.SlotLost: lost\nHINT: curl\n\n\tat org.apache"


def printed(error: Exception) -> str:
    """As a Python worker prints what its task has raised, within the message of Spark."""
    return f"Job aborted\n{''.join(traceback.format_exception(error))}\n\tat org.apache.spark.Python"


def test_what_a_task_has_raised_last_is_raised_again() -> None:
    hostile = TargetMismatch(FORGED, detail=FORGED, hint="add it")
    hostile.__cause__ = ValueError(FORGED)
    with pytest.raises(TargetMismatch) as raised, translated_spark_errors("replay"):
        raise PySparkException(printed(hostile))
    assert (raised.value.message, raised.value.detail, raised.value.hint) == (FORGED, FORGED, "add it")


def test_task_that_raises_what_is_not_ours_raises_none_of_ours() -> None:
    def fail(_: int) -> pa.RecordBatch:
        raise ValueError(FORGED)

    def task(batches: Iterable[int]) -> Iterator[pa.RecordBatch]:
        yield from map(fail, batches)

    with pytest.raises(TaskFailed) as failed:
        list(raise_only_ours(task)([1]))
    with pytest.raises(SparkJobFailed, match="failed in Spark") as raised, translated_spark_errors("replay"):
        raise PySparkException(printed(failed.value))
    assert (type(raised.value), raised.value.hint) == (SparkJobFailed, None)
    assert raised.value.detail == f"ValueError: {FORGED}"


@pytest.mark.parametrize(
    ("error", "expected", "retry"),
    [
        (
            SparkConnectGrpcException("refused", grpc_status_code=StatusCode.UNAVAILABLE),
            SparkServerUnavailable,
            Retry.LATER,
        ),
        (
            # A server that was started again.
            SparkConnectGrpcException(
                "gone", errorClass="INVALID_HANDLE.SESSION_NOT_FOUND", messageParameters={"handle": "1"}
            ),
            SparkServerUnavailable,
            Retry.LATER,
        ),
        (
            SparkConnectGrpcException("token", grpc_status_code=StatusCode.UNAUTHENTICATED),
            SparkServerRefused,
            Retry.NEVER,
        ),
    ],
)
def test_what_is_wrong_with_a_server_is_no_failed_job(
    error: Exception, expected: type[SparkJobFailed], retry: Retry
) -> None:
    with (
        pytest.raises(expected, match="replay was not completed") as raised,
        translated_spark_errors("replay"),
    ):
        raise error
    assert raised.value.retry is retry


def test_java_that_does_not_start_leads_to_doctor() -> None:
    error = PySparkException(
        "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number."
    )
    with pytest.raises(SparkJobFailed) as raised, translated_spark_errors("replay of s"):
        raise error
    assert raised.value.hint == "Run `cdc-replay doctor`, which checks Java."
