"""The commands, with a change log in an object store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fixtures.command_line import CommandLine
from fixtures.postgres import Database
from integration.changelog.conftest import SECRET

TABLE = "create table t (id int primary key, v text)"


@pytest.mark.slow
@pytest.mark.spark
def test_a_subscription_is_set_up_synchronised_and_verified(
    tmp_path: Path, publisher: Database, subscriber: Database, s3_uri: str
) -> None:
    """Snapshot and replay: Spark's workers inherit the store's environment variables."""
    publisher.run(f"{TABLE}; insert into t values (1, 'a'), (2, 'b'); create publication p for table t")
    subscriber.run(TABLE)
    cli = CommandLine(tmp_path, publisher, subscriber, environment=dict(os.environ))
    cli.write("p", of_publisher={"change_log": s3_uri})
    cli.succeeds("setup", "pub")
    cli.succeeds("sync", "s")
    publisher.run(
        "insert into t values (3, 'c'); update t set v = 'x' where id = 1; delete from t where id = 2"
    )
    process = cli.run("sync", "s")
    assert process.returncode == 0, process.stderr
    assert SECRET not in process.stdout + process.stderr
    assert subscriber.rows("select * from t order by id") == [(1, "x"), (3, "c")]

    cli.succeeds("verify-log", "pub")
    cli.succeeds("teardown", "pub")
