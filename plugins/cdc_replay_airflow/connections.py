"""Airflow connections as libpq URIs, for the task that needs them and for the Spark driver it starts.

A secret reaches a Spark job only through the environment of its driver, as `AIRFLOW_CONN_<ID>`: never as an
argument, which the process list and the task log show, and never through XCom. The variables are set in the
task's own process while it submits, not through the operator's `env_vars`: those are a template field,
which Airflow stores, and on YARN and Kubernetes the hook turns them into arguments.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

from airflow.sdk import BaseHook, Connection

from cdc_replay.config import Config, load_config
from cdc_replay.errors import InvalidConfiguration

POSTGRES: Final = frozenset({"postgres", "postgresql"})

LIBPQ_OPTIONS: Final = frozenset(
    {
        "application_name", "channel_binding", "client_encoding", "connect_timeout",
        "fallback_application_name", "gssdelegation", "gssencmode", "gsslib", "hostaddr",
        "keepalives", "keepalives_count", "keepalives_idle", "keepalives_interval", "krbsrvname",
        "load_balance_hosts", "max_protocol_version", "min_protocol_version", "options",
        "passfile", "require_auth", "requirepeer", "service", "ssl_max_protocol_version",
        "ssl_min_protocol_version", "sslcert", "sslcertmode", "sslcompression", "sslcrl",
        "sslcrldir", "sslkey", "sslmode", "sslnegotiation", "sslpassword", "sslrootcert",
        "sslsni", "target_session_attrs", "tcp_user_timeout",
    }
)  # fmt: skip
"""What of a connection's extra goes into the URI: the rest is for Airflow's hooks, and libpq refuses it."""


def airflow_config() -> Config:
    """The configuration, with its connection ids looked up in Airflow."""
    return load_config(connections=dsn)


def dsn(conn_id: str) -> str:
    """The libpq URI of an Airflow connection. A secret: never log it.

    Raises:
        InvalidConfiguration: if the connection is of another type.
    """
    connection = BaseHook.get_connection(conn_id)
    if connection.conn_type not in POSTGRES:
        raise InvalidConfiguration(
            f'connection "{conn_id}" is of type "{connection.conn_type}"',
            hint="Give the id of a connection of type postgres.",
        )
    return libpq_uri(connection)


def libpq_uri(connection: Connection) -> str:
    """The connection as psycopg accepts it: percent-encoded, with libpq's options only."""
    password = f":{_quoted(connection.password)}" if connection.password else ""
    account = f"{_quoted(connection.login or '')}{password}"
    host = connection.host or ""
    # A folder is the place of a Unix socket: libpq wants it percent-encoded; an IPv6 address in brackets.
    server = f"[{host}]" if ":" in host and not host.startswith("[") else quote(host, safe="[]:.,-")
    port = f":{connection.port}" if connection.port else ""
    extra: Mapping[str, Any] = connection.extra_dejson
    options = urlencode(
        {key: str(extra[key]) for key in sorted(LIBPQ_OPTIONS & extra.keys())}, quote_via=quote
    )
    location = f"{account}{'@' if account else ''}{server}{port}/{_quoted(connection.schema or '')}"
    return f"postgresql://{location}{'?' if options else ''}{options}"


@contextlib.contextmanager
def exported(conn_ids: Iterable[str]) -> Iterator[None]:
    """While open, this process and those it starts find the connections in their environment."""
    before = dict(os.environ)
    os.environ.update({f"AIRFLOW_CONN_{conn_id.upper()}": dsn(conn_id) for conn_id in conn_ids})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _quoted(text: str) -> str:
    return quote(text, safe="")
