"""A Spark application's command in the task's own process, on a running Spark Connect server.

No JVM and no process starts: the task is the driver, and its connections are in its own environment.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from airflow.providers.apache.spark.hooks.spark_connect import SparkConnectHook
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException

from cdc_replay.errors import InvalidConfiguration, Retry
from cdc_replay.spark.job_outcome import JobOutcome

logger = logging.getLogger(__name__)

CONNECT_TYPE: Final = SparkConnectHook.conn_type


def connect_url(conn_id: str) -> str | None:
    """The URL of a Spark Connect connection, with its token; None if the connection is of another type.

    Raises:
        InvalidConfiguration: if it has no host, or more than that.
    """
    connection = BaseHook.get_connection(conn_id)
    if connection.conn_type != CONNECT_TYPE:
        return None
    hint = "Give the server's name or address, such as localhost; the port has a field of its own."
    if not connection.host:
        raise InvalidConfiguration(f'connection "{conn_id}" has no host', hint=hint)
    try:
        url = SparkConnectHook(conn_id).get_connection_url()
    except ValueError:
        raise InvalidConfiguration(f'the host of connection "{conn_id}" has a path', hint=hint) from None
    # The hook leaves the slashes of a token as they are, and pyspark shows what it takes for a path.
    server, separator, parameters = url.partition("/;")
    return server + separator + parameters.replace("/", "%2F")


def run_on_server(
    job: str, arguments: Sequence[str], *, url: str, name: str, settings: Mapping[str, str]
) -> JobOutcome:
    """Run a job of `cdc_replay.jobs` with these arguments; its results.

    Raises:
        CdcReplayError: as the command, or if the server is unavailable.
        AirflowException: after a transient error of a subscription, once the others are applied.
    """
    from cdc_replay.jobs.application import parse_arguments
    from cdc_replay.spark.connect import connected_to, is_of_session
    from cdc_replay.spark.session import SESSION_DEFAULTS

    application: Any = importlib.import_module(f"cdc_replay.jobs.{job}")
    of_server = sorted(key for key in settings if not is_of_session(key))
    if of_server:
        logger.info("settings of the Spark Connect server, which a session cannot have: %s", of_server)
    options = parse_arguments(application.build_parser(), arguments)
    with connected_to(url, name, SESSION_DEFAULTS | dict(settings)):
        results = application.command(options)
    outcome = JobOutcome([result.to_dict() for result in results])
    if any(result.get("retry") == Retry.LATER.value for result in outcome.results):
        raise AirflowException(outcome.reason)
    return outcome
