"""With whose rights statements run is decided where nobody can change it any more (R8.21)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql

from cdc_replay.errors import MissingPrivilege, TargetMismatch
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber.apply_connection import connect_as_apply_worker
from cdc_replay.subscriber.as_owner import act_on
from cdc_replay.subscriber.owners import Rights
from cdc_replay.subscriber.staged_columns import StagedColumns
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables
from fixtures.postgres import Database
from security.stranger import Stranger

T: Final = QualifiedName("own", "t")
CODE: Final = (
    "create function own.code(text) returns text immutable language sql as 'select $1';"
    " create function own.code() returns trigger language plpgsql as $$ begin return new; end $$;"
)
PLAIN: Final = {
    "values that the server makes": "create type public.mood as enum ('good');"
    " create table own.t (id bigint generated always as identity primary key, n serial,"
    " at timestamptz default now(), day date default current_date, key uuid default gen_random_uuid(),"
    " mood public.mood, part int4range, names text[], more text default 'x' || 'y',"
    " twice text generated always as (upper(names[1])) stored, check (n > 0 and names[1] ~ 'a'));"
    " create index on own.t (lower(more)) where n > 1",
    "sequence that the owner may use": "create sequence public.s;"
    " grant usage on sequence public.s to {owner};"
    " create table own.t (id int, n bigint default nextval('public.s') * 2)",
    "triggers that do not fire": f"{CODE} create table own.t (id int);"
    " create trigger code before insert on own.t for each row execute function own.code()",
    "partitions": "create table own.t (id int primary key) partition by range (id);"
    " create table own.part partition of own.t default",
    "row security that the owner passes": "create table own.t (id int);"
    " alter table own.t enable row level security",
}
CODED: Final = {
    "default": f"{CODE} create table own.t (id int, v text default own.code('x'))",
    "default that reads a setting": "create table own.t (id int, v text default current_setting('x'))",
    "default that changes a setting": "create table own.t (id int, v text default"
    " set_config('search_path', 'own', false))",
    "default that runs a query": "create table own.t (id int, v tsquery default ts_rewrite('a', 'select'))",
    "default that reads a file": "create table own.t (id int, v text default pg_read_file('/etc/passwd'))",
    "default that takes from a sequence of others": "create sequence public.s;"
    " create table own.t (id int, n bigint default nextval('public.s'))",
    "default that takes from a sequence by its oid": "create table own.t (id int, n bigint"
    " default nextval(1::oid::regclass))",
    "check that takes from a sequence": "create sequence own.s; create table own.t (id int,"
    " check (nextval('own.s') > 0))",
    "check": f"{CODE} create table own.t (id int, v text check (own.code(v) = v))",
    "generated column": f"{CODE} create table own.t (id int, v text,"
    " w text generated always as (own.code(v)) stored)",
    "check that evaluates the partition key of another table": f"{CODE} create table own.other (v text)"
    " partition by hash (own.code(v)); create table own.t (id int, v text,"
    " check (satisfies_hash_partition('own.other'::regclass, 4, 0, v) is not null))",
    "default that evaluates the partition key of another table": f"{CODE} create table own.other (v text)"
    " partition by hash (own.code(v)); create table own.t (id int, b boolean"
    " default satisfies_hash_partition('own.other'::regclass, 4, 0, 'x'::text))",
    "index": f"{CODE} create table own.t (id int, v text); create index on own.t (own.code(v))",
    "operator": f"{CODE} create function own.same(text, text) returns boolean language sql as 'select true';"
    " create operator own.=== (leftarg = text, rightarg = text, function = own.same);"
    " create table own.t (id int, v text, check (v operator(own.===) 'x'))",
    "partition key": f"{CODE} create table own.t (id int, v text) partition by list (own.code(v))",
    "partition key of an ancestor": f"{CODE} create table own.a (id int, v text)"
    " partition by list (own.code(v)); create table own.t partition of own.a default",
    "index of a partition": f"{CODE} create table own.t (id int, v text) partition by list (id);"
    " create table own.part partition of own.t default; create index on own.part (own.code(v))",
    "statistics": f"{CODE} create table own.t (id int, v text);"
    " create statistics own.s on (own.code(v)) from own.t",
    "default too large to be searched": "create table own.t (id int); do $$ begin execute format('alter table"
    " own.t alter id set default case when 1 in (%s) then 1 end', (select string_agg(n::text, ',')"
    " from generate_series(1, 40000) as n)); end $$",
    "trigger": f"{CODE} create table own.t (id int);"
    " create trigger code before insert on own.t for each row execute function own.code();"
    " alter table own.t enable replica trigger code",
    "domain": "create domain own.d as text; create table own.t (id int, v own.d)",
    "array of domain": "create domain own.d as text; create table own.t (id int, v own.d[])",
    "cast to a domain": "create domain own.d as text; create table own.t (id int, v text default 'x'::own.d)",
    "composite type": "create type own.c as (n int); create table own.t (id int, v own.c)",
    "range": "create type own.r as range (subtype = text); create table own.t (id int, v own.r)",
    "enum of the owner": "create type own.e as enum ('x'); alter type own.e owner to {owner};"
    " create table own.t (id int, v own.e)",
    "foreign table": "create foreign data wrapper w; create server s foreign data wrapper w;"
    " create table own.t (id int) partition by list (id);"
    " create foreign table own.part partition of own.t default server s",
}


@pytest.fixture
def owner(subscriber: Database) -> Iterator[Stranger]:
    made = Stranger(subscriber, f"owner_of_{subscriber.name}")
    made.enter()
    subscriber.run(
        f"create schema own authorization {made.name};"
        f" grant create on database {subscriber.name} to {made.name}"
    )
    yield made
    made.leave()


@pytest.fixture
def worker(subscriber: Database) -> Iterator[Connection]:
    with connect_as_apply_worker(subscriber.dsn, purpose="apply") as connection:
        connection.execute("set lock_timeout = '20s'")
        yield connection


def make(owner: Stranger, script: str) -> None:
    owner.database.run(f"{script.replace('{owner}', owner.name)}; alter table own.t owner to {owner.name}")


def target(connection: Connection) -> TargetTable:
    return read_target_tables(connection, [T])[T]


@pytest.mark.parametrize("script", PLAIN.values(), ids=PLAIN)
def test_tables_without_code_cost_nothing(owner: Stranger, worker: Connection, script: str) -> None:
    make(owner, script)

    assert target(worker).acting.rights is Rights.PLAIN
    with worker.transaction(), act_on(worker, [target(worker)]) as sessions:
        assert not sessions.session_for(target(worker)).runs_as_owner


@pytest.mark.parametrize("script", CODED.values(), ids=CODED)
def test_expressions_that_may_run_code_are_detected(owner: Stranger, worker: Connection, script: str) -> None:
    make(owner, script)

    assert target(worker).acting.rights is Rights.RESTRICTED
    with worker.transaction(), act_on(worker, [target(worker)]) as sessions:
        [(who,)] = sessions.session_for(target(worker)).query(sql.SQL("select current_user").format())
    assert who == owner.name


def test_code_added_after_planning_is_detected(owner: Stranger, worker: Connection) -> None:
    make(owner, f"{CODE} create table own.t (id int, v text)")
    planned = target(worker)
    owner.database.run("alter table own.t add check (own.code(v) is not null)")

    with worker.transaction(), act_on(worker, [planned]) as sessions:
        assert sessions.session_for(planned).runs_as_owner


def test_a_rule_added_after_planning_is_never_fired(owner: Stranger, worker: Connection) -> None:
    """The functions of a rule run with the rights of the session, unlike what it reads and writes."""
    make(
        owner,
        "create table own.t (id int); create function own.rise() returns int language plpgsql as $$ begin"
        f" execute 'alter role {owner.name} superuser'; return 1; end $$",
    )
    planned = target(worker)
    owner.run(
        "create rule rise as on insert to own.t do also select own.rise();"
        " alter table own.t enable always rule rise"
    )

    with (
        pytest.raises(TargetMismatch, match='rules that rewrite applied changes: "rise"'),
        worker.transaction(),
        act_on(worker, [planned]) as sessions,
    ):
        sessions.session_for(planned).execute(sql.SQL("insert into own.t values (1)").format())

    assert not owner.is_superuser()


@pytest.mark.parametrize("code", ["", "check (own.code(v) = v)"], ids=["plain", "with code"])
def test_rows_that_a_policy_hides_after_planning_are_not_passed_over(
    owner: Stranger, worker: Connection, code: str
) -> None:
    """As natively: a change that reaches no row because of a policy must not count as applied."""
    make(owner, f"{CODE} create table own.t (id int, v text {code}); insert into own.t values (1, 'x')")
    planned = target(worker)
    owner.run("alter table own.t enable row level security, force row level security")

    with (
        pytest.raises(TargetMismatch, match="row-level security is forced on its owner"),
        worker.transaction(),
        act_on(worker, [planned]) as sessions,
    ):
        sessions.session_for(planned).execute(sql.SQL("delete from own.t").format())

    assert owner.database.rows("select * from own.t") == [(1, "x")]


ADDED: Final = {
    "check": "alter table own.t add check (own.code(v) is not null)",
    "trigger": "create trigger code before insert on own.t for each row execute function own.code()",
    "index": "create index on own.t (own.code(v))",
    "statistics": "create statistics own.s on (own.code(v)) from own.t",
    "partition": "alter table own.t attach partition own.other for values in (1)",
    "rule": "create rule code as on insert to own.t do also select own.code('x');"
    " alter table own.t enable always rule code",
    "another table of the name": "alter table own.t rename to u",
    "another schema of the name": "alter schema own rename to other",
}


@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
def test_code_cannot_come_while_the_table_is_written(owner: Stranger, worker: Connection, added: str) -> None:
    make(
        owner,
        f"{CODE} create table own.t (id int, v text) partition by list (id);"
        f" create table own.other (id int, v text); alter table own.other owner to {owner.name}",
    )
    planned = target(worker)

    with worker.transaction(), act_on(worker, [planned]) as sessions:
        assert not sessions.session_for(planned).runs_as_owner
        with pytest.raises(pg.LockNotAvailable):
            owner.run(f"set lock_timeout = '200ms'; {added}")


def test_commands_neither_wait_for_a_vacuum_nor_cancel_it(owner: Stranger, worker: Connection) -> None:
    """Without the lock the owner could put code into the table, so that statements run as the owner."""
    make(owner, "create table own.t (id int)")
    planned = target(worker)
    with owner.database.connect() as vacuum, vacuum.transaction():
        vacuum.execute("lock table own.t in share update exclusive mode")
        with worker.transaction(), act_on(worker, [planned]) as sessions:
            assert sessions.session_for(planned).runs_as_owner
            assert (
                sessions.session_for(planned).execute(sql.SQL("insert into own.t values (1)").format()) == 1
            )


def test_a_table_that_has_taken_the_name_gets_nothing(owner: Stranger, worker: Connection) -> None:
    make(owner, "create table own.t (id int)")
    planned = target(worker)
    owner.run("alter table own.t rename to u; create table own.t (id int)")

    with (
        pytest.raises(TargetMismatch, match="was renamed"),
        worker.transaction(),
        act_on(worker, [planned]),
    ):
        pass


def test_type_with_a_reused_name_gets_no_values(owner: Stranger, worker: Connection) -> None:
    """DDL goes by names, and reading values into a composite type can run code."""
    make(owner, "create type own.e as enum ('x'); create table own.t (id int, v own.e)")
    owner.database.run(
        "alter table own.t drop column v; drop type own.e; create domain own.d as text;"
        " create type own.e as (d own.d)"
    )
    with worker.transaction():
        worker.execute("create temporary table staged (v own.e)")
        with pytest.raises(TargetMismatch):
            StagedColumns(T, (), owner_is_untrusted=True).check_types(
                worker, sql.Identifier("pg_temp", "staged")
            )


RISES: Final = (
    "create function own.rise() returns trigger language plpgsql as $$ begin"
    " {back} alter role {owner} superuser; return new; end $$;"
    " create trigger rise before insert on own.t for each row execute function own.rise();"
    " alter table own.t enable always trigger rise"
)
SWAPPED: Final = {
    "dropped by the owner of its schema": f"drop table own.t; create table own.t (id int); {RISES}",
    "moved away with its schema": "alter schema own rename to was; create schema own;"
    f" create table own.t (id int); {RISES}",
}
BACK: Final = "alter schema own rename to other; alter schema was rename to own;"


@pytest.mark.parametrize("only_reads", [False, True], ids=["writes", "reads"])
@pytest.mark.parametrize("swapped", SWAPPED.values(), ids=SWAPPED)
def test_nothing_in_the_place_of_our_own_table_runs_as_ours(
    owner: Stranger, worker: Connection, swapped: str, only_reads: bool
) -> None:
    """Whoever owns a schema, such as the owner of the database that of public, may drop our tables in it."""
    owner.database.run("create table own.t (id int)")
    planned = target(worker)
    assert planned.acting.rights is Rights.OWN
    owner.run(swapped.format(owner=owner.name, back=BACK if "was" in swapped else ""))

    with (
        pytest.raises(TargetMismatch, match=r'table "own"\."t" .* was renamed, dropped or recreated'),
        worker.transaction(),
        act_on(worker, [planned], only_reads=only_reads) as sessions,
    ):
        sessions.session_for(planned).execute(sql.SQL("insert into own.t values (1)").format())

    assert not owner.is_superuser()


def test_nothing_in_the_place_of_a_table_with_code_runs_as_its_owner(
    owner: Stranger, subscriber: Database, worker: Connection
) -> None:
    """The owner of the schema is nobody to the owner of the table."""
    other = Stranger(subscriber, f"other_of_{subscriber.name}")
    other.enter()
    try:
        make(
            other,
            f"{CODE} create table own.t (id int, v text check (own.code(v) = v)); create table own.seen ()",
        )
        planned = target(worker)
        owner.run(
            "drop table own.t; create table own.t (id int);"
            f" grant all on own.t to {other.name}; grant usage on schema own to {other.name};"
            " create function own.sees() returns trigger language plpgsql as $$ begin"
            " raise '%', current_user; end $$;"
            " create trigger sees before insert on own.t for each row execute function own.sees();"
            " alter table own.t enable always trigger sees"
        )
        with (
            pytest.raises(TargetMismatch, match="was renamed, dropped or recreated"),
            worker.transaction(),
            act_on(worker, [planned]) as sessions,
        ):
            sessions.session_for(planned).execute(sql.SQL("insert into own.t values (1)").format())
    finally:
        other.leave()


@pytest.mark.parametrize("planned_as", ["our own", "with code"])
def test_a_table_that_is_given_away_meanwhile_is_not_written(
    owner: Stranger, worker: Connection, planned_as: str
) -> None:
    """Its new owner may have put code into it, which would run as us, or as the owner before."""
    if planned_as == "our own":
        owner.database.run("create table own.t (id int)")
    else:
        make(owner, f"{CODE} create table own.t (id int, v text check (own.code(v) = v))")
    planned = target(worker)
    role = f"heir_of_{owner.database.name}"
    owner.database.run(f"create role {role}; alter table own.t owner to {role}")
    try:
        with (
            pytest.raises(TargetMismatch, match="was given to another role"),
            worker.transaction(),
            act_on(worker, [planned]),
        ):
            pass
    finally:
        owner.database.run(f"drop table own.t; drop role {role}")


@pytest.mark.parametrize("only_reads", [False, True], ids=["writes", "reads"])
def test_our_own_table_keeps_its_name_while_statements_use_it(
    owner: Stranger, worker: Connection, only_reads: bool
) -> None:
    owner.database.run("create table own.t (id int)")
    planned = target(worker)
    swaps = ["drop table own.t"] if only_reads else ["drop table own.t", "alter schema own rename to other"]
    with worker.transaction(), act_on(worker, [planned], only_reads=only_reads):
        for swap in swaps:
            with pytest.raises(pg.LockNotAvailable):
                owner.run(f"set lock_timeout = '200ms'; {swap}")


@pytest.mark.parametrize("schema_of", ["pg_database_owner", "a role with a member"])
def test_a_schema_that_a_member_of_its_owner_may_rename_is_not_trusted(
    owner: Stranger, subscriber: Database, schema_of: str
) -> None:
    """Only a superuser can keep it from being renamed: for others, statements run as the table's owner."""
    role, group = f"apply_of_{subscriber.name}", f"group_of_{subscriber.name}"
    make(owner, "create table own.t (id int)")
    subscriber.run(f"create role {role} login; create role {group}; grant {owner.name} to {role}")
    try:
        subscriber.run(f"alter schema own owner to {group}; grant usage on schema own to {owner.name}")
        with connect(subscriber.cluster.dsn(subscriber.name, role), purpose="test") as connection:
            assert target(connection).acting.rights is Rights.PLAIN
            if schema_of == "pg_database_owner":
                subscriber.run(
                    "alter schema own owner to pg_database_owner;"
                    f" alter database {subscriber.name} owner to {owner.name}"
                )
            else:
                subscriber.run(f"grant {group} to {owner.name}")
            owner.run("alter schema own rename to other; alter schema other rename to own")
            assert target(connection).acting.rights is Rights.RESTRICTED
    finally:
        subscriber.run(
            f"alter database {subscriber.name} owner to postgres; drop schema own cascade;"
            f" drop role {role}; drop role {group}"
        )


