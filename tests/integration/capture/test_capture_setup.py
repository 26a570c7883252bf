"""Preparing a publisher: idempotent, never stricter than the real publications, everything wrong at once."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from cdc_replay.capture.log_start import read_mark
from cdc_replay.capture.publications import MARKED_PUBLICATION, comment_text
from cdc_replay.capture.setup import (
    SetupRequest,
    setup_publisher,
    teardown_publisher,
)
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import (
    ChangeLogMismatch,
    ChangeLogMissing,
    MissingPrivilege,
    PublicationMissing,
    PublisherNotReady,
    SlotLost,
    SlotMissing,
)
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.slot import slot_exists
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from embedded.postgres import Cluster
from fixtures.captured import Captured
from fixtures.postgres import Database, create_database

SetUp = Callable[..., Captured]


def members(publisher: Database) -> dict[str, list[str]]:
    """The listed tables of each capture publication, by the last letter of its name."""
    result: dict[str, list[str]] = {name[-1]: [] for name in CAPTURE_PUBLICATIONS.values()}
    for publication, table in publisher.rows(
        "select pubname::text, prrelid::regclass::text from pg_publication_rel"
        " join pg_publication p on p.oid = prpubid where pubname like 'cdc_replay_capture%' order by 1, 2"
    ):
        result[publication[-1]].append(table)
    return result


def test_capture_publications_have_tables_by_published_action(publisher: Database, set_up: SetUp) -> None:
    """R2.17: a table without replica identity that is published for inserts only stays updatable."""
    publisher.run(
        "create table keyed (id int primary key); create table keyless (id int);"
        "create publication p1 for table keyed;"
        "create publication p2 for table keyless with (publish = 'insert, truncate')"
    )
    set_up("p1", "p2")

    assert members(publisher) == {
        "i": ["keyed", "keyless"],
        "u": ["keyed"],
        "d": ["keyed"],
        "t": ["keyed", "keyless"],
    }
    publisher.run("insert into keyless values (1); update keyless set id = 2; delete from keyless")


def test_root_publications_have_published_roots_by_depth(publisher: Database, set_up: SetUp) -> None:
    """R2.14: TRUNCATE alone, via root; all of them exist (R1.19), and they follow like the others."""
    publisher.run(
        "create table t (id int primary key) partition by range (id);"
        + "".join(
            f"create table t{number} partition of t{number - 1 or ''} for values from (0) to (10)"
            " partition by range (id);"
            for number in range(1, 6)
        )
        + "create publication p for table t with (publish_via_partition_root = true);"
        "create publication q for table t2 with (publish_via_partition_root = true);"
        "create publication r for table t4, t5 with (publish_via_partition_root = true)"
    )
    captured = set_up("p", "q", "r")

    def roots() -> list[tuple[str, str | None]]:
        return publisher.rows(
            "select pubname::text, prrelid::regclass::text from pg_publication p"
            " left join pg_publication_rel on prpubid = p.oid"
            " where pubname ~ 'cdc_replay_capture_t[0-9]' and pubtruncate and pubviaroot"
            " and not (pubinsert or pubupdate or pubdelete) order by 1"
        )

    name = "cdc_replay_capture_t"
    assert roots() == [(f"{name}0", "t"), (f"{name}1", None), (f"{name}2", "t2"), (f"{name}3", None)]
    [warning] = setup_publisher(captured.request).warnings
    assert "public.t4 has more than 3 ancestors" in warning

    setup_publisher(dataclasses.replace(captured.request, publications=("p",)))
    assert roots() == [(f"{name}0", "t"), (f"{name}1", None), (f"{name}2", None), (f"{name}3", None)]
    assert setup_publisher(dataclasses.replace(captured.request, publications=("p",))).statements == ()


def test_repeated_setup_does_nothing(publisher: Database, set_up: SetUp) -> None:
    publisher.run("create table t (id int primary key); create publication p for table t")
    captured = set_up()
    end = captured.log.end_lsn

    outcome = setup_publisher(captured.request)

    assert outcome.statements == ()
    assert (outcome.slot_created, outcome.log_created) == (False, False)
    assert captured.log.end_lsn == end == outcome.from_lsn == captured.position


def test_dry_run_returns_statements_and_changes_nothing(publisher: Database, tmp_path: Path) -> None:
    publisher.run('create table "T t" (id int primary key); create publication p for table "T t"')
    request = SetupRequest("test", publisher.dsn, "dry_run", str(tmp_path / "log"), ("p",))

    outcome = setup_publisher(request, dry_run=True)

    assert [statement for statement in outcome.statements if 'table only "public"."T t"' in statement]
    *_, creation, mark = outcome.statements
    assert "pg_create_logical_replication_slot" in creation
    assert publisher.rows("select from pg_publication where pubname like 'cdc_replay%'") == []
    assert publisher.rows("select from pg_replication_slots where slot_name = 'dry_run'") == []
    assert not ChangeLog.exists(request.change_log)
    with publisher.connect() as connection:
        for statement in outcome.statements:
            connection.execute(statement.encode())
        # Run before the slot is there, it does no harm.
        connection.execute("select pg_drop_replication_slot('dry_run')")
        connection.execute(mark.encode())
        assert read_mark(connection, "dry_run") is None
        connection.execute(creation.encode())
        connection.execute(mark.encode())
    assert [len(tables) for tables in members(publisher).values()] == [1, 1, 1, 1]
    assert setup_publisher(request).statements == ()


def test_refresh_follows_subscribed_publications(publisher: Database, set_up: SetUp) -> None:
    """Tables and schemas are added and removed; to FOR ALL TABLES and back the publication is recreated."""
    publisher.run(
        "create table a (id int primary key); create table b (id int primary key); create schema s;"
        "create table s.c (id int primary key); create publication p for table a;"
        "create publication everything for all tables; create publication in_schema for tables in schema s"
    )
    captured = set_up()

    def refreshed(*publications: str) -> dict[str, list[str]]:
        setup_publisher(dataclasses.replace(captured.request, publications=publications))
        return members(publisher)

    publisher.run("alter publication p add table b; alter publication p drop table a")
    assert refreshed("p")["u"] == ["b"]
    assert refreshed("p", "in_schema")["u"] == ["b"]
    schemas = "select count(*) from pg_publication_namespace"
    assert publisher.rows(schemas) == [(1 + 4,)]
    publisher.run("insert into s.c values (1); insert into b values (1)")
    assert captured.capture().messages == 2
    refreshed("everything")
    assert publisher.rows("select count(*) from pg_publication where puballtables") == [(1 + 4,)]
    publisher.run("insert into a values (1)")
    refreshed("p")
    assert members(publisher)["i"] == ["b"]
    publisher.run("insert into a values (2); insert into b values (2)")
    # a's first row is captured: the catalog at its position still had FOR ALL TABLES.
    assert captured.capture().messages == 2
    assert setup_publisher(dataclasses.replace(captured.request, publications=("p",))).statements == ()


def test_setup_lists_all_obstacles_at_once(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """R1.33: wal_level and the role's attribute are both wrong."""
    cluster = make_cluster("not_logical", wal_level="replica")
    with psycopg.connect(cluster.dsn(), autocommit=True) as admin:
        admin.execute("create role reader login")
    request = SetupRequest("test", cluster.dsn(user="reader"), "s", str(tmp_path / "log"), ())

    with pytest.raises(PublisherNotReady) as refused:
        setup_publisher(request)

    assert 'wal_level of the publisher is "replica"' in refused.value.message
    assert 'role "reader" lacks the attribute REPLICATION' in refused.value.message
    assert "Set wal_level to logical" in str(refused.value.hint)


