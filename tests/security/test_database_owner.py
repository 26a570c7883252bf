"""The owner of a database chooses what every session begins with, and gets no rights by it (R8.21).

Each setting that a role may change for itself can be given to a database by its owner. The roles of the
pipeline are superusers here: whatever runs with their rights makes the owner one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from psycopg import sql
from psycopg.errors import InsufficientPrivilege

from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import state_schema
from cdc_replay.subscriber.apply_connection import connect_as_apply_worker
from cdc_replay.subscriber.as_owner import act_on
from cdc_replay.subscriber.target_tables import read_target_tables
from fixtures.postgres import Database
from security.stranger import Stranger


@pytest.fixture
def owner(subscriber: Database) -> Iterator[Stranger]:
    made = Stranger(subscriber, f"owner_of_{subscriber.name}")
    made.enter()
    subscriber.run(f"alter database {subscriber.name} owner to {made.name}")
    made.run("create schema own")
    yield made
    subscriber.run(
        f"alter database {subscriber.name} reset all; alter database {subscriber.name} owner to postgres"
    )
    made.leave()


def give(owner: Stranger, setting: str) -> None:
    owner.run(f"alter database {owner.database.name} set {setting}")


@pytest.mark.parametrize("replication", [False, True])
def test_no_operator_is_looked_up_in_the_search_path_of_the_database(
    owner: Stranger, replication: bool
) -> None:
    operators = "; ".join(
        f"create operator own.{name} (leftarg = text, rightarg = text, function = own.rise)"
        for name in ("~", "=", "||", "~~")
    )
    owner.run(
        "create function own.rise(text, text) returns boolean language plpgsql as $$ begin"
        f" alter role {owner.name} superuser; return true; end $$; {operators}"
    )
    give(owner, "search_path = own, pg_catalog")

    connect(owner.database.dsn, purpose="attacked", replication=replication).close()

    assert not owner.is_superuser()


def test_a_role_of_the_database_does_not_become_ours(owner: Stranger) -> None:
    """The owner's schema would pass for our own, and its code would run without a restriction."""
    owner.run(
        "create function own.rise() returns text language plpgsql as $$ begin"
        f" set role none; alter role {owner.name} superuser; return ''; end $$;"
        " create schema cdc_replay;"
        " create table cdc_replay.lock_key (name text primary key, key bigint, more text default own.rise())"
    )
    give(owner, f"role = {owner.name}")

    with (
        connect(owner.database.dsn, purpose="attacked") as connection,
        pytest.raises(SubscriberNotReady, match=f'owned by role "{owner.name}"'),
    ):
        state_schema.install(connection)


def test_a_role_that_the_dsn_or_our_role_sets_is_kept(subscriber: Database, owner: Stranger) -> None:
    give(owner, f"role = {owner.name}")
    with connect(f"{subscriber.dsn}?options=-crole%3Dpg_monitor", purpose="test") as connection:
        assert connection.execute("select current_user::text").fetchone() == ("pg_monitor",)


def test_code_that_is_added_while_a_transaction_runs_is_seen(owner: Stranger) -> None:
    """In a repeatable read transaction, what is checked after the lock would be older than the lock."""
    owner.run("create table own.t (id int)")
    give(owner, "default_transaction_isolation = 'repeatable read'")
    name = QualifiedName("own", "t")

    with connect_as_apply_worker(owner.database.dsn, purpose="apply") as worker, worker.transaction():
        [planned] = read_target_tables(worker, [name]).values()
        owner.run(
            "create function own.rises() returns trigger language plpgsql as $$ begin"
            f" alter role {owner.name} superuser; return new; end $$;"
            " create trigger rises before insert on own.t for each row execute function own.rises();"
            " alter table own.t enable always trigger rises"
        )
        with suppress(InsufficientPrivilege), worker.transaction(), act_on(worker, [planned]) as sessions:
            sessions.session_for(planned).execute(sql.SQL("insert into own.t values (1)").format())

    assert not owner.is_superuser()
