"""Validations in a loop beside steady traffic: none sees a difference, and the proof follows the traffic.

Two writers commit 200 transactions a second between them; rows cross the row filter, keys change, values are
stored out of line. Syncs and validations run one after the other in one process, whole ones and samples.

    CDC_REPLAY_VALIDATE_SECONDS=3600 .venv/bin/python -m pytest tests/soak/test_no_false_alarm.py -m slow -s
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from cdc_replay.commands.validate import validate
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.validation_scope import ValidationScope
from fixtures.postgres import Database
from fixtures.twin import Twin

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SECONDS: Final = float(os.environ.get("CDC_REPLAY_VALIDATE_SECONDS", "300"))
PER_SECOND: Final = 200
WRITERS: Final = 2
KEYS: Final = 20_000
TABLES: Final = """
    create table t (id int primary key, a int, note text);
    create table k (id int primary key, n int, body text);
"""
STATEMENTS: Final = (
    "insert into t values ({key}, {value}, 'new') on conflict (id) do update set a = excluded.a",
    "update t set a = 100 - a where id between {key} and {key} + 3",
    "delete from t where id = {key}",
    "update k set n = n + 1 where id = {key}",
    "update k set body = repeat('{value} ', 900) where id = {key}",
    "update k set id = id + {keys} where id = {key}",
    "delete from k where id >= {keys} and id % 50 = {value}",
    "insert into k values ({key}, 1, repeat('x', 3000)) on conflict (id) do nothing",
)
SCOPES: Final = (ValidationScope(), ValidationScope(sample=0.1), ValidationScope(sample=0.25, max_seconds=1))


def write(publisher: Database, seed: int, stop: threading.Event) -> int:
    """Commit a fixed number of transactions a second until told to stop; how many."""
    choose, done, began = random.Random(seed), 0, time.monotonic()
    with publisher.connect() as connection:
        while not stop.is_set():
            statement = choose.choice(STATEMENTS).format(
                key=choose.randrange(KEYS) * WRITERS + seed, value=choose.randrange(100), keys=10 * KEYS
            )
            connection.execute(statement.encode())
            done += 1
            ahead = done * WRITERS / PER_SECOND - (time.monotonic() - began)
            stop.wait(max(0.0, ahead))
    return done


def test_validations_beside_traffic_see_no_difference(twin: Twin) -> None:
    twin.publisher.run(
        f"{TABLES}; alter table t replica identity full; alter table k alter body set storage external;"
        f" insert into t select i, i % 100, 'old' from generate_series(1, {KEYS}) i;"
        f" insert into k select i, 0, repeat('y', 2500) from generate_series(1, {KEYS // 4}) i;"
        " create publication p for table t where (a > 50 and id % 7 <> 0), k"
    )
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    stop, fences = threading.Event(), list[Lsn]()
    end = time.monotonic() + SECONDS
    with ThreadPoolExecutor(WRITERS) as pool:
        writers = [pool.submit(write, twin.publisher, seed, stop) for seed in range(WRITERS)]
        try:
            while time.monotonic() < end:
                result = validate(twin.config, "s", scope=SCOPES[len(fences) % len(SCOPES)])
                assert result.error is None, f"a false alarm after {len(fences)} validations: {result.error}"
                fences.append(result.to_lsn)
        finally:
            stop.set()
    transactions = sum(writer.result() for writer in writers)
    sys.stderr.write(f"\n{len(fences)} validations beside {transactions / SECONDS:.0f} transactions/s\n")
    assert len(set(fences)) == len(fences) >= 3
    assert fences == sorted(fences)
    assert transactions > 0
    # The loop can see a difference.
    twin.pairs["s"].ours.run("delete from k where id = (select min(id) from k)")
    assert not validate(twin.config, "s").success
