"""The stranger makes schema `cdc_replay` in a subscriber while a command runs that has not found it.

Its tables and views would run its functions with the rights of the role that replays. A command that has not
found the schema must not read it, and an installation must not adopt it, whenever it appears.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg
import pytest

from cdc_replay.errors import SubscriberNotReady
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import state_schema
from cdc_replay.subscriber.copy_definitions import read_copy_definitions
from cdc_replay.subscriber.copy_progress import read_progress
from cdc_replay.subscriber.history import last_windows
from cdc_replay.subscriber.proofs import read_summaries
from cdc_replay.subscriber.recorded_results import last_result
from cdc_replay.subscriber.subscription_records import (
    bind_subscription,
    remove_subscription,
    subscription_record,
)
from cdc_replay.subscriber.subscription_tables import known_tables, tables_are_listed
from fixtures.postgres import ANY_DATABASE, Database
from security.stranger import Stranger

VIEWS: Final = """
    create schema cdc_replay;
    grant usage on schema cdc_replay to public;
    create function cdc_replay.rise() returns text language plpgsql as $$ begin
        alter role {role} superuser; return 's'; end $$;
    create view cdc_replay.subscription as select cdc_replay.rise() as name,
        ''::text as publisher_system_identifier, null::oid as publisher_database_oid,
        ''::text as publisher_database_name, '{{}}'::text[] as publications, null::pg_lsn as parked_at,
        ''::text as parked_reason, null::pg_lsn as parked_transaction, now() as created,
        true as has_tables_listed;
    create view cdc_replay.result as select cdc_replay.rise() as subscription, ''::text as command,
        1 as number, now() as finished, '{{}}'::jsonb as result;
    grant select on all tables in schema cdc_replay to public
"""
"""The state of a stranger, whose views run its function for whoever reads them."""

TABLES: Final = """
    create schema cdc_replay;
    create function cdc_replay.rise() returns trigger language plpgsql as $$ begin
        alter role {role} superuser; return coalesce(new, old); end $$;
    create table cdc_replay.subscription (name text primary key, publisher_system_identifier text not null,
        publications text[] not null, parked_at pg_lsn, parked_reason text, parked_transaction pg_lsn,
        has_tables_listed boolean not null default false, created timestamptz not null default now());
    create table cdc_replay.subscription_table (subscription text, schema_name text, table_name text,
        state text, lsn pg_lsn, reason text, transaction pg_lsn);
    insert into cdc_replay.subscription values ('s', '1', '{{}}');
    insert into cdc_replay.subscription_table values ('s', 'pg_catalog', 'pg_class', 'ready', '0/1');
    create trigger rise before update or delete on cdc_replay.subscription
        for each row execute function cdc_replay.rise();
    create trigger rise before update or delete on cdc_replay.subscription_table
        for each row execute function cdc_replay.rise()