@pytest.fixture
def reader(publisher: Database) -> Iterator[Database]:
    """The publisher as seen by a role without attributes."""
    role = f"reader_{publisher.name}"
    publisher.run(f"create role {role} login")
    yield publisher
    publisher.run(f"drop owned by {role}; drop role {role}")


def test_role_without_replication_gets_remedy(reader: Database, tmp_path: Path) -> None:
    dsn = reader.cluster.dsn(reader.name, f"reader_{reader.name}")
    with pytest.raises(MissingPrivilege, match="lacks the attribute REPLICATION") as refused:
        setup_publisher(SetupRequest("test", dsn, "s", str(tmp_path / "log"), ()))
    assert "alter role" in str(refused.value.hint)


def test_role_that_may_not_create_publications_gets_remedy(reader: Database, tmp_path: Path) -> None:
    reader.run(
        "create table t (id int primary key); create publication p for table t;"
        f" alter role reader_{reader.name} replication"
    )
    dsn = reader.cluster.dsn(reader.name, f"reader_{reader.name}")
    with pytest.raises(MissingPrivilege, match="permission denied for database") as refused:
        setup_publisher(SetupRequest("shop", dsn, "s", str(tmp_path / "log"), ("p",)))
    assert "`cdc-replay setup shop --dry-run`" in str(refused.value.hint)


