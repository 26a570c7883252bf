"""The jobs on a Spark standalone cluster: two workers share them, and the result is native's.

Driver, executors and this test run on one machine, so the folder of the change log is shared, as a cluster's
must be. Configuration and connections are the driver's: executors get what they need with their tasks.
"""

from __future__ import annotations

import os
import signal

import pytest

from benchmarks.memory import descendants
from cdc_replay.commands.capture import capture
from cdc_replay.commands.snapshot import snapshot
from fixtures.native import wait_for
from fixtures.twin import Twin
from scale_out.cluster import SparkCluster, Submitted

pytestmark = pytest.mark.spark

TABLES = """
    create table t (id int primary key, a int, note text);
    create table big (id int primary key, body text);
    create table log (n int, note text)
"""
PUBLISHED = f"""
    {TABLES};
    alter table t replica identity full;
    create publication odd for table t where (a % 2 = 1);
    create publication far for table t where (id > 20000 and note like '%7%');
    create publication rest for table big, log with (publish = 'insert, update, delete, truncate');
    alter table log replica identity full;
    alter table big alter body set storage external;
    insert into big select n, repeat(n::text, 1000) from generate_series(1, 100) n;
    insert into log select n % 5, 'same' from generate_series(1, 50) n
"""
# More than a window that one task does alone.
TRAFFIC = """
    insert into t select n, n % 7, 'note ' || n from generate_series(1, 30000) n;
    update t set a = a + 1 where id % 2 = 0;
    update t set id = id + 100000, note = 'moved ' || note where id % 10 = 3;
    delete from t where id % 9 = 4;
    update big set id = id + 1000 where id > 50;
    delete from log where ctid in (select ctid from log where n = 2 limit 3);
    insert into log select n, 'new' from generate_series(1, 20) n
"""
NAMES = {"odd": ("t",), "odd_and_far": ("t",), "rest": ("big", "log")}


def subscribed(twin: Twin) -> None:
    """Three subscriptions, the first two of the same table, which is not copied."""
    twin.publisher.run(PUBLISHED)
    twin.subscribe("odd", "odd", tables=TABLES, copy_data=False)
    twin.subscribe("odd_and_far", "odd", "far", tables=TABLES, copy_data=False)
    twin.subscribe("rest", "rest", tables=TABLES)
    for name in ("odd", "odd_and_far"):
        snapshot(twin.config, name)


def replayed(twin: Twin, cluster: SparkCluster, **executor_environment: str) -> Submitted:
    """The backlog is captured, and its replay submitted."""
    capture(twin.config, "pub")
    return cluster.start("replay.py", "--config", str(twin.file), *twin.pairs, **executor_environment)


def check_equal(twin: Twin) -> None:
    for name, tables in NAMES.items():
        twin.native(name).wait()
        for table in tables:
            assert twin.rows(name, table), f"{name} has no rows of {table}: that compares nothing"


def test_two_workers_copy_and_replay_what_native_replication_does(
    twin: Twin, spark_cluster: SparkCluster
) -> None:
    subscribed(twin)
    spark_cluster.submit("snapshot.py", "--config", str(twin.file), "rest")
    twin.publish(TRAFFIC)
    results = replayed(twin, spark_cluster).results()
    assert [(each["subscription"], each["error"]) for each in results] == [(name, None) for name in NAMES]
    check_equal(twin)
    tasks = spark_cluster.tasks_of_last_application()
    assert len(tasks) == spark_cluster.workers
    assert all(tasks.values()), tasks


@pytest.mark.slow
def test_a_killed_executor_is_replaced_and_its_part_is_staged_again_not_twice(
    twin: Twin, spark_cluster: SparkCluster
) -> None:
    """SIGKILL while its COPY is open: what it has sent belongs to an attempt that nobody merges."""
    subscribed(twin)
    spark_cluster.submit("snapshot.py", "--config", str(twin.file), "rest")
    twin.publish(TRAFFIC)
    submitted = replayed(twin, spark_cluster, CDC_REPLAY_FAILPOINT="replay.mid_staging=stop")
    wait_for(lambda: bool(spark_cluster.stopped()), "an executor to be in the middle of a COPY")
    victim = next(iter(spark_cluster.stopped().values()))
    for pid in descendants(victim):
        os.kill(pid, signal.SIGKILL)

    def has_ended() -> bool:
        # The others stop there too, and those that take over.
        for pid in spark_cluster.stopped():
            os.kill(pid, signal.SIGCONT)
        return submitted.process.poll() is not None

    wait_for(has_ended, "the application to end")
    results = submitted.results()
    assert [each["error"] for each in results] == [None] * len(NAMES)
    assert victim not in set(spark_cluster.executors())
    check_equal(twin)
