"""The connection string that a server gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import ConninfoOption

from cdc_replay.certify.native_side import connection_string


def option(name: str, value: str | None, default: str | None = None) -> ConninfoOption:
    def encoded(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    return ConninfoOption(name.encode(), None, encoded(default), encoded(value), b"", b"", 0)


@pytest.mark.parametrize(
    ("server_version", "known"), [(150019, set()), (160010, {"sslcertmode"}), (180006, {"sslcertmode"})]
)
def test_it_has_what_the_servers_libpq_knows_and_the_resolved_password(
    server_version: int, known: set[str]
) -> None:
    connection: Any = SimpleNamespace(
        pgconn=SimpleNamespace(
            info=[
                option("service", "shop"),
                option("passfile", "/srv/.pgpass"),
                option("host", "db.example"),
                option("sslmode", "verify-full", "prefer"),
                option("sslcompression", "0", "0"),
                option("sslcertmode", "allow"),
                option("sslkeylogfile", "/tmp/keys"),
                option("dbname", "a 'quoted' name"),
                option("replication", None),
            ]
        ),
        info=SimpleNamespace(password="p w'd"),
    )

    parts = conninfo_to_dict(connection_string(connection, "cdc_replay certify s", server_version))

    assert parts.pop("sslcertmode", None) == ("allow" if known else None)
    assert parts == {
        "host": "db.example",
        "sslmode": "verify-full",
        "dbname": "a 'quoted' name",
        "password": "p w'd",
        "application_name": "cdc_replay certify s",
    }