def test_setup_names_all_missing_publications(publisher: Database, tmp_path: Path) -> None:
    request = SetupRequest("test", publisher.dsn, "s", str(tmp_path / "log"), ("x", "y"))
    with pytest.raises(PublicationMissing, match="x, y"):
        setup_publisher(request)


def test_setup_warns_of_tables_whose_updates_fail(publisher: Database, tmp_path: Path) -> None:
    """R2.17: they fail with the real publication already."""
    publisher.run("create table keyless (id int); create publication p for table keyless")
    request = SetupRequest("test", publisher.dsn, "s", str(tmp_path / "log"), ("p",))
    (warning,) = setup_publisher(request, dry_run=True).warnings
    assert "public.keyless" in warning
    assert "UPDATE and DELETE" in warning


def test_publications_of_another_slot_are_not_changed(publisher: Database, set_up: SetUp) -> None:
    publisher.run("create table t (id int primary key); create publication p for table t")
    captured = set_up()
    other = dataclasses.replace(captured.request, slot="other", change_log=captured.request.change_log + "2")
    with pytest.raises(PublisherNotReady, match="do not belong") as refused:
        setup_publisher(other)
    assert captured.request.slot in str(refused.value.detail)
    assert teardown_publisher(other) == ()


def test_setup_that_died_after_slot_is_completed(publisher: Database, set_up: SetUp) -> None:
    """A slot without a log has delivered nothing: the log starts at the slot's position."""
    publisher.run("create table t (id int primary key); create publication p for table t")
    captured = set_up()
    shutil.rmtree(captured.request.change_log)
    publisher.run("insert into t values (1)")

    outcome = setup_publisher(captured.request)

    assert (outcome.slot_created, outcome.log_created) == (False, True)
    assert captured.capture().messages == 1


class Died(Exception):
    """In place of the process."""


