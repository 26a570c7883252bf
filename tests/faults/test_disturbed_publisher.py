"""The fault matrix of what reads the publisher: what happens to it, by the step at which it happens.

| step                                       | sessions end | backend killed | restart | silence |
|--------------------------------------------|--------------|----------------|---------|---------|
| snapshot.after_export, before_swap         | x            | x              | x       | x       |
| snapshot.mid_copy, in a worker             | x            | x              | x       |         |
| reconcile.*, validate.*, fill.*            | x            | x              | x       | x       |

After each a table is there as it was or as it is to be, what is said is an error of ours, and the next run
makes the subscriber equal to a native one. A dropped slot does not come back: a new log begins.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.setup import setup
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.teardown import teardown
from cdc_replay.commands.validate import validate
from cdc_replay.compare.reconcile import reconcile_tables
from cdc_replay.errors import SlotMissing
from cdc_replay.failpoints import FAILPOINTS
from embedded.postgres import Cluster
from faults.disturbing import DISTURBANCES, Program
from faults.test_killed_commands import check_nothing_is_left
from fixtures.postgres import Database, create_database, drop_database
from fixtures.proxy import Line
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLES = """
    create table t (id int primary key, a int);
    create table notes (n int, note text);
    create table big (id int, pad text);
    create table long (id int primary key, body text)
"""
PUBLISHED = f"""
    {TABLES};
    alter table long alter body set storage external;
    alter table t replica identity full;
    create publication p for table t where (a > 10), long where (id > 1000);
    create publication q for table notes, big;
    insert into t values (1, 1), (2, 20), (3, 30);
    insert into notes values (0, 'before'), (0, 'before');
    insert into big select n, repeat('x', 100) from generate_series(1, 3000) n;
    insert into long select n, repeat('x', 3000) from generate_series(1, 200) n
"""
DAMAGE = """
    delete from t where id = 2;
    update notes set note = 'other';
    delete from big where id % 2 = 0;
    insert into big select 0, 'own' from generate_series(1, 20)
"""
KEYED = ("t", "notes", "big")
NAMES = (*KEYED, "long")
PATIENCE = (
    "keepalives_idle=1&keepalives_interval=1&keepalives_count=2&tcp_user_timeout=3000&connect_timeout=3"
)
"""What an operator sets who wants to know sooner that a line is dead; two minutes are the default."""

EXPECTED_ERROR: Final = re.compile(r"(s: )?(cannot |subscription \"s\" |snapshot \")")
"""How errors of ours begin; those of the server or of libpq say something else first."""

COMMANDS: Final = {
    "snapshot": ("snapshot", "s", *(f"--table public.{name}" for name in NAMES)),
    "reconcile": ("refresh", "s", "--reconcile", "--yes"),
    "validate": ("validate", "s"),
    "fill": ("replay", "s"),
}
"""What is disturbed, by the beginning of its failpoints' names."""

IN_WORKERS = "snapshot.mid_copy"
STEPS = [
    "snapshot.after_export",
    "snapshot.before_swap",
    *(name for name in FAILPOINTS if name.startswith(("reconcile.", "validate.", "fill."))),
]
SILENCE = "line swallows"
ORDINARY = {
    ("snapshot.after_export", "server restarted"),
    ("fill.after_fence", "backends terminated"),
    ("validate.after_fence", "backends terminated"),
    ("reconcile.after_digests", SILENCE),
}

_keys = itertools.count(1)


def cells(steps: Iterable[str], disturbances: Iterable[str]) -> list[Any]:
    """Parameters; the ordinary run has few of them."""
    return [
        pytest.param(*cell, marks=() if cell in ORDINARY else pytest.mark.slow)
        for cell in itertools.product(steps, disturbances)
    ]


def content(database: Database) -> dict[str, Counter[str]]:
    """The tables' rows; of `long` the keys, because native has no bodies (R4.6)."""
    rows = {
        name: Counter(text for (text,) in database.rows(f"select x::text from {name} x")) for name in KEYED
    }
    return {**rows, "long": Counter(str(key) for (key,) in database.rows("select id from long"))}


@dataclass
class Reading:
    """A publisher that may crash, a subscriber with its native twin, and the program."""

    twin: Twin
    program: Program

    @property
    def ours(self) -> Database:
        return self.twin.pairs["s"].ours

    def prepare(self, command: str) -> dict[str, Counter[str]]:
        """There is something to do for the command; returns what the subscriber has."""
        key = next(_keys)
        self.twin.publish(
            f"update long set id = id + 1000 where id = {key};\ninsert into t values ({key}00, 50)"
        )
        if command == "fill":
            capture(self.twin.config, "pub")
        else:
            answer = self.program.run("sync", "s")
            assert answer["ok"], answer["error"]
        if command in {"snapshot", "reconcile"}:
            self.ours.run(DAMAGE)
        return content(self.ours)

    def check(self, command: str, before: dict[str, Counter[str]], answer: dict[str, Any]) -> None:
        """No table is half done, what is said is ours, and the next run ends equal to native."""
        rows_now = content(self.ours)
        error_text = answer.get("error") or ""
        assert answer["ok"] or EXPECTED_ERROR.match(error_text), error_text
        assert "Traceback" not in error_text, error_text
        after = self.run_again(command)
        for name in NAMES:
            assert rows_now[name] in (before[name], after[name]), f"half of {name} is there, after {answer}"
        if command != "snapshot":  # which completes one table after the other
            assert rows_now in (before, after), answer
        assert not answer["ok"] or rows_now == after, answer

    def run_again(self, command: str) -> dict[str, Counter[str]]:
        """The command ends well now, as the subscriber equals native; nothing is left behind."""
        for again in (COMMANDS[command], ("sync", "s")):
            answer = self.program.run(*again)
            assert answer["ok"], answer["error"]
        self.twin.native("s").wait()
        expected = content(self.twin.pairs["s"].native)
        assert content(self.ours) == expected
        bodies = "select count(*) from long where body is distinct from repeat('x', 3000)"
        assert self.ours.rows(bodies) == [(0,)]
        check_nothing_is_left(self.twin)
        return expected


