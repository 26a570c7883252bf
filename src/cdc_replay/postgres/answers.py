"""Queries to many servers in parallel, with one deadline, and the last answer of each server.

    ask ──▶ no answer yet, or an old one ──▶ start a thread ──┐
        ──▶ a fresh answer                                    ├──▶ wait, at most `seconds` for all ──▶ answers
        ──▶ a thread is running already      ─────────────────┘     (only its starter, or without an answer)

A server that hangs occupies its thread until the connection is cut (`postgres.connection`), and one caller
for `seconds`. It is not queried again until then; other callers get its last answer. A late answer is there
for the next caller. No lock is held during a query. Whatever a query raises is an error of this server only:
its superusers can put anything into the state that is read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import psycopg

from cdc_replay.errors import CdcReplayError, InvalidMessage, ServerUnavailable, bounded

logger = logging.getLogger(__name__)

SERVERS_AT_ONCE: Final = 32

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[_T]):
    """The last `value` of one server, if it ever answered, and its age.

    `error` says why the newest query has no answer; None if it has one.
    """

    value: _T | None
    seconds_old: float | None
    error: Exception | None


@dataclass(slots=True)
class _Server(Generic[_T]):
    started_at: float = float("-inf")
    running: Future[tuple[_T, float]] | None = None
    value: _T | None = None
    answered_at: float | None = None
    error: Exception | None = None

    def collect(self) -> None:
        """Store the result of the thread, if it has finished."""
        if self.running is None or not self.running.done():
            return
        finished, self.running = self.running, None
        try:
            self.value, self.answered_at = finished.result()
            self.error = None
        except (CdcReplayError, psycopg.Error) as error:
            self.error = error
        except Exception as error:
            logger.warning("a server's answer cannot be read", exc_info=error)
            self.error = InvalidMessage(
                f"the server's answer cannot be read: {type(error).__name__}: {bounded(str(error))}"
            )


@dataclass(slots=True)
class Answers(Generic[_T]):
    """The answers of servers by key; as a context manager, it abandons threads that still wait at its end.

    No call waits longer than `seconds`. An answer is reused until it is older than `fresh_seconds`.
    """

    seconds: float
    fresh_seconds: float = 0.0
    _servers: dict[str, _Server[_T]] = field(default_factory=dict)
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

    def restore(self, values: Mapping[str, tuple[_T, float]]) -> None:
        """Take over answers of an earlier process, each with its age in seconds."""
        now = time.monotonic()
        with self._lock:
            for key, (value, seconds_old) in values.items():
                self._servers.setdefault(key, _Server(value=value, answered_at=now - seconds_old))

    def last(self) -> dict[str, tuple[_T, float]]:
        """The last answer of each server that ever answered, and its age in seconds."""
        now = time.monotonic()
        with self._lock:
            return {
                key: (server.value, now - server.answered_at)
                for key, server in self._servers.items()
                if server.value is not None and server.answered_at is not None
            }

    def ask(self, questions: Mapping[str, Callable[[], _T]]) -> dict[str, Answer[_T]]:
        """An answer for each key; calls `questions[key]` in a thread if the last answer is too old."""
        with self._lock:
            futures = [self._start(key, question) for key, question in questions.items()]
        wait([future for future in futures if future is not None], timeout=self.seconds)
        with self._lock:
            return {key: self._answer(self._servers[key]) for key in questions}

    def _start(self, key: str, question: Callable[[], _T]) -> Future[tuple[_T, float]] | None:
        """The thread that the caller waits for, if any."""
        now = time.monotonic()
        server = self._servers.setdefault(key, _Server())
        server.collect()
        if server.running is None and now - server.started_at > self.fresh_seconds:
            server.started_at = now
            server.running = self._threads.submit(lambda: (question(), time.monotonic()))
            return server.running
        is_new = server.answered_at is None and now - server.started_at < self.seconds
        return server.running if is_new else None

    def _answer(self, server: _Server[_T]) -> Answer[_T]:
        server.collect()
        now = time.monotonic()
        error = server.error
        if server.running is not None and now - server.started_at >= self.seconds:
            error = ServerUnavailable(f"no answer within {self.seconds:g} s")
        return Answer(server.value, None if server.answered_at is None else now - server.answered_at, error)
