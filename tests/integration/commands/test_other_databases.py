"""Log and subscriber are of one database; another one is refused, under whatever name, and so are two owners.

A system identifier tells clusters apart. The databases of one are told apart by oid, which a rename keeps.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.prune import prune
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.replay import replay
from cdc_replay.commands.setup import setup
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.sync import sync
from cdc_replay.commands.teardown import teardown
from cdc_replay.commands.validate import validate
from cdc_replay.config import Config, load_config
from cdc_replay.errors import (
    AnotherPublisher,
    ChangeLogMismatch,
    ChangeLogMissing,
    InvalidConfiguration,
    NotConsistent,
    PruneLimitUnknown,
    PublisherNotReady,
    SlotLost,
)
from cdc_replay.model.database import Database as PublisherDatabase
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import subscription_records
from fixtures.postgres import Database, create_database, drop_database
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLES = "create table t (id int primary key, a int)"
T = QualifiedName("public", "t")

COMMANDS: dict[str, Callable[[Config], object]] = {
    "setup": lambda config: setup(config, "pub"),
    "capture": lambda config: capture(config, "pub"),
    "snapshot": lambda config: snapshot(config, "s", tables=[T]),
    "sync": lambda config: sync(config, ["s"]),
    "refresh": lambda config: refresh(config, "s"),
    "refresh --reconcile": lambda config: refresh(config, "s", reconcile=True),
    "validate": lambda config: validate(config, "s"),
}


@pytest.fixture
def other(publisher: Database) -> Iterator[Database]:
    """Another database of the publisher's cluster, with the same table and publication."""
    database = create_database(publisher.cluster, "other")
    database.run(f"{TABLES}; insert into t values (7, 7); create publication p for table t")
    yield database
    drop_database(database)


@pytest.fixture
def synced(twin: Twin) -> Twin:
    """Subscription `s` has the publisher's one row."""
    twin.publisher.run(f"{TABLES}; insert into t values (1, 1); create publication p for table t")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    return twin


def rows(twin: Twin) -> list[tuple[object, ...]]:
    return twin.pairs["s"].ours.rows("table t order by id")


def oid(database: Database) -> int:
    [(database_oid,)] = database.rows(
        "select oid::bigint from pg_database where datname = current_database()"
    )
    assert isinstance(database_oid, int)
    return database_oid


def says_both(text: str, *databases: Database) -> None:
    for database in databases:
        assert f'"{database.name}" (oid {oid(database)})' in text


def test_another_database_of_the_cluster_is_not_captured_into_the_log(synced: Twin, other: Database) -> None:
    synced.options = {"dsn": other.dsn}
    for run in COMMANDS.values():
        with pytest.raises(ChangeLogMismatch) as refused:
            run(synced.config)
        says_both(str(refused.value), synced.publisher, other)
    assert rows(synced) == [(1, 1)]
    assert other.rows("select from pg_publication where pubname like 'cdc_replay%'") == []
    synced.options = {}
    synced.publish("insert into t values (2, 2)")
    synced.sync_ours()
    assert rows(synced) == [(1, 1), (2, 2)]


def errors(run: Callable[[Config], object], config: Config) -> str:
    """What a command says that is refused, be it in its result."""
    try:
        results = run(config)
    except (AnotherPublisher, NotConsistent, PruneLimitUnknown) as error:
        return str(error)
    assert isinstance(results, tuple)
    (result,) = results
    replayed: Any = getattr(result, "replay", result)
    return str(replayed.error)


