"""Shared by the tests of this folder: copies of a subscription's tables, as by the commands."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import TableState
from cdc_replay.postgres.connection import connect
from cdc_replay.postgres.exported_snapshot import export_snapshot, import_snapshot
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.snapshot.copy_tables import CopiedTable, load_tables
from cdc_replay.snapshot.planning import SnapshotRequest
from cdc_replay.subscriber import state_schema, subscription_records, subscription_tables
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables
from fixtures.postgres import ANY_DATABASE, Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANY_CLUSTER = "1"


@contextmanager
def snapshot_request(
    publisher_dsn: str, subscriber_dsn: str, *publications: str, **changes: Any
) -> Iterator[SnapshotRequest]:
    """A request for every table of the publications as of now; `changes` are fields of it."""
    with connect(subscriber_dsn, purpose="test") as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(connection, "s", ANY_CLUSTER, publications, ANY_DATABASE)
    with export_snapshot(publisher_dsn) as exported:
        with import_snapshot(exported, purpose="test") as reader:
            catalog = read_catalog(reader, exported.consistent_point)
        request = SnapshotRequest("s", exported, subscriber_dsn, synced_tables(catalog, publications))
        yield dataclasses.replace(request, **changes)


def copy_tables(
    spark: SparkSession, publisher: Database, subscriber: Database, *publications: str, **changes: Any
) -> tuple[CopiedTable, ...]:
    """Copy every table of the publications as of now."""
    with snapshot_request(publisher.dsn, subscriber.dsn, *publications, **changes) as request:
        return load_tables(spark, request)


def states_of(subscriber: Database) -> dict[str, TableState]:
    with subscriber.connect() as connection:
        return {
            str(name): table_state
            for name, table_state in subscription_tables.table_states(connection, "s").items()
        }


def target_table(subscriber: Database, name: str) -> TargetTable:
    with subscriber.connect() as connection:
        return read_target_tables(connection, [public(name)])[public(name)]


def public(name: str) -> QualifiedName:
    return QualifiedName("public", name)


def run_until_killed(
    publisher: Database, subscriber: Database, failpoint: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Copy in a separate process that is killed at the failpoint."""
    return subprocess.run(
        [sys.executable, str(Path(__file__)), publisher.dsn, subscriber.dsn, *arguments],
        env=os.environ | {"CDC_REPLAY_FAILPOINT": failpoint, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def main(publisher_dsn: str, subscriber_dsn: str, chunk_bytes: str, replace: str) -> None:
    """The program of `run_until_killed`."""
    from cdc_replay.spark.session import spark_session

    spark = spark_session("test", conf={"spark.master": "local[2]"})
    changes = {"chunk_bytes": int(chunk_bytes), "replace": replace == "replace"}
    with snapshot_request(publisher_dsn, subscriber_dsn, "p", **changes) as request:
        load_tables(spark, request)


if __name__ == "__main__":
    main(*sys.argv[1:])
