"""Where a DSN leads."""

from __future__ import annotations

import pytest

from cdc_replay.postgres.server_address import ServerAddress, server_address


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        ("postgresql://me:s3cret@db.example:6432/shop?sslmode=require", ("db.example", "6432", "shop")),
        ("postgresql://me@[::1]/shop", ("::1", "5432", "shop")),
        ("postgresql://me@first:1,second:2/shop", ("first", "1", "shop")),
        ("host=first,second port=6000 dbname=shop", ("first", "6000", "shop")),
        ("hostaddr=10.0.0.1 dbname=shop", ("10.0.0.1", "5432", "shop")),
        ("postgresql://me:s3cret@%2Frun%2Fpg/ware%20house", ("localhost", "5432", "ware house")),
        ("user=me", ("localhost", "5432", "me")),
    ],
)
def test_address_is_host_port_and_database(
    dsn: str, expected: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)
    assert server_address(dsn) == ServerAddress(*expected)


def test_libpqs_environment_completes_a_dsn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PGHOST", "db.example"), ("PGPORT", "7000"), ("PGDATABASE", "shop")):
        monkeypatch.setenv(name, value)
    assert server_address("user=me") == ServerAddress("db.example", "7000", "shop")
