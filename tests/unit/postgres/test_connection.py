"""A DSN that libpq may parse in another way than meant is refused before any part of it is shown."""

from __future__ import annotations

import pytest

from cdc_replay.errors import InvalidConfiguration, ServerUnavailable
from cdc_replay.postgres.connection import connect
from cdc_replay.postgres.environment_connection import connection_from_environment


@pytest.mark.parametrize(
    "location",
    [
        "u:pw@hunter2@127.0.0.1:1/db",
        "u:pw@hunter2:x@127.0.0.1:1/db",
        "u:pw@/hunter2@127.0.0.1:1/db",
        "u:pw@@hunter2@127.0.0.1:1/db",
        "u:pw@hunter2,127.0.0.1@127.0.0.1:1/db",
        "u:hunter2/pw@127.0.0.1:1/db",
        "u:1/hunter2@127.0.0.1:1/db",
        "u:hunter2/db",
    ],
)
def test_a_host_that_may_be_part_of_the_password_is_not_resolved(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_A", f"postgres://{location}")
    for dsn in (f"postgresql://{location}", connection_from_environment("a")):
        with pytest.raises(InvalidConfiguration, match="DSN is not readable") as refused:
            connect(dsn, purpose="test")
        assert "hunter2" not in str(refused.value)
        assert "percent-encode" in str(refused.value.hint)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:p%40w%2F@127.0.0.1:1/db",
        "postgresql://u:p?w#:@127.0.0.1:1,127.0.0.1:2/db%40a",
        "postgresql://127.0.0.1:1/db?user=u@tenant",
        "postgresql:///db?host=/nowhere/a@b",
        "postgresql://u@%2Fnowhere%2Fa%40b/db",
        "host=/nowhere/a@b user=u@tenant password=p@w",
    ],
)
def test_an_unambiguous_dsn_is_used(dsn: str) -> None:
    with pytest.raises(ServerUnavailable):
        connect(dsn, purpose="test")


def test_a_host_with_an_account_is_refused_with_keywords_too() -> None:
    with pytest.raises(InvalidConfiguration, match="DSN is not readable"):
        connect("host=hunter2@127.0.0.1", purpose="test")
