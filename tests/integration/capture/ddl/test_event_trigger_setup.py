"""The event triggers are installed, replaced and removed as wanted, and the capture publications follow."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg import sql

from cdc_replay.capture.ddl.event_triggers import EVENT_TRIGGERS, is_installed
from cdc_replay.capture.setup import (
    SetupRequest,
    setup_publisher,
    teardown_publisher,
)
from cdc_replay.catalog.ddl_change import CATALOG_PREFIX, apply_ddl_change, parse_ddl_change
from cdc_replay.catalog.json_form import same_definitions
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.errors import MissingPrivilege
from cdc_replay.pgoutput.messages import LogicalMessage
from cdc_replay.pgoutput.reader import decode
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from fixtures.catalogs import catalog as some_catalog
from fixtures.catalogs import table
from fixtures.postgres import Database

TRACES = """
    select evtname::text from pg_event_trigger where evtname like 'cdc_replay%'
    union all select nspname::text from pg_namespace where nspname like 'cdc_replay%'
    union all select proname::text from pg_proc where pronamespace::regnamespace::text like 'cdc_replay%'
    order by 1
"""


@pytest.fixture
def request_for(publisher: Database, tmp_path: Path) -> Iterator[Callable[..., SetupRequest]]:
    """A request with event triggers for publications, by default `p`, that the test has created."""

    def request(*publications: str) -> SetupRequest:
        slot = f"slot_{publisher.name}"
        log = str(tmp_path / "log")
        return SetupRequest("test", publisher.dsn, slot, log, publications or ("p",), event_trigger=True)

    yield request
    publisher.run("drop role if exists cdc_replay_plain")


RequestFor = Callable[..., SetupRequest]


def messages(database: Database, slot: str) -> list[LogicalMessage]:
    """Those that the slot has for the next capture."""
    result = database.rows(
        f"select data from pg_logical_slot_peek_binary_changes('{slot}', null, null, 'proto_version', '1',"
        " 'publication_names', 'cdc_replay_capture_i', 'messages', 'true')"
    )
    decoded = [decode(message) for (message,) in result]
    return [
        logical_message
        for logical_message in decoded
        if isinstance(logical_message, LogicalMessage) and logical_message.prefix == CATALOG_PREFIX
    ]


def installed(database: Database, slot: str) -> bool:
    with database.connect() as connection:
        return is_installed(connection, slot)


def test_setup_installs_triggers_and_writes_full_catalog(
    publisher: Database, request_for: RequestFor
) -> None:
    """R9.11: the first message of the slot is the full start state."""
    publisher.run("create table t (id int primary key); create publication p for table t where (id > 5)")
    request = request_for()

    outcome = setup_publisher(request)

    assert outcome.event_trigger
    assert installed(publisher, request.slot)
    whole, *more = messages(publisher, request.slot)
    assert not more
    with publisher.connect() as connection:
        now = read_catalog(connection)
    unlike = some_catalog(table(7, "s.gone"), server_version=now.server_version)
    assert same_definitions(apply_ddl_change(unlike, parse_ddl_change(whole.content)), now)


def test_repeated_setup_keeps_triggers(publisher: Database, request_for: RequestFor) -> None:
    publisher.run("create table t (id int primary key); create publication p for table t")
    setup_publisher(request_for())

    assert setup_publisher(request_for()).statements == ()
    assert len(messages(publisher, request_for().slot)) == 1


def test_setup_that_died_before_log_rewrites_full_catalog(
    publisher: Database, request_for: RequestFor
) -> None:
    """Where the log begins, everything has been told."""
    publisher.run("create table t (id int primary key); create publication p for table t")
    request = request_for()
    setup_publisher(request)
    shutil.rmtree(request.change_log)

    setup_publisher(request)

    assert [parse_ddl_change(message.content).whole for message in messages(publisher, request.slot)] == [
        True,
        True,
    ]


def test_teardown_by_role_without_privilege_raises(publisher: Database, request_for: RequestFor) -> None:
    publisher.run("create table t (id int primary key); create publication p for table t")
    request = request_for()
    setup_publisher(request)
    publisher.run("create role cdc_replay_plain login replication")
    publisher.run(
        "do $$ declare name text; begin"
        " for name in select pubname from pg_publication where pubname like 'cdc_replay%' loop"
        " execute format('drop publication %I', name); end loop; end $$"
    )
    plain = dataclasses.replace(request, dsn=publisher.cluster.dsn(publisher.name, "cdc_replay_plain"))

    with pytest.raises(
        MissingPrivilege, match=r"(?s)must be owner of event trigger.*Nothing was removed.*DSN of the role"
    ):
        teardown_publisher(plain)

    assert teardown_publisher(request)[0] == f"replication slot {request.slot}"
    assert publisher.rows(TRACES) == []


OTHER_VERSION = "'created by cdc-replay for replication slot {slot}, definition 0'"


@pytest.mark.parametrize(
    "meddling",
    [
        f"comment on event trigger cdc_replay_ddl is {OTHER_VERSION}",
        "alter event trigger cdc_replay_drop disable",
        "drop event trigger cdc_replay_rewrite",
    ],
)
def test_other_trigger_version_is_replaced_with_full_catalog(
    publisher: Database, request_for: RequestFor, meddling: str
) -> None:
    publisher.run("create table t (id int primary key); create publication p for table t")
    request = request_for()
    setup_publisher(request)
    publisher.run(meddling.format(slot=request.slot))

    outcome = setup_publisher(request)

    assert outcome.statements
    assert installed(publisher, request.slot)
    assert len(messages(publisher, request.slot)) == 2
    assert setup_publisher(request).statements == ()


def test_disabled_or_missing_trigger_counts_as_not_installed(
    publisher: Database, request_for: RequestFor
) -> None:
    publisher.run("create table t (id int primary key); create publication p for table t")
    request = request_for()
    setup_publisher(request)
    assert not installed(publisher, "another")
    publisher.run("alter event trigger cdc_replay_ddl disable")
    assert not installed(publisher, request.slot)
    publisher.run("alter event trigger cdc_replay_ddl enable")
    assert installed(publisher, request.slot)
    publisher.run("drop event trigger cdc_replay_ddl")
    assert not installed(publisher, request.slot)


def test_setup_removes_unwanted_triggers(publisher: Database, request_for: RequestFor) -> None:
    publisher.run("create table t (id int primary key); create publication p for table t")
    request = request_for()
    setup_publisher(request)

    outcome = setup_publisher(dataclasses.replace(request, event_trigger=False))

    assert not outcome.event_trigger
    assert publisher.rows(TRACES) == []


def test_dry_run_prints_statements_for_superuser(publisher: Database, request_for: RequestFor) -> None:
    """Names with quotes and dollars are data, in the comments and in the list of publications."""
    name = "p' $cdc_replay$ \"x"
    with publisher.connect() as connection:
        connection.execute("create table t (id int primary key)")
        connection.execute(sql.SQL("create publication {} for table t").format(sql.Identifier(name)))
    request = request_for(name)

    outcome = setup_publisher(request, dry_run=True)

    assert publisher.rows(TRACES) == []
    assert not outcome.event_trigger
    with publisher.connect() as connection:
        for statement in outcome.statements:
            connection.execute(statement.encode())
        subscribed = connection.execute("select cdc_replay_capture.subscribed()").fetchall()
    assert subscribed == [([name],)]
    assert installed(publisher, request.slot)
    assert setup_publisher(request).statements == ()


def test_role_without_privilege_is_warned_and_rest_is_set_up(
    publisher: Database, request_for: RequestFor
) -> None:
    """R9.11: without them definitions are as each pull finds them."""
    publisher.run(
        "create role cdc_replay_plain login replication;"
        f"grant create on database {publisher.name} to cdc_replay_plain; set role cdc_replay_plain;"
        "create schema mine; create table mine.t (id int primary key); create publication p for table mine.t"
    )
    request = dataclasses.replace(
        request_for(), dsn=publisher.cluster.dsn(publisher.name, "cdc_replay_plain")
    )

    outcome = setup_publisher(request)

    assert not outcome.event_trigger
    assert outcome.slot_created
    (warning,) = outcome.warnings
    assert "event triggers cannot be set up (permission denied to create event trigger" in warning
    assert publisher.rows(TRACES) == []
    # An administrator does what the role may not; then there is nothing left to warn of.
    setup_publisher(request_for())
    outcome = setup_publisher(request)
    assert (outcome.event_trigger, outcome.warnings, outcome.statements) == (True, (), ())
    teardown_publisher(request_for())
    publisher.run("drop owned by cdc_replay_plain")


def test_teardown_removes_triggers_completely(publisher: Database, request_for: RequestFor) -> None:
    publisher.run("create table t (id int primary key); create publication p for table t")
    setup_publisher(request_for())

    removed = teardown_publisher(request_for())

    assert [f"event trigger {name}" for name in EVENT_TRIGGERS] == [
        name for name in removed if name.startswith("event trigger")
    ]
    assert publisher.rows(TRACES) == []


def test_teardown_keeps_foreign_objects_in_schema(publisher: Database, request_for: RequestFor) -> None:
    publisher.run("create table t (id int primary key); create publication p for table t")
    setup_publisher(request_for())
    publisher.run("create table cdc_replay_capture.notes (a int)")

    teardown_publisher(request_for())

    assert publisher.rows(TRACES) == [("cdc_replay_capture",)]


def test_triggers_of_another_slot_are_kept(publisher: Database, request_for: RequestFor) -> None:
    """One database has one slot: a second one can neither replace nor remove them."""
    publisher.run("create table t (id int primary key); create publication p for table t")
    request = request_for()
    setup_publisher(request)
    publisher.run(
        "do $$ declare name text; begin"
        " for name in select pubname from pg_publication where pubname like 'cdc_replay%' loop"
        " execute format('drop publication %I', name); end loop; end $$"
    )
    before = publisher.rows(TRACES)
    other = dataclasses.replace(request, slot=f"{request.slot}_2", change_log=f"{request.change_log}2")

    outcome = setup_publisher(other)

    assert not outcome.event_trigger
    assert any(
        f"created by cdc-replay for replication slot {request.slot}" in warning
        for warning in outcome.warnings
    )
    assert publisher.rows(TRACES) == before
    teardown_publisher(other)
    assert publisher.rows(TRACES) == before
    assert teardown_publisher(request)
    assert publisher.rows(TRACES) == []


FOLLOWED = (
    "alter publication p add table b",
    "alter publication p add table b where (id > 1), s.c (id)",
    "alter publication p set table b",
    "alter publication p add tables in schema s",
    "alter publication p set (publish = 'insert, update, delete, truncate')",
    "alter publication p set (publish = 'update')",
    "drop publication p; create publication p for table b, tables in schema s",
    "alter publication other rename to p2",
    "drop publication p; create publication p for all tables",
    "alter publication every set (publish = 'insert, delete')",
    "alter publication rooted set (publish = 'insert, truncate')",
    "alter publication rooted add table middle",
    "alter publication rooted set table middle",
    "alter publication p set table root; alter publication p set (publish_via_partition_root = true)",
    "alter publication p owner to current_user",
)


def covered(database: Database) -> set[tuple[object, ...]]:
    """Capture publication, kind of member, member."""
    return set(
        database.rows(
            """
            select p.pubname::text, 'table', prrelid::regclass::text from pg_publication_rel
            join pg_publication p on p.oid = prpubid where pubname like 'cdc_replay%'
            union all
            select p.pubname::text, 'schema', pnnspid::regnamespace::text from pg_publication_namespace
            join pg_publication p on p.oid = pnpubid where pubname like 'cdc_replay%'
            union all
            select p.pubname::text, 'all', '' from pg_publication p
            where puballtables and pubname like 'cdc_replay%'
            """
        )
    )


@pytest.mark.parametrize("command", FOLLOWED)
def test_capture_publications_follow_in_same_transaction(
    publisher: Database, request_for: RequestFor, command: str
) -> None:
    """R9.10: `refresh` has nothing to add; R2.17: it may have something to remove."""
    publisher.run("""
        create schema s;
        create table a (id int primary key); create table b (id int primary key);
        create table s.c (id int primary key);
        create table root (id int primary key) partition by range (id);
        create table middle partition of root for values from (0) to (9) partition by range (id);
        create table leaf partition of middle for values from (0) to (5);
        create publication p for table a with (publish = 'insert');
        create publication every for all tables with (publish = 'delete');
        create publication other for table b;
        create publication rooted for table root with (publish = 'insert', publish_via_partition_root = true);
    """)
    request = request_for("p", "p2") if "p2" in command else request_for("p", "every", "rooted")
    if "p2" in command:
        publisher.run("create publication p2")
    setup_publisher(request)
    if "p2" in command:
        publisher.run("drop publication p2")

    publisher.run(command)

    followed = covered(publisher)
    setup_publisher(request)
    wanted = covered(publisher)
    all_tables = {name for name, kind, _ in followed if kind == "all"}
    missing = {entry for entry in wanted - followed if entry[0] not in all_tables}
    assert not missing
    assert not setup_publisher(request).statements


def test_values_of_generated_columns_are_captured(publisher: Database, request_for: RequestFor) -> None:
    """R3.13: where a filter reads them, they decide; they are not computed again."""
    publisher.require(18, "publish_generated_columns")
    publisher.run("create table t (id int); create publication p for table t with (publish = 'insert')")
    setup_publisher(request_for())
    settings = (
        "select pubname::text from pg_publication where pubgencols = 's' and pubname like 'cdc_replay%'"
    )
    for command in ("alter publication p set (publish = 'update')", "alter publication p add table t2"):
        assert {name for (name,) in publisher.rows(settings)} == set(CAPTURE_PUBLICATIONS.values())
        publisher.run(f"create table if not exists t2 (id int primary key); {command}")


def test_recreated_publication_keeps_comment(publisher: Database, request_for: RequestFor) -> None:
    """A capture publication that is recreated for all tables keeps its settings and its comment."""
    publisher.run("create table t (id int); create publication p for all tables with (publish = 'insert')")
    setup_publisher(request_for())

    publisher.run("alter publication p set (publish = 'insert, truncate')")

    assert setup_publisher(request_for()).statements == ()


def test_unsubscribed_publications_are_not_followed(publisher: Database, request_for: RequestFor) -> None:
    publisher.run(
        "create table t (id int primary key); create table u (id int); create publication p for table t"
    )
    setup_publisher(request_for())
    before = covered(publisher)

    publisher.run(
        "create publication x for table u with (publish = 'insert'); alter publication x add table t"
    )

    assert covered(publisher) == before
    publisher.run("update u set id = 1")
