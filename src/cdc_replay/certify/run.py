"""Run a certification from the first check to the removal of everything that it created.

    publisher   versions, room for slots, leftovers of killed runs
    ours        synced once: all tables are copied
    server      started; plain tables; CREATE SUBSCRIPTION copies their rows
    both        follow the publisher, for a time or a number of transactions
    fence       native stopped, ours replayed to there, compared, explained

Everything is in contexts, so an error, Ctrl-C and SIGTERM remove what there is by then. Ours keeps what it
has replayed, as after a `sync`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import importlib.metadata
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.certify.at_fence import Claims, OpenSession, locked_session, open_at_fence
from cdc_replay.certify.native_side import (
    NAME,
    SERVER_SETTINGS,
    NativeSubscriber,
    last_error,
    native_subscription,
)
from cdc_replay.certify.native_tables import NativeTable, create_native_tables, plan_native_tables
from cdc_replay.certify.page import write_certificate
from cdc_replay.certify.publisher_slots import check_headroom, own_slots, remove_leftovers
from cdc_replay.certify.tables import (
    ComparedTable,
    certify_at_fence,
    compared_tables,
    with_changes,
    with_claims,
    with_keys_that_differ,
)
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.compare.fence import ComparisonFence
from cdc_replay.errors import (
    CdcReplayError,
    NativeSubscriptionFailed,
    Retry,
    SubscriptionInUse,
    ThrowawayServerFailed,
    retry_of,
)
from cdc_replay.failpoints import failpoint
from cdc_replay.model.certificate import (
    DEVIATION_TEXTS,
    CertifiedTable,
    CertifyResult,
    Deviation,
    TableOutcome,
)
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.progress import Progress, Report, Unit, each_table, unreported
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.subscription import Subscription
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.postgres.server_programs import find_programs
from cdc_replay.postgres.server_version import check_version
from cdc_replay.postgres.throwaway_server import ThrowawayServer, throwaway_server
from cdc_replay.replay.log_view import LogView
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.table_rewrites import rewrites_in

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.2

_SYSTEM_IDENTIFIER: Final = "select system_identifier::text from pg_catalog.pg_control_system()"


@dataclass(frozen=True, slots=True)
class CertifyRequest:
    """What to certify, and for how long: `seconds` or `transactions`, whichever comes first.

    `configured` are all subscriptions by name. `open_session` opens ours, with its lock held, `advance`
    captures and replays it once. `bin_folder` has the programs of the throw-away server; None: those that are
    installed. `stop` ends the time early.
    """

    subscription: Subscription
    configured: Mapping[str, Subscription]
    source: CaptureSource
    open_session: OpenSession
    advance: Callable[[], None]
    report_folder: Path
    seconds: float | None = None
    transactions: int | None = None
    bin_folder: Path | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    report: Report = unreported


def certify_subscription(request: CertifyRequest) -> CertifyResult:
    """Compare the subscription with a native one beside it, after both have followed the publisher.

    Raises:
        ServerProgramsMissing: if no server of the publisher's version is installed.
        ThrowawayServerFailed: if it cannot be started, or ends.
        PublisherNotReady, MissingPrivilege: if the publisher has no room for a native subscription.
        NativeSubscriptionFailed: if PostgreSQL refuses it, or it stands still.
        NotConsistent: if our subscription cannot be replayed to where native is.
    """
    began, name = time.monotonic(), request.subscription.name
    with connect(request.source.dsn, purpose=f"certify {name}") as publisher:
        check_version(publisher)
        major = publisher.info.server_version // 10000
        programs = find_programs(major, request.bin_folder)
        removed = remove_leftovers(publisher)
        check_headroom(publisher)
        # Another process that works on the subscription may be the one that brings it forward.
        with contextlib.suppress(SubscriptionInUse):
            request.advance()
        with (
            throwaway_server(major, bin_folder=programs.folder, settings=SERVER_SETTINGS) as server,
            contextlib.closing(connect(server.dsn, purpose=f"certify {name}")) as native_server,
        ):
            run = _Run(request, publisher, native_server, server)
            return run.certify(began, removed)


@dataclass(slots=True)
class _Follower:
    """How far the change log has come since both follow, in transactions and seconds."""

    request: CertifyRequest
    at: Lsn
    transactions: int = 0
    began: float = field(default_factory=time.monotonic)

    def is_done(self) -> bool:
        """Whether the time or the number is reached, or the run is asked to stop."""
        if self.request.stop.is_set():
            return True
        if self.request.transactions is not None and self.transactions >= self.request.transactions:
            return True
        return self.request.seconds is not None and self.seconds >= self.request.seconds

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    def count(self) -> None:
        """Count what the log has got since the last time, and report."""
        log = ChangeLog.open(self.request.source.change_log)
        if log.end_lsn > self.at:
            window = Window(self.at, log.end_lsn)
            self.transactions, self.at = self.transactions + log.summary(window).transactions, log.end_lsn
        name, current = self.request.subscription.name, f"at {self.at}"
        if self.request.transactions is not None:
            total, unit = self.request.transactions, Unit.TRANSACTIONS
            self.request.report(Progress("follow", name, self.transactions, total, unit, current=current))
        elif self.request.seconds is not None:
            total, unit = int(self.request.seconds), Unit.SECONDS
            done = min(int(self.seconds), total)
            self.request.report(Progress("follow", name, done, total, unit, current=current))


@dataclass(frozen=True, slots=True)
class _Followed:
    """What both went through."""

    window: Window
    transactions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Run:
    request: CertifyRequest
    publisher: Connection
    server: Connection
    started: ThrowawayServer

    @property
    def name(self) -> str:
        return self.request.subscription.name

    def certify(self, began: float, removed: tuple[str, ...]) -> CertifyResult:
        """Subscribe, follow, compare.

        Raises:
            ThrowawayServerFailed: if the throw-away server has ended; else as `certify_subscription`.
        """
        try:
            return self._certify(began, removed)
        except (CdcReplayError, psycopg.Error) as error:
            with contextlib.suppress(psycopg.Error):
                self.server.execute("select 1")
            if not self.server.broken:
                raise
            raise ThrowawayServerFailed(
                "the throw-away server ended before the comparison",
                detail=f"It said: {last_error(self.started.folder) or 'nothing'}",
                hint="Check that there is room for the tables in the folder for temporary files (TMPDIR), and"
                " enough memory.",
            ) from error

    def _certify(self, began: float, removed: tuple[str, ...]) -> CertifyResult:
        request = self.request
        catalog = read_catalog(self.publisher)
        planned, tables = self._create_tables(catalog)
        ((identifier,),) = self.server.execute(_SYSTEM_IDENTIFIER).fetchall()
        with (
            own_slots(self.publisher, request.source.dsn, identifier) as slot,
            native_subscription(
                self.server, self.publisher, slot, request.subscription, self.started.folder
            ) as native,
        ):
            failpoint("certify.after_subscribe")
            native.await_copies(self._advance)
            if request.stop.is_set():
                raise NativeSubscriptionFailed(
                    "the native subscription was stopped before it had copied its tables: nothing is compared"
                )
            tables = self._with_start(native, tables)
            start = native.present_position()
            logger.info("subscription %s and a native one: both follow from %s on", self.name, start)
            followed = self._follow(start)
            with self._open_at_fence(native) as (fence, claims):
                window = Window(followed.window.after, fence.lsn)
                final = with_claims(tuple(self._with_changes(tables, catalog, window)), claims)
                compared = each_table(request.report, "compare", self.name, final, lambda table: table.name)
                certified = [
                    certify_at_fence(fence, table, request.source.dsn, self.name) for table in compared
                ]
        left_out = (_left_out(table) for table in planned if _is_left_out(table))
        return self._result(
            sorted([*certified, *left_out], key=lambda table: table.table),
            dataclasses.replace(followed, window=window),
            removed,
            began,
        )

    def _create_tables(
        self, catalog: PublisherCatalog
    ) -> tuple[tuple[NativeTable, ...], tuple[ComparedTable, ...]]:
        """Create what native needs; the plan, and the tables to compare."""
        request, change_log = self.request, LogView(self.request.source.change_log)
        with locked_session(request.open_session) as session:
            known = [table.name or table.recorded_name for table in session.known_tables()]
            targets = session.read_targets(known)
            planned = plan_native_tables(
                catalog,
                request.subscription.publications,
                {name: targets.get(name) for name in known},
                self.server,
            )
            create_native_tables(self.server, planned)
            # A list of the tables, in the form in which the comparison reads a publisher's.
            self.server.execute(
                sql.SQL("create publication {} for all tables with (publish = 'insert')").format(
                    sql.Identifier(NAME)
                )
            )
            names = [table.name for table in planned if not _is_left_out(table)]
            names = [name for name in names if name in set(known)]
            return planned, compared_tables(session, catalog, self.server, names, change_log)

    def _with_start(
        self, native: NativeSubscriber, tables: tuple[ComparedTable, ...]
    ) -> tuple[ComparedTable, ...]:
        """The tables with the keys that differ from the start, if there may be any."""
        if all(table.facts.history is None for table in tables):
            return tables
        with self._open_at_fence(native) as (fence, claims):
            tables = tuple(with_keys_that_differ(fence, with_claims(tables, claims)))
        native.resume()
        return tables

    def _open_at_fence(
        self, native: NativeSubscriber
    ) -> AbstractContextManager[tuple[ComparisonFence, Claims]]:
        request = self.request
        return open_at_fence(
            request.source, request.open_session, native, self.started.dsn, request.configured
        )

    def _follow(self, start: Lsn) -> _Followed:
        """Let both follow until the time, the number, or the signal."""
        follower = _Follower(self.request, start)
        while True:
            self._advance()
            follower.count()
            self.server.execute("select 1")  # a lost one is told now, and not at the end of hours
            if follower.is_done():
                break
            self.request.stop.wait(_POLL_SECONDS)
        return _Followed(Window(start, follower.at), follower.transactions, follower.seconds)

    def _advance(self) -> bool:
        """Capture and replay ours; False if the run is asked to stop.

        What another try can mend is left to the next one: another process may be replaying the subscription.
        """
        try:
            self.request.advance()
        except (CdcReplayError, psycopg.Error) as error:
            if retry_of(error) is Retry.NEVER:
                raise
            logger.info("subscription %s: %s", self.name, str(error).partition("\n")[0])
        return not self.request.stop.is_set()

    def _with_changes(
        self, tables: tuple[ComparedTable, ...], before: PublisherCatalog, window: Window
    ) -> Iterator[ComparedTable]:
        log, publications = (
            ChangeLog.open(self.request.source.change_log),
            self.request.subscription.publications,
        )
        window = Window(before.lsn, window.upto)
        later = tuple(catalog_history(log).within(window).values())
        rewritten = rewrites_in(log, window, log.summary(window)).published(publications)
        yield from with_changes(tables, before, later, publications, frozenset(rewritten))

    def _result(
        self,
        tables: list[CertifiedTable],
        followed: _Followed,
        removed: tuple[str, ...],
        began: float,
    ) -> CertifyResult:
        request, now = self.request, dt.datetime.now(dt.UTC)
        failing = [table for table in tables if table.outcome.fails]
        compared = [table for table in tables if table.outcome is not TableOutcome.LEFT_OUT]
        error = "\n".join(map(describe_failure, failing)) or None
        if not compared:
            error = "there was no table to compare"
        result = CertifyResult(
            subscription=self.name,
            publisher=request.subscription.publisher,
            publications=request.subscription.publications,
            version=importlib.metadata.version("cdc-replay"),
            publisher_version=str(self.publisher.info.parameter_status("server_version")),
            native_version=self.started.version,
            from_lsn=followed.window.after,
            to_lsn=followed.window.upto,
            transactions=followed.transactions,
            followed_seconds=followed.seconds,
            seconds=time.monotonic() - began,
            success=error is None,
            tables=tuple(tables),
            report=request.report_folder
            / f"certificate-{followed.window.upto.file_name}-{now:%Y%m%dT%H%M%S%fZ}.html",
            removed=removed,
            error=error,
        )
        write_certificate(result, now.astimezone())
        return result


def describe_failure(table: CertifiedTable) -> str:
    """One line: the table, the differences, the first keys."""
    if not table.differences:
        return f"{table.table}: {table.reason or table.outcome.value}"
    counts = ", ".join(f"{count:,} {kind}" for kind, count in table.differences.items())
    keys = f" (first: {', '.join(table.keys[:3])})" if table.keys else ""
    return f"{table.table}: {counts}{keys}"


def _is_left_out(table: NativeTable) -> bool:
    return table.why_left_out is not None or not table.is_subscribed


def _left_out(table: NativeTable) -> CertifiedTable:
    deviation = Deviation.NOT_SUBSCRIBED
    reason = table.why_left_out or f"{DEVIATION_TEXTS[deviation]} ({deviation.value})"
    return CertifiedTable(str(table.name), TableOutcome.LEFT_OUT, reason=reason)
