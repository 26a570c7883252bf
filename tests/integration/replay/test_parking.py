"""Permanent errors: earlier transactions are applied, the failing one is parked (R8.5)."""

from __future__ import annotations

from typing import Any, Final

import pytest

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from cdc_replay.commands.resume import resume
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.status import status, subscription_result
from cdc_replay.errors import NotParked, ReplayFailed, Retry
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ReplayResult
from cdc_replay.model.table_state import Parked, Ready
from cdc_replay.subscriber import subscription_records
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

T, U = QualifiedName("public", "t"), QualifiedName("public", "u")
PUBLISHER: Final = """
    create table t (id int primary key, a text);
    create table u (id int primary key, a int);
    create table v (id int primary key, a int);
    create publication p for table t, u, v
"""
SUBSCRIBER: Final = """
    create table t (id int primary key, a text, c int);
    create table u (id int primary key, a int);
    create table v (id int primary key, a int);
"""
TRIGGER: Final = """
    create function refuse() returns trigger language plpgsql as $$
        begin
            if new.a = 'two' then raise exception 'never'; end if;
            return new;
        end $$;
    create trigger refuse before insert on t for each row execute function refuse();
    alter table t enable replica trigger refuse
"""

TRANSACTIONS: Final = (
    "insert into t values (1, '1'); insert into v values (1, 1)",
    "insert into u values (1, 1)",
    "insert into u values (2, 2); insert into t values (2, 'two'); insert into u values (3, 3)",
    "update v set a = 2",
    "insert into u values (4, 4)",
    "alter table t add c int",
    "insert into t values (5, '5', 5); insert into u values (5, 5)",
    "insert into u values (6, 6)",
)

# What blocks the subscriber, at which transaction it stops, what the error says, and what repairs it.
REFUSED: Final[dict[str, tuple[str, int, str, str]]] = {
    "constraint": (
        "alter table t add constraint not_two check (a <> 'two')",
        2,
        '"not_two"',
        "alter table t drop constraint not_two",
    ),
    "type": (
        "alter table t alter a type int using 0",
        2,
        "invalid input syntax for type integer",
        "alter table t alter a type text",
    ),
    "exists": (
        "insert into t values (2, 'own')",
        2,
        "insert_exists: key (id)=(2)",
        "delete from t where id = 2",
    ),
    "trigger": (TRIGGER, 2, "never", "drop trigger refuse on t"),
    "identity": ("alter table v drop constraint v_pkey", 3, "R8.6", "alter table v add primary key (id)"),
    "column": ("alter table t drop c", 6, 'missing column "c"', "alter table t add c int"),
}
ALL_OF_U: Final = [(number, number) for number in range(1, 7)]


def ours(twin: Twin, name: str, query: str) -> list[tuple[Any, ...]]:
    return twin.pairs[name].ours.rows(query)


def subscribed(twin: Twin, *names: str, **options: object) -> None:
    twin.publisher.run(PUBLISHER)
    for name in names:
        twin.subscribe(name, "p", tables=SUBSCRIBER, native=False, **options)
    twin.sync_ours()
    for name in names:
        if name in REFUSED:
            twin.pairs[name].ours.run(REFUSED[name][0])


def traffic(twin: Twin) -> list[Lsn]:
    """Run and capture `TRANSACTIONS`; their commit positions."""
    begins = []
    for transaction in TRANSACTIONS:
        begins.append(twin.position())
        twin.publisher.run(transaction)
    capture(twin.config, "pub")
    change_log = ChangeLog.open(str(twin.change_log))
    commits = [commit.commit_lsn for commit in change_log.commits(Window(ZERO, change_log.end_lsn))]
    return [min(commit for commit in commits if commit > begin) for begin in begins]


def replayed(twin: Twin, *names: str) -> dict[str, ReplayResult]:
    return {result.subscription: result for result in replay(twin.config, names)}


def record(twin: Twin, name: str) -> subscription_records.SubscriptionRecord:
    with twin.pairs[name].ours.connect() as connection:
        found = subscription_records.subscription_record(connection, name)
    assert found is not None
    return found


