"""R8.4, R8.5: conflicts have the kinds that PostgreSQL 18 counts for a native subscription."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from fixtures.native import wait_for
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

COUNTED = """
    select exists (
        select from pg_attribute
        where attrelid = 'pg_stat_subscription_stats'::regclass and attname = 'confl_insert_exists'
    )
"""

# Per table: what both subscribers have besides, what is published, and native's kind.
STOPPED = {
    "insert_key": ("(100, 1000)", "insert into {} values (100, 1)", "insert_exists", "(id)=(100)"),
    "insert_other": ("(100, 1000)", "insert into {} values (7, 1000)", "insert_exists", "(a)=(1000)"),
    "update_key": ("(100, 1000)", "update {} set id = 100", "update_exists", "(id)=(100)"),
    "update_other": ("(100, 1000)", "update {} set a = 1000", "update_exists", "(a)=(1000)"),
}


def counts(twin: Twin, name: str, kinds: Sequence[str]) -> tuple[Any, ...]:
    """The conflicts that native has counted for the subscription."""
    columns = ", ".join(f"confl_{kind}" for kind in kinds)
    subscription = twin.native(name).name
    query = f"select {columns} from pg_stat_subscription_stats where subname = '{subscription}'"
    [row] = twin.pairs[name].native.rows(query)
    return row


def has_counted(twin: Twin, name: str, kind: str) -> bool:
    return bool(counts(twin, name, [kind])[0] > 0)


def test_missing_rows_are_counted_as_natively(twin: Twin) -> None:
    table = "create table t (id int primary key, a int)"
    twin.publisher.run(f"{table}; insert into t select n, n from generate_series(1, 6) as n")
    twin.publisher.run("create publication p for table t")
    twin.subscribe("s", "p", tables=table)
    if twin.pairs["s"].native.rows(COUNTED) != [(True,)]:
        pytest.skip("this version counts no conflicts")
    twin.sync()
    for database in (twin.pairs["s"].ours, twin.pairs["s"].native):
        database.run("delete from t where id <= 3")
    twin.publish(
        "update t set a = 1 where id = 1;\nupdate t set a = 2 where id = 1;\ndelete from t where id = 2;\n"
        "update t set id = 13 where id = 3;\nupdate t set a = 0 where id = 4"
    )

    result = twin.sync()["s"]

    kinds = ("update_missing", "delete_missing", "insert_exists", "update_exists")
    assert result.conflicts == {"update_missing": 3, "delete_missing": 1}
    wait_for(lambda: counts(twin, "s", kinds) == (3, 1, 0, 0), "native to report what it has counted")
    assert sorted(result.conflict_keys["update_missing"]) == ["public.t (id)=(1)", "public.t (id)=(3)"]
    assert result.conflict_keys["delete_missing"] == ("public.t (id)=(2)",)


def test_blocking_rows_have_the_native_conflict_kind(twin: Twin) -> None:
    """Native retries and counts each time; ours is parked, with the kind and the key in its error."""
    for name in STOPPED:
        table = f"create table {name} (id int primary key, a int unique)"
        twin.publisher.run(
            f"{table}; insert into {name} values (1, 10); create publication {name} for table {name}"
        )
        twin.subscribe(name, name, tables=table)
    if twin.pairs["insert_key"].native.rows(COUNTED) != [(True,)]:
        pytest.skip("this version counts no conflicts")
    twin.sync()
    for name, (rows, statement, _, _) in STOPPED.items():
        for database in (twin.pairs[name].ours, twin.pairs[name].native):
            database.run(f"insert into {name} values {rows}")
        twin.publish(statement.format(name))
    capture(twin.config, "pub")

    results = {result.subscription: result for result in replay(twin.config, list(STOPPED))}

    for name, (_, _, kind, key) in STOPPED.items():
        error = results[name].error or ""
        for part in ("parked", f'"public"."{name}"', f"{kind}: ", key):
            assert part in error, error
        wait_for(functools.partial(has_counted, twin, name, kind), f"native to count {kind} for {name}")
