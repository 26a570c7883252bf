"""`snapshot` in a separate process: killed at any point it is resumed, and it does not stop replay."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_replay.commands.prune import prune
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.sync import sync
from cdc_replay.commands.teardown import teardown
from cdc_replay.errors import PruneLimitUnknown, SubscriptionInUse
from cdc_replay.model.table_state import Copying, Ready
from embedded.java import spark_environment
from fixtures.command_line import PROGRAM
from fixtures.native import wait_for
from fixtures.postgres import Database
from integration.snapshot.copying import public, states_of
from integration.snapshot.resumed import ResumedCopy

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

TABLE = "create table t (id int primary key, a int, pad text)"
FILLED = "insert into t select n, n % 100, repeat('x', 150) from generate_series(1, 2000) n"
CONTENT = "select count(*), md5(string_agg(t::text, ',' order by id)) from t"


@pytest.fixture
def copy(publisher: Database, subscriber: Database, tmp_path: Path) -> ResumedCopy:
    options = {"snapshot_chunk": "32kB", "snapshot_readers": 1}
    return ResumedCopy(publisher, subscriber, tmp_path, options)


def started(copy: ResumedCopy, failpoint: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [PROGRAM, "snapshot", "s", "--config", str(copy.file), *arguments],
        env=os.environ | spark_environment() | {"CDC_REPLAY_FAILPOINT": failpoint},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_snapshot_killed_at_every_step_is_resumed_and_exact(copy: ResumedCopy) -> None:
    copy.publisher.run(f"{TABLE}; {FILLED}; create publication p for table t where (id % 5 < 4)")
    copy.subscriber.run(TABLE)
    copy.begin("p")
    changes = {
        "snapshot.after_chunk@3": "update t set pad = repeat('u', 300) where id % 3 = 0",
        "snapshot.mid_copy@4": "update t set id = id + 10001 where id % 7 = 0",
        "snapshot.after_late": "delete from t where id % 11 = 0; update t set a = 1 where id % 2 = 0",
        "snapshot.before_swap": "insert into t select n, 0, 'new' from generate_series(20000, 20100) n",
    }
    for failpoint, change in changes.items():
        assert started(copy, failpoint).wait(timeout=300) != 0
        assert copy.subscriber.rows("select count(*) from t") == [(0,)]
        assert isinstance(states_of(copy.subscriber)["public.t"], Copying)
        copy.publisher.run(change)
    (result,) = sync(copy.config, ["s"])
    (copied,) = result.snapshot.tables
    assert copied.chunks_read == 0
    assert copied.chunks_staged_before > 6
    assert copy.subscriber.rows(CONTENT) == copy.publisher.rows(f"{CONTENT} where id % 5 < 4")


@pytest.mark.parametrize("failpoint", ["snapshot.after_chunk@3", "snapshot.before_swap"])
def test_table_with_a_killed_copy_is_renamed_on_both_sides(copy: ResumedCopy, failpoint: str) -> None:
    copy.publisher.run(f"{TABLE}; {FILLED}; create publication p for table t")
    copy.subscriber.run(TABLE)
    copy.begin("p")
    assert started(copy, failpoint).wait(timeout=300) != 0
    for side in (copy.subscriber, copy.publisher):
        side.run("alter table t rename to u")
    copy.publisher.run("update u set a = 1000 where id < 10")
    assert isinstance(states_of(copy.subscriber)["public.u"], Copying)
    (result,) = sync(copy.config, ["s"])
    assert result.replay.error is None
    content = CONTENT.replace("from t", "from u").replace("t::text", "u::text")
    assert copy.subscriber.rows(content) == copy.publisher.rows(content)
    assert isinstance(states_of(copy.subscriber)["public.u"], Ready)


@pytest.fixture
def stopped(copy: ResumedCopy) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A resync of `t` whose reader stops after its first chunk, and the reader's process id."""
    copy.publisher.run(f"{TABLE}; {FILLED}; create table u (id int primary key)")
    copy.publisher.run("create publication p for table t, u")
    copy.subscriber.run(f"{TABLE}; create table u (id int primary key)")
    copy.begin("p")
    sync(copy.config, ["s"])
    copy.subscriber.run("update t set pad = 'damaged' where id = 1999")
    process = started(copy, "snapshot.after_chunk=stop", "--table", "public.t")
    wait_for(lambda: bool(stopped_below(process.pid)), "a reader stands still")
    (reader,) = stopped_below(process.pid)
    yield process, reader
    if process.poll() is None:
        process.kill()
        process.wait()


def stopped_below(pid: int) -> list[int]:
    """The descendants of a process that are stopped."""
    stopped = []
    todo = [pid]
    while todo:
        below = children_of(todo[0])
        todo = todo[1:] + below
        stopped += [child for child in below if is_stopped(child)]
    return stopped


def children_of(pid: int) -> list[int]:
    """Its child processes; none of one that has ended."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    try:
        return [int(child) for file in files for child in file.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_stopped(pid: int) -> bool:
    """A process that has ended is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_replay_continues_while_a_table_is_copied_again(
    copy: ResumedCopy, stopped: tuple[subprocess.Popen[bytes], int]
) -> None:
    process, reader = stopped
    copy.publisher.run("insert into u select generate_series(1, 10); update t set a = -1 where id % 3 = 0")
    (result,) = sync(copy.config, ["s"])
    assert result.replay.error is None
    assert copy.subscriber.rows("select count(*) from u") == [(10,)]
    assert copy.subscriber.rows("select a from t where id = 3") == [(-1,)]
    with pytest.raises(SubscriptionInUse):
        snapshot(copy.config, "s", tables=[public("u")])
    with pytest.raises(PruneLimitUnknown, match='"s" is being copied'):  # t returns to its snapshot
        prune(copy.config, "pub", keep_hours=0)
    os.kill(reader, signal.SIGCONT)
    assert process.wait(timeout=300) == 0
    states = states_of(copy.subscriber)
    assert isinstance(states["public.t"], Ready)
    # As of its snapshot, which precedes the replayed changes.
    assert copy.subscriber.rows("select a, pad from t where id in (3, 1999) order by id") == [
        (3, "x" * 150),
        (99, "x" * 150),
    ]
    sync(copy.config, ["s"])
    assert copy.subscriber.rows(CONTENT) == copy.publisher.rows(CONTENT)


def test_teardown_beside_a_copy_is_refused_and_leaves_nothing_after_it(
    copy: ResumedCopy, stopped: tuple[subprocess.Popen[bytes], int]
) -> None:
    """The copy would go on, and stage its chunks for nobody."""
    process, reader = stopped
    before = states_of(copy.subscriber)
    with pytest.raises(SubscriptionInUse, match="snapshot"):
        teardown(copy.config, "s")
    assert states_of(copy.subscriber) == before
    os.kill(reader, signal.SIGCONT)
    assert process.wait(timeout=300) == 0
    assert copy.subscriber.rows(CONTENT) == copy.publisher.rows(CONTENT)
    teardown(copy.config, "s")
    assert copy.subscriber.rows("select from pg_namespace where nspname = 'cdc_replay'") == []
