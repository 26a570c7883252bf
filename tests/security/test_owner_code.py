"""Code of a table's owner does not run with our rights (`subscriber.owners`, R8.21).

The stranger owns the subscriber's table, and all the places in which a table can have code are tried. The
code would make it a superuser, by whatever way leads back to our role, or leaves something behind that runs
later. It is in the native subscriber's table, too, and both must hold the same rows after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import pytest

from cdc_replay.commands.backfill import backfill
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.resume import resume
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.status import status
from cdc_replay.commands.validate import validate
from cdc_replay.model.relation import QualifiedName
from fixtures.twin import Twin
from security.stranger import Stranger

pytestmark = pytest.mark.spark

ATTACK: Final = """
    create schema own authorization {owner};
    create table own.seen (who text);
    create function own.rise() returns text language plpgsql as $$ begin
        execute 'alter role {owner} superuser';
        return 'risen';
    exception when others then
        return 'no';
    end $$;
    create function own.later() returns trigger language plpgsql as $$ begin
        perform own.rise();
        return null;
    end $$;
    create table own.other (id int);
    create constraint trigger later after insert on own.other deferrable initially deferred
        for each row execute function own.later();
    alter table own.other enable always trigger later;
    create function own.attack() returns text language plpgsql as $$
    declare
        way text;
    begin
        if current_setting('application_name') = 'cdc_replay test' then
            return 'x'; -- sessions of the test itself
        end if;
        insert into own.seen values (current_user);
        foreach way in array array[
            'select own.rise()',
            'reset role; select own.rise()',
            'set role postgres; select own.rise()',
            'set local role none; select own.rise()',
            'set session authorization postgres; select own.rise()',
            'reset session authorization; select own.rise()',
            'declare held cursor with hold for select own.rise()',
            'prepare _pg3_0 as select own.rise()',
            'insert into own.other values (1)',
            'create temporary table pg_class as select own.rise()',
            'listen something',
            'set session_replication_role = origin',
            'set search_path = own, pg_catalog',
            'set standard_conforming_strings = off',
            'set row_security = off'
        ] loop
            begin
                execute way;
            exception when others then
                null;
            end;
        end loop;
        return 'x';
    end $$;
    create function own.pure(text) returns text immutable language plpgsql as $$ begin
        return own.attack();
    end $$;
    create function own.set_config(text, text, boolean) returns text language sql as 'select own.rise()';
    create function own.current_setting(text) returns text language sql as 'select own.rise()';
    create function own.fires() returns trigger language plpgsql as $$ begin
        perform own.attack();
        return new;
    end $$
"""
"""Whoever calls `attack` is noted, and all ways are tried. `pure` is what must be immutable."""

PLAIN: Final = "create table t (id int primary key, v text)"
TRIGGER: Final = "execute function own.fires(); alter table t enable always trigger fires"
CODE_IN: Final = {
    "default": "create table t (id int primary key, v text, more text default own.attack())",
    "run by a function of the server": "create table t (id int primary key, v text, more tsquery"
    " default ts_rewrite('a', 'select ''a''::tsquery, own.attack()::tsquery'))",
    "check": "create table t (id int primary key, v text, check (own.attack() is not null))",
    "generated column": "create table t (id int primary key, v text,"
    " more text generated always as (own.pure(v)) stored)",
    "index expression": f"{PLAIN}; create index on t (own.pure(v))",
    "index predicate": f"{PLAIN}; create index on t (v) where own.pure('x') = 'x'",
    "statistics": f"{PLAIN}; create statistics s on (own.pure('x')), v from t",
    "domain": "create domain own.d as text check (own.attack() is not null);"
    " create table t (id int primary key, v own.d)",
    "domain in a composite type": "create domain own.d as text check (own.attack() is not null);"
    " create type own.c as (d own.d); create table t (id int primary key, v own.c)",
    "domain in an array": "create domain own.d as text check (own.attack() is not null);"
    " create table t (id int primary key, v own.d[])",
    "cast": "create type own.e as enum ('{A}', '{B}', '{C}');"
    " create function own.text(own.e) returns text language sql as 'select own.attack()';"
    " create cast (own.e as text) with function own.text(own.e);"
    " create table t (id int primary key, v own.e)",
    "trigger": f"{PLAIN}; create trigger fires before insert or update on t for each row {TRIGGER}",
    "constraint trigger": f"{PLAIN}; create constraint trigger fires after insert or update on t"
    f" deferrable for each row {TRIGGER}",
    "trigger of TRUNCATE": f"{PLAIN}; create trigger fires after truncate on t {TRIGGER}",
    "trigger of a partition": "create table t (id int primary key, v text) partition by range (id);"
    " create table part partition of t default; create trigger fires before insert or update on part"
    " for each row execute function own.fires(); alter table part enable always trigger fires",
    "no key": "create table t (id int, v text, check (own.attack() is not null))",
}
WITHOUT_NATIVE: Final = frozenset({"trigger of TRUNCATE"})
"""Native's worker is in no restricted operation any more when it fires this: `held` makes a superuser."""
NATIVE_RUNS_AS_OWNER_SINCE: Final = 16
"""Before, the owner's code runs natively as the subscription's owner, and each attack succeeds."""
DEFAULT_VALUES: Final = ("{a}", "{b}", "{c}")
VALUES: Final = {"domain in a composite type": ("(a)", "(b)", "(c)")}


