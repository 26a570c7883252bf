"""Unsent values (R4.6) that are hard to find, and lost ones: found, NULL as natively, or parked.

`body` is stored out of line, so that an UPDATE which does not change it does not send it; a row enters the
filter by its key. If the publisher's replica identity changes meanwhile, nothing links a row's changes, and
its values at the entry are unknown.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import pytest

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from cdc_replay.commands.resume import resume
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.status import status
from cdc_replay.errors import CdcReplayError, NotParked
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Parked, Ready
from cdc_replay.subscriber import subscription_records
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

T: Final = QualifiedName("public", "t")
TABLE: Final = "create table t (id int primary key, a int, body text, note text)"
OTHER: Final = "create table u (id int primary key, a int)"
LOSE: Final = """
    alter table t replica identity using index t_other;
    update t set a = a + 100 where id = {id};
    alter table t replica identity default
""".strip()
"""Under the other identity the row of `id` cannot be followed."""


def long(letter: str) -> str:
    """SQL of a value that is stored out of line."""
    return f"repeat('{letter}', 3000)"


def prepare(twin: Twin, *, publish: str = "insert, update, delete, truncate") -> None:
    """Tables `t`, published where id > 10, with rows 1 to 5, and `u`, published whole."""
    rows = "insert into t select n, n, repeat(chr(96 + n), 3000), repeat(chr(64 + n), 3000)"
    twin.publisher.run(f"""
        {TABLE}; {OTHER};
        alter table t alter body set storage external, alter note set storage external, alter a set not null;
        create unique index t_other on t (id, a);
        create publication p for table t where (id > 10) with (publish = '{publish}');
        create publication q for table u;
        {rows} from generate_series(1, 5) n
    """)


def short(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Long values by their first character."""
    return [
        tuple(value[0] if isinstance(value, str) and len(value) > 9 else value for value in row)
        for row in rows
    ]


def ours(twin: Twin, query: str, name: str = "s") -> list[tuple[Any, ...]]:
    return short(twin.pairs[name].ours.rows(query))


def native(twin: Twin, query: str, name: str = "s") -> list[tuple[Any, ...]]:
    return short(twin.pairs[name].native.rows(query))


def on_both(twin: Twin, statement: str) -> None:
    for database in (twin.pairs["s"].ours, twin.pairs["s"].native):
        database.run(statement)


def record(twin: Twin, name: str = "s") -> subscription_records.SubscriptionRecord:
    with twin.pairs[name].ours.connect() as connection:
        record = subscription_records.subscription_record(connection, name)
    assert record is not None
    return record


def ends(twin: Twin) -> list[Lsn]:
    """The commits that the log has."""
    change_log = ChangeLog.open(str(twin.change_log))
    return [commit.commit_lsn for commit in change_log.commits(Window(ZERO, change_log.end_lsn))]


def test_values_of_renamed_columns_are_found(twin: Twin) -> None:
    """R9.10: a column is the same by its attribute number, before and after a rename, in a transaction too.

    The log alone has the values of row 6: it is deleted again, which is not published.
    """
    prepare(twin, publish="insert, update")
    twin.subscribe("s", "p", "q", tables=f"{TABLE}; {OTHER}")
    twin.sync()
    twin.publish("update t set id = 20 where id = 1;\nalter table t rename body to content")
    result = twin.sync()["s"]
    assert result.unsent_nulls == 0
    assert ours(twin, "table t") == [(20, 1, "a", "A")]
    assert native(twin, "table t") == [(20, 1, None, None)]
    on_both(twin, "alter table t rename body to content")

    # Two columns exchange their names, between an entry and the next, and within one transaction.
    exchange = (
        "alter table t rename content to x; alter table t rename note to content;"
        " alter table t rename x to note"
    )
    twin.publish(f"insert into t values (6, 6, {long('f')}, {long('F')})")
    twin.publish(
        f"update t set id = 22 where id = 2;\nbegin;\nupdate t set id = 23 where id = 3;\n{exchange};\n"
        "update t set id = 24 where id = 4;\ncommit"
    )
    twin.publish("update t set id = 25 where id = 5;\nupdate t set id = 26 where id = 6")
    twin.publish("delete from t where id = 26")
    twin.sync()
    query = "select id, content, note from t where id between 22 and 26 order by id"
    assert ours(twin, query) == [
        (22, "b", "B"),
        (23, "c", "C"),
        (24, "D", "d"),
        (25, "E", "e"),
        (26, "F", "f"),
    ]
    assert {row[1:] for row in native(twin, query)} == {(None, None)}


