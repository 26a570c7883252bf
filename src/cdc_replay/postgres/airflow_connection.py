"""An Airflow connection as a libpq URI, from Airflow or from an environment variable."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, urlencode

from cdc_replay.errors import InvalidConfiguration

CONNECTION_TYPES: Final = frozenset(
    {"postgres", "postgresql", "cdc_replay_publisher", "cdc_replay_subscriber"}
)
"""The types of Airflow's provider for PostgreSQL and of ours; in a URI `-` stands for `_`."""

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
"""Options of a connection's extra for the URI; libpq rejects the others, which are for Airflow's hooks."""

ADDRESS_OPTIONS: Final = frozenset({"dbname", "host", "password", "port", "user"})
"""Parts of a DSN that libpq also accepts in a URI's query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AirflowConnection:
    """A connection's fields, under Airflow's names; `schema` is the database."""

    host: str = ""
    port: str = ""
    login: str = ""
    password: str = field(default="", repr=False)
    schema: str = ""
    extra: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def uri(self) -> str:
        """The URI for psycopg: percent-encoded, with libpq's options only. A secret: never log it."""
        account = _quoted(self.login) + (f":{_quoted(self.password)}" if self.password else "")
        host = self.host
        # libpq requires a Unix socket's directory percent-encoded, and an IPv6 address in brackets.
        server = f"[{host}]" if ":" in host and not host.startswith("[") else quote(host, safe="[]:.,-")
        port = f":{self.port}" if self.port else ""
        location = f"{account}{'@' if account else ''}{server}{port}/{_quoted(self.schema)}"
        return f"postgresql://{location}{libpq_query(self.extra)}"


def check_type(conn_id: str, kind: str | None) -> None:
    """Check that a connection is of a type for PostgreSQL.

    Raises:
        InvalidConfiguration: if it is of another type.
    """
    if kind not in CONNECTION_TYPES:
        raise InvalidConfiguration(
            f'connection "{conn_id}" is of type "{kind}"',
            hint="Give the id of a connection of type postgres, or of one of this package's types.",
        )


def libpq_query(extra: Mapping[str, object], names: Set[str] = LIBPQ_OPTIONS) -> str:
    """The URI's query, with its question mark, from libpq's options in the extra; empty if there are none."""
    given = {key for key, value in extra.items() if value not in (None, "")}  # forms store empty fields
    options = {key: str(extra[key]) for key in sorted(names & given)}
    # Not `quote_plus`: libpq does not decode a plus sign as a blank.
    return f"?{urlencode(options, quote_via=quote)}" if options else ""


def _quoted(text: str) -> str:
    return quote(text, safe="")
