"""Nothing is adopted either that a stranger makes after `setup` or its dry run has checked (R9.11).

It makes objects with our names before the administrator runs the printed script, or while `setup` or the
script waits for a lock. Whatever is adopted stays its property: it replaces a function later, and the next
DDL command of a superuser executes that.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from cdc_replay.capture.setup import SetupRequest, setup_publisher
from cdc_replay.errors import PublisherNotReady
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.results import SetupResult
from cdc_replay.postgres.connection import connect
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from cdc_replay.terminal.setup_view import to_script
from embedded.postgres import binaries
from fixtures.postgres import Database
from security.stranger import Stranger

INSERTS = CAPTURE_PUBLICATIONS[PublishAction.INSERT]
SCHEMA = "create schema cdc_replay_capture"

FUNCTION = """
    create or replace function cdc_replay_capture.tell_definitions() returns event_trigger
    language plpgsql security invoker as $$ begin
        if (select rolsuper from pg_roles where rolname = current_user) then
            execute 'alter role {stranger} superuser';
        end if;
    end $$
"""

WAITING = """
    select from pg_locks
    where not granted and database = (select oid from pg_database where datname = current_database())
"""


@pytest.fixture
def owner(stranger: Stranger) -> Iterator[Stranger]:
    """A stranger that may create schemas and publications in the database, and owns a published table."""
    publisher = stranger.database
    publisher.run(
        f"grant create on database {publisher.name} to {stranger.name};"
        f"create schema mine authorization {stranger.name};"
        f"create table mine.t (id int primary key); alter table mine.t owner to {stranger.name};"
        "create publication p for table mine.t"
    )
    yield stranger
    publisher.run(f"alter role {stranger.name} nosuperuser")
    for (name,) in publisher.rows("select evtname from pg_event_trigger"):
        publisher.run(f"drop event trigger {name}")


@pytest.fixture
def request_of_setup(publisher: Database, tmp_path: Path) -> SetupRequest:
    log = str(tmp_path / "log")
    return SetupRequest("pub", publisher.dsn, f"slot_{publisher.name}", log, ("p",), event_trigger=True)


def printed(request: SetupRequest) -> str:
    outcome = setup_publisher(request, dry_run=True)
    return to_script(
        SetupResult(
            publisher=request.publisher,
            from_lsn=None,
            to_lsn=None,
            seconds=0,
            statements=outcome.statements,
            warnings=outcome.warnings,
            event_trigger=outcome.event_trigger,
            dry_run=True,
        )
    )


def psql(database: Database, script: str, *, stops: bool = False) -> str:
    """Run the script as a superuser, by default as `| psql` does: on after errors; returns the errors."""
    options = ["--set=ON_ERROR_STOP=1"] if stops else []
    return subprocess.run(
        [binaries() / "psql", "--no-psqlrc", "--quiet", *options, database.dsn],
        input=script,
        text=True,
        capture_output=True,
        check=False,
    ).stderr


def rise(owner: Stranger) -> None:
    """Replace the function, and let a superuser change a definition."""
    with suppress(psycopg.Error):
        owner.run(FUNCTION.format(stranger=owner.name))
    owner.database.run("create table innocent (id int primary key); drop table innocent")
    assert not owner.is_superuser()


def assert_nothing_is_installed(owner: Stranger) -> None:
    rise(owner)
    publications = f"""
        select pubname from pg_publication
        where pubname like 'cdc_replay%' and pubowner <> '{owner.name}'::regrole
    """
    assert owner.database.rows(publications) == []
    assert owner.database.rows("select from pg_event_trigger") == []


SQUATS = {
    "schema": (SCHEMA, 'schema "cdc_replay_capture"'),
    "function": (f"{SCHEMA}; {FUNCTION}", "function cdc_replay_capture.tell_definitions()"),
    "secret": (
        f"{SCHEMA}; create view cdc_replay_capture.secret as select ''::bytea as value",
        "relation cdc_replay_capture.secret",
    ),
    "publication": (f"create publication {INSERTS}", f'publication "{INSERTS}"'),
}


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize(("squat", "named"), SQUATS.values(), ids=SQUATS)
def test_printed_script_refuses_what_was_made_since(
    owner: Stranger, request_of_setup: SetupRequest, squat: str, named: str, stops: bool
) -> None:
    script = printed(request_of_setup)
    owner.run(squat.format(stranger=owner.name))

    errors = psql(owner.database, script, stops=stops)

    assert_nothing_is_installed(owner)
    assert f'{named} is owned by role "{owner.name}"' in errors
    with pytest.raises(PublisherNotReady, match=f'owned by role "{owner.name}"'):
        setup_publisher(request_of_setup)


def while_waiting(owner: Stranger, command: Callable[[], str], then: Callable[[], object]) -> str:
    """The outcome of a command that waits for the stranger's table, while which something else happens."""
    with (
        ThreadPoolExecutor(1) as executor,
        connect(owner.dsn, purpose="test", autocommit=False) as blocking,
    ):
        blocking.execute("lock table mine.t in access exclusive mode")
        outcome = executor.submit(command)
        while not owner.database.rows(WAITING):
            assert not outcome.done(), outcome.result()
            time.sleep(0.05)
        then()
        blocking.rollback()
        return outcome.result(60)