def test_a_new_log_of_another_database_does_not_replace_rows(synced: Twin, other: Database) -> None:
    """As if a slot had been lost: then a new log of the same database is the documented way."""
    teardown(synced.config, "pub")
    synced.change_log.rename(synced.folder / "old")
    other.run("insert into t values (8, 8)")
    synced.options = {"dsn": other.dsn}
    setup(synced.config, "pub")
    capture(synced.config, "pub")
    commands = {name: run for name, run in COMMANDS.items() if name not in {"setup", "capture"}}
    commands |= {
        "replay": lambda config: replay(config, ["s"]),
        "snapshot of all": lambda config: snapshot(config, "s"),
        "prune": lambda config: prune(config, "pub", keep_hours=0),
    }
    before = synced.states("s")
    for run in commands.values():
        text = errors(run, synced.config)
        assert 'subscription "s" belongs to another publisher' in text
        says_both(text, synced.publisher, other)
    assert (rows(synced), synced.states("s")) == ([(1, 1)], before)

    teardown(synced.config, "s")
    synced.pairs["s"].ours.run("truncate t")
    synced.sync_ours()
    assert rows(synced) == [(7, 7), (8, 8)]


def test_new_log_of_the_same_database_is_accepted(synced: Twin) -> None:
    """docs/how-to/lost-slot.md."""
    teardown(synced.config, "pub")
    synced.change_log.rename(synced.folder / "old")
    synced.publish("insert into t values (2, 2)")
    setup(synced.config, "pub")
    snapshot(synced.config, "s")
    synced.publish("insert into t values (3, 3)")
    synced.sync_ours()
    assert rows(synced) == [(1, 1), (2, 2), (3, 3)]
    assert validate(synced.config, "s").success


def test_database_dropped_and_created_again_is_another_database(synced: Twin) -> None:
    """Its name is all that it has of the first."""
    dropped = synced.publisher
    before = PublisherDatabase(oid(dropped), dropped.name)
    drop_database(dropped)
    with connect(dropped.cluster.dsn(), purpose="test") as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(dropped.name)))
    dropped.run(f"{TABLES}; insert into t values (9, 9); create publication p for table t")
    for run in COMMANDS.values():
        with pytest.raises(ChangeLogMismatch) as refused:
            run(synced.config)
        assert str(before) in str(refused.value)
        says_both(str(refused.value), dropped)
    assert rows(synced) == [(1, 1)]


NASTY = """o'b"a %s {} \\ $1 größe;--"""


def test_renamed_database_is_replayed_under_its_new_name(synced: Twin) -> None:
    publisher = synced.publisher
    before = oid(publisher)

    def rename(old: str, new: str) -> None:
        with connect(publisher.cluster.dsn(), purpose="test") as admin:
            admin.execute(
                sql.SQL("alter database {} rename to {}").format(sql.Identifier(old), sql.Identifier(new))
            )

    rename(publisher.name, NASTY)
    try:
        dsn = make_conninfo(publisher.dsn, dbname=NASTY)
        synced.options = {"dsn": dsn}
        setup(synced.config, "pub")
        with connect(dsn, purpose="test") as connection:
            connection.execute("insert into public.t values (2, 2)")
        synced.sync_ours()
        assert rows(synced) == [(1, 1), (2, 2)]
        now = PublisherDatabase(before, NASTY)
        assert ChangeLog.open(str(synced.change_log)).header.database == now
        assert replay(synced.config, ["s"])[0].error is None
        with synced.pairs["s"].ours.connect() as connection:
            record = subscription_records.subscription_record(connection, "s")
        assert record is not None
        assert record.publisher_database == now
        assert validate(synced.config, "s").success
    finally:
        rename(NASTY, publisher.name)


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Another configuration of the same servers, with what it has in common with the twin's."""

    twin: Twin

    def config(self, name: str = "theirs", **publisher: object) -> Config:
        twin = self.twin
        own = {"dsn": twin.publisher.dsn, "slot": twin.slot, "change_log": str(twin.folder / name)}
        subscription = {"publisher": "pub", "publications": ["p"], "dsn": twin.pairs["s"].ours.dsn}
        file = twin.folder / f"{name}.yaml"
        content = {"publishers": {"pub": own | publisher}, "subscriptions": {"s": subscription}}
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return load_config(file)


