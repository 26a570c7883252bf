"""Several subscriptions of one database, and both directions, equal native subscriptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from cdc_replay.commands.setup import setup
from cdc_replay.commands.sync import sync
from cdc_replay.config import Config, load_config
from embedded.postgres import Cluster
from fixtures.native import NativeSubscription
from fixtures.postgres import Database, create_database, drop_database
from fixtures.twin import Twin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key, region text, v text, own text default 'new')"


def share(twin: Twin, name: str, *publications: str, beside: str, **options: object) -> None:
    """A further pair of subscriptions into the databases of the pair `beside`."""
    twin.pairs[name] = dataclasses.replace(twin.pairs[beside], publications=publications, options=options)
    setup(twin.config, "pub")
    twin.native(name).create(publications, options)


@pytest.fixture
def regions(twin: Twin) -> Twin:
    """One table is fed by two subscriptions, each of a region."""
    twin.publisher.run("""
        create table t (id int primary key, region text, v text);
        alter table t replica identity full;
        create publication eu for table t where (region = 'eu');
        create publication us for table t where (region = 'us');
        insert into t select i, case i % 2 when 0 then 'eu' else 'us' end, 'c' from generate_series(1, 12) i
    """)
    twin.subscribe("eu", "eu", tables=TABLE)
    share(twin, "us", "us", beside="eu")
    twin.sync()
    for database in (twin.pairs["eu"].ours, twin.pairs["eu"].native):
        database.run("update t set own = 'mine ' || id; insert into t values (500, 'eu', 'own row')")
    return twin


@pytest.mark.parametrize("order", ["eu, us", "us, eu"])
def test_row_moves_from_one_feed_to_the_other(regions: Twin, order: str) -> None:
    """R8.5, R8.16: one feed deletes rows that the other one inserts; a native worker retries until it can."""
    regions.publish(
        """
        update t set region = 'us', v = 'now us' where id = 2;
        update t set region = 'eu', v = 'now eu' where id = 1;
        update t set id = 100, region = 'us' where id = 6;
        update t set id = 6, region = 'eu' where id = 3;
        update t set region = null where id = 8;
        update t set region = 'us', v = 'through nothing' where id = 8;
        delete from t where id = 5;
        insert into t values (5, 'eu', 'again')
    """.strip()
    )
    regions.sync(*order.split(", "))
    assert len(regions.rows("eu", "t")) == 13


def test_row_that_moves_to_the_other_feed_and_back_exists(regions: Twin) -> None:
    """R8.5: natively that depends on the order of the workers; each window has only the row's last state."""
    regions.publish("""
        update t set region = 'us', v = 'now us' where id = 2;
        update t set region = 'us' where id = 4;
        update t set region = 'eu', v = 'now eu' where id = 1;
        update t set region = 'eu', v = 'back' where id = 4
    """)

    assert [result.replay.error for result in regions.sync_ours("us", "eu")] == [None, None]
    rows = regions.pairs["eu"].ours.rows("select id, region, v from t where id in (1, 2, 4) order by id")
    assert rows == [(1, "eu", "now eu"), (2, "us", "now us"), (4, "eu", "back")]


def test_feeds_update_columns_of_the_same_rows(twin: Twin) -> None:
    """R6.3, R8.3: one feed inserts rows with one column, the other one updates another column."""
    twin.publisher.run("""
        create table t (id int primary key, region text, v text);
        create publication whole for table t (id, region);
        create publication values_only for table t (id, v) with (publish = 'update');
        create publication deleted for table t with (publish = 'delete, truncate');
        insert into t select i, 'r', 'c' from generate_series(1, 6) i
    """)
    twin.subscribe("whole", "whole", tables=TABLE)
    twin.sync("whole")
    share(twin, "values", "values_only", beside="whole", copy_data=False)
    share(twin, "deleted", "deleted", beside="whole", copy_data=False)
    twin.sync()
    twin.publish(
        """
        update t set region = 'x', v = 'x' where id in (1, 2);
        insert into t values (7, 'new', 'not brought');
        update t set v = 'y' where id in (2, 3);
        alter table t rename v to own;
        update t set own = 'renamed' where id = 4;
        alter table t rename own to v;
        alter publication values_only set table t (id, region, v);
        update t set v = 'both', region = 'z' where id = 5;
        delete from t where id = 6
    """.strip()
    )
    twin.sync()
    assert len(twin.rows("whole", "t")) == 6


