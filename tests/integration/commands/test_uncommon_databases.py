"""What few databases have on either side, beside native."""

from __future__ import annotations

from collections import Counter

import pytest

from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.validate import validate
from cdc_replay.subscriber import state_schema, subscription_records
from fixtures.postgres import ANY_DATABASE
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key, a int)"
TEMPORAL = """
    create table t (id int4range, valid daterange, v text, primary key (id, valid without overlaps))
"""


def test_a_key_without_overlaps_finds_rows_by_equality(twin: Twin) -> None:
    """R8.6: its index is GiST, where the numbers of operators mean other ones than in a btree."""
    twin.publisher.require(18, "keys WITHOUT OVERLAPS")
    twin.publisher.run(f"{TEMPORAL}; create publication p for table t")
    twin.subscribe("s", "p", tables=TEMPORAL)
    year = "[2020-01-01,2021-01-01)"
    rows = [f"('[{low},{high})', '{year}', 'v')" for low, high in ((1, 2), (1, 10), (3, 4), (20, 30))]
    twin.publish(f"insert into t values {', '.join(rows)}")
    twin.sync()

    twin.publish(f"""delete from t where id = '[1,2)';
        update t set v = 'w' where id = '[1,10)';
        update t set valid = '[2021-01-01,2022-01-01)' where id = '[3,4)';
        insert into t values ('[1,2)', '[2022-01-01,2023-01-01)', 'new'), ('[5,6)', '{year}', 'new')""")
    twin.sync()

    assert sorted(row[2] for row in twin.rows("s", "t")) == ["new", "new", "v", "v", "w"]


@pytest.mark.parametrize("enabled", ["always", "replica"])
def test_rewrite_rules_on_a_target_table_are_refused_by_name(twin: Twin, enabled: str) -> None:
    """R8.13: a native worker does not see them; a rule that is not in force for it changes nothing."""
    twin.publisher.run(f"{TABLE}; create publication p for table t; insert into t values (1, 1)")
    twin.subscribe("s", "p", tables=f"{TABLE}; create rule gone as on insert to t do instead nothing")
    twin.sync()
    ours = twin.pairs["s"].ours
    ours.run(f"alter table t enable {enabled} rule gone")
    twin.publish("insert into t values (2, 2)")

    [result] = twin.sync_ours("s")

    assert 'disable them, or ENABLE RULE: "gone"' in (result.replay.error or "")
    assert ours.rows("table t") == [(1, 1)]
    ours.run("alter table t enable rule gone")
    twin.sync()
    assert len(twin.rows("s", "t")) == 2


DUE_AT_THE_END = """
    create constraint trigger c after insert on t deferrable initially deferred
        for each row execute function public.f();
    alter table t enable always trigger c
"""
ON_CONFLICT = """
    create trigger c before insert on t for each row when (pg_trigger_depth() = 0)
        execute function public.g();
    alter table t enable replica trigger c
"""


@pytest.mark.parametrize("trigger", [DUE_AT_THE_END, ON_CONFLICT])
def test_a_copy_leaves_the_indexes_to_triggers_that_fire(twin: Twin, trigger: str) -> None:
    """R7.10: they may look for the indexes while rows come, or be due when the indexes would be built."""
    twin.publisher.run(f"{TABLE}; create publication p for table t; insert into t values (1, 1), (2, 2)")
    functions = """
        create function f() returns trigger language plpgsql as $$ begin return null; end $$;
        create function g() returns trigger language plpgsql as $$ begin
            insert into public.t values (new.id + 100, 0) on conflict (id) do update set a = 1;
            return new;
        end $$
    """
    twin.subscribe("s", "p", tables=f"{TABLE}; {functions}; {trigger}")

    twin.sync()

    assert len(twin.rows("s", "t")) >= 2


