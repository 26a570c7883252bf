"""Progress of a command: a live display on a terminal, elsewhere a log line per item every ten seconds."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Display
from rich.table import Column
from rich.text import Text

from cdc_replay.beside import beside
from cdc_replay.model.duration import duration_in_words
from cdc_replay.model.printable import printable
from cdc_replay.model.progress import Pace, Progress

logger = logging.getLogger(__name__)

LOG_SECONDS: Final = 10.0
"""Interval of an item's log lines."""

REMIND_SECONDS: Final = 1.0
"""How often it is looked whether a line is due of an item that reports nothing: one table may take long."""


@contextlib.contextmanager
def show_progress(title: str, console: Console | None = None) -> Iterator[ShownProgress]:
    """Where a command reports; the display is gone when it ends, and the result takes its place."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        log = ProgressLog()
        with beside(log.remind_until):
            yield log
        return
    columns = (
        SpinnerColumn(finished_text=" "),
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold", max_width=34)),
        BarColumn(bar_width=12),
        _Counts("{task.fields[counts]}", markup=False, table_column=Column(overflow="fold")),
    )
    with Display(*columns, console=console, transient=True) as display:
        display.add_task(title, total=None, counts="")
        yield LiveReport(display)


class _Counts(TextColumn):
    """What was reported of an item; of the command itself, for how long it has run."""

    def render(self, task: Task) -> Text:
        """The text of the column."""
        return super().render(task) if task.fields["counts"] else Text(duration_in_words(task.elapsed or 0.0))


class ShownProgress(Protocol):
    """A `Report` that can make way for a question."""

    def __call__(self, progress: Progress, /) -> None:
        """Show the progress."""

    def paused(self) -> AbstractContextManager[None]:
        """Show nothing inside the context."""


@dataclass(slots=True)
class ProgressLog:
    """Logs each item every ten seconds while it is reported, and the latest until it is done."""

    clock: Callable[[], float] = time.monotonic
    _paces: dict[tuple[str, str], Pace] = field(default_factory=dict)
    _logged: dict[tuple[str, str], float] = field(default_factory=dict)
    _latest: Progress | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, progress: Progress, /) -> None:
        """Log the progress, if it is time."""
        now, key = self.clock(), (progress.action, progress.of)
        with self._lock:
            self._latest = progress
            pace = self._paces.setdefault(key, Pace(now, progress.done))
            if now - self._logged.setdefault(key, now) < LOG_SECONDS:
                return
            self._logged[key] = now
        logger.info("%s %s: %s", progress.action, progress.of, pace.describe(progress, now))

    def remind_until(self, ended: threading.Event) -> None:
        """Say again what is worked on, also while nothing reports."""
        while not ended.wait(REMIND_SECONDS):
            self.remind()

    def remind(self) -> None:
        """Log what was reported last, if it is not done and it is time."""
        latest = self._latest
        if latest is not None and not latest.is_done:
            self(latest)

    def paused(self) -> AbstractContextManager[None]:
        """Log lines disturb no question."""
        return contextlib.nullcontext()


@dataclass(slots=True)
class LiveReport:
    """A line per item that is not done."""

    display: Display
    _items: dict[tuple[str, str], tuple[TaskID, Pace]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, progress: Progress, /) -> None:
        """Show the progress."""
        now, key = time.monotonic(), (progress.action, progress.of)
        with self._lock:
            if key not in self._items:
                task = self.display.add_task(
                    printable(f"{progress.action} {progress.of}"), total=None, counts=""
                )
                self._items[key] = (task, Pace(now, progress.done))
            task, pace = self._items[key]
        self.display.update(
            task,
            completed=progress.done,
            total=progress.total,
            visible=not progress.is_done,
            counts=printable(pace.describe(progress, now)),
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take the display away meanwhile."""
        self.display.stop()
        try:
            yield
        finally:
            self.display.start()