def test_subscription_parks_before_the_transaction_and_continues_once_repaired(twin: Twin) -> None:
    """All kinds of permanent errors, beside a subscription without any."""
    subscribed(twin, "good", *REFUSED)
    ends = traffic(twin)

    results = replayed(twin, "good", *REFUSED)

    assert results["good"].error is None
    assert ours(twin, "good", "table u order by id") == ALL_OF_U
    reported = {subscription.subscription: subscription for subscription in status(twin.config).subscriptions}
    for name, (_, stop, words, _) in REFUSED.items():
        error = results[name].error or ""
        for part in (f"parked before the transaction that committed at {ends[stop]}", words, "--skip"):
            assert part in error, (name, error)
        assert "run the command again" not in error, (name, error)
        assert error.count("HINT:") == 1, (name, error)
        assert ("The row has (id)=(2)" in error) is (name in {"constraint", "type", "trigger"}), (name, error)
        assert results[name].parked_before == ends[stop], name
        # Rows 2 and 3 of u are of transaction 2, and so on: all before it, nothing of it, nothing after it.
        last = {2: 1, 3: 3, 6: 4}[stop]
        assert ours(twin, name, "table u order by id") == ALL_OF_U[:last], name
        assert record(twin, name).parked_transaction == ends[stop], name
        assert (reported[name].error or "").startswith("parked at "), name
        assert str(ends[stop]) in (reported[name].error or ""), name

    again = replayed(twin, *REFUSED)
    for name, (_, _, _, repair) in REFUSED.items():
        assert again[name].error == results[name].error
        twin.pairs[name].ours.run(repair)

    for name, result in replayed(twin, *REFUSED).items():
        assert result.error is None, result.error
        assert record(twin, name).parked_at is None
        for table in ("t", "u", "v"):
            query = f"select to_jsonb({table}) from {table} order by id"
            assert ours(twin, name, query) == ours(twin, "good", query), name


def test_transaction_is_skipped_by_its_position(twin: Twin) -> None:
    """As ALTER SUBSCRIPTION … SKIP (lsn = …): the whole transaction, and no other."""
    subscribed(twin, "constraint")
    ends = traffic(twin)
    with pytest.raises(NotParked, match="is not parked"):
        resume(twin.config, "constraint", skip=ends[2])
    replayed(twin, "constraint")
    with pytest.raises(NotParked, match=f"It is parked before transaction {ends[2]}"):
        resume(twin.config, "constraint", skip=ends[1])

    resumed = resume(twin.config, "constraint", skip=ends[2])
    (result,) = replay(twin.config, ["constraint"])

    assert set(resumed.tables) == {"public.t", "public.u", "public.v"}
    assert result.error is None, result.error
    assert ours(twin, "constraint", "select id from t order by id") == [(1,), (5,)]
    assert ours(twin, "constraint", "select id from u order by id") == [(1,), (4,), (5,), (6,)]


def test_transaction_is_not_skipped_before_a_resumed_table_has_reached_it(twin: Twin) -> None:
    """Only the transaction is left out: no earlier change of a table that was parked before."""
    subscribed(twin, "s", on_failure="table")
    ours_db = twin.pairs["s"].ours
    ours_db.run("alter table u add constraint not_one check (id <> 1)")
    ends = traffic(twin)
    assert replay(twin.config, ["s"], to_lsn=ends[1])[0].parked == ("public.u",)
    twin.change("s", on_failure="subscription")
    ours_db.run("alter table t add constraint not_two check (a <> 'two')")
    replayed(twin, "s")
    ours_db.run("alter table u drop constraint not_one")
    resume(twin.config, "s", tables=[U])

    with pytest.raises(NotParked, match=rf"table public\.u has not reached transaction {ends[2]}"):
        resume(twin.config, "s", skip=ends[2])

    assert f"parked before the transaction that committed at {ends[2]}" in str(replayed(twin, "s")["s"].error)
    assert ours(twin, "s", "table u") == [(1, 1)]
    resume(twin.config, "s", skip=ends[2])
    assert replay(twin.config, ["s"])[0].error is None
    assert ours(twin, "s", "select id from u order by id") == [(1,), (4,), (5,), (6,)]
    assert ours(twin, "s", "select id from t order by id") == [(1,), (5,)]