def test_the_state_of_a_subscriber_that_is_a_publisher_too_is_not_replicated(twin: Twin) -> None:
    """R2.2: it is to us what catalogs are to PostgreSQL."""
    twin.publisher.run(f"{TABLE}; create publication p for all tables; insert into t values (1, 1)")
    with twin.publisher.connect() as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(
            connection, "s", "7000000000000000001", ["upstream"], ANY_DATABASE
        )
    twin.subscribe("s", "p", tables=TABLE, native=False)
    twin.sync_ours("s")

    twin.publish("insert into t values (2, 2);\ntruncate cdc_replay.subscription cascade")
    [result] = twin.sync_ours("s")

    assert result.replay.error is None
    assert set(twin.states("s")) == {"t"}
    assert twin.pairs["s"].ours.rows("table t order by id") == [(1, 1), (2, 2)]


def test_changes_of_unsubscribed_tables_are_reported(twin: Twin, caplog: pytest.LogCaptureFixture) -> None:
    """R7.12: they are passed over, as those of a table that came to the publication later."""
    others = "create table later (id int primary key)"
    twin.publisher.run(f"{TABLE}; {others}; create publication p for table t")
    twin.subscribe("s", "p", tables=f"{TABLE}; {others}; create table renamed (like t)", native=False)
    twin.sync_ours("s")
    caplog.clear()
    twin.publish("insert into t values (1, 1)")
    twin.sync_ours("s")
    assert "skipped changes" not in caplog.text

    twin.publish(
        "alter table t rename to renamed;\ninsert into renamed values (2, 2);\n"
        "alter table renamed rename to t;\nalter publication p add table later;\ninsert into later values (1)"
    )
    twin.sync_ours("s")

    assert (
        "skipped changes of public.later, public.renamed: published but not in the subscription"
        in caplog.text
    )
    assert "`cdc-replay refresh s`" in caplog.text
    assert twin.pairs["s"].ours.rows("table t") == [(1, 1)]


def test_filter_does_not_depend_on_the_backslash_setting_of_the_session(twin: Twin) -> None:
    """R3.15: its text is read again, under settings of our own."""
    twin.publisher.run("create table w (id int primary key, a text); create publication p for table w")
    twin.publisher.run("alter publication p set (publish = 'insert')")
    twin.subscribe("s", "p", tables="create table w (id int primary key, a text)")
    twin.sync()

    twin.publish(
        "set standard_conforming_strings = off;\n"
        "alter publication p set table w where (a ~ E'^\\\\d+$');\n"
        "insert into w values (1, '12'), (2, 'x'), (3, E'\\\\ddd')"
    )
    twin.sync()

    assert twin.rows("s", "w") == [(1, "12")]


FORMATS = """
    do $$ declare setting text; begin
        foreach setting in array array[
            'timezone = ''Asia/Kolkata''', 'datestyle = ''German, DMY''', 'intervalstyle = sql_standard',
            'extra_float_digits = 0', 'bytea_output = escape'
        ] loop
            execute format('alter database %I set %s', current_database(), setting);
        end loop;
    end $$
"""
EVENTS = """
    create table events (id int primary key, at timestamp, day date, said text, f float8, b bytea, i interval)
"""
EVENTS_THERE = """
    create table events (
        id int primary key, at timestamptz(0), day timestamptz, said date, f float8, b bytea, i interval,
        zone text default current_setting('TimeZone'), told text
    );
    create function tell() returns trigger language plpgsql as $$ begin
        new.told := concat_ws(' ', new.at, new.day, new.said, new.f, new.b, new.i);
        return new;
    end $$;
    create trigger tell before insert or update on events for each row execute function public.tell();
    alter table events enable always trigger tell
"""


