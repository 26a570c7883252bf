"""Steps that nobody is spared who does the same work, measured without this project's code."""

from __future__ import annotations

import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from unittest import mock

import psycopg
from psycopg import sql

from benchmarks.backlogs import Connection
from benchmarks.programs import Run, fresh, sampled
from benchmarks.stand import Stand
from cdc_replay.capture.publications import publication_comments
from cdc_replay.commands.status import status
from cdc_replay.config import load_config
from cdc_replay.postgres.answers import SERVERS_AT_ONCE

WHOLE_SLOT: Final = "whole"
"""A slot at the beginning of the backlog, which is read through publications without filters."""

_START_SPARK: Final = """
from pyspark.sql import SparkSession

def same(batches):
    yield from batches

builder = SparkSession.builder.master("local[*]").config("spark.ui.enabled", "false")
options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
session = builder.config("spark.driver.extraJavaOptions", options).getOrCreate()
rows = session.range(0, 1000, numPartitions=2).mapInArrow(same, "id bigint")
rows.repartition(2, "id").mapInArrow(same, "id bigint").collect()
"""
_ASK: Final = """
import pickle, sys
from concurrent.futures import ThreadPoolExecutor
import psycopg, pyarrow.parquet

with open(sys.argv[1], "rb") as file:
    databases, statements, at_once = pickle.load(file)

def ask(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement, *values in statements:
            connection.execute(statement, *values)

with ThreadPoolExecutor(at_once) as pool:
    list(pool.map(ask, databases))
"""
_SEND_MESSAGES: Final = """
    copy (
        select lsn, xid, data from pg_logical_slot_peek_binary_changes(
            {}, {}, null, 'proto_version', '1', 'publication_names', {}
        )
    ) to stdout (format binary)
"""
_HASH_ALL: Final = """
    select count(*), sum(('x' || left(md5(convert_to(row(id)::text, 'UTF8')), 8))::bit(32)::bigint),
        sum(('x' || left(md5(convert_to(row(t.*)::text, 'UTF8')), 16))::bit(64)::bigint::numeric)
    from t
"""


def start_spark(at: Stand) -> Run:
    """A new process that starts Spark and runs one job with Python workers and a shuffle.

    Java is the one that our commands start, with its ahead-of-time cache and their options.
    """
    return fresh([sys.executable, "-c", _START_SPARK], at.folder, at.servers)


def send_whole_slot(at: Stand, end: str) -> Run:
    """The publisher decodes everything up to `end`, in memory, and sends it; what comes is thrown away."""
    with at.publisher_connection() as connection, sampled(None, at.servers) as sampler:
        names = ",".join(publication_comments(connection))
        connection.execute("set logical_decoding_work_mem = '1GB'")
        send = sql.SQL(_SEND_MESSAGES).format(WHOLE_SLOT, end, names)
        began = time.monotonic()
        with connection.cursor().copy(send) as messages:
            for _ in messages:
                pass
        seconds = time.monotonic() - began
    return Run(seconds, sampler.peaks, {})


def hash_both(at: Stand) -> Run:
    """Both servers hash keys and rows at the same time, and add them up."""

    def hash_all(connection: Connection) -> None:
        with connection:
            connection.execute(_HASH_ALL).fetchall()

    with sampled(None, at.servers) as sampler, ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        sides = (at.publisher_connection(), at.subscriber_connection("warm_0"))
        list(pool.map(hash_all, sides))
        seconds = time.monotonic() - began
    return Run(seconds, sampler.peaks, {})


def ask_subscribers(at: Stand) -> Run:
    """A new process that executes in new sessions what `status` does, as many at once."""
    names = at.names("warm")
    statements: list[tuple[Any, ...]] = []
    execute = psycopg.Connection.execute

    def recorded(
        connection: Connection, statement: str | sql.SQL | sql.Composed, *values: Any
    ) -> psycopg.Cursor[Any]:
        if connection.info.dbname == names[0]:
            text = statement.as_string(connection) if isinstance(statement, sql.Composable) else statement
            statements.append((text, *values))
        return execute(connection, statement, *values)

    with mock.patch.object(psycopg.Connection, "execute", recorded):
        status(load_config(at.file), names[0])
    file = at.folder / "statements.pickle"
    file.write_bytes(pickle.dumps(([at.subscriber.dsn(name) for name in names], statements, SERVERS_AT_ONCE)))
    return fresh([sys.executable, "-c", _ASK, str(file)], at.folder, at.servers)