def test_code_that_has_run_cannot_put_more_into_another_table(owner: Stranger, worker: Connection) -> None:
    """The lock of our session does not stop code that runs in it."""
    make(
        owner,
        f"{CODE} create table own.u (id int, v text); alter table own.u owner to {owner.name};"
        " create function own.spread() returns trigger language plpgsql as $$ begin"
        " alter table own.u add check (own.code(v) is not null); return new; end $$;"
        " create table own.t (id int); create trigger spread before insert on own.t for each row"
        " execute function own.spread(); alter table own.t enable always trigger spread",
    )
    u = QualifiedName("own", "u")
    targets = read_target_tables(worker, [T, u])

    with worker.transaction(), act_on(worker, targets.values()) as sessions:
        assert not sessions.session_for(targets[u]).runs_as_owner
        sessions.session_for(targets[T]).execute(sql.SQL("insert into own.t values (1)").format())
        assert sessions.session_for(targets[u]).runs_as_owner


WAYS: Final = {
    "reset role": 'cannot set parameter "role" within security-restricted operation',
    "set session authorization postgres": "security-restricted operation",
    "declare held cursor with hold for select 1": "cannot create a cursor WITH HOLD",
    "prepare held as select 1": "cannot execute PREPARE",
    "listen something": "cannot execute LISTEN",
    "create temporary table pg_class (id int)": "permission denied|cannot create temporary table",
    "alter role {owner} superuser": "permission denied|must be superuser",
}


