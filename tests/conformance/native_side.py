"""The truth: a real subscription."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from conformance.scenario import Refreshed, Stalled, Subscription
from conformance.sides import CorpusError, Refused
from fixtures.native import NativeStandsStill, NativeSubscription, wait_for
from fixtures.postgres import Database


@dataclass
class Native:
    """Native subscriptions, and what the servers have logged since they are observed.

    `suffix` is added to the names of the subscriptions, and so of their slots.
    """

    publisher: Database
    databases: Mapping[str, Database]
    suffix: str = ""
    _logs: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for database in (self.publisher, *self.databases.values()):
            log = database.cluster.log
            self._logs[log] = log.stat().st_size

    def subscribe(self, subscription: Subscription) -> None:
        try:
            self._of(subscription).create(subscription.publications, subscription.options)
        except psycopg.Error as error:
            raise Refused(str(error)) from error
        self.sync(subscription)

    def sync(self, subscription: Subscription) -> None:
        try:
            self._of(subscription).wait()
        except NativeStandsStill as error:
            raise CorpusError(f"{error}; the servers say: {self.complaints()}") from error

    def refresh(self, subscription: Subscription, what: Refreshed) -> None:
        try:
            self._of(subscription).refresh(what.publications, copy_data=what.copy_data)
        except psycopg.Error as error:
            raise Refused(str(error)) from error

    def stall(self, subscription: Subscription, what: Stalled) -> None:
        server = self.publisher if what.where == "publisher" else self.databases[subscription.name]
        log = server.cluster.log
        wait_for(lambda: any(each in self._said(log) for each in what.message), f"{what.message} in {log}")

    def pause(self, subscription: Subscription) -> None:
        self._of(subscription).pause()

    def resume(self, subscription: Subscription) -> None:
        self._of(subscription).resume()

    def _of(self, subscription: Subscription) -> NativeSubscription:
        database = self.databases[subscription.name]
        return NativeSubscription(self.publisher, database, subscription.name + self.suffix)

    def _said(self, log: Path) -> str:
        return log.read_bytes()[self._logs[log] :].decode(errors="replace")

    def complaints(self) -> str:
        """The last errors in the servers' logs."""
        lines = [line for log in self._logs for line in self._said(log).splitlines()]
        found = [line for line in lines if "ERROR:" in line or "FATAL:" in line]
        return "\n".join(found[-6:]) or "nothing"
