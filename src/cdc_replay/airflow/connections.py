"""Airflow connections as libpq URIs, for a task and for the Spark driver that it starts.

A secret reaches a Spark job only through the environment of its driver, as `AIRFLOW_CONN_<ID>`: never as an
argument, which the process list and the task log show, and never through XCom. The variables are set in the
task's own process while it submits. They are not the operator's `env_vars`: Airflow stores these, as they are
a template field, and on YARN and Kubernetes the hook turns them into arguments.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping

from airflow.sdk import BaseHook, Connection
from airflow.sdk.exceptions import AirflowNotFoundException

from cdc_replay.config import Config, load_config
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.postgres.airflow_connection import AirflowConnection, check_type


def airflow_config() -> Config:
    """The configuration, with its connection ids looked up in Airflow."""
    return load_config(connections=dsn)


def dsn(conn_id: str) -> str:
    """The libpq URI of an Airflow connection. A secret: never log it.

    Raises:
        InvalidConfiguration: if Airflow does not have the connection, or it is of another type.
    """
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException as error:
        raise InvalidConfiguration(f'connection "{conn_id}" is not known', detail=str(error)) from None
    check_type(conn_id, connection.conn_type)
    return libpq_uri(connection)


def libpq_uri(connection: Connection) -> str:
    """The connection as psycopg accepts it."""
    return AirflowConnection(
        host=connection.host or "",
        port=str(connection.port or ""),
        login=connection.login or "",
        password=connection.password or "",
        schema=connection.schema or "",
        extra=connection.extra_dejson,
    ).uri


@contextlib.contextmanager
def connections_in_environment(
    conn_ids: Iterable[str], further: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Inside the context, this process and its children have the connections in their environment.

    So do they have the variables of `further`.
    """
    before = dict(os.environ)
    os.environ.update({f"AIRFLOW_CONN_{conn_id.upper()}": dsn(conn_id) for conn_id in conn_ids})
    os.environ.update(further or {})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
