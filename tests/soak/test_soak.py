"""Twenty minutes of random traffic and random kills: no difference to native, and memory that stays flat.

| side      | what it goes through                                                              |
|-----------|-----------------------------------------------------------------------------------|
| native    | nothing; the truth                                                                |
| disturbed | its process or a Spark worker is killed, its sessions end, its server crashes     |
| steady    | nothing: one process, window after window, whose memory is looked at              |

All follow one publisher; the last two share a change log. Every few rounds the traffic rests, and the tables
of all three are compared.

    CDC_REPLAY_SOAK_SECONDS=180 CDC_REPLAY_CASE_SEED=4711 .venv/bin/python -m pytest tests/soak -m slow -s
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg
import pytest
import yaml

from benchmarks.memory import descendants, tree_mib
from cdc_replay.commands.setup import setup
from cdc_replay.config import load_config
from cdc_replay.failpoints import FAILPOINTS
from embedded.postgres import Cluster
from faults.disturbing import (
    Program,
    kill_backend,
    our_sessions,
    restart_server,
    terminate_backends,
)
from fixtures.native import NativeSubscription
from fixtures.postgres import Database, create_database
from soak.traffic import PUBLICATIONS, PUBLISHER, SUBSCRIBER, TABLES, Traffic

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SECONDS: Final = float(os.environ.get("CDC_REPLAY_SOAK_SECONDS", "1200"))
SEED: Final = int(os.environ.get("CDC_REPLAY_CASE_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
ROUNDS_PER_COMPARISON: Final = 4
WARM_UP_SHARE: Final = 1 / 3
GROWTH_SHARE: Final = 0.15
GROWTH_MIB: Final = 64
"""So much more than at the end of the warm-up the steady process may have."""
KILLING: Final = [name for name in FAILPOINTS if name.startswith(("replay.", "capture."))]


@dataclass
class Soak:
    """All sides, and what has been seen."""

    folder: Path
    publisher: Database
    native: Database
    disturbed: Database
    steady: Database
    choose: random.Random
    programs: contextlib.ExitStack
    victim: Program
    steady_program: Program
    memory_mib: list[float] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    @property
    def file(self) -> Path:
        return self.folder / "cdc_replay.yaml"

    def program(self) -> Program:
        """A process with a Spark session, killed at the end if it lives."""
        return self.programs.enter_context(Program(self.folder, self.file))

    def disturb(self) -> None:
        """A sync of the disturbed side to which something happens."""
        what = self.choose.choice(tuple(EVENTS))
        failpoint = self.choose.choice(KILLING) if what == "process killed at a point" else "none"
        self.victim.begin(failpoint, "sync", "disturbed")
        # Whatever it is doing then.
        threading.Event().wait(self.choose.random() * 2)
        EVENTS[what](self)
        self.done[what] += 1
        answer = self.victim.answer_if_alive()
        # It may have been killed when it had answered.
        if answer is None or self.victim.process.poll() is not None:
            self.done["new process"] += 1
            self.victim = self.program()

    def compare(self, twin: NativeSubscription) -> None:
        """With the traffic at rest all three hold the same."""
        answer = self.victim.run("sync", "disturbed")
        assert answer["ok"], answer["error"]
        answer = self.steady_program.run("sync", "steady")
        assert answer["ok"], answer["error"]
        twin.wait()
        for table in TABLES:
            expected = content(self.native, table)
            for side in (self.disturbed, self.steady):
                found = content(side, table)
                missing, surplus = expected - found, found - expected
                assert not missing, f"seed {SEED}: {side.name}.{table} lacks {list(missing)[:3]}"
                assert not surplus, f"seed {SEED}: {side.name}.{table} has {list(surplus)[:3]} besides"
        self.done["comparison"] += 1


def content(database: Database, table: str) -> Counter[str]:
    return Counter(text for (text,) in database.rows(f"select x::text from {table} x"))


def kill_process(soak: Soak) -> None:
    """The driver; what it has started ends by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(soak.victim.process.pid, signal.SIGKILL)
    soak.victim.process.wait()


def kill_worker(soak: Soak) -> None:
    """One of the Python processes that Spark has forked."""
    workers = descendants(soak.victim.process.pid)[3:]
    if workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(soak.choose.choice(workers), signal.SIGKILL)


def kill_backend_if_any(soak: Soak) -> None:
    with contextlib.suppress(psycopg.Error):
        if our_sessions(soak.disturbed):
            kill_backend(soak.disturbed)


EVENTS: Final[dict[str, Callable[[Soak], None]]] = {
    "nothing": lambda _: None,
    "process killed at a point": lambda _: None,
    "process killed": kill_process,
    "worker killed": kill_worker,
    "backends terminated": lambda soak: terminate_backends(soak.disturbed),
    "backend killed": kill_backend_if_any,
    "server restarted": lambda soak: restart_server(soak.disturbed),
}


@pytest.fixture
def soak(make_cluster: Callable[..., Cluster], tmp_path: Path) -> Iterator[Soak]:
    publisher = create_database(make_cluster("soaked_publisher"), "publisher")
    quiet, crashing = make_cluster("soaked_subscriber"), make_cluster("soaked_crashing")
    sides = [create_database(each, "side") for each in (quiet, crashing, quiet)]
    publisher.run(PUBLISHER)
    for side in sides:
        side.run(SUBSCRIBER)
    native, disturbed, steady = sides
    subscriptions = {
        name: {"publisher": "pub", "publications": list(PUBLICATIONS), "dsn": side.dsn}
        for name, side in {"disturbed": disturbed, "steady": steady}.items()
    }
    source = {"dsn": publisher.dsn, "slot": "soaked", "change_log": str(tmp_path / "change_log")}
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(
        yaml.safe_dump({"publishers": {"pub": source}, "subscriptions": subscriptions}), encoding="utf-8"
    )
    setup(load_config(file), "pub")
    with contextlib.ExitStack() as programs:
        victim, steady_program = (programs.enter_context(Program(tmp_path, file)) for _ in range(2))
        found = Soak(
            tmp_path,
            publisher,
            native,
            disturbed,
            steady,
            random.Random(SEED),
            programs,
            victim,
            steady_program,
        )
        yield found


def test_random_traffic_and_random_kills_end_equal_to_native_and_memory_stays_flat(soak: Soak) -> None:
    twin = NativeSubscription(soak.publisher, soak.native, "soaked_native")
    twin.create(PUBLICATIONS)
    traffic = Traffic(soak.publisher, random.Random(SEED))
    soak.compare(twin)
    deadline = time.monotonic() + SECONDS
    rounds = 0
    while time.monotonic() < deadline:
        with traffic.flowing():
            soak.disturb()
            answer = soak.steady_program.run("sync", "steady")
        assert answer["ok"], f"seed {SEED}: {answer['error']}"
        soak.memory_mib.append(tree_mib(soak.steady_program.process.pid))
        rounds += 1
        if rounds % ROUNDS_PER_COMPARISON == 0:
            soak.compare(twin)
    soak.compare(twin)
    warm = soak.memory_mib[: max(1, int(len(soak.memory_mib) * WARM_UP_SHARE))]
    sys.stdout.write(
        f"\nseed {SEED}: {rounds} rounds, {traffic.transactions} transactions, {dict(soak.done)};"
        f" memory of the steady process in MiB: warm {max(warm):.0f}, later {max(soak.memory_mib):.0f}\n"
    )
    assert max(soak.memory_mib) <= max(warm) * (1 + GROWTH_SHARE) + GROWTH_MIB, soak.memory_mib
