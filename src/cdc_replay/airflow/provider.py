"""The package as a provider of Airflow, by the entry point `apache_airflow_provider`."""

from __future__ import annotations

from typing import Any, Final

_NULLABLE_TEXT: Final = {"type": ["string", "null"]}

_SSL_MODES: Final = ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]

_CONNECTION_FIELDS: Final[dict[str, Any]] = {
    "sslmode": {
        "label": "TLS mode",
        "description": "libpq's sslmode; verify-full checks the server's certificate and name",
        "schema": {**_NULLABLE_TEXT, "enum": [*_SSL_MODES, None]},
    },
    "sslrootcert": {
        "label": "TLS root certificate",
        "description": "Path of the authority's certificate, on every machine that runs tasks; or system",
        "schema": _NULLABLE_TEXT,
    },
    "sslcert": {"label": "TLS client certificate", "description": "Path", "schema": _NULLABLE_TEXT},
    "sslkey": {"label": "TLS client key", "description": "Path", "schema": _NULLABLE_TEXT},
    "target_session_attrs": {
        "label": "Server of several hosts",
        "description": "libpq's target_session_attrs: read-write finds the primary",
        "schema": _NULLABLE_TEXT,
    },
}

_FORM: Final = {
    "ui-field-behaviour": {
        "hidden-fields": [],
        "relabeling": {"schema": "Database", "login": "Role"},
        "placeholders": {"port": "5432"},
    },
    "conn-fields": _CONNECTION_FIELDS,
}


def get_provider_info() -> dict[str, Any]:
    """What Airflow lists under providers, and registers: connection types and links.

    Not the plugin, which is in the plugins folder: Airflow reports a second registration as an error.
    """
    integration = {"integration-name": "CDC replay"}
    return {
        "package-name": "cdc-replay",
        "name": "CDC replay",
        "description": "CDC replay for PostgreSQL logical replication, on Spark.",
        "integrations": [integration],
        "operators": [
            integration
            | {
                "python-modules": [
                    "cdc_replay.airflow.operators.in_process",
                    "cdc_replay.airflow.operators.report",
                    "cdc_replay.airflow.operators.spark",
                ]
            }
        ],
        "sensors": [integration | {"python-modules": ["cdc_replay.airflow.sensors"]}],
        "notifications": [
            "cdc_replay.airflow.alarm_notifiers.AlarmNotifier",
            "cdc_replay.airflow.alarm_notifiers.ResolvedNotifier",
        ],
        "triggers": [integration | {"python-modules": ["cdc_replay.airflow.triggers"]}],
        "hooks": [integration | {"python-modules": ["cdc_replay.airflow.hooks"]}],
        "connection-types": [
            {
                "connection-type": f"cdc_replay_{kind}",
                "hook-class-name": f"cdc_replay.airflow.hooks.{kind.capitalize()}Hook",
                "hook-name": f"CDC replay: {kind}",
                **_FORM,
            }
            for kind in ("publisher", "subscriber")
        ],
        "extra-links": [
            "cdc_replay.airflow.links.ValidationReportLink",
            "cdc_replay.airflow.links.WindowLink",
            "cdc_replay.airflow.links.SparkHistoryLink",
            "cdc_replay.airflow.links.StatusPageLink",
        ],
    }
