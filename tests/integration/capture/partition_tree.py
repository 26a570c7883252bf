"""A partition tree, and what the change log holds of its changes.

root ─┬─ north ─── north_1          two more tables: plain, and empty, a partitioned table without partitions
      └─ south
"""

from __future__ import annotations

from typing import Any

from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import RelationId
from cdc_replay.pgoutput.messages import Truncate
from cdc_replay.pgoutput.reader import decode
from fixtures.captured import Captured

TREE = """
    create table root (id int, part text, primary key (id, part)) partition by list (part);
    create table north partition of root for values in ('n') partition by range (id);
    create table north_1 partition of north for values from (0) to (1000);
    create table south partition of root for values in ('s');
    create table empty (id int primary key) partition by range (id);
    create table plain (id int primary key);
"""
VIA_ROOT = "with (publish_via_partition_root = true)"
ROOT = TREE + f"create publication p for table root, empty, plain {VIA_ROOT};"
LEAVES = {"north_1", "south"}

Row = tuple[str, Any]


def content(captured: Captured) -> list[Row]:
    """Every log row in order: the tables of a TRUNCATE, the first value of other rows."""
    names = {
        RelationId(oid): name
        for oid, name in captured.database.rows(
            "select oid::bigint, relname::text from pg_class where relkind in ('r', 'p') and oid >= 16384"
        )
    }
    result: list[Row] = []
    for row, (kind, values) in zip(captured.rows(), captured.changes(), strict=True):
        message = decode(row["message"])
        tables = (
            {names[relation] for relation in message.relations} if isinstance(message, Truncate) else None
        )
        result.append((kind, tables if tables is not None else values[0] if values else None))
    return result


def check_order(captured: Captured) -> None:
    """Transactions are in commit order, and `seq` of their rows has no gaps."""
    rows = captured.rows()
    expected, last = 0, 0
    for row in rows:
        expected = expected + 1 if row["commit_lsn"] == last else 0
        assert row["commit_lsn"] >= last
        assert row["seq"] == expected
        last = row["commit_lsn"]
    everything = Window(Lsn(0), captured.log.end_lsn)
    assert captured.log.summary(everything).messages == len(rows)
    commits = [commit.commit_lsn.value for commit in captured.log.commits(everything)]
    assert commits == sorted({row["commit_lsn"] for row in rows})
