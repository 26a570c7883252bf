"""Ask many servers side by side, wait for them together, and remember what each said last.

    ask ──▶ no answer yet, or an old one ──▶ a thread asks ──┐
        ──▶ a fresh answer                                    ├──▶ wait, at most `seconds` for all ──▶ answers
        ──▶ a thread asks already            ─────────────────┘     (only who started it, or has nothing yet)

A server that hangs keeps its thread until the connection is cut (`postgres.connection`), and one caller for
`seconds`: it is not asked again meanwhile, and others are given what is known. An answer that comes late is
there for the next caller. Nobody holds a lock while a server is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import psycopg

from cdc_replay.errors import CdcReplayError, ServerUnavailable

SERVERS_AT_ONCE: Final = 32

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[_T]):
    """What is known of one server: the last `value`, if it ever gave one, and how old that is.

    `error` says why the newest question has no answer; None if it has.
    """

    value: _T | None
    seconds_old: float | None
    error: Exception | None


@dataclass(slots=True)
class _Known(Generic[_T]):
    asked: float = float("-inf")
    running: Future[tuple[_T, float]] | None = None
    value: _T | None = None
    answered: float | None = None
    error: Exception | None = None

    def take(self) -> None:
        """Keep what the thread brought, if it is done.

        Raises:
            Exception: what is neither an error of the server's nor of ours.
        """
        if self.running is None or not self.running.done():
            return
        done, self.running = self.running, None
        try:
            self.value, self.answered = done.result()
            self.error = None
        except (CdcReplayError, psycopg.Error) as error:
            self.error = error


@dataclass(slots=True)
class Answers(Generic[_T]):
    """The answers of servers by key; a context manager, that leaves threads which still wait to themselves.

    Nobody is waited for longer than `seconds`. An answer that is not older than `fresh_seconds` is not asked
    for again.
    """

    seconds: float
    fresh_seconds: float = 0.0
    _known: dict[str, _Known[_T]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(SERVERS_AT_ONCE, thread_name_prefix="ask")
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, questions: Mapping[str, Callable[[], _T]]) -> dict[str, Answer[_T]]:
        """An answer for each key, by calling `questions[key]` in a thread of its own where that is due."""
        with self._lock:
            waited_for = [self._started(key, question) for key, question in questions.items()]
        wait([future for future in waited_for if future is not None], timeout=self.seconds)
        with self._lock:
            return {key: self._answer(self._known[key]) for key in questions}

    def _started(self, key: str, question: Callable[[], _T]) -> Future[tuple[_T, float]] | None:
        """The thread that the caller has to wait for, if there is one."""
        now = time.monotonic()
        known = self._known.setdefault(key, _Known())
        known.take()
        if known.running is None and now - known.asked > self.fresh_seconds:
            known.asked = now
            known.running = self._threads.submit(lambda: (question(), time.monotonic()))
            return known.running
        is_new = known.answered is None and now - known.asked < self.seconds
        return known.running if is_new else None

    def _answer(self, known: _Known[_T]) -> Answer[_T]:
        known.take()
        now = time.monotonic()
        error = known.error
        if known.running is not None and now - known.asked >= self.seconds:
            error = ServerUnavailable(f"no answer within {self.seconds:g} s")
        return Answer(known.value, None if known.answered is None else now - known.answered, error)