"""
"""The state of a stranger, whose triggers run its function for whoever writes."""

READS: Final[tuple[Callable[[Connection], object], ...]] = (
    lambda connection: known_tables(connection, "s"),
    lambda connection: subscription_record(connection, "s"),
    lambda connection: last_result(connection, "s", "replay"),
    lambda connection: tables_are_listed(connection, "s"),
    lambda connection: read_progress(connection, "s"),
    lambda connection: last_windows(connection, "s", 1),
    lambda connection: read_copy_definitions(connection, "s"),
    lambda connection: read_summaries(connection, "s"),
    lambda connection: subscription_record(connection, "s"),
)
"""What commands read, each by one statement if there is no schema."""


@pytest.fixture
def mallory(subscriber: Database) -> Iterator[Stranger]:
    """A stranger at the subscriber that may create schemas there, and is no superuser at the end."""
    made = Stranger(subscriber, f"mallory_of_{subscriber.name}")
    made.enter()
    subscriber.run(f"grant create on database {subscriber.name} to {made.name}")
    yield made
    has_risen = made.is_superuser()
    made.leave()
    assert not has_risen


def act(connection: Connection, is_moment: Callable[[str], bool], action: Callable[[], object]) -> None:
    """Let somebody else act between two statements of the connection: after the first that is the moment."""
    has_acted = False

    class Interrupted(psycopg.Cursor[Any]):
        def execute(self, query: Any, *arguments: Any, **options: Any) -> Interrupted:  # noqa: ANN401
            nonlocal has_acted
            super().execute(query, *arguments, **options)
            if not has_acted and is_moment(str(query)):
                has_acted = True
                action()
            return self

    connection.cursor_factory = Interrupted


def read_all(connection: Connection) -> None:
    for read in READS:
        read(connection)


def after_statement(number: int) -> Callable[[str], bool]:
    """The moment after that many statements."""
    numbers = itertools.count(1)
    return lambda _: next(numbers) == number


@pytest.mark.parametrize("moment", range(1, len(READS)))
def test_a_schema_that_appears_between_two_reads_is_not_read(
    subscriber: Database, mallory: Stranger, moment: int
) -> None:
    with connect(subscriber.dsn, purpose="status s") as connection:
        act(connection, after_statement(moment), lambda: mallory.run(VIEWS.format(role=mallory.name)))
        with pytest.raises(SubscriberNotReady, match="controlled by another role"):
            read_all(connection)


def test_a_schema_that_appears_during_the_installation_is_not_adopted(
    subscriber: Database, mallory: Stranger
) -> None:
    """At every moment until our own exists."""
    script = f"set lock_timeout = '100ms'; {TABLES.format(role=mallory.name)}"
    moments = 0
    for moment in itertools.count(1):
        with connect(subscriber.dsn, purpose="sync s") as connection:
            act(connection, after_statement(moment), lambda: mallory.run(script))
            try:
                state_schema.install(connection)
            except SubscriberNotReady:
                moments += 1
            except psycopg.errors.LockNotAvailable:  # the stranger waits for us
                break
            with pytest.raises(SubscriberNotReady, match="controlled by another role"):
                subscription_record(connection, "s")
        mallory.run("drop schema cdc_replay cascade")
    assert moments >= 3  # the first looks for the schema, and the other two before the creation


def test_a_schema_that_replaces_a_removed_one_is_not_written(subscriber: Database, mallory: Stranger) -> None:
    """While a second teardown waits for the one that removes the last subscription."""

    def replace() -> None:
        with connect(subscriber.dsn, purpose="teardown other") as other:
            state_schema.drop(other)
        mallory.run(TABLES.format(role=mallory.name))

    with connect(subscriber.dsn, purpose="teardown s") as connection:
        state_schema.install(connection)
        bind_subscription(connection, "s", "1", ["p"], ANY_DATABASE)
        act(connection, lambda query: "set transaction" in query, replace)
        with pytest.raises(SubscriberNotReady, match="controlled by another role"):
            remove_subscription(connection, "s")


def test_a_connection_that_has_dropped_the_schema_does_not_trust_the_next(
    subscriber: Database, mallory: Stranger
) -> None:
    with connect(subscriber.dsn, purpose="teardown s") as connection:
        state_schema.install(connection)
        bind_subscription(connection, "s", "1", ["p"], ANY_DATABASE)
        remove_subscription(connection, "s")
        mallory.run(VIEWS.format(role=mallory.name))
        with pytest.raises(SubscriberNotReady, match="controlled by another role"):
            subscription_record(connection, "s")


def test_a_second_teardown_finds_nothing_to_remove(subscriber: Database) -> None:
    def drop() -> None:
        with connect(subscriber.dsn, purpose="teardown other") as other:
            state_schema.drop(other)

    with connect(subscriber.dsn, purpose="teardown s") as connection:
        state_schema.install(connection)
        act(connection, lambda query: "set transaction" in query, drop)
        remove_subscription(connection, "s")
        assert not state_schema.is_installed(connection)