@pytest.fixture
def owner(twin: Twin) -> Iterator[Stranger]:
    """A stranger at the subscriber, who may create objects in the databases."""
    made = Stranger(twin.database(), f"owner_of_{twin.publisher.name}")
    made.enter()
    yield made
    for pair in twin.pairs.values():
        for database in (pair.ours, pair.native):
            database.run(f"drop owned by {made.name} cascade")
    made.leave()


def own(owner: Stranger, script: str, *tables: str) -> str:
    """The script as superuser, with all that comes of it given to the owner."""
    given = "; ".join(f"alter table {table} owner to {owner.name}" for table in (*tables, "t"))
    return (
        f"{ATTACK.format(owner=owner.name)}; {script}; {given};"
        f" grant usage on schema public to {owner.name};"
        " do $$ declare f regprocedure; begin"
        " for f in select oid from pg_proc where pronamespace = 'own'::regnamespace loop"
        f" execute format('alter function %s owner to {owner.name}', f); end loop; end $$;"
        " do $$ declare c regclass; begin for c in select oid from pg_class"
        " where relnamespace = 'own'::regnamespace and relkind = 'r' loop"
        f" execute format('alter table %s owner to {owner.name}', c); end loop; end $$;"
        " do $$ declare c regtype; begin for c in select oid from pg_type"
        " where typnamespace = 'own'::regnamespace"
        " and (typtype in ('d', 'e') or oid = to_regtype('own.c')) loop"
        f" execute format('alter type %s owner to {owner.name}', c); end loop; end $$;"
        f" alter role {owner.name} nosuperuser; truncate own.seen"
    )


def ran_as(twin: Twin) -> set[str]:
    """Who has run the owner's code on our side."""
    return {who for (who,) in twin.pairs["s"].ours.rows("select distinct who from own.seen")}


@dataclass(frozen=True)
class Sides:
    """Ours, and native's where it can be compared."""

    twin: Twin
    has_native: bool

    def apply(self, *statements: str) -> None:
        for statement in statements:
            self.twin.publisher.run(statement)
        if self.has_native:
            self.twin.sync("s")
        else:
            assert [result.replay.error for result in self.twin.sync_ours("s")] == [None]

    def rows(self) -> list[tuple[object, ...]]:
        query = "select id, format('%s', v) as v from t"
        if self.has_native:
            return self.twin.rows("s", f"({query})")
        return self.twin.pairs["s"].ours.rows(f"{query} order by id")


@pytest.mark.parametrize("kind", CODE_IN)
def test_code_in_a_table_runs_as_its_owner(twin: Twin, owner: Stranger, kind: str) -> None:
    a, b, c = VALUES.get(kind, DEFAULT_VALUES)
    twin.publisher.run(
        "create table t (id int primary key, v text); create publication p for table t;"
        f" insert into t values (1, '{a}'), (2, '{b}');"
        f" alter table t replica identity {'full' if kind == 'no key' else 'default'}"
    )
    script = CODE_IN[kind].replace("{A}", a).replace("{B}", b).replace("{C}", c)
    parts = ["part"] if "partition" in kind else []
    sides = Sides(twin, twin.publisher.version >= NATIVE_RUNS_AS_OWNER_SINCE and kind not in WITHOUT_NATIVE)
    twin.subscribe("s", "p", tables=own(owner, script, *parts), native=sides.has_native)

    sides.apply()
    assert sides.rows() == [(1, a), (2, b)]
    sides.apply(
        f"insert into t values (3, '{c}')",
        f"update t set v = '{c}' where id = 1",
        "delete from t where id = 2",
    )
    assert sides.rows() == [(1, c), (3, c)]
    sides.apply(
        "truncate t", f"insert into t values (4, '{a}'), (5, '{b}')", f"update t set v = '{c}' where id = 4"
    )
    assert sides.rows() == [(4, c), (5, b)]

    assert not owner.is_superuser()
    # No cast is made at all.
    assert ran_as(twin) == (set() if kind == "cast" else {owner.name})


