"""`sync --follow`: sync whenever the publisher has written WAL, until asked to stop.

Every round is a `sync`, which takes its locks and releases them: scheduled runs take their turns in between.

| failure                                      | then                                                        |
|----------------------------------------------|-------------------------------------------------------------|
| of some subscriptions                        | the others continue; these are retried after 1, 2, 4 … 60 s |
| of all, transient: a server is down          | all are retried after such pauses                           |
| of all, permanent: the slot is lost          | it is raised                                                |
| Spark has ended                              | it is raised: another JVM needs another process             |
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import psycopg

from cdc_replay.arrow.freed_memory import release_freed_memory
from cdc_replay.capture.followers import connect_follower
from cdc_replay.capture.slot_continuity import reachable_lsn
from cdc_replay.commands.sync import sync
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError, Retry, retry_of
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.results import SyncResult
from cdc_replay.opening import common_source
from cdc_replay.spark.session import check_jvm_runs

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 60.0
REPORT_SECONDS: Final = 10.0


def follow(config: Config, subscriptions: Sequence[str], stop: threading.Event) -> tuple[SyncResult, ...]:
    """Sync subscriptions of one publisher until `stop` is set; one result for each that was synced.

    Raises:
        CdcReplayError: as `sync`, if it is permanent and concerns all subscriptions; `SparkEnded`.
    """
    source = common_source(config, subscriptions)
    followed = {name: _Followed(name) for name in subscriptions}
    backoff = _Backoff()
    while not stop.is_set():
        try:
            with connect_follower(source) as publisher:
                while not stop.is_set():
                    position = reachable_lsn(publisher, None)
                    if due := [name for name, state in followed.items() if state.is_due(position)]:
                        for result in sync(config, due, to_lsn=position):
                            followed[result.subscription].add(result, position)
                        release_freed_memory()
                        check_jvm_runs(f'following publisher "{source.publisher}"')
                        backoff = _Backoff()
                    else:
                        stop.wait(POLL_SECONDS)
        except (CdcReplayError, psycopg.Error) as error:
            check_jvm_runs(f'following publisher "{source.publisher}"')
            if retry_of(error) is Retry.NEVER:
                raise
            backoff = backoff.next()
            logger.warning("publisher %s: retry in %.0f s: %s", source.publisher, backoff.seconds, error)
            stop.wait(backoff.seconds)
    return tuple(state.result for state in followed.values() if state.result is not None)


@dataclass(frozen=True, slots=True)
class _Backoff:
    """The pause before the next try: none, then 1 s, and each time twice as long."""

    seconds: float = 0.0
    until: float = 0.0

    def next(self) -> _Backoff:
        seconds = min(max(1.0, 2 * self.seconds), LONGEST_PAUSE_SECONDS)
        return _Backoff(seconds, time.monotonic() + seconds)


@dataclass(slots=True)
class _Followed:
    """A subscription: how far it is synced, its failures, and what has not been logged yet."""

    name: str
    synced_to: Lsn = ZERO
    backoff: _Backoff = _Backoff()
    result: SyncResult | None = None
    rounds: int = 0
    changes: int = 0
    logged_at: float = field(default_factory=time.monotonic)

    def is_due(self, position: Lsn) -> bool:
        if self.backoff.seconds:
            return time.monotonic() >= self.backoff.until
        return position > self.synced_to

    def add(self, result: SyncResult, position: Lsn) -> None:
        self.result = result if self.result is None else self.result.followed_by(result)
        if result.replay.error is None:
            self.synced_to, self.backoff = position, _Backoff()
        else:
            self.backoff = self.backoff.next()
            error = result.replay.error
            logger.warning("subscription %s: retry in %.0f s: %s", self.name, self.backoff.seconds, error)
        self.rounds, self.changes = self.rounds + 1, self.changes + result.replay.changes_read
        if self.changes and time.monotonic() >= self.logged_at + REPORT_SECONDS:
            logger.info(
                "subscription %s: up to %s, %d changes in %d rounds within %.0f s",
                *(self.name, result.to_lsn, self.changes, self.rounds, time.monotonic() - self.logged_at),
            )
            self.rounds, self.changes, self.logged_at = 0, 0, time.monotonic()