@pytest.fixture(scope="module")
def crashing(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster("crashing_publisher", shared_buffers="32MB")


def reading_of(crashing: Cluster, subscribers: Cluster, folder: Path, in_workers: str) -> Iterator[Reading]:
    publisher = create_database(crashing, "publisher")
    twin = Twin(publisher, subscribers, folder)
    try:
        publisher.run(PUBLISHED)
        twin.subscribe("s", "p", "q", tables=TABLES)
        with Program(folder, twin.file, in_workers) as program:
            answer = program.run("sync", "s")
            assert answer["ok"], answer["error"]
            yield Reading(twin, program)
    finally:
        twin.drop()
        drop_database(publisher)


@pytest.fixture(scope="module")
def reading(
    crashing: Cluster, subscriber_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reading]:
    yield from reading_of(crashing, subscriber_cluster, tmp_path_factory.mktemp("reading"), "none")


@pytest.fixture(scope="module")
def worker_reading(
    crashing: Cluster, subscriber_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reading]:
    folder = tmp_path_factory.mktemp("worker_reading")
    yield from reading_of(crashing, subscriber_cluster, folder, f"{IN_WORKERS}=stop")


@pytest.mark.parametrize(("step", "disturbance"), cells(STEPS, DISTURBANCES))
def test_disturbed_publisher_leaves_no_partial_table_and_the_next_run_continues(
    reading: Reading, step: str, disturbance: str
) -> None:
    command = step.partition(".")[0]
    before = reading.prepare(command)
    reading.program.stop_at(step, *COMMANDS[command])
    DISTURBANCES[disturbance](reading.twin.publisher)
    reading.check(command, before, reading.program.answer())


@pytest.mark.parametrize(("step", "_disturbance"), cells(STEPS, [SILENCE]))
def test_a_publisher_that_falls_silent_is_given_up(reading: Reading, step: str, _disturbance: str) -> None:
    """No packet comes any more, not even a reset; the DSN says how long that is borne."""
    command, publisher = step.partition(".")[0], reading.twin.publisher
    before = reading.prepare(command)
    with Line(publisher.cluster.port) as line:
        reading.twin.options["dsn"] = (
            f"postgresql://postgres@127.0.0.1:{line.port}/{publisher.name}?{PATIENCE}"
        )
        assert reading.twin.file.exists()
        reading.program.stop_at(step, *COMMANDS[command])
        line.swallow()
        answer = reading.program.answer()
    del reading.twin.options["dsn"]
    assert reading.twin.file.exists()
    reading.check(command, before, answer)


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_a_publisher_that_is_disturbed_in_the_middle_of_a_copy_is_copied_by_the_next_run(
    worker_reading: Reading, disturbance: str
) -> None:
    before = worker_reading.prepare("snapshot")
    worker_reading.program.stop_worker(*COMMANDS["snapshot"])
    DISTURBANCES[disturbance](worker_reading.twin.publisher)
    worker_reading.check("snapshot", before, worker_reading.program.answer())


def test_slot_dropped_meanwhile_costs_only_a_new_log(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1.33. The reconciliation no longer needs the slot, and is right; later changes are in no log."""
    twin.publisher.run(PUBLISHED)
    twin.subscribe("s", "p", "q", tables=TABLES)
    twin.sync()
    ours = twin.pairs["s"].ours
    before = content(ours)
    ours.run(DAMAGE)

    def merge_without_slot(*arguments: Any) -> object:
        twin.publisher.run(f"select pg_drop_replication_slot('{twin.slot}')")
        return reconcile_tables(*arguments)

    monkeypatch.setattr("cdc_replay.snapshot.refresh.reconcile_tables", merge_without_slot)
    refresh(twin.config, "s", reconcile=True)
    assert content(ours) == before
    twin.publish("insert into t values (4, 40)")
    for _ in range(2):
        with pytest.raises(SlotMissing, match=f'"{twin.slot}" of change log .* no longer exists'):
            capture(twin.config, "pub")
    assert content(ours) == before

    teardown(twin.config, "pub")
    twin.change_log.rename(twin.folder / "change_log.old")
    setup(twin.config, "pub")
    snapshot(twin.config, "s")
    twin.sync()
    assert content(ours) == content(twin.pairs["s"].native)
    assert validate(twin.config, "s").success
