"""The state of a subscriber is kept only where nobody else can write code (`subscriber.ownership`).

The stranger may create schemas in the subscriber's database. Tables that it made under our names would run
its triggers and defaults with the rights of the role that replays.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc_replay.commands.status import status
from cdc_replay.errors import SubscriberNotReady
from fixtures.twin import Twin
from security.stranger import Stranger

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key)"


@pytest.fixture
def subscribed(twin: Twin) -> Twin:
    twin.publisher.run(f"{TABLE}; create publication p for table t; insert into t values (1)")
    twin.subscribe("s", "p", tables=TABLE, native=False)
    return twin


@pytest.fixture
def owner(subscribed: Twin) -> Iterator[Stranger]:
    """A stranger at the subscriber that may create schemas there."""
    database = subscribed.pairs["s"].ours
    made = Stranger(database, f"stranger_of_{database.name}")
    made.enter()
    database.run(f"grant create on database {database.name} to {made.name}")
    yield made
    made.leave()


def test_a_schema_that_a_stranger_has_made_is_not_used(subscribed: Twin, owner: Stranger) -> None:
    owner.run("create schema cdc_replay")

    with pytest.raises(SubscriberNotReady, match=f'schema cdc_replay is owned by role "{owner.name}"'):
        subscribed.sync_ours()

    assert owner.run("select relname from pg_class where relnamespace = 'cdc_replay'::regnamespace") == []


def test_a_trigger_of_a_stranger_does_not_run(subscribed: Twin, owner: Stranger) -> None:
    """Its table is like ours, and its function would make it a superuser."""
    owner.run(
        "create schema cdc_replay; create table cdc_replay.subscription (name text primary key,"
        " publisher_system_identifier text not null, publications text[] not null, parked_at pg_lsn,"
        " parked_reason text, parked_transaction pg_lsn, has_tables_listed boolean not null default false,"
        " created timestamptz not null default now()); create function cdc_replay.rise() returns trigger"
        f" language plpgsql as $$ begin alter role {owner.name} superuser; return new; end $$;"
        " create trigger rise before insert on cdc_replay.subscription for each row"
        " execute function cdc_replay.rise();"
        " alter table cdc_replay.subscription enable always trigger rise"
    )

    with pytest.raises(SubscriberNotReady, match="controlled by another role"):
        subscribed.sync_ours()

    assert not owner.is_superuser()


def test_a_view_of_a_stranger_is_not_read(subscribed: Twin, owner: Stranger) -> None:
    """`status` only reads."""
    owner.run(
        "create schema cdc_replay; create table cdc_replay.subscription_table (null_accepted_at int);"
        " create function cdc_replay.rise() returns text language plpgsql as $$ begin"
        f" alter role {owner.name} superuser; return 's'; end $$;"
        " create view cdc_replay.subscription as select cdc_replay.rise() as name"
    )

    status(subscribed.config)

    assert not owner.is_superuser()


IN_OTHER_HANDS = {
    "schema": "alter schema cdc_replay owner to {}",
    "table": "alter table cdc_replay.result owner to {}",
    "create": "grant create on schema cdc_replay to {}",
    "insert": "grant insert on cdc_replay.subscription_table to {}",
    "trigger": "grant trigger on cdc_replay.subscription_table to {}",
    "policy": "create policy mine on cdc_replay.subscription",
    "rule": "create rule mine as on insert to cdc_replay.result do also nothing",
}


@pytest.mark.parametrize("script", IN_OTHER_HANDS.values(), ids=IN_OTHER_HANDS)
def test_every_run_refuses_what_has_come_into_other_hands(
    subscribed: Twin, owner: Stranger, script: str
) -> None:
    subscribed.sync_ours()
    owner.database.run(script.format(owner.name))

    with pytest.raises(SubscriberNotReady, match="controlled by another role"):
        subscribed.sync_ours()
