"""TRUNCATE of partitioned tables, and origins of single changes, reach each subscription as they do natively.

root ─┬─ north ─── north_1          child references root; empty has no partition
      └─ south
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TREE = """
    create table root (id int, part text, a int, primary key (id, part)) partition by list (part);
    create table north partition of root for values in ('n') partition by range (id);
    create table north_1 partition of north for values from (0) to (1000);
    create table south partition of root for values in ('s');
    create table empty (id int primary key) partition by range (id);
    create table child (id int primary key, root_id int, part text,
                        foreign key (root_id, part) references root)
"""
PUBLICATIONS = """
    create publication of_root for table root where (a > 0) with (publish_via_partition_root = true);
    create publication of_middle for table north with (publish_via_partition_root = true);
    create publication of_leaves for table root;
    create publication of_empty for table empty, child with (publish_via_partition_root = true);
    create publication everything for all tables;
    create publication all_via_root for all tables with (publish_via_partition_root = true);
    create publication inserts for table root with (publish = 'insert', publish_via_partition_root = true)
"""
COLUMNS = "(id int, part text, a int, primary key (id, part))"
CHILD = "create table child (id int primary key, root_id int, part text)"
# Rows of the subscriber's own show a TRUNCATE that deletes no row of the publisher.
EMPTY = "create table empty (id int primary key); insert into empty values (77)"
SUBSCRIPTIONS = {
    "root": (("of_root",), f"create table root {COLUMNS}", ("root",)),
    "middle": (("of_middle",), f"create table north {COLUMNS}", ("north",)),
    # R7.2: before 16 a subscription to both needs both tables, though changes reach the root alone.
    "both": (
        ("of_root", "of_middle"),
        f"create table root {COLUMNS}; create table north {COLUMNS}",
        ("root",),
    ),
    "leaves": (
        ("of_leaves",),
        f"create table north_1 {COLUMNS}; create table south {COLUMNS}",
        ("north_1", "south"),
    ),
    "empty": (("of_empty",), f"{EMPTY}; {CHILD}", ("empty", "child")),
    "mixed": (
        ("everything", "inserts"),
        f"create table root {COLUMNS}; create table south {COLUMNS}; create table north_1 {COLUMNS}; {CHILD}",
        ("root", "child"),
    ),
    "all": (("all_via_root",), f"create table root {COLUMNS}; {EMPTY}; {CHILD}", ("root", "empty", "child")),
}
ROWS = "insert into root values ({0}, 'n', 1), ({0}, 's', 1), ({0} + 1, 'n', -1), ({0} + 1, 's', -1)"


def counts(twin: Twin) -> dict[str, int]:
    """Rows of all tables of each subscription, which are those that native has."""
    return {
        name: sum(len(twin.rows(name, table)) for table in tables)
        for name, (_, _, tables) in SUBSCRIPTIONS.items()
    }


def test_truncate_reaches_subscriptions_to_truncated_relation(twin: Twin) -> None:
    """R2.13, R2.10, R8.15: seven subscriptions at several levels of one tree, over one log."""
    twin.publisher.run(f"{TREE}; {PUBLICATIONS}; {ROWS.format(1)}")
    for name, (publications, tables, _) in SUBSCRIPTIONS.items():
        twin.subscribe(name, *publications, tables=tables)
    twin.sync()
    at_first = counts(twin)
    assert at_first == {
        "root": 2, "middle": 2, "both": 2, "leaves": 4, "empty": 1, "mixed": 4, "all": 5
    }  # fmt: skip

    twin.publish("truncate south cascade;\ntruncate north_1 cascade")
    twin.sync()
    # Both are their own published relations for `leaves` alone.
    assert counts(twin) == at_first | {"leaves": 0}

    twin.publish(f"{ROWS.format(11)};\ntruncate north cascade;\ninsert into north values (21, 'n', 1)")
    twin.sync()
    # of_middle: what was inserted behind the TRUNCATE. With of_root beside it the root alone counts.
    assert counts(twin)["middle"] == 1
    assert counts(twin)["both"] == at_first["both"] + 3

    twin.publish(
        f"begin;\n{ROWS.format(31)};\ntruncate root, south, child restart identity;\n{ROWS.format(41)};\n"
        "commit;\ntruncate empty"
    )
    twin.sync()
    # R2.10: nobody publishes TRUNCATE of the root as such in `mixed`.
    assert counts(twin) == {
        "root": 2, "middle": 2, "both": 2, "leaves": 4, "empty": 0, "mixed": counts(twin)["mixed"], "all": 4
    }  # fmt: skip
    assert counts(twin)["mixed"] > 4

    twin.publish("insert into child values (1, 41, 'n');\ntruncate root cascade")
    twin.sync()
    assert counts(twin) == {
        "root": 0, "middle": 0, "both": 0, "leaves": 0, "empty": 0, "mixed": counts(twin)["mixed"], "all": 0
    }  # fmt: skip


@pytest.fixture
def origin(twin: Twin) -> Iterator[str]:
    """A replication origin on the publisher."""
    twin.publisher.require(16, "option origin of pgoutput (R8.20)")
    with twin.publisher.connect() as connection:
        name = f"origin_{twin.publisher.name}"
        connection.execute("select pg_replication_origin_create(%s)", (name,))
    yield name
    twin.publisher.run(f"select pg_replication_origin_drop('{name}')")


def test_origin_none_skips_single_changes(twin: Twin, origin: str) -> None:
    """R8.19, R8.20: by the origin of their own record, and by that of the commit."""
    tables = "create table t (id int primary key, a int)"
    twin.publisher.run(f"{TREE}; {tables}")
    twin.publisher.run(
        "create publication p for table t, root, empty with (publish_via_partition_root = true)"
    )
    tables += f"; create table root {COLUMNS}; {EMPTY}"
    twin.subscribe("none", "p", tables=tables, origin="none")
    twin.subscribe("any", "p", tables=tables)
    twin.sync()

    remote, local = (
        f"select pg_replication_origin_session_setup('{origin}')",
        ("select pg_replication_origin_session_reset()"),
    )
    script = f"""
        begin;
        insert into t values (1, 0), (2, 0);
        {remote};
        insert into t values (3, 0);
        update t set a = 1 where id = 1;
        select pg_replication_origin_xact_setup('0/1', now());
        {local};
        update t set a = 2 where id = 2;
        commit;
        begin;
        insert into t values (4, 0);
        {remote};
        insert into t values (5, 0);
        commit;
        truncate root, empty cascade;
        {local};
        begin;
        {ROWS.format(1)};
        {remote};
        truncate root cascade;
        {local};
        insert into t values (6, 0);
        commit;
        update t set a = 7
    """
    twin.publish("\n".join(line.strip() for line in script.splitlines()))
    twin.sync()

    # Locally changed rows only: 3, 4 and 5 never came, and their later UPDATEs find nothing.
    assert twin.rows("none", "t") == [(1, 7), (2, 7), (6, 7)]
    assert len(twin.rows("none", "root")) == 4
    assert twin.rows("none", "empty") == [(77,)]
    assert len(twin.rows("any", "t")) == 6
    assert twin.rows("any", "root") == twin.rows("any", "empty") == []