def test_table_alone_is_parked_with_on_failure_table(twin: Twin) -> None:
    names = [name for name in REFUSED if name != "identity"]
    subscribed(twin, *names, "identity", on_failure="table")
    ends = traffic(twin)

    results = replayed(twin, *names, "identity")

    table_of = {**dict.fromkeys(names, "t"), "identity": "v"}
    shown = {(table.subscription, table.table): table.state for table in status(twin.config).tables}
    for name, result in results.items():
        assert (result.error, result.parked) == (None, (f"public.{table_of[name]}",)), name
        assert ours(twin, name, "table u order by id") == ALL_OF_U, name
        parked = twin.states(name)[table_of[name]]
        assert isinstance(parked, Parked), name
        stop = REFUSED[name][1]
        assert (parked.transaction, parked.applied_lsn < ends[stop]) == (ends[stop], True), name
        assert f"before transaction {ends[stop]}" in shown[name, f"public.{table_of[name]}"]
        expected = ["(1,)"] if stop == 2 and name != "exists" else None
        assert expected is None or ours(twin, name, "select id from t order by id") == [(1,)], name

    # It stays at its position until it is resumed or copied.
    twin.publish("insert into u values (7, 7);\ninsert into t values (7, '7', 7)")
    for synced in twin.sync_ours():
        assert (synced.replay.error, synced.replay.parked, synced.snapshot.tables) == (None, (), ())
    for name in ("type", "identity", "column"):
        twin.pairs[name].ours.run(REFUSED[name][3])
        resume(twin.config, name, tables=[QualifiedName("public", table_of[name])])
    resume(twin.config, "constraint", tables=[T], skip=ends[2])
    twin.pairs["trigger"].ours.run(REFUSED["trigger"][3])
    snapshot(twin.config, "trigger", tables=[T])
    for synced in twin.sync_ours("type", "identity", "column", "constraint", "trigger"):
        assert synced.replay.error is None, synced.replay.error
        assert all(
            isinstance(table_state, Ready) for table_state in twin.states(synced.subscription).values()
        )
    for name in ("type", "identity", "column", "trigger"):
        assert ours(twin, name, "select id, a, c from t order by id") == [
            (1, "1", None),
            (2, "two", None),
            (5, "5", 5),
            (7, "7", 7),
        ]
        assert ours(twin, name, "table v") == [(1, 2)]
    assert ours(twin, "constraint", "select id from t order by id") == [(1,), (5,), (7,)]
    with pytest.raises(NotParked, match="not parked before a transaction"):
        resume(twin.config, "constraint", tables=[T])


@pytest.mark.parametrize("policy", ["subscription", "table"])
def test_row_that_another_subscription_of_the_database_still_has_parks_nothing(
    twin: Twin, policy: str
) -> None:
    """Rows exchange their filters: each subscription inserts what the other has yet to delete (R8.5)."""
    columns = "create table t (id int primary key, a int)"
    twin.publisher.run(
        f"{columns}; alter table t replica identity full; insert into t values (1, 1), (2, 9);"
        " create publication low for table t where (a < 5); create publication high for table t where (a > 5)"
    )
    twin.subscribe("low", "low", tables=columns, on_failure=policy)
    twin.subscribe_beside("low", "high", "high", on_failure=policy)
    twin.sync()

    twin.publish("update t set a = 9 where id = 1;\nupdate t set a = 1 where id = 2")
    results = twin.sync("low", "high")

    assert twin.rows("low", "t") == [(1, 9), (2, 1)]
    assert [result.parked for result in results.values()] == [(), ()]


def test_transient_error_parks_nothing(twin: Twin) -> None:
    """A lock: the error names its holder, and the next run applies the window."""
    subscribed(twin, "good", lock_timeout=0.2)
    traffic(twin)
    with twin.pairs["good"].ours.connect() as other, other.transaction():
        other.execute("lock table t in share mode")
        (result,) = replay(twin.config, ["good"])
        error = result.error or ""
        assert f"server process {other.info.backend_pid} " in error
        assert '"public"."t"' in error
        assert result.retry is Retry.LATER
    assert record(twin, "good").parked_at is None
    with pytest.raises(ReplayFailed, match="lock timeout"):
        subscription_result(twin.config, "good")
    assert ours(twin, "good", "table u") == []
    (result,) = replay(twin.config, ["good"])
    assert (result.error, result.retry) == (None, None)
    assert subscription_result(twin.config, "good")["to_lsn"] == str(result.to_lsn)
    assert ours(twin, "good", "table u order by id") == ALL_OF_U
