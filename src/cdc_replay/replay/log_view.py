"""A change log as several subscriptions see it at one moment: opened once, and each fact of it read once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.queries import CommittedTransaction
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.replay.log_window import catalog_history


@dataclass(slots=True)
class LogView:
    """The change log at `uri` as of its first use. Threads may share it; an error is not kept.

    Every method raises ChangeLogMissing, ChangeLogDamaged or ChangeLogUnavailable if the log cannot be read.
    """

    uri: str
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _log: ChangeLog | None = None
    _end_lsn: Lsn | None = None
    _catalogs: CatalogHistory | None = None
    _commits: dict[Lsn, CommittedTransaction | None] = field(default_factory=dict)

    def log(self) -> ChangeLog:
        """The open log."""
        with self._lock:
            if self._log is None:
                self._log = ChangeLog.open(self.uri)
            return self._log

    def end_lsn(self) -> Lsn:
        """Its end when it was opened."""
        with self._lock:
            if self._end_lsn is None:
                self._end_lsn = self.log().end_lsn
            return self._end_lsn

    def catalogs(self) -> CatalogHistory:
        """The publisher's catalogs."""
        with self._lock:
            if self._catalogs is None:
                self._catalogs = catalog_history(self.log())
            return self._catalogs

    def first_commit_after(self, lsn: Lsn) -> CommittedTransaction | None:
        """The first transaction of the log that committed after `lsn`.

        Raises:
            ChangeLogPruned: if the log starts after `lsn`.
        """
        with self._lock:
            if lsn not in self._commits:
                end = self.end_lsn()
                self._commits[lsn] = self.log().first_commit(Window(lsn, end)) if lsn < end else None
            return self._commits[lsn]
