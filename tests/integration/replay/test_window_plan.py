"""Windows large enough for several tasks, with more subscriptions than there are cores."""

from __future__ import annotations

import pytest

from cdc_replay.spark.session import SMALL_WINDOW_ROWS
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key, a int)"


@pytest.mark.parametrize(
    ("subscriptions", "moved"),
    [
        pytest.param(5, 600, id="with a shuffle, few keys move"),
        pytest.param(5, 60_000, id="with a shuffle, many keys move", marks=pytest.mark.slow),
        pytest.param(8, 600, id="without, few keys move"),
        pytest.param(8, 60_000, id="without, many keys move", marks=pytest.mark.slow),
    ],
)
def test_each_of_many_subscriptions_holds_its_share_of_a_large_window(
    twin: Twin, subscriptions: int, moved: int
) -> None:
    """R4.2 to R4.5: rows pass from one row filter to the next, some with another key, and move on.

    On two cores eight subscriptions are divided among tasks that read the whole window.
    """
    twin.publisher.run(f"{TABLE}; alter table t replica identity full")
    for number in range(subscriptions):
        twin.publisher.run(f"create publication p{number} for table t where (a % {subscriptions} = {number})")
        twin.subscribe(f"s{number}", f"p{number}", tables=TABLE)
    twin.sync()

    twin.publish(
        f"insert into t select g, g from generate_series(1, {SMALL_WINDOW_ROWS}) as g;\n"
        "update t set a = a + 1 where id % 7 = 0;\n"
        "update t set id = -id, a = a + 2 where id <= 100;\n"
        f"update t set id = -id, a = a + {subscriptions} where id between 101 and {moved};\n"
        "update t set a = a + 1 where id < -200;\n"
        f"update t set id = id - {moved} where id < 0;\n"
        "delete from t where id % 11 = 0"
    )
    results = twin.sync()

    assert all(result.changes_read > SMALL_WINDOW_ROWS for result in results.values())
    left = sum(len(twin.rows(f"s{number}", "t")) for number in range(subscriptions))
    assert [(left,)] == twin.publisher.rows("select count(*) from t")


@pytest.mark.parametrize("moved", [0, 600, 60_000], ids=["no key moves", "few keys move", "many keys move"])
def test_rows_truncated_in_a_large_window_are_not_applied(twin: Twin, moved: int) -> None:
    """R3.12, R8.15: rows before it, of its table alone; twice in a window, once within a transaction."""
    other = "create table u (id int primary key, a int)"
    twin.publisher.run(f"{TABLE}; {other}; alter table t replica identity full")
    for number in range(2):
        twin.publisher.run(f"create publication p{number} for table t where (a % 2 = {number}), u")
        twin.subscribe(f"s{number}", f"p{number}", tables=f"{TABLE}; {other}")
    twin.publisher.run("insert into t select g, g from generate_series(-10, 10) as g")
    twin.sync()

    half = SMALL_WINDOW_ROWS // 2
    twin.publish(
        f"insert into t select g, g from generate_series(11, {half}) as g;\n"
        f"insert into u select g, g from generate_series(1, {half}) as g;\n"
        "truncate t;\n"
        f"insert into t select g, g from generate_series(1, {half}) as g;\n"
        f"update t set id = -id where id <= {moved};\n"
        f"begin; truncate t; insert into t select g, g + 1 from generate_series(1, {half}) as g; commit;\n"
        f"update t set id = -id, a = a + 1 where id between {moved // 2} and {moved};\n"
        "update t set a = a + 1 where id % 3 = 0"
    )
    results = twin.sync()

    assert all(result.changes_read > SMALL_WINDOW_ROWS for result in results.values())
    assert all(result.applied["truncate"] == 2 for result in results.values())
    left = sum(len(twin.rows(f"s{number}", "t")) for number in range(2))
    assert [(left,)] == twin.publisher.rows("select count(*) from t")
    assert len(twin.rows("s0", "u")) == half
