"""An Airflow connection as a libpq URI, whether Airflow has it or an environment variable."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, urlencode

from cdc_replay.errors import InvalidConfiguration

CONNECTION_TYPES: Final = frozenset({"postgres", "postgresql"})

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

URI_FIELDS: Final = frozenset({"dbname", "host", "password", "port", "user"})
"""What libpq takes from the query of a URI as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AirflowConnection:
    """The fields of a connection, under Airflow's names; `schema` is the database."""

    host: str = ""
    port: str = ""
    login: str = ""
    password: str = field(default="", repr=False)
    schema: str = ""
    extra: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def uri(self) -> str:
        """As psycopg accepts it: percent-encoded, with libpq's options only. A secret: never log it."""
        account = _quoted(self.login) + (f":{_quoted(self.password)}" if self.password else "")
        host = self.host
        # A folder is the place of a Unix socket: libpq wants it percent-encoded; an IPv6 address in brackets.
        server = f"[{host}]" if ":" in host and not host.startswith("[") else quote(host, safe="[]:.,-")
        port = f":{self.port}" if self.port else ""
        location = f"{account}{'@' if account else ''}{server}{port}/{_quoted(self.schema)}"
        return f"postgresql://{location}{options_of(self.extra)}"


def check_type(conn_id: str, kind: str | None) -> None:
    """Check that a connection leads to PostgreSQL.

    Raises:
        InvalidConfiguration: if it is of another type.
    """
    if kind not in CONNECTION_TYPES:
        raise InvalidConfiguration(
            f'connection "{conn_id}" is of type "{kind}"',
            hint="Give the id of a connection of type postgres.",
        )


def options_of(extra: Mapping[str, object], names: Set[str] = LIBPQ_OPTIONS) -> str:
    """The query of a URI, with its question mark: what libpq knows of the extra; empty if that is nothing."""
    known = {key: str(extra[key]) for key in sorted(names & extra.keys())}
    # libpq does not take a plus sign for a blank.
    return f"?{urlencode(known, quote_via=quote)}" if known else ""


def _quoted(text: str) -> str:
    return quote(text, safe="")