@pytest.mark.parametrize("kind", ["default", "index predicate", "domain in a composite type", "no key"])
def test_code_runs_as_its_owner_where_tables_are_compared(twin: Twin, owner: Stranger, kind: str) -> None:
    a, b, _ = VALUES.get(kind, DEFAULT_VALUES)
    twin.publisher.run(
        "create table t (id int primary key, v text); create publication p for table t;"
        f" insert into t values (1, '{a}'), (2, '{b}')"
    )
    twin.subscribe("s", "p", tables=own(owner, CODE_IN[kind]), native=False)
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    rows = "select id, format('%s', v) from t order by id"

    assert validate(twin.config, "s").success
    ours.run("set session_replication_role = replica; delete from t where id = 2")
    assert not validate(twin.config, "s").success
    refresh(twin.config, "s", reconcile=True, confirm=lambda _: True)
    assert ours.rows(rows) == [(1, a), (2, b)]
    snapshot(twin.config, "s", tables=[QualifiedName("public", "t")])
    assert ours.rows(rows) == [(1, a), (2, b)]

    assert not owner.is_superuser()
    assert ran_as(twin) == {owner.name}


def test_code_that_refuses_a_change_runs_as_its_owner_again(twin: Twin, owner: Stranger) -> None:
    """The change parks; `resume`, and `backfill` of earlier rows, fire the trigger as the owner."""
    twin.publisher.run("create table t (id int primary key, v text); create publication p for table t")
    twin.subscribe("s", "p", tables=own(owner, CODE_IN["trigger"]), native=False)
    twin.sync_ours()
    ours, begin = twin.pairs["s"].ours, twin.position()
    angry = "create function own.fires() returns trigger language plpgsql as $$ begin perform own.attack();"
    ours.run(f"{angry} raise 'never'; end $$".replace("create", "create or replace", 1))

    twin.publisher.run("insert into t values (1, 'a')")
    [parked] = twin.sync_ours()
    assert "never" in str(parked.replay.error)
    ours.run(f"{angry} return new; end $$".replace("create", "create or replace", 1))
    resume(twin.config, "s")
    assert [result.replay.error for result in twin.sync_ours()] == [None]
    assert ours.rows("select id, v from t") == [(1, "a")]
    assert ran_as(twin) == {owner.name}

    ours.run("truncate own.seen; set session_replication_role = replica; delete from t")
    backfill(twin.config, "s", str(begin), str(twin.position()))
    assert ours.rows("select id, v from t") == [(1, "a")]
    assert ran_as(twin) == {owner.name}
    assert not owner.is_superuser()


def test_words_of_the_owner_are_bounded(twin: Twin, owner: Stranger) -> None:
    """What it raises may have a gigabyte: it is kept with the subscription, and each status shows it."""
    twin.publisher.run("create table t (id int primary key, v text); create publication p for table t")
    twin.subscribe("s", "p", tables=own(owner, CODE_IN["trigger"]), native=False)
    twin.sync_ours()
    twin.pairs["s"].ours.run(
        "create or replace function own.fires() returns trigger language plpgsql as $$ begin"
        " raise exception '%', repeat('never ', 500000) using errcode = 'check_violation',"
        " detail = repeat('never ', 500000); end $$"
    )
    twin.publisher.run("insert into t values (1, 'a')")

    [parked] = twin.sync_ours()

    assert "never never" in str(parked.replay.error)
    assert len(str(parked.replay.error)) < 100_000
    assert len(str(status(twin.config).to_dict())) < 1_000_000


def test_words_of_the_owner_are_bounded_where_tables_are_compared(twin: Twin, owner: Stranger) -> None:
    twin.publisher.run("create table t (id int primary key, v text); create publication p for table t")
    twin.subscribe("s", "p", tables=own(owner, CODE_IN["statistics"]), native=False)
    twin.sync_ours()
    twin.pairs["s"].ours.run(
        "create or replace function own.pure(text) returns text immutable language plpgsql as $$ begin"
        " raise exception '%', repeat('never ', 500000); end $$"
    )

    result = validate(twin.config, "s")

    assert "never never" in str(result.error)
    assert len(str(result.to_dict())) < 100_000


def test_an_answer_that_the_owner_forges_stops_only_its_subscription(twin: Twin, owner: Stranger) -> None:
    """Its code runs beside ours, and may write what a statement has answered."""
    table = "create table t (id int primary key, v text)"
    twin.publisher.run(f"{table}; create publication p for table t")
    twin.subscribe("s", "p", tables=own(owner, CODE_IN["trigger"]), native=False)
    twin.subscribe("u", "p", tables=table, native=False)
    twin.sync_ours()
    twin.pairs["s"].ours.run(
        "create or replace function own.fires() returns trigger language plpgsql as $$ begin"
        " execute format('insert into %s values (null, %L)', (select oid::regclass from pg_class"
        " where relname like 'answer%' and relnamespace = pg_my_temp_schema()), '{');"
        " return new; end $$"
    )
    twin.publisher.run("insert into t values (1, 'a')")

    results = {result.subscription: result.replay.error for result in twin.sync_ours()}

    assert f'code in tables of "{owner.name}"' in str(results["s"])
    assert results["u"] is None
    assert twin.pairs["u"].ours.rows("table t") == [(1, "a")]