def test_values_are_read_and_written_in_the_formats_of_the_subscribers_database(twin: Twin) -> None:
    """R8.13: the worker's session has them. The texts that it reads are in those of the capture (R1.11)."""
    twin.publisher.run(f"{EVENTS}; alter table events replica identity full")
    twin.publisher.run("create publication p for table events")
    times = "'2024-01-02 03:04:05.6', '2024-02-03', '2024-02-03'"
    values = f"{times}, 0.1::float8 + 0.2, '\\xff00', '-1 day 2 hours'"
    twin.publisher.run(f"insert into events values (1, {values}); insert into events values (2)")
    twin.subscribe("s", "p", tables=f"{FORMATS}; {EVENTS_THERE}")
    twin.sync()
    zones = "(select id, zone, events::text from events)"
    assert [row[:2] for row in twin.rows("s", zones)] == [(1, "Asia/Kolkata"), (2, "Asia/Kolkata")]

    twin.publish(f"""insert into events values (3, {values});
        insert into events values (4, 'infinity', '-infinity', null, 'NaN');
        update events set at = at + interval '1 month', said = '2024-03-02' where id = 1;
        update events set day = null, f = null, b = null where id = 3;
        delete from events where id = 2""")
    twin.sync()
    assert len(twin.rows("s", zones)) == 3
    assert validate(twin.config, "s").success

    twin.pairs["s"].ours.run("delete from events where id = 4; update events set at = at + i where id = 3")
    result = refresh(twin.config, "s", reconcile=True)
    assert (result.inserted, result.updated, result.deleted) == (1, 1, 0)
    assert len(twin.rows("s", zones)) == 3


WITHOUT_NULLS = """
    do $$ begin execute format('alter database %I set array_nulls = off', current_database()); end $$
"""


@pytest.mark.parametrize("where", ["publisher", "subscriber"])
def test_arrays_are_read_as_natively_where_a_database_has_no_nulls_in_them(twin: Twin, where: str) -> None:
    """R1.11: a walsender never reads a text, so such a publisher's filters see NULL; R8.13: a worker does."""
    table = "create table t (id int primary key, tags text[])"
    twin.publisher.run(f"{table}; alter table t replica identity full")
    twin.publisher.run("insert into t values (1, array[null]), (2, array['NULL'])")
    twin.publisher.run("create publication p for table t where (array_position(tags, null) is not null)")
    if where == "publisher":
        twin.publisher.run(WITHOUT_NULLS)
    twin.subscribe("s", "p", tables=f"{WITHOUT_NULLS}; {table}" if where == "subscriber" else table)
    twin.sync()
    assert [id for id, _ in twin.rows("s", "t")] == [1]

    twin.publish(
        "insert into t values (3, array[null, 'x']), (4, '{}'); update t set tags = tags || null::text"
    )
    twin.sync()

    assert [id for id, _ in twin.rows("s", "t")] == [1, 2, 3, 4]


AUDITED = """
    create table t (id int primary key, a int);
    create table fired (what text, level text);
    create function note() returns trigger language plpgsql as $$ begin
        insert into public.fired values (tg_op, tg_level);
        return null;
    end $$;
    create trigger row_level after insert or update or delete on t for each row execute function note();
    create trigger statement_level after insert or update or delete or truncate on t execute function note();
    create trigger "Before each" before update on t execute function note();
    create constraint trigger deferred after insert on t deferrable initially deferred
        for each row execute function note();
    alter table t enable always trigger row_level;
    alter table t enable always trigger statement_level;
    alter table t enable replica trigger "Before each";
    alter table t enable always trigger deferred
"""


def test_triggers_for_each_statement_fire_where_they_do_in_a_native_worker(twin: Twin) -> None:
    """R8.13: at TRUNCATE, and once for each COPY of the initial copy, but not when changes are applied."""
    twin.publisher.run(f"{TABLE}; create publication p for table t; insert into t values (1, 1), (2, 2)")
    twin.subscribe("s", "p", tables=AUDITED)
    twin.sync()
    copied = twin.rows("s", "fired")
    assert copied.count(("INSERT", "STATEMENT")) == 1

    twin.publish("insert into t values (3, 3);\nupdate t set a = 0 where id = 1;\ndelete from t where id = 2")
    twin.sync()

    assert Counter(twin.rows("s", "fired")) - Counter(copied) == Counter(
        {("INSERT", "ROW"): 2, ("UPDATE", "ROW"): 1, ("DELETE", "ROW"): 1}
    )
    twin.publish("truncate t")
    twin.sync()
    assert ("TRUNCATE", "STATEMENT") in twin.rows("s", "fired")
    enabled = "(select tgname, tgenabled from pg_trigger where tgrelid = 't'::regclass)"
    assert dict(twin.rows("s", enabled)) == {
        "row_level": "A",
        "statement_level": "A",
        "Before each": "R",
        "deferred": "A",
    }