@pytest.mark.parametrize("last", ["create_slot", "execute_marks"])
def test_setup_that_dies_between_slot_and_log_is_completed(
    last: str, publisher: Database, set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the slot takes the place of an earlier one, whose position is marked."""
    publisher.run("create table t (id int primary key); create publication p for table t")
    captured = set_up()
    publisher.run("insert into t values (0)")
    captured.capture()
    publisher.run(f"select pg_drop_replication_slot('{captured.request.slot}')")
    shutil.rmtree(captured.request.change_log)
    module = "cdc_replay.capture.setup"
    real = getattr(sys.modules[module], last)

    def dying(connection: Connection, *arguments: object, **options: object) -> object:
        done = real(connection, *arguments, **options)
        if slot_exists(connection, captured.request.slot):
            raise Died
        return done

    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.{last}", dying)
        with pytest.raises(Died):
            setup_publisher(captured.request)
    assert (mark_of(captured) is None) is (last == "create_slot")
    assert not ChangeLog.exists(captured.request.change_log)
    publisher.run("insert into t values (1)")

    outcome = setup_publisher(captured.request)

    assert (outcome.slot_created, outcome.log_created, outcome.warnings) == (False, True, ())
    assert mark_of(captured) == outcome.from_lsn == captured.log.header.start_lsn
    assert captured.capture().messages == 1


def mark_of(captured: Captured) -> Lsn | None:
    with captured.database.connect() as connection:
        return read_mark(connection, captured.request.slot)


@pytest.fixture
def without_log(publisher: Database, set_up: SetUp, tmp_path: Path) -> Captured:
    """A log that changes were captured into is `elsewhere`, and one more change waits in the slot."""
    publisher.run("create table t (id int primary key); create publication p for table t")
    captured = set_up()
    publisher.run("insert into t values (1)")
    captured.capture()
    Path(captured.request.change_log).rename(tmp_path / "elsewhere")
    publisher.run("insert into t values (2)")
    return captured


def test_missing_log_is_not_recreated(without_log: Captured, tmp_path: Path) -> None:
    """Such as on a volume that is not mounted: the slot must not move on before it is back."""
    request, position = without_log.request, without_log.position
    without_log.database.run("create table u (id int primary key); alter publication p add table u")

    for dry_run in (False, True):
        with pytest.raises(ChangeLogMissing, match=f'"{request.slot}" is not at') as refused:
            setup_publisher(request, dry_run=dry_run)
        assert str(position) in str(refused.value.detail)
        assert "Mount or restore" in str(refused.value.hint)
        assert "cdc-replay teardown" in str(refused.value.hint)

    assert without_log.position == position
    assert not Path(request.change_log).exists()
    assert members(without_log.database)["i"] == ["t"]

    (tmp_path / "elsewhere").rename(request.change_log)
    outcome = setup_publisher(request)
    assert (outcome.slot_created, outcome.log_created) == (False, False)
    without_log.capture()
    assert without_log.changes() == [("I", ("1",)), ("I", ("2",))]


def test_missing_log_is_recreated_after_teardown(without_log: Captured) -> None:
    assert len(teardown_publisher(without_log.request)) == 1 + 4 + 4

    outcome = setup_publisher(without_log.request)

    assert (outcome.slot_created, outcome.log_created) == (True, True)
    without_log.database.run("insert into t values (3)")
    without_log.capture()
    assert without_log.changes() == [("I", ("3",))]


def test_missing_log_without_slot_is_recreated(without_log: Captured) -> None:
    without_log.database.run(f"select pg_drop_replication_slot('{without_log.request.slot}')")

    outcome = setup_publisher(without_log.request)

    assert (outcome.slot_created, outcome.log_created, outcome.warnings) == (True, True, ())
    assert mark_of(without_log) == outcome.from_lsn
    assert setup_publisher(without_log.request).statements == ()


def test_older_log_is_marked_by_next_setup(without_log: Captured, tmp_path: Path) -> None:
    """The log is older than marks; a recreated publication keeps its mark."""
    request, slot = without_log.request, without_log.request.slot
    log = (tmp_path / "elsewhere").rename(request.change_log)
    without_log.database.run(
        f"comment on publication {MARKED_PUBLICATION} is '{comment_text(slot)}';"
        " create publication everything for all tables"
    )
    assert mark_of(without_log) is None

    assert len(setup_publisher(request, dry_run=True).statements) == 1
    assert mark_of(without_log) is None
    assert len(setup_publisher(request).statements) == 1

    setup_publisher(dataclasses.replace(request, publications=("everything",)))
    assert mark_of(without_log) == without_log.log.header.start_lsn
    log.rename(tmp_path / "elsewhere")
    with pytest.raises(ChangeLogMissing):
        setup_publisher(request)


def test_role_that_may_not_mark_gets_statement_for_owner(without_log: Captured, tmp_path: Path) -> None:
    database, request = without_log.database, without_log.request
    (tmp_path / "elsewhere").rename(request.change_log)
    comment = f"comment on publication {MARKED_PUBLICATION} is '{comment_text(request.slot)}'"
    role = f"plain_{database.name}"
    database.run(f"{comment}; create role {role} login replication")
    plain = dataclasses.replace(request, dsn=database.cluster.dsn(database.name, role))
    try:
        (warning,) = setup_publisher(plain).warnings
        assert "must be owner of publication" in warning
        database.run(warning.split("`")[1])
        assert setup_publisher(plain).warnings == ()
        assert mark_of(without_log) == without_log.log.header.start_lsn
    finally:
        database.run(f"drop role {role}")


def test_log_without_slot_is_not_continued_by_new_slot(publisher: Database, set_up: SetUp) -> None:
    publisher.run("create table t (id int primary key); create publication p for table t")
    captured = set_up()
    publisher.run(f"select pg_drop_replication_slot('{captured.request.slot}')")
    with pytest.raises(SlotMissing, match="no longer exists") as refused:
        setup_publisher(captured.request)
    assert str(captured.log.end_lsn) in str(refused.value.detail)
    publisher.run(f"select pg_create_logical_replication_slot('{captured.request.slot}', 'pgoutput')")
    with pytest.raises(SlotLost, match="past the end"):
        captured.capture()


def test_log_of_another_cluster_is_refused(
    publisher: Database, set_up: SetUp, subscriber_cluster: Cluster
) -> None:
    """Another server with the same configuration: its system identifier differs."""
    publisher.run("create table t (id int primary key); create publication p for table t")
    captured = set_up()
    elsewhere = create_database(subscriber_cluster, "other")
    request = dataclasses.replace(captured.request, dsn=elsewhere.dsn, publications=())
    with pytest.raises(ChangeLogMismatch) as refused:
        setup_publisher(request)
    assert "system identifier" in str(refused.value.detail)


def test_teardown_removes_exactly_what_setup_created(publisher: Database, set_up: SetUp) -> None:
    publisher.run("create table t (id int primary key); create publication p for table t")
    captured = set_up()

    removed = teardown_publisher(captured.request)

    assert len(removed) == 1 + 4 + 4
    assert publisher.rows("select pubname::text from pg_publication") == [("p",)]
    assert (
        publisher.rows(f"select from pg_replication_slots where slot_name = '{captured.request.slot}'") == []
    )
    assert ChangeLog.exists(captured.request.change_log)
    assert teardown_publisher(captured.request) == ()
