"""R8.5: a row that moves to a key of another row of the subscriber stops ours where it stops native.

The publisher's key allows such moves: it is deferrable, or has more columns than the subscriber's. Later
changes of that key are meant for the blocking row, which the publisher does not have there.
"""

from __future__ import annotations

import functools
from typing import Final

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from fixtures.native import wait_for
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

# Per table: its key on the publisher, and one transaction.
STOPPED: Final = {
    "shifted": ("primary key (a) deferrable", "update shifted set a = a + 1"),
    "deleted": (
        "primary key (a) deferrable initially deferred",
        "begin; update deleted set a = 2 where v = 'a'; delete from deleted where v = 'b'; commit",
    ),
    "narrower": (
        "primary key (a, b)",
        "begin; update narrower set a = 2, b = 9 where a = 1; update narrower set a = 4 where b = 1; commit",
    ),
}
ROWS: Final = [(1, 1, "a"), (2, 1, "b"), (3, 5, "c")]


def errors(twin: Twin, name: str) -> int:
    """How often native has failed to apply a transaction."""
    query = "select apply_error_count from pg_stat_subscription_stats where subname = '{}'"
    [(count,)] = twin.pairs[name].native.rows(query.format(twin.native(name).name))
    return int(count)


def has_failed(twin: Twin, name: str) -> bool:
    return errors(twin, name) > 0


def test_move_onto_an_existing_row_is_refused_although_the_row_moves_on(twin: Twin) -> None:
    for name, (key, _) in STOPPED.items():
        twin.publisher.run(
            f"create table {name} (a int, b int, v text, {key}); alter table {name} replica identity full;"
            f" insert into {name} values (1, 1, 'a'), (2, 1, 'b'), (3, 5, 'c');"
            f" create publication {name} for table {name}"
        )
        twin.subscribe(name, name, tables=f"create table {name} (a int primary key, b int, v text)")
    twin.sync()
    for _, transaction in STOPPED.values():
        twin.publisher.run(transaction)
    capture(twin.config, "pub")

    results = {result.subscription: result for result in replay(twin.config, list(STOPPED))}

    for name in STOPPED:
        error = results[name].error or ""
        for part in ("parked before the transaction", f'"public"."{name}"', "update_exists: key (a)=(2)"):
            assert part in error, (name, error)
        wait_for(functools.partial(has_failed, twin, name), f"native to fail for {name}")
        assert twin.rows(name, name) == ROWS, name


def test_chains_of_moves_without_blocking_rows_are_applied(twin: Twin) -> None:
    """Rows that exchange keys by way of a free one, shift them in a safe order, pass through and return."""
    twin.publisher.run(
        "create table t (a int primary key, v text); create publication p for table t;"
        " insert into t values (1, 'a'), (2, 'b'), (3, 'c'), (4, 'd'), (5, 'e')"
    )
    twin.subscribe("s", "p", tables="create table t (a int primary key, v text)")
    twin.sync()
    twin.publish(
        "update t set a = 0 where a = 1;\nupdate t set a = 1 where a = 2;\nupdate t set a = 2 where a = 0;\n"
        "update t set a = 6 where a = 5;\nupdate t set a = 5 where a = 4;\nupdate t set a = 4 where a = 3;\n"
        "update t set a = 7 where a = 6;\nupdate t set a = 8 where a = 5;\ndelete from t where a = 8;\n"
        "update t set a = 9 where a = 4;\nupdate t set a = 4 where a = 9;\ninsert into t values (8, 'f')"
    )

    result = twin.sync()["s"]

    assert twin.rows("s", "t") == [(1, "b"), (2, "a"), (4, "c"), (7, "e"), (8, "f")]
    assert result.conflicts == {}
