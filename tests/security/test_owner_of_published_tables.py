"""Whoever owns a published table can replace it at any moment, and none of their code runs then (R2.1).

Between a command's look at the catalog and its reading, the owner gives the table's name to a view, or a
column to a type with a cast. Either calls a function that writes a file on the publisher's host if it runs
with the rights of the role that reads.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
import pytest

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.replay import replay
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.sync import sync
from cdc_replay.commands.validate import validate
from cdc_replay.errors import CdcReplayError, MissingPrivilege
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.exported_snapshot import export_snapshot, import_snapshot
from cdc_replay.postgres.planned_tables import PlannedTable, lock_planned_tables
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.snapshot.copy_tables import load_tables
from fixtures.postgres import Database
from fixtures.twin import Twin
from integration.snapshot.resumed import ResumedCopy
from security.stranger import Stranger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key, a int, body text)"

TRAP = """
    create function trap() returns boolean language plpgsql as $$
    begin
        if current_user <> '{owner}' then
            execute format('copy (select 1) to %L', current_setting('data_directory') || '/{file}');
        end if;
        return true;
    end $$
"""

BY_VIEW = "alter table t rename to hidden; create view t as select * from hidden where trap()"

BY_TYPE = """
    create type evil as enum ('11', '12', '13', '14', '15', '16', '17', '18', '19', '20');
    create function cast_of(evil) returns int language plpgsql as $$ begin return public.trap()::int; end $$;
    create cast (evil as int) with function cast_of(evil) as implicit;
    alter table t drop column id cascade;
    alter table t drop column a cascade;
    alter table t add column id evil default '11';
    alter table t add column a evil default '11'
"""
"""The filter of the plan compares a number, and rows are found by one."""

REPLACED = {"view": BY_VIEW, "type": BY_TYPE}


Before: TypeAlias = Callable[[str, Callable[[], None]], None]


@dataclass(frozen=True)
class Owner:
    """The stranger, who owns table `t`, and the trap."""

    stranger: Stranger

    @property
    def file(self) -> str:
        return f"trap_of_{self.stranger.name}"

    def has_run_code(self) -> bool:
        """Whether the trap has run with other rights than the owner's."""
        query = f"select (pg_stat_file('{self.file}', true)).size is not null"
        [(answer,)] = self.stranger.database.rows(query)
        return bool(answer)


@pytest.fixture
def owner(stranger: Stranger) -> Owner:
    stranger.database.run(f"grant create on schema public to {stranger.name}")
    made = Owner(stranger)
    stranger.run(f"set search_path = public; {TABLE}; alter table t alter body set storage external")
    stranger.run("set search_path = public;" + TRAP.format(owner=stranger.name, file=made.file))
    stranger.run(
        "insert into public.t select n, n + 5, repeat(chr(96 + n), 3000) from generate_series(1, 20) n"
    )
    stranger.database.run("create publication p for table t where (id > 10)")
    return made


def subscribe(twin: Twin) -> None:
    twin.subscribe("s", "p", tables=TABLE, native=False)


def synced(twin: Twin) -> None:
    subscribe(twin)
    sync(twin.config, ["s"])


def rewritten(twin: Twin) -> None:
    """The publisher has rewritten the table, and its values are to be compared."""
    synced(twin)
    twin.publisher.run("alter table t alter a type int using a + 1")
    capture(twin.config, "pub")
    replay(twin.config, ["s"])


def entered(twin: Twin) -> None:
    """A row has entered the filter with a value that was not sent."""
    synced(twin)
    twin.publisher.run("update t set id = 101 where id = 1")
    capture(twin.config, "pub")


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Before:
    """Does something before a function is called for the first time."""

    def arrange(name: str, act: Callable[[], None]) -> None:
        module, _, attribute = name.rpartition(".")
        location = importlib.import_module(module)
        original: Callable[..., Any] = getattr(location, attribute)

        @functools.wraps(original)
        def changed(*arguments: object, **options: object) -> object:
            monkeypatch.setattr(location, attribute, original)
            act()
            return original(*arguments, **options)

        monkeypatch.setattr(location, attribute, changed)

    return arrange


READERS: dict[str, tuple[Callable[[Twin], None], str, Callable[[Twin], object]]] = {
    "snapshot": (
        subscribe,
        "cdc_replay.snapshot.copy_tables.tasks",
        lambda twin: snapshot(twin.config, "s"),
    ),
    "validate": (
        synced,
        "cdc_replay.commands.validate.observe_subscription",
        lambda twin: validate(twin.config, "s"),
    ),
    "reconcile": (
        synced,
        "cdc_replay.snapshot.refresh.reconcile_tables",
        lambda twin: refresh(twin.config, "s", reconcile=True),
    ),
    "preview": (
        synced,
        "cdc_replay.snapshot.refresh.preview_tables",
        lambda twin: refresh(twin.config, "s", reconcile=True, dry_run=True),
    ),
    "compare": (
        rewritten,
        "cdc_replay.replay.rewritten_values.compare_values",
        lambda twin: snapshot(twin.config, "s"),
    ),
    "fill": (
        entered,
        "cdc_replay.replay.toast.resolve.PublisherRowReader",
        lambda twin: replay(twin.config, ["s"]),
    ),
}


