"""Steps that nobody is spared who does the same work, measured without this project's code."""

from __future__ import annotations

import dataclasses
import json
import operator
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from unittest import mock

import psycopg
from psycopg import sql

from benchmarks import pass_through
from benchmarks.backlogs import Connection
from benchmarks.pass_through import Plan
from benchmarks.programs import Run, fresh, sampled
from benchmarks.stand import PUBLISHER, Stand
from cdc_replay.capture.publications import publication_comments
from cdc_replay.commands.status import status
from cdc_replay.config import load_config
from cdc_replay.postgres.answers import SERVERS_AT_ONCE

WHOLE_SLOT: Final = "whole"
"""A slot at the beginning of the backlog, which is read through publications without filters."""

PIECE_BYTES: Final = 256 << 20
"""Of WAL."""

_FLOOR_RUNS: Final = 2

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
_BACKLOG: Final = """
    select confirmed_flush_lsn, (%s::pg_lsn - confirmed_flush_lsn)::bigint
    from pg_replication_slots where slot_name = %s
"""
_BOUNDARY: Final = "select (%s::pg_lsn + %s::numeric)::text"
_HASH_ALL: Final = """
    select count(*), sum(('x' || left(md5(convert_to(row(id)::text, 'UTF8')), 8))::bit(32)::bigint),
        sum(('x' || left(md5(convert_to(row(t.*)::text, 'UTF8')), 16))::bit(64)::bigint::numeric)
    from t
"""


def pass_slot_through(at: Stand, end: str) -> tuple[Run, Run]:
    """All up to `end`, without filters, through `pass_through`: as a new process, and with a warm Spark.

    The faster of two runs each: the first after other runs is a quarter slower than those that follow.
    """
    with at.publisher_connection() as connection:
        publications = ",".join(publication_comments(connection))
        pieces = _divide_slot(connection, end)
    plan = Plan(at.publisher.dsn(PUBLISHER), publications, str(at.folder), pieces)
    file = at.folder / "pass_through.json"
    file.write_text(json.dumps(dataclasses.asdict(plan)), encoding="utf-8")
    program = [sys.executable, pass_through.__file__, str(file)]
    cold, warm = [], []
    for _ in range(_FLOOR_RUNS):
        at.write_out()
        cold.append(fresh(program, at.folder, at.servers))
        run = fresh([*program, "--warm"], at.folder, at.servers)
        warm.append(dataclasses.replace(run, seconds=run.result["seconds"]))
    by_seconds = operator.attrgetter("seconds")
    return min(cold, key=by_seconds), min(warm, key=by_seconds)


def _divide_slot(connection: Connection, end: str) -> tuple[tuple[str, str], ...]:
    """Slots at the beginnings of at least two pieces of the backlog, with the LSNs at which these end."""
    [(begin, length)] = connection.execute(_BACKLOG, (end, WHOLE_SLOT)).fetchall()
    count = max(2, round(length / PIECE_BYTES))
    steps = [length * step // count for step in range(count + 1)]
    boundaries = [connection.execute(_BOUNDARY, (begin, step)).fetchall()[0][0] for step in steps]
    pieces = [(f"{WHOLE_SLOT}_{number}", upto) for number, upto in enumerate(boundaries[1:])]
    for (slot, _), after in zip(pieces, boundaries, strict=False):
        connection.execute("select pg_copy_logical_replication_slot(%s, %s)", (WHOLE_SLOT, slot))
        connection.execute("select pg_replication_slot_advance(%s, %s)", (slot, after))
    return tuple(pieces)


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