@dataclass(frozen=True)
class Both:
    """Two databases that publish to each other, ours and natively."""

    ours: Mapping[str, Database]
    native: Mapping[str, Database]
    config: Config

    def run(self, name: str, script: str) -> None:
        """Each statement in a separate transaction."""
        for database in (self.ours[name], self.native[name]):
            with database.connect() as connection:
                for statement in script.split(";\n"):
                    connection.execute(statement.encode())

    def subscription(self, source: str, target: str) -> NativeSubscription:
        name = f"{source}_{target}_{self.native[source].name}"
        return NativeSubscription(self.native[source], self.native[target], name)

    def sync(self) -> None:
        for _ in range(2):
            for name in ("ab", "ba"):
                (result,) = sync(self.config, [name])
                assert result.replay.error is None, result.replay.error
            self.subscription("a", "b").wait()
            self.subscription("b", "a").wait()

    def rows(self, name: str, table: str) -> list[str]:
        """After a check that native has the same."""
        texts = f"select x::text from {table} x order by 1"
        ours, native = self.ours[name].rows(texts), self.native[name].rows(texts)
        assert ours == native, f"{name}: ours is {ours}, native {native}"
        return [text for (text,) in ours]


@pytest.fixture
def both(
    spark: SparkSession, publisher_cluster: Cluster, subscriber_cluster: Cluster, tmp_path: Path
) -> Iterator[Both]:
    assert spark.version
    clusters = {"a": publisher_cluster, "b": subscriber_cluster}
    ours, native = (
        {name: create_database(database, name) for name, database in clusters.items()} for _ in range(2)
    )
    for database in (*ours.values(), *native.values()):
        database.run("""
            create table t (id int primary key, v text, n int);
            alter table t replica identity full;
            create table u (id int primary key, v text);
            create publication p for table t where (id < 1000), u
        """)
    content = {
        "publishers": {
            name: {"dsn": database.dsn, "slot": f"r_{database.name}", "change_log": str(tmp_path / name)}
            for name, database in ours.items()
        },
        "subscriptions": {
            source + target: {
                "publisher": source,
                "publications": ["p"],
                "dsn": ours[target].dsn,
                "origin": "none",
                "copy_data": False,
            }
            for source, target in ("ab", "ba")
        },
    }
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    both = Both(ours, native, load_config(file))
    for name in clusters:
        setup(both.config, name)
    for source, target in ("ab", "ba"):
        both.subscription(source, target).create(["p"], {"copy_data": False, "origin": "none"})
    both.sync()
    yield both
    for source, target in ("ab", "ba"):
        both.subscription(source, target).pause()
    for database in (*ours.values(), *native.values()):
        drop_database(database)


def test_both_directions_equal_native_replication(both: Both) -> None:
    """R8.19: nothing comes back; changes of the other side's rows arrive, with moves and filters."""
    both.run(
        "a", "insert into t select i, 'a', i from generate_series(1, 6) i;\ninsert into u values (1, 'a')"
    )
    both.run(
        "b", "insert into t select i, 'b', i from generate_series(11, 16) i;\ninsert into u values (2, 'b')"
    )
    both.sync()
    both.run(
        "a",
        """
        update t set v = 'a2' where id in (1, 11);
        update t set id = 21 where id = 2;
        update t set id = 2 where id = 12;
        update t set id = 1003 where id = 3;
        delete from t where id = 13;
        alter table t add column x int default 7;
        insert into t values (7, 'a', 7, 7)
        """.strip(),
    )
    both.run(
        "b",
        """
        alter table t add column x int default 9;
        update t set v = 'b2' where id in (4, 14);
        update t set id = 25 where id = 5;
        update t set id = 1015 where id = 15;
        update t set v = 'b3', n = 0 where id = 25;
        delete from t where id = 6;
        insert into t values (6, 'again', 6, 1);
        truncate u;
        insert into u values (3, 'b')
        """.strip(),
    )
    both.sync()
    assert both.rows("a", "u") == both.rows("b", "u") == ["(3,b)"]
    assert len(both.rows("a", "t")) == len(both.rows("b", "t"))
    both.run("a", "update t set id = 15 where id = 1003;\nupdate t set v = 'end' where id = 25")
    both.run("b", "delete from t where id in (1, 1015)")
    both.sync()
    assert both.rows("a", "t")
    assert both.rows("b", "t")
