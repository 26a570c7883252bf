"""Timeouts are added to a DSN in its own form, and never override its own settings."""

from __future__ import annotations

import datetime as dt

import pytest
from psycopg.conninfo import conninfo_to_dict

from cdc_replay.postgres.timeouts import SessionTimeouts

TIMEOUTS = SessionTimeouts(
    connect=dt.timedelta(seconds=4), lock=dt.timedelta(seconds=5), statement=dt.timedelta(seconds=6)
)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://host/db",
        "postgresql://",
        "postgresql://u:p?w#@host/db",
        "postgresql://u:p%40%3F@host/db?sslmode=require",
        "host=host password='a b?c://d' dbname=db",
        "",
        "postgresql://host/db?connect_timeout=77",
        "host=host tcp_user_timeout=1 connect_timeout=77",
        "postgresql://host/db?options=-c%20work_mem%3D4MB",
        r"host=host options='-c search_path=a\\ b'",
        "postgresql://host/db?options=-c%20lock_timeout%3D1",
    ],
)
def test_settings_in_the_dsn_take_precedence(dsn: str) -> None:
    before, after = conninfo_to_dict(dsn), conninfo_to_dict(TIMEOUTS.add_to(dsn))
    options = str(after.pop("options"))
    own = str(before.pop("options", ""))
    assert options.startswith(own)
    assert after == {"connect_timeout": "4", **before}
    assert ("lock_timeout=5000" in options) == ("lock_timeout" not in own)
    assert "-c statement_timeout=6000" in options


@pytest.mark.parametrize("dsn", ["postgresql://[", "nonsense", "host='"])
def test_an_unreadable_dsn_is_returned_unchanged(dsn: str) -> None:
    assert TIMEOUTS.add_to(dsn) == dsn


def test_defaults_are_not_repeated() -> None:
    assert SessionTimeouts().add_to("postgresql://host/db") == "postgresql://host/db"
