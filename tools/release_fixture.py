"""Writes what this version leaves on disk and in a subscriber, for tests of later versions to read.

Run it at a release: `python tools/release_fixture.py tests/fixtures/written_by_0_1`. The folder gets

| file             | content                                                                         |
|------------------|---------------------------------------------------------------------------------|
| `change_log`     | a log whose last transactions are not replayed yet, with a DDL command          |
| `subscriber.sql` | `pg_dump` of the subscriber: its tables, and the state in schema `cdc_replay`   |
| `rows.json`      | the rows that the subscriber must have once the rest of the log is replayed      |
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import psycopg
import yaml

from cdc_replay.commands.capture import capture
from cdc_replay.commands.setup import setup
from cdc_replay.commands.sync import sync
from cdc_replay.config import load_config
from embedded.java import spark_environment
from embedded.postgres import Cluster, binaries

TABLES: Final = """
create table orders (id int primary key, state text not null, total numeric, note text);
create table parts (id int, place int, name text, primary key (id, place)) partition by list (place);
create table parts_1 partition of parts for values in (1);
create table parts_2 partition of parts for values in (2);
"""
PUBLISHED: Final = """
alter table orders replica identity full;
create publication nsw for table orders where (state = 'NSW');
create publication parts for table parts with (publish_via_partition_root);
insert into orders
select i, case when i % 2 = 0 then 'NSW' else 'VIC' end, i, 'note ' || i from generate_series(1, 40) as i;
insert into parts select i, 1 + i % 2, 'part ' || i from generate_series(1, 20) i;
"""
REPLAYED: Final = ("update orders set total = total + 1 where id <= 10", "delete from parts where id = 1")
NEW_COLUMN: Final = "alter table orders add column paid boolean"
NOT_REPLAYED: Final = (
    "update orders set state = 'NSW' where id = 1",
    "update orders set state = 'QLD' where id = 2",
    NEW_COLUMN,
    "update orders set paid = true, note = null where id in (4, 5)",
    "insert into orders values (100, 'NSW', 1.50, 'new', false)",
    "update parts set id = 30, place = 2 where id = 2",
    "delete from orders where id = 6",
)
QUERIES: Final = {
    "orders": "select to_jsonb(t) from orders t where state = 'NSW' order by id",
    "parts": "select to_jsonb(t) from parts t order by id",
}


def write(folder: Path) -> None:
    """Write the files into an empty folder."""
    os.environ.update(spark_environment())
    with (
        tempfile.TemporaryDirectory() as work,
        Cluster(Path(work), "publisher") as publisher,
        Cluster(Path(work), "subscriber") as subscriber,
    ):
        configuration = Path(work) / "cdc_replay.yaml"
        configuration.write_text(yaml.safe_dump(_configuration(publisher, subscriber)), encoding="utf-8")
        config = load_config(configuration)
        _run(publisher, TABLES, PUBLISHED)
        _run(subscriber, TABLES)
        setup(config, "shop")
        sync(config, ["nsw"])
        _run(publisher, *REPLAYED)
        sync(config, ["nsw"])
        _run(publisher, *NOT_REPLAYED)
        capture(config, "shop")
        _run(subscriber, NEW_COLUMN)
        shutil.copytree(Path(work) / "change_log", folder / "change_log")
        (folder / "subscriber.sql").write_text(_dump(subscriber), encoding="utf-8")
        with psycopg.connect(publisher.dsn()) as connection:
            rows = {
                table: [row for (row,) in connection.execute(query.encode()).fetchall()]
                for table, query in QUERIES.items()
            }
        (folder / "rows.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _configuration(publisher: Cluster, subscriber: Cluster) -> dict[str, object]:
    subscription = {"publisher": "shop", "publications": ["nsw", "parts"], "dsn": subscriber.dsn()}
    return {
        "publishers": {"shop": {"dsn": publisher.dsn(), "change_log": "change_log"}},
        "subscriptions": {"nsw": subscription},
    }


def _run(cluster: Cluster, *scripts: str) -> None:
    with psycopg.connect(cluster.dsn(), autocommit=True) as connection:
        for script in scripts:
            connection.execute(script.encode())


def _dump(cluster: Cluster) -> str:
    """The database as INSERTs, without the names of roles and without psql's own commands."""
    program = binaries() / "pg_dump"
    dump = subprocess.run(
        [program, "--no-owner", "--no-privileges", "--inserts", cluster.dsn()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return "".join(
        line for line in dump.stdout.splitlines(keepends=True) if not line.startswith(("\\", "--"))
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