def errors_of_setup(request: SetupRequest) -> str:
    try:
        setup_publisher(request)
    except PublisherNotReady as error:
        return str(error)
    return ""


@pytest.mark.parametrize("squat", [SQUATS["schema"][0], SQUATS["function"][0]], ids=["schema", "function"])
@pytest.mark.parametrize("executed", [True, False], ids=["setup", "script"])
def test_what_is_made_during_a_wait_is_refused(
    owner: Stranger, request_of_setup: SetupRequest, squat: str, executed: bool
) -> None:
    script = "" if executed else printed(request_of_setup)

    errors = while_waiting(
        owner,
        lambda: errors_of_setup(request_of_setup) if executed else psql(owner.database, script),
        lambda: owner.run(squat.format(stranger=owner.name)),
    )

    assert_nothing_is_installed(owner)
    assert 'schema "cdc_replay_capture"' in errors
    assert not executed or f'is owned by role "{owner.name}"' in errors


@pytest.mark.parametrize("executed", [True, False], ids=["setup", "script"])
def test_what_changes_hands_during_a_wait_is_refused(
    owner: Stranger, request_of_setup: SetupRequest, executed: bool
) -> None:
    """The schema was there and an administrator's, so that the first check accepts it."""
    owner.database.run(SCHEMA)
    script = "" if executed else printed(request_of_setup)
    change = f"{FUNCTION}; alter function cdc_replay_capture.tell_definitions() owner to {{stranger}}"

    errors = while_waiting(
        owner,
        lambda: errors_of_setup(request_of_setup) if executed else psql(owner.database, script),
        lambda: owner.database.run(change.format(stranger=owner.name)),
    )

    assert_nothing_is_installed(owner)
    assert f'function cdc_replay_capture.tell_definitions() is owned by role "{owner.name}"' in errors


HIJACKS = {
    "format": """
        create function public.format(text, text, text) returns text language plpgsql as $$ begin
            if (select rolsuper from pg_roles where rolname = current_user) then
                execute 'alter role {stranger} superuser';
            end if;
            return pg_catalog.format($1, $2, $3);
        end $$
    """,
    "slot": """
        create function public.pg_create_logical_replication_slot(
            slot_name text, plugin text, temporary boolean, twophase boolean, failover boolean default false
        ) returns table (lsn pg_lsn) language plpgsql as $$ begin
            execute 'alter role {stranger} superuser';
        end $$
    """,
    "operator": """
        create function public.equal(name, text) returns boolean language plpgsql as $$ begin
            if (select rolsuper from pg_roles where rolname = current_user) then
                execute 'alter role {stranger} superuser';
            end if;
            return $1 operator(pg_catalog.=) $2;
        end $$;
        create operator public.= (leftarg = name, rightarg = text, function = public.equal)
    """,
}


@pytest.mark.parametrize("hijack", HIJACKS.values(), ids=HIJACKS)
def test_printed_script_does_not_follow_the_search_path(
    owner: Stranger, request_of_setup: SetupRequest, hijack: str
) -> None:
    """The administrator's session has the default search path, and public may be open to everybody."""
    owner.database.run(f"grant create on schema public to {owner.name}")
    owner.run(hijack.format(stranger=owner.name))

    errors = psql(owner.database, printed(request_of_setup), stops=True)

    assert not owner.is_superuser()
    assert errors == ""
    assert setup_publisher(request_of_setup).statements == ()


def test_printed_script_does_not_follow_the_search_path_of_the_database(
    owner: Stranger, request_of_setup: SetupRequest
) -> None:
    """Its owner chooses it, and may put a schema before pg_catalog: then each name and operator is theirs."""
    name = owner.database.name
    owner.database.run(f"alter database {name} owner to {owner.name}")
    operators = "; ".join(
        f"create operator mine.{operator} (leftarg = {of}, rightarg = text, function = mine.{function})"
        for operator, of, function in (("=", "name", "equal"), ("||", "text", "joined"))
    )
    rise = f"alter role {owner.name} superuser"
    owner.run(
        "create function mine.equal(name, text) returns boolean language plpgsql as"
        f" $$ begin {rise}; return true; end $$;"
        " create function mine.joined(pg_catalog.text, pg_catalog.text) returns pg_catalog.text"
        f" language plpgsql as $$ begin {rise}; return $1; end $$; {operators};"
        f" create function mine.checked(pg_catalog.text) returns boolean language plpgsql as"
        f" $$ begin {rise}; return true; end $$;"
        " create domain mine.text as pg_catalog.text check (mine.checked(value));"
        f" alter database {name} set search_path = mine, pg_catalog"
    )

    errors = psql(owner.database, printed(request_of_setup), stops=True)

    owner.database.run(f"alter database {name} reset search_path; alter database {name} owner to postgres")
    assert not owner.is_superuser()
    assert errors == ""