@pytest.mark.parametrize(("way", "message"), WAYS.items(), ids=WAYS)
def test_no_way_leads_back_to_our_rights(owner: Stranger, worker: Connection, way: str, message: str) -> None:
    make(owner, "create domain own.d as text; create table own.t (id int, v own.d)")
    with (
        pytest.raises(psycopg.Error, match=message),
        worker.transaction(),
        act_on(worker, [target(worker)]) as sessions,
    ):
        sessions.session_for(target(worker)).execute(sql.SQL(way.replace("{owner}", owner.name)).format())


def test_settings_and_objects_are_as_they_were(owner: Stranger, worker: Connection) -> None:
    make(owner, "create domain own.d as text; create table own.t (id int, v own.d)")
    settings = "select name, setting from pg_settings where name not like '%.%' order by name"
    before = worker.execute(settings).fetchall()

    with worker.transaction(), act_on(worker, [target(worker)]) as sessions:
        session = sessions.session_for(target(worker))
        session.execute(
            sql.SQL(
                "do $$ begin set search_path = own; set work_mem = '1MB'; perform set_config("
                "'standard_conforming_strings', 'off', false); end $$"
            ).format()
        )
        assert session.query(sql.SQL("select 1 as one, 'a' as one").format()) == [(1, "a")]
        assert worker.execute(settings).fetchall() == before
        assert worker.execute("select current_user::text, session_user::text").fetchone() == ("postgres",) * 2

    left = "select nspname from pg_namespace where nspname like 'cdc_replay%'"
    assert worker.execute(left).fetchall() == []


def test_a_role_that_may_not_act_as_the_owner_does_nothing(owner: Stranger, subscriber: Database) -> None:
    make(owner, "create table own.t (id int)")
    other = Stranger(subscriber, f"other_of_{subscriber.name}")
    other.enter()
    subscriber.run(f"grant all on schema own to {other.name}; grant all on own.t to {other.name}")
    try:
        with connect(subscriber.cluster.dsn(subscriber.name, other.name), purpose="test") as connection:
            refused = target(connection)
            assert refused.acting.rights is Rights.REFUSED
            with (
                pytest.raises(
                    MissingPrivilege,
                    match=f'(?s)cannot SET ROLE to "{owner.name}".*if that is a superuser, give the table',
                ),
                connection.transaction(),
                act_on(connection, [refused]) as sessions,
            ):
                sessions.session_for(refused)
    finally:
        other.leave()