def test_new_column_of_an_old_name_is_another_one(twin: Twin) -> None:
    """The new `body` has its own value; the old one's value entered, and is in the log only."""
    prepare(twin)
    twin.subscribe("s", "p", "q", tables=f"{TABLE}; {OTHER}")
    twin.publish(f"insert into t values (6, 6, {long('f')}, {long('F')})")
    twin.sync()
    twin.publish(
        f"""
        update t set id = 26 where id = 6;
        alter table t drop note;
        alter table t drop body;
        alter table t add body text, add note text;
        alter table t alter body set storage external;
        update t set body = {long("x")} where id = 1;
        update t set id = 21 where id = 1
    """.strip().replace(";\n        ", ";\n")
    )
    twin.sync()
    query = "select id, body, note from t order by id"
    assert ours(twin, query) == [(21, "x", None), (26, "f", "F")]
    assert native(twin, query) == [(21, None, None), (26, None, None)]


def test_rewrite_ends_the_publishers_values_and_not_the_logs(twin: Twin) -> None:
    """R11.9: after it a row of the publisher may have another key and other values."""
    prepare(twin)
    twin.subscribe("s", "p", "q", tables=f"{TABLE}; {OTHER}", copy_data=False)
    twin.sync()
    twin.publish(f"insert into t values (6, 6, {long('f')}, {long('F')})")
    twin.sync()
    twin.publish("update t set id = 26 where id = 6;\nupdate t set id = 21 where id = 1")
    twin.publish("alter table t alter a type bigint;\nupdate t set id = 22 where id = 2")
    result = twin.sync()["s"]
    assert (result.unsent_nulls, result.error) == (2, None)
    query = "select id, body, note from t order by id"
    assert ours(twin, query) == [(21, None, None), (22, "b", "B"), (26, "f", "F")]
    assert native(twin, query) == [(id_, None, None) for id_ in (21, 22, 26)]


GONE: Final = {
    "column": ("alter table t drop body;\nalter table t drop note", [(20, None, None)]),
    "table": ("drop table t", [(20, None, None)]),
    "row": ("delete from t where id = 20", [(20, None, None)]),
    "all rows": ("truncate t", [(20, None, None)]),
    "publication": (
        f"alter publication p drop table t;\nupdate t set body = {long('X')} where id = 20",
        [(20, None, "A")],
    ),
}