def test_two_logs_of_one_slot_refuse_each_other(synced: Twin) -> None:
    """Whoever has read it first has it."""
    theirs = Deployment(synced).config()
    with pytest.raises(ChangeLogMissing, match="is not at"):
        setup(theirs, "pub")
    teardown(synced.config, "pub")
    shutil.rmtree(synced.change_log)
    setup(synced.config, "pub")
    setup(theirs, "pub")  # nothing has been read yet
    synced.publish("insert into t values (2, 2)")
    capture(theirs, "pub")
    with pytest.raises(SlotLost, match="another deployment with the same slot") as lost:
        capture(synced.config, "pub")
    assert "choose another slot if this one is" in str(lost.value)
    assert capture(theirs, "pub").transactions == 0


def test_two_slots_of_one_log_refuse_each_other(synced: Twin) -> None:
    theirs = Deployment(synced).config(slot="another_slot", change_log=str(synced.change_log))
    for run in COMMANDS.values():
        with pytest.raises(ChangeLogMismatch, match=f"slot '{synced.slot}', not 'another_slot'"):
            run(theirs)
    synced.sync_ours()


def test_two_slots_of_one_database_refuse_each_other(synced: Twin) -> None:
    theirs = Deployment(synced).config(slot="another_slot")
    with pytest.raises(PublisherNotReady, match='do not belong to replication slot "another_slot"'):
        setup(theirs, "pub")
    synced.sync_ours()


def test_a_slot_of_another_database_is_not_read(synced: Twin, other: Database) -> None:
    theirs = Deployment(synced).config(dsn=other.dsn)
    with pytest.raises(PublisherNotReady, match="cannot be used") as refused:
        setup(theirs, "pub")
    assert f'database "{synced.publisher.name}"' in str(refused.value)


def test_one_subscription_of_two_deployments_belongs_to_the_first(synced: Twin, other: Database) -> None:
    """Nothing that the first has on the subscriber is touched by the second."""
    theirs = Deployment(synced).config(dsn=other.dsn, slot=f"other_{other.name}")
    setup(theirs, "pub")
    subscriber = synced.pairs["s"].ours
    everything = "select * from cdc_replay.subscription, cdc_replay.subscription_table, cdc_replay.result"
    before = subscriber.rows(everything)
    for run in (lambda config: sync(config, ["s"]), lambda config: replay(config, ["s"])):
        text = errors(run, theirs)
        assert "two deployments on one subscriber need different names" in text
        says_both(text, synced.publisher, other)
    assert (subscriber.rows(everything), rows(synced)) == (before, [(1, 1)])
    synced.publish("insert into t values (2, 2)")
    synced.sync_ours()
    assert rows(synced) == [(1, 1), (2, 2)]


def test_publishers_that_exchange_their_databases_are_refused(synced: Twin, other: Database) -> None:
    second = Deployment(synced).config("second", dsn=other.dsn, slot=f"second_{other.name}")
    setup(second, "pub")
    exchanged = Deployment(synced).config("exchanged", dsn=other.dsn, change_log=str(synced.change_log))
    for config in (exchanged, Deployment(synced).config("logs", change_log=str(synced.folder / "second"))):
        with pytest.raises(ChangeLogMismatch) as refused:
            capture(config, "pub")
        says_both(str(refused.value), synced.publisher, other)


def test_a_log_that_was_copied_has_one_reader(synced: Twin) -> None:
    shutil.copytree(synced.change_log, synced.folder / "copy")
    copy = Deployment(synced).config("copy")
    synced.publish("insert into t values (2, 2)")
    capture(copy, "pub")
    with pytest.raises(SlotLost, match="a copy of this log"):
        synced.sync_ours()


def test_one_configuration_has_a_slot_once(synced: Twin) -> None:
    config = synced.config
    content = yaml.safe_load(config.path.read_text(encoding="utf-8"))
    content["publishers"]["second"] = content["publishers"]["pub"] | {"change_log": "elsewhere"}
    config.path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(InvalidConfiguration, match=r'slot: publisher "pub" reads the same replication slot'):
        load_config(config.path)
