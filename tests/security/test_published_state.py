"""Nobody at the publisher writes the subscriber's own tables: its state, or the system's.

The names of published tables are those of the tables that are written. The stranger owns one table and a
publication with it, and may create schemas on the publisher: it publishes a table with the name of one that
keeps the state of all subscriptions of the subscriber.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection

import pytest

from cdc_replay.certify import run
from cdc_replay.certify.native_side import NativeSubscriber
from cdc_replay.certify.native_tables import NativeTable, create_native_tables
from cdc_replay.commands.certify import CertifyOptions, certify
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.setup import setup
from cdc_replay.errors import NativeSubscriptionFailed, TargetMismatch
from cdc_replay.postgres.connection import Connection
from embedded.postgres import binaries
from fixtures.twin import Twin
from security.stranger import Stranger

pytestmark = pytest.mark.spark

MINE = "create table mine (id int primary key)"
THEIRS = "create table theirs (id int primary key)"

STATE = """
    create schema cdc_replay;
    create table cdc_replay.subscription_table (
        subscription text, relation text, schema_name text, table_name text, state text, lsn pg_lsn,
        reason text, transaction pg_lsn, rewritten_at pg_lsn, null_accepted_at pg_lsn,
        primary key (subscription, relation)
    )
"""

CATALOG = """
    set allow_system_table_mods = on;
    alter table pg_catalog.pg_description rename to pg_described;
    create table pg_catalog.pg_description (
        objoid oid, classoid oid, objsubid int, description text, primary key (objoid, classoid, objsubid)
    );
    insert into pg_catalog.pg_description values (1, 1, 1, 'written by the publisher');
    alter publication p add table pg_catalog.pg_description
"""
WRITTEN = "select from pg_catalog.pg_description where description = 'written by the publisher'"

NATIVE_COPIES = NativeSubscriber.await_copies


@pytest.fixture
def beside(twin: Twin, stranger: Stranger) -> Twin:
    """Subscription `s` has the stranger's publication, and `other` has another one, in one database."""
    twin.publisher.run(
        f"{THEIRS}; create publication q for table theirs;"
        f" grant create on database {twin.publisher.name} to {stranger.name};"
        f" grant create on schema public to {stranger.name}"
    )
    stranger.run(f"set search_path = public; {MINE}; create publication p for table mine")
    twin.subscribe("s", "p", tables=f"{MINE}; {THEIRS}", native=False)
    twin.pairs["other"] = twin.pairs["s"]
    twin.change("other", "q")
    setup(twin.config, "pub")
    twin.sync_ours()
    return twin


def test_a_published_table_is_not_written_as_the_state(beside: Twin, stranger: Stranger) -> None:
    """Its update would tell that `other` has applied what it has not."""
    stranger.run(STATE)
    stranger.run("alter publication p add table cdc_replay.subscription_table")

    with pytest.raises(TargetMismatch, match=r"cdc_replay.*subscription_table.*not for published rows"):
        refresh(beside.config, "s")

    stranger.run("alter publication p set (publish = 'update')")
    stranger.run(
        "insert into cdc_replay.subscription_table (subscription, relation, schema_name, table_name, state,"
        " lsn) values ('other', 'public.theirs', 'public', 'theirs', 'ready', '0/1')"
    )
    stranger.run("update cdc_replay.subscription_table set lsn = 'FFFFFFFF/0'")
    beside.sync_ours("s")
    beside.publisher.run("insert into theirs values (1)")
    beside.sync_ours("other")
    assert beside.pairs["other"].ours.rows("select id from theirs") == [(1,)]


def test_a_published_table_is_not_written_as_a_system_catalog(twin: Twin) -> None:
    """The publisher's superuser would become that of the subscriber, if our role there is one."""
    twin.publisher.run(f"{MINE}; create publication p for table mine")
    twin.subscribe("s", "p", tables=MINE, native=False)
    twin.sync_ours()
    twin.publisher.run(CATALOG)

    with pytest.raises(TargetMismatch, match=r"pg_catalog.*pg_description.*not for published rows"):
        refresh(twin.config, "s")

    assert twin.pairs["s"].ours.rows(WRITTEN) == []


def test_a_published_table_is_not_written_as_a_catalog_of_the_throwaway_server(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its native worker is a superuser, and could run programs as the user of `certify`."""
    twin.publisher.run(f"{MINE}; create publication p for table mine")
    twin.subscribe("s", "p", tables=MINE, native=False)
    written = []

    def create_late(server: Connection, tables: Collection[NativeTable]) -> None:
        create_native_tables(server, tables)
        twin.publisher.run(CATALOG)  # after the look at the catalog

    def await_copies(native: NativeSubscriber, between: Callable[[], bool]) -> None:
        NATIVE_COPIES(native, between)
        written.extend(native.server.execute(WRITTEN).fetchall())

    monkeypatch.setattr(run, "create_native_tables", create_late)
    monkeypatch.setattr(NativeSubscriber, "await_copies", await_copies)
    with pytest.raises(NativeSubscriptionFailed, match=r"catalogs.*pg_description"):
        certify(twin.config, "s", CertifyOptions(time=dt.timedelta(seconds=1), bin_folder=binaries()))

    assert written == []
