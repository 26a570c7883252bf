"""How a Spark Connect server is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc_replay.spark.connect_server import parallelism_of, server_command, server_settings

if TYPE_CHECKING:
    import pytest


def test_it_listens_where_it_is_told_and_shows_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_CONNECT_AUTHENTICATE_TOKEN", "s3cret")
    command = server_command("local[2]", server_settings("127.0.0.1", 4711))
    assert "--conf=spark.connect.grpc.binding.address=127.0.0.1" in command
    assert "--conf=spark.connect.grpc.binding.port=4711" in command
    assert not any("s3cret" in word for word in command)


def test_a_local_master_tells_its_cores() -> None:
    assert parallelism_of("local[3]") == {"spark.default.parallelism": "3"}
    assert int(parallelism_of("local[*]")["spark.default.parallelism"]) > 0
    assert parallelism_of("spark://master:7077") == {}