@pytest.mark.parametrize("disappearance", GONE)
def test_given_up_value_is_null_as_natively(
    twin: Twin, disappearance: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The row or the value does not exist any more: no policy stops for it."""
    statements, expected = GONE[disappearance]
    prepare(twin, publish="insert, update")
    twin.subscribe("s", "p", "q", tables=f"{TABLE}; {OTHER}")
    twin.sync()
    twin.publish("update t set id = 20 where id = 1;\ninsert into u values (1, 1)")
    twin.publish(statements)
    twin.publish("insert into u values (2, 2)")

    with caplog.at_level(logging.WARNING, "cdc_replay"):
        result = twin.sync()["s"]

    query = "select id, body, note from t order by id"
    assert ours(twin, query) == expected
    assert native(twin, query) == [(id_, None, None) for id_, *_ in expected]
    assert ours(twin, "table u order by id") == [(1, 1), (2, 2)]
    assert result.unsent_nulls == sum(value is None for row in expected for value in row)
    log_lines = [record.message for record in caplog.records if "NULL" in record.message]
    assert len(log_lines) == 1
    assert "public.t" in log_lines[0]
    assert f"(id)=({expected[0][0]})" in log_lines[0]


def test_gaps_in_earlier_history_do_not_lose_values(twin: Twin) -> None:
    """The replica identity changed before the window; inside it the row can be tracked, and is gone."""
    prepare(twin, publish="insert, update")
    twin.subscribe("s", "p", "q", tables=f"{TABLE}; {OTHER}")
    twin.sync()
    twin.publish(LOSE.format(id=2))
    twin.sync()
    twin.publish("update t set id = 20 where id = 1;\ndelete from t where id = 20")
    assert twin.sync()["s"].unsent_nulls == 2
    assert twin.rows("s", "t") == [(20, 1, None, None)]


def lose(twin: Twin, id_: int) -> None:
    """Row `id_` enters under id_ + 20, and its values are lost."""
    twin.publish(f"update t set id = id + 20 where id = {id_}")
    twin.publish(LOSE.format(id=id_ + 20))


def traffic(twin: Twin) -> Lsn:
    """Changes before, with, and after the row that lacks its value; the end of its transaction."""
    twin.publish(f"insert into u values (1, 1);\ninsert into t values (11, 11, {long('k')}, null)")
    twin.publish("update t set id = 12 where id = 2;\nupdate t set body = null, note = null where id = 12")
    before = twin.position()
    twin.publish("begin;\nupdate t set id = 21 where id = 1;\ninsert into u values (2, 2);\ncommit")
    twin.publish(LOSE.format(id=21))
    twin.publish("insert into u values (3, 3);\ninsert into t values (13, 13, 'm', 'n')")
    capture(twin.config, "pub")
    return next(end for end in ends(twin) if end > before)


AROUND: Final = [(11, "k", None), (12, None, None), (13, "m", "n")]
QUERY: Final = "select id, body, note from t order by id"


def test_lost_value_parks_before_its_transaction(twin: Twin) -> None:
    """Everything before is applied, and every remedy in the error works."""
    prepare(twin)
    for name in ("skip", "accept", "copy"):
        twin.subscribe(name, "p", "q", tables=f"{TABLE}; {OTHER}", native=False)
    twin.sync_ours()
    end = traffic(twin)

    for _ in range(2):
        for result in replay(twin.config, ["skip", "accept", "copy"]):
            name, error = result.subscription, result.error or ""
            for part in (
                *(
                    f"parked before the transaction that committed at {end}",
                    "[R4.6]",
                    "public",
                    '"body", "note"',
                ),
                *("(id)=(21)", f"resume {name} --skip {end}", f"resume {name} --accept-null"),
                f"snapshot {name} --table public.t",
            ):
                assert part in error, (part, error)
            assert (record(twin, name).parked_transaction, result.unsent_nulls) == (end, 0)
            assert ours(twin, QUERY, name) == AROUND[:2]
            assert ours(twin, "table u order by id", name) == [(1, 1)]
    assert {str(end) in (subscription.error or "") for subscription in status(twin.config).subscriptions} == {
        True
    }

    resume(twin.config, "skip", skip=end)
    resume(twin.config, "accept", accept_null=True)
    snapshot(twin.config, "copy", tables=[T])
    results = {result.subscription: result for result in replay(twin.config, ["skip", "accept", "copy"])}
    assert {name: (each.error, each.unsent_nulls) for name, each in results.items()} == {
        "skip": (None, 0),
        "accept": (None, 2),
        "copy": (None, 0),
    }
    assert ours(twin, QUERY, "skip") == AROUND
    assert ours(twin, QUERY, "accept") == [*AROUND, (21, None, None)]
    assert ours(twin, QUERY, "copy") == [*AROUND, (21, "a", "A")]
    assert [ours(twin, "select id from u order by id", name) for name in results] == [
        [(1,), (3,)],
        [(1,), (2,), (3,)],
        [(1,), (2,), (3,)],
    ]
    # What was accepted was that transaction, and no later one.
    lose(twin, 3)
    twin.sync_ours("accept")
    assert (record(twin, "accept").parked_transaction or end) > end
    with pytest.raises(NotParked, match="is not parked"):
        resume(twin.config, "skip", accept_null=True)


@pytest.mark.slow
def test_table_alone_parks_before_the_transaction(twin: Twin) -> None:
    prepare(twin)
    for name in ("skip", "accept"):
        twin.subscribe(name, "p", "q", tables=f"{TABLE}; {OTHER}", native=False, on_failure="table")
    twin.sync_ours()
    end = traffic(twin)

    for result in replay(twin.config, ["skip", "accept"]):
        assert (result.error, result.parked) == (None, ("public.t",))
        parked = twin.states(result.subscription)["t"]
        assert isinstance(parked, Parked)
        assert parked.transaction == end
        assert ours(twin, QUERY, result.subscription) == AROUND[:2]
        assert len(ours(twin, "table u", result.subscription)) == 3

    resume(twin.config, "skip", tables=[T], skip=end)
    resume(twin.config, "accept", tables=[T], accept_null=True)
    results = {result.subscription: result for result in replay(twin.config, ["skip", "accept"])}
    assert [(result.error, result.unsent_nulls) for result in results.values()] == [(None, 0), (None, 2)]
    assert ours(twin, QUERY, "skip") == AROUND
    assert ours(twin, QUERY, "accept") == [*AROUND, (21, None, None)]
    assert isinstance(twin.states("accept")["t"], Ready)


@pytest.mark.slow
def test_refused_change_in_the_extension_parks_before_itself(twin: Twin) -> None:
    """Row 21 enters, its value is changed later, and the subscriber refuses a row between the two."""
    prepare(twin)
    twin.subscribe("s", "p", "q", tables=f"{TABLE}; {OTHER}", native=False)
    twin.sync_ours()
    twin.pairs["s"].ours.run("alter table u add check (a <> 2)")
    twin.publish("update t set id = 21 where id = 1;\ninsert into u values (1, 1)")
    before = twin.position()
    twin.publish(f"insert into u values (2, 2);\nupdate t set body = {long('X')}, note = 'n' where id = 21")
    capture(twin.config, "pub")
    end = next(lsn for lsn in ends(twin) if lsn > before)

    (result,) = replay(twin.config, ["s"])

    assert f"parked before the transaction that committed at {end}" in (result.error or "")
    assert ours(twin, "table u") == [(1, 1)]
    # It is changed since, by what comes as soon as replay goes on.
    assert (ours(twin, QUERY), result.unsent_nulls) == ([(21, None, None)], 2)
    resume(twin.config, "s", skip=end)
    twin.sync_ours()
    assert ours(twin, QUERY) == [(21, "X", "n")]


@pytest.mark.slow
def test_unchanged_toast_native_stores_null(twin: Twin, caplog: pytest.LogCaptureFixture) -> None:
    """Values that can be found are found; lost ones are NULL, and refused if the column is NOT NULL."""
    prepare(twin)
    twin.subscribe("s", "p", "q", tables=f"{TABLE}; {OTHER}", unchanged_toast="native")
    twin.subscribe("strict", "p", tables=TABLE, native=False, unchanged_toast="native")
    twin.sync_ours()
    twin.native("s").wait()
    twin.pairs["strict"].ours.run("alter table t alter body set not null")
    lose(twin, 1)
    lose(twin, 2)

    with caplog.at_level(logging.WARNING, "cdc_replay"):
        results = {result.subscription: result.replay for result in twin.sync_ours()}

    twin.native("s").wait()
    assert (results["s"].error, results["s"].unsent_nulls) == (None, 4)
    assert twin.rows("s", "t") == [(21, 101, None, None), (22, 102, None, None)]
    log_lines = [
        record.message
        for record in caplog.records
        if "NULL" in record.message and "subscription s:" in record.message
    ]
    assert len(log_lines) == 1
    assert "(id)=(21), (id)=(22)" in log_lines[0]
    assert "not-null constraint" in (results["strict"].error or "")
    assert record(twin, "strict").parked_transaction is not None
    with pytest.raises(CdcReplayError, match="not parked for a value"):
        resume(twin.config, "strict", accept_null=True)

    twin.publish("update t set id = 23 where id = 3")
    assert twin.sync("s")["s"].unsent_nulls == 0
    assert ours(twin, QUERY)[2:] == [(23, "c", "C")]
    assert native(twin, QUERY)[2:] == [(23, None, None)]