def forge(answer: str) -> str:
    """The statement by which the owner's code answers for a statement of ours."""
    return (
        "execute format('insert into %s values (0, %L)', (select oid::regclass from pg_class where relname"
        f" like 'answer%' and relnamespace = pg_my_temp_schema()), '{answer}')"
    )


UNREADABLE: Final = {
    "infinite": ("before delete", '{"deleted": 1e999, "u": 0, "us": null, "d": 0, "ds": null}'),
    "no column": ("statistics", "{}"),
    "half a character": ("before delete", '{"deleted": 1, "u": 1, "us": [["\\ud800"]], "d": 0, "ds": null}'),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_answer_that_is_no_count_stops_only_its_subscription(
    twin: Twin, owner: Stranger, kind: str
) -> None:
    """Of deleted rows, by a trigger; of rows that have an inserted key, by a function that planning calls."""
    table = "create table t (id int primary key, v text)"
    twin.publisher.run(f"{table}; insert into t values (1, 'a'); create publication p for table t")
    place, answer = UNREADABLE[kind]
    code = f"create trigger fires {place} on t for each row {TRIGGER}"
    script = CODE_IN["statistics"] if place == "statistics" else f"{table}; {code}"
    twin.subscribe("s", "p", tables=own(owner, script), native=False, on_conflict="skip")
    twin.subscribe("u", "p", tables=table, native=False)
    twin.sync_ours()
    twin.pairs["s"].ours.run(
        "create or replace function own.attack() returns text language plpgsql as $$ begin"
        f" {forge(answer)}; return 'x'; exception when others then return 'x'; end $$;"
        "create or replace function own.fires() returns trigger language plpgsql as $$ begin"
        " perform own.attack(); return old; end $$"
    )
    twin.publisher.run("insert into t values (2, 'b')" if place == "statistics" else "delete from t")

    results = {result.subscription: result.replay.error for result in twin.sync_ours()}

    assert f'code in tables of "{owner.name}"' in str(results["s"])
    assert results["u"] is None
    expected = [(1, "a"), (2, "b")] if place == "statistics" else []
    assert twin.pairs["u"].ours.rows("select id, v from t order by id") == expected


def test_an_error_that_the_owner_forges_stops_only_its_subscription(twin: Twin, owner: Stranger) -> None:
    """Its DETAIL looks like that of a constraint, and shows no row."""
    table = "create table t (v int, id int primary key)"
    twin.publisher.run(f"{table}; create publication p for table t")
    fires = f"create trigger fires before insert on t for each row {TRIGGER}"
    twin.subscribe("s", "p", tables=own(owner, f"{table}; {fires}"), native=False)
    twin.subscribe("u", "p", tables=table, native=False)
    twin.sync_ours()
    twin.pairs["s"].ours.run(
        "create or replace function own.fires() returns trigger language plpgsql as $$ begin"
        " raise 'never' using errcode = 'check_violation', detail = 'none'; end $$"
    )
    twin.publisher.run("insert into t values (1, 1)")

    results = {result.subscription: result.replay.error for result in twin.sync_ours()}

    assert "never" in str(results["s"])
    assert results["u"] is None
    assert twin.pairs["u"].ours.rows("table t") == [(1, 1)]


def test_code_that_never_returns_keeps_no_rows_from_others(twin: Twin, owner: Stranger) -> None:
    """The other subscription's window is applied meanwhile; an administrator ends the owner's session."""
    table = "create table t (id int primary key, v text)"
    twin.publisher.run(f"{table}; create publication p for table t")
    fires = f"create trigger fires before insert on t for each row {TRIGGER}"
    twin.subscribe("s", "p", tables=own(owner, f"{table}; {fires}"), native=False)
    twin.subscribe("u", "p", tables=table, native=False)
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    ours.run(
        "create or replace function own.fires() returns trigger language plpgsql as $$ begin"
        " loop perform pg_sleep(60); end loop; end $$"
    )
    twin.publisher.run("insert into t values (1, 'a')")
    with ThreadPoolExecutor(1) as executor:
        synced = executor.submit(twin.sync_ours)
        try:
            twin.wait_for_ids("u", 1)
        finally:
            ours.run(
                "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
                " where datname = current_database() and wait_event = 'PgSleep'"
            )
        results = {result.subscription: result.replay.error for result in synced.result()}

    assert results["u"] is None
