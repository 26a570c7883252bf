"""`why` of rows that another subscription of the same table has brought."""

from __future__ import annotations

import pytest

from cdc_replay.commands.why import why
from cdc_replay.model.explained_row import Cause, WhyResult
from cdc_replay.model.relation import QualifiedName
from fixtures.native import NativeSubscription
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLE = 'create table t (id int primary key, region text collate "C")'


def ask(twin: Twin, name: str, key: int) -> WhyResult:
    return why(twin.config, name, QualifiedName("public", "t"), [str(key)])


def test_rows_of_another_subscription_are_named_as_such(twin: Twin) -> None:
    """What passes the own row filter, or none, is never excused."""
    twin.publisher.run(f"""
        {TABLE}; alter table t replica identity full;
        insert into t select i, 'nsw' from generate_series(1, 9) as i;
        create publication pa for table t where (id < 100 and region = 'nsw');
        create publication pb for table t where (id < 100 and region = 'vic');
    """)
    twin.subscribe("a", "pa", tables=TABLE, native=False)
    twin.share("a", "b", "pb")
    twin.sync_ours("a", "b")
    twin.publisher.run("update t set region = 'vic' where id in (1, 2)")
    twin.sync_ours("a")
    assert ask(twin, "a", 1).cause is Cause.FILTERED_OUT
    twin.sync_ours("b")
    row = ask(twin, "a", 1)
    assert (row.cause, row.differs) == (Cause.OTHER_SUBSCRIPTION, False)
    assert "but of b, whose row filter does" in row.explanation
    assert ask(twin, "b", 1).cause is Cause.SAME

    database = twin.pairs["a"].ours
    database.run("""
        update t set region = 'nsw' where id = 2;
        insert into t values (20, 'qld'), (21, 'nsw'), (22, 'vic'), (200, 'vic');
    """)
    wrong = [(key, ask(twin, "a", key)) for key in (2, 20, 21, 200)]
    assert [(key, row.cause, row.differs) for key, row in wrong] == [
        (key, Cause.CHANGED_LOCALLY, True) for key in (2, 20, 21, 200)
    ]
    assert ask(twin, "a", 22).cause is Cause.OTHER_SUBSCRIPTION
    assert (ask(twin, "b", 22).cause, ask(twin, "b", 2).differs) == (Cause.CHANGED_LOCALLY, True)


def test_a_feed_of_unknown_rows_is_named_and_excuses_nothing(twin: Twin) -> None:
    twin.publisher.run(f"""
        {TABLE}; insert into t select i, 'x' from generate_series(1, 9) as i;
        create publication pa for table t where (id < 5);
        create publication pb for table t where (id >= 5);
    """)
    twin.subscribe("a", "pa", tables=TABLE, native=False)
    twin.sync_ours("a")
    native = NativeSubscription(twin.publisher, twin.pairs["a"].ours, f"beside_{twin.publisher.name}")
    native.create(["pb"], {})
    native.wait()
    row = ask(twin, "a", 7)
    assert (row.cause, row.differs) == (Cause.CHANGED_LOCALLY, True)
    assert f"It may be of {native.name}, which also feeds the table" in row.explanation
