"""How much memory and CPU processes take while something is measured.

Every two seconds a thread adds up, by role (looking more often takes CPU from what is measured):

| processes   | counted                                                                  |
|-------------|--------------------------------------------------------------------------|
| ours        | proportional set size: what driver, JVM and workers share counts once    |
| the servers | anonymous memory: shared buffers are the same whoever reads              |

Linux only: it reads `/proc`.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

FIRST_PERIOD_SECONDS: Final = 0.5
PERIOD_SECONDS: Final = 2.0
KIB_PER_MIB: Final = 1024
OURS: Final = ("driver", "JVM", "Python workers")

_PROC: Final = Path("/proc")
_SERVER_ROLES: Final = (
    "walsender", "logical replication apply worker", "logical replication parallel worker",
    "logical replication tablesync worker", "logical replication launcher", "checkpointer",
    "background writer", "walwriter", "autovacuum", "io worker", "slotsync worker",
)  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """The most that the processes of a role had together, in MiB.

    `ours` is the most that driver, JVM and workers had at one moment.
    """

    ours: float
    by_role: Mapping[str, float]


@dataclass
class MemorySampler:
    """A context that watches a tree of processes, and those of servers (name → postmaster)."""

    root: int | None
    servers: Mapping[str, int]
    ours: list[float] = field(default_factory=list)
    _peaks: Counter[str] = field(default_factory=Counter)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def peaks(self) -> Peaks:
        """What has been seen so far."""
        rounded = {role: round(kib / KIB_PER_MIB, 1) for role, kib in sorted(self._peaks.items())}
        return Peaks(round(max(self.ours, default=0.0), 1), rounded)

    def _watch(self) -> None:
        is_over, pause = False, FIRST_PERIOD_SECONDS
        while not is_over:
            now = sample(self.root, self.servers)
            self.ours.append(sum(now[role] for role in OURS) / KIB_PER_MIB)
            for role, kib in now.items():
                self._peaks[role] = max(self._peaks[role], kib)
            is_over, pause = self._stop.wait(pause), PERIOD_SECONDS


def sample(root: int | None, servers: Mapping[str, int]) -> Counter[str]:
    """Role → kB now; nothing for a process that is gone."""
    children = _children()
    found: Counter[str] = Counter()
    for pid in () if root is None else _tree(root, children):
        found[_role(pid, root)] += _field(pid, "smaps_rollup", "Pss")
    for server, postmaster in servers.items():
        for pid in children.get(postmaster, ()):
            found[f"{server}: {_server_role(pid)}"] += _field(pid, "status", "RssAnon")
    return found


def tree_mib(root: int) -> float:
    """The proportional set size of a process and its descendants."""
    return sum(_field(pid, "smaps_rollup", "Pss") for pid in _tree(root, _children())) / KIB_PER_MIB


def cpu_seconds(root: int, postmasters: Iterable[int]) -> float:
    """CPU time so far of a process, of servers, and of their descendants, the ended ones included."""
    children = _children()
    trees = [pid for top in (root, *postmasters) for pid in _tree(top, children)]
    return sum(_ticks(pid) for pid in trees) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    with contextlib.suppress(OSError):
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        return sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return 0


def descendants(root: int) -> tuple[int, ...]:
    """The process and all that it has started and are still its descendants."""
    return tuple(_tree(root, _children()))


def _tree(root: int, children: Mapping[int, Sequence[int]]) -> Iterator[int]:
    yield root
    for child in children.get(root, ()):
        yield from _tree(child, children)


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # The name in parentheses may hold anything; the parent is the second word after it.
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                parent = int(stat.rpartition(")")[2].split()[1])
                found.setdefault(parent, []).append(int(entry.name))
    return found


def _role(pid: int, root: int | None) -> str:
    if pid == root:
        return "driver"
    return "JVM" if "java" in _command(pid).partition(" ")[0] else "Python workers"


def _server_role(pid: int) -> str:
    title = _command(pid).removeprefix("postgres: ")
    return next((role for role in _SERVER_ROLES if title.startswith(role)), "backend")


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        text = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        return text.replace("\0", " ").strip()
    return ""


def _field(pid: int, file: str, name: str) -> int:
    with contextlib.suppress(OSError):
        text = (_PROC / str(pid) / file).read_text(encoding="utf-8")
        if (match := re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)) is not None:
            return int(match[1])
    return 0
