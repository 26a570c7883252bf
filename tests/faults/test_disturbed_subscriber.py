"""The fault matrix of replay: what happens to the subscriber, by the step at which it happens.

| step                 | backends terminated | backend killed | server restarted | server away | worker |
|----------------------|---------------------|----------------|------------------|-------------|--------|
| replay.mid_staging   | x                   | x              | x                |             | x      |
| replay.after_staging | x                   | x              | x                | x           |        |
| replay.mid_merge     | x                   | x              | x                | x           |        |
| replay.before_commit | x                   | x              | x                | x           |        |
| replay.after_commit  | x                   | x              | x                | x           |        |

After each the window is there completely or not at all; the next run makes the subscriber equal to a native
one, and leaves no staging. A killed driver is the subject of `test_killed_commands`, a killed executor that
of `scale_out`.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.failpoints import FAILPOINTS
from embedded.postgres import Cluster
from faults.disturbing import DISTURBANCES, Program, restart_server
from faults.test_killed_commands import PUBLISHED, STAGING, TABLES, TRAFFIC, content
from fixtures.postgres import Database, create_database, drop_database
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

IN_WORKERS = "replay.mid_staging"
STEPS = [name for name in FAILPOINTS if name.startswith("replay.") and name != IN_WORKERS]

HARDEST = "backend killed"
LAST = "replay.before_commit"


def cells(steps: Sequence[str], disturbances: Iterable[str]) -> list[Any]:
    """Parameters: the ordinary run has the hardest disturbance at each step, and each at the last step."""
    return [
        pytest.param(step, disturbance, marks=() if is_ordinary(step, disturbance) else pytest.mark.slow)
        for step, disturbance in itertools.product(steps, disturbances)
    ]


def is_ordinary(step: str, disturbance: str) -> bool:
    return step == LAST or disturbance == HARDEST


_ordinals = itertools.count(1)


@dataclass
class Matrix:
    """A publisher, a subscriber of a server that may crash beside its native twin, and the program."""

    twin: Twin
    program: Program

    @property
    def ours(self) -> Database:
        return self.twin.pairs["s"].ours

    def new_window(self) -> None:
        """Changes are in the log, and not applied."""
        # It uses the keys of `n` and, behind an UPDATE, those of `n + 10`.
        tens, ones = divmod(next(_ordinals), 10)
        self.twin.publish(TRAFFIC.format(n=20 * tens + ones))
        capture(self.twin.config, "pub")

    def disturbed(
        self,
        stop: Callable[[], object],
        disturb: Callable[[], None],
        recover: Callable[[], None] | None = None,
    ) -> None:
        """One cell of the matrix; `recover` is done when the disturbed run has ended."""
        before = content(self.ours)
        self.new_window()
        stop()
        disturb()
        answer = self.program.answer()
        if recover is not None:
            recover()
        rows_now = content(self.ours)
        after = self.run_again()
        assert rows_now in (before, after), f"half a window is there, after {answer}"
        assert not answer["ok"] or rows_now == after, answer
        assert "Traceback" not in answer.get("error", ""), answer["error"]

    def run_again(self) -> dict[str, Counter[str]]:
        """The next run ends well and equal to native, whose content it returns; nothing is left behind."""
        answer = self.program.run("replay", "s")
        assert answer["ok"], answer["error"]
        self.twin.native("s").wait()
        expected = content(self.twin.pairs["s"].native)
        assert content(self.ours) == expected
        # What a committed window has left behind goes with the next one that has something to stage.
        self.new_window()
        assert self.program.run("replay", "s")["ok"]
        assert self.ours.rows(STAGING) == []
        return expected


@pytest.fixture(scope="module")
def crashing(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster("crashing", shared_buffers="32MB")


def matrix_of(
    publisher_cluster: Cluster, crashing: Cluster, folder: Path, in_workers: str
) -> Iterator[Matrix]:
    publisher = create_database(publisher_cluster, "publisher")
    twin = Twin(publisher, crashing, folder)
    try:
        publisher.run(PUBLISHED)
        twin.subscribe("s", "p", "q", tables=TABLES)
        with Program(folder, twin.file, in_workers) as program:
            answer = program.run("sync", "s")
            assert answer["ok"], answer["error"]
            yield Matrix(twin, program)
    finally:
        twin.drop()
        drop_database(publisher)


@pytest.fixture(scope="module")
def matrix(
    publisher_cluster: Cluster, crashing: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    yield from matrix_of(publisher_cluster, crashing, tmp_path_factory.mktemp("matrix"), "none")


@pytest.fixture(scope="module")
def worker_matrix(
    publisher_cluster: Cluster, crashing: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("worker_matrix")
    yield from matrix_of(publisher_cluster, crashing, folder, f"{IN_WORKERS}=stop")


@pytest.mark.parametrize(("step", "disturbance"), cells(STEPS, DISTURBANCES))
def test_disturbed_subscriber_has_the_whole_window_or_nothing_and_the_next_run_continues(
    matrix: Matrix, step: str, disturbance: str
) -> None:
    disturb = DISTURBANCES[disturbance]
    matrix.disturbed(lambda: matrix.program.stop_at(step, "replay", "s"), lambda: disturb(matrix.ours))


@pytest.mark.parametrize(("step", "_disturbance"), cells(STEPS, ["away"]))
def test_unavailable_subscriber_costs_only_the_run(matrix: Matrix, step: str, _disturbance: str) -> None:
    cluster = matrix.ours.cluster
    matrix.disturbed(
        lambda: matrix.program.stop_at(step, "replay", "s"), lambda: cluster.stop("immediate"), cluster.start
    )


@pytest.mark.parametrize(("step", "disturbance"), cells([IN_WORKERS], DISTURBANCES))
def test_a_subscriber_that_is_disturbed_in_the_middle_of_a_copy_gets_the_window_by_the_next_run(
    worker_matrix: Matrix, step: str, disturbance: str
) -> None:
    assert worker_matrix.program.in_workers == f"{step}=stop"
    disturb = DISTURBANCES[disturbance]
    worker_matrix.disturbed(
        lambda: worker_matrix.program.stop_worker("replay", "s"), lambda: disturb(worker_matrix.ours)
    )


def test_a_spark_worker_that_is_killed_in_the_middle_of_a_copy_leaves_nothing(worker_matrix: Matrix) -> None:
    worker_matrix.disturbed(
        lambda: worker_matrix.program.stop_worker("replay", "s"),
        lambda: os.kill(worker_matrix.program.stopped()[0], signal.SIGKILL),
    )


def test_server_that_crashes_between_runs_keeps_commits(matrix: Matrix) -> None:
    """The applied LSN and the rows are of one commit, so both survive or neither does."""
    matrix.new_window()
    assert matrix.program.run("replay", "s")["ok"]
    before = content(matrix.ours)
    restart_server(matrix.ours)
    assert content(matrix.ours) == before
    matrix.run_again()
