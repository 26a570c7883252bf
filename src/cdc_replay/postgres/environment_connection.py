"""The DSN of an Airflow connection that is given in the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from cdc_replay.errors import InvalidConfiguration
from cdc_replay.postgres.airflow_connection import (
    ADDRESS_OPTIONS,
    CONNECTION_TYPES,
    LIBPQ_OPTIONS,
    AirflowConnection,
    check_type,
    libpq_query,
)


def connection_from_environment(conn_id: str) -> str:
    """The DSN of an Airflow connection that is given as `AIRFLOW_CONN_<ID>`, in URI or JSON form.

    Raises:
        InvalidConfiguration: if the variable is not set, or cannot be parsed.
    """
    variable = f"AIRFLOW_CONN_{conn_id.upper()}"
    text = os.environ.get(variable)
    if text is None:
        raise InvalidConfiguration(
            f'connection "{conn_id}" is not known',
            detail=f"The environment variable {variable} is not set.",
            hint="Set it to a PostgreSQL URI, or give `dsn` instead of `conn_id` in the configuration.",
        )
    if text.lstrip().startswith("{"):
        return _connection(conn_id, _parse_json(conn_id, text)).uri
    return _keep_libpq_options(conn_id, text)


def _parse_json(conn_id: str, text: str) -> dict[str, Any]:
    """The fields; the error does not repeat what it cannot read, which may be a password."""
    detail = None
    try:
        fields = json.loads(text)
        json.dumps(fields, ensure_ascii=False).encode()  # an escape may be of no character
        if isinstance(fields, dict):
            return fields
        detail = "It is no object."
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at character {error.pos}."
    except (ValueError, RecursionError):  # a number of thousands of digits, or such a nesting
        pass
    raise InvalidConfiguration(f'connection "{conn_id}" is not readable JSON', detail=detail)


def _connection(conn_id: str, fields: Mapping[str, Any]) -> AirflowConnection:
    check_type(conn_id, str(fields.get("conn_type", "postgres")))
    extra = fields.get("extra") or {}
    names = ("host", "port", "login", "password", "schema")
    return AirflowConnection(
        **{name: str(fields.get(name) or "") for name in names},
        extra=_parse_json(conn_id, extra if isinstance(extra, str) else json.dumps(extra)),
    )


def _keep_libpq_options(conn_id: str, text: str) -> str:
    """A URI of Airflow's or libpq's form, without options that libpq does not know; other texts unchanged."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.replace("-", "_") not in CONNECTION_TYPES:
        return text
    location, _, query = rest.partition("?")
    extra: dict[str, object] = dict(parse_qsl(query, keep_blank_values=True))
    extra |= _parse_json(conn_id, str(extra.pop("__extra__", "{}")))
    return f"postgresql://{location}{libpq_query(extra, LIBPQ_OPTIONS | ADDRESS_OPTIONS)}"