@pytest.mark.parametrize("script", REPLACED.values(), ids=REPLACED)
@pytest.mark.parametrize("reader", READERS)
def test_a_table_that_is_replaced_before_it_is_read_is_not_read(
    twin: Twin,
    owner: Owner,
    before: Before,
    reader: str,
    script: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepare, location, command = READERS[reader]
    prepare(twin)
    before(location, lambda: replace(owner, script))

    message = what_is_said(lambda: command(twin)) + caplog.text

    assert not owner.has_run_code()
    assert 'cannot read table "public.t" of the publisher' in message, message


def replace(owner: Owner, script: str) -> None:
    owner.stranger.run(f"set search_path = public; {script}")


def what_is_said(command: Callable[[], object]) -> str:
    try:
        return str(command())
    except CdcReplayError as error:
        return str(error)


@pytest.mark.parametrize("script", REPLACED.values(), ids=REPLACED)
def test_table_replaced_during_its_copy_is_not_read(
    owner: Owner, before: Before, subscriber: Database, tmp_path: Path, spark: SparkSession, script: str
) -> None:
    """What the log has touched is read last, by key."""
    publisher = owner.stranger.database
    owner.stranger.run("insert into public.t select n, n, repeat('x', 200) from generate_series(100, 2000) n")
    subscriber.run(TABLE)
    copy = ResumedCopy(publisher, subscriber, tmp_path)
    copy.begin("p")
    assert copy.killed_after(2) > 2
    publisher.run("update t set a = a + 1 where id % 100 = 0")
    before("cdc_replay.snapshot.copy_tables.stage_changed_rows", lambda: replace(owner, script))

    with copy.request() as request:
        message = what_is_said(lambda: load_tables(spark, request))

    assert not owner.has_run_code()
    assert 'cannot read table "public.t" of the publisher' in message, message


def test_a_domain_in_a_key_checks_nothing_on_the_publisher(twin: Twin, owner: Owner) -> None:
    """The key of a row that is looked for goes there as a text."""
    owner.stranger.run(
        "set search_path = public; create domain checked as int check (trap());"
        "create table k (n int, c checked[], body text, primary key (n, c));"
        "alter table k alter body set storage external;"
        "insert into k select n, array[n], repeat('x', 3000) from generate_series(1, 3) n"
    )
    owner.stranger.database.run("create publication q for table k where (n > 10)")
    tables = "create table k (n int, c int[], body text, primary key (n, c))"
    twin.subscribe("s", "q", tables=tables, native=False)
    sync(twin.config, ["s"])
    twin.publisher.run("update k set n = 100 where n = 2")

    sync(twin.config, ["s"])

    assert not owner.has_run_code()
    rows = twin.pairs["s"].ours.rows("select n, c, length(body) from k")
    assert rows == [(100, [2], 3000)]


def test_a_copy_of_a_whole_table_calls_no_function_of_its_indexes(twin: Twin, owner: Owner) -> None:
    """A query would: the planner evaluates their constants. Native reads by COPY, too (R7.6)."""
    owner.stranger.run(
        "set search_path = public; create table w (id int primary key, a int);"
        "insert into w values (1, 1), (2, 2);"
        "create function constant() returns boolean immutable language plpgsql as"
        " $$ begin return public.trap(); end $$;"
        "create index on w (a) where constant()"
    )
    owner.stranger.database.run("create publication q for table w")
    twin.subscribe("s", "q", tables="create table w (id int primary key, a int)")

    twin.sync()

    assert not owner.has_run_code()
    assert twin.rows("s", "w") == [(1, 1), (2, 2)]


def test_a_table_does_not_become_a_view(twin: Twin, owner: Owner, before: Before) -> None:
    """A rule makes a view of an empty table, which keeps its oid; 16 and later refuse that."""
    owner.stranger.run("set search_path = public; create table e (id int, a int)")
    owner.stranger.database.run("create publication q for table e where (a > 10)")
    twin.subscribe("s", "q", tables="create table e (id int, a int)", native=False)
    script = 'create rule "_RETURN" as on select to e do instead select id, a from t where trap()'
    refused: list[psycopg.Error] = []

    def make_rule() -> None:
        try:
            replace(owner, script)
        except psycopg.Error as error:
            refused.append(error)

    before("cdc_replay.snapshot.copy_tables.tasks", make_rule)

    message = what_is_said(lambda: snapshot(twin.config, "s"))

    assert not owner.has_run_code()
    assert bool(refused) or 'cannot read table "public.e" of the publisher' in message, message


def test_a_policy_of_the_owner_is_not_evaluated(owner: Owner) -> None:
    """The server refuses to read where one would restrict the role (R7.10)."""
    publisher, reader = owner.stranger.database, f"reader_{owner.stranger.database.name}"
    owner.stranger.run(
        "set search_path = public; create policy guard on t using (trap());"
        "alter table t enable row level security"
    )
    rights = "pg_read_all_data, pg_read_all_settings, pg_write_server_files"
    publisher.run(f"create role {reader} login replication in role {rights}")
    dsn = publisher.cluster.dsn(publisher.name, reader)
    try:
        with export_snapshot(dsn) as exported, closing(import_snapshot(exported, purpose="test")) as source:
            (synced_table,) = synced_tables(read_catalog(source, exported.consistent_point), ["p"])
            read = partial(source.execute, "select from public.t")
            for reads in (
                partial(lock_planned_tables, source, [PlannedTable.from_catalog(synced_table.table)]),
                read,
            ):
                with pytest.raises(
                    (MissingPrivilege, psycopg.errors.InsufficientPrivilege), match="row-level security"
                ):
                    in_savepoint(source, reads)
        assert not owner.has_run_code()
        publisher.run(f"set role {reader}; select from t")
        assert owner.has_run_code()
    finally:
        publisher.run(f"drop role {reader}")


def in_savepoint(connection: Connection, act: Callable[[], object]) -> None:
    with connection.transaction():
        act()
