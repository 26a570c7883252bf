"""`prune`: drop the segments of a publisher's change log that no subscription needs any more.

| a table of a subscription is | it needs what commits after                                               |
|------------------------------|---------------------------------------------------------------------------|
| ready, or parked             | its applied LSN                                                           |
| being copied                 | the consistent point of its snapshot                                      |
| waiting for its snapshot     | that snapshot, which is taken at the log's end or later; if a job runs    |
|                              | that may have taken it already, nobody can tell, and nothing is pruned    |
| behind the log's start       | its next snapshot                                                         |

What was committed within the publisher's `keep` stays too, or what `--before` and `--keep-hours` say instead:
for backfills, and for a subscriber that is restored. Where one subscription cannot be asked, nothing is
pruned. The publisher need not answer: a full disk is when it may not.

Files of pruned segments are deleted once the commit is durable. A replay that runs meanwhile needs none of
them; a backfill may, so while a job of a subscription runs they stay for a day, and a later run deletes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.maintenance import compact_log
from cdc_replay.config import Config, PublisherConfig, SubscriptionConfig
from cdc_replay.errors import (
    AnotherPublisher,
    CdcReplayError,
    ChangeLogDamaged,
    InvalidConfiguration,
    InvalidLsn,
    PruneLimitUnknown,
    SubscriptionInUse,
)
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import PruneResult
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready, TableState
from cdc_replay.model.timestamp import parse_timestamp_us, timestamp_text
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import state_schema, subscription_lock, subscription_records, subscription_tables
from cdc_replay.subscriber.subscription_tables import KnownTable

if TYPE_CHECKING:
    from cdc_replay.changelog.segment import Segment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogRequirement:
    """What a subscription still needs: what commits after `lsn`."""

    subscription: str
    lsn: Lsn
    is_busy: bool
    """A job of it runs, which may read more than it needs."""


@dataclass(frozen=True, slots=True)
class _Retention:
    """What is kept beside what subscriptions need; without `before` and `keep_hours`, the publisher's `keep`.

    `before` is a WAL position or a timestamp: what commits after it is kept. `keep_hours`: what was committed
    in the last so many hours.
    """

    before: str | None = None
    keep_hours: float | None = None

    @property
    def is_given(self) -> bool:
        """Somebody has said what is kept."""
        return self.before is not None or self.keep_hours is not None

    def limit(self, publisher: PublisherConfig, needed: Lsn) -> PruneLimit:
        """Up to where may be pruned of what is not `needed`."""
        upto, moments = needed, []
        hours = self.keep_hours
        if not self.is_given:
            hours = publisher.keep.total_seconds() / 3600
        if hours:
            moments.append(round(max(0.0, time.time() - hours * 3600) * 1_000_000))
        if self.before is not None:
            try:
                upto = min(needed, Lsn.parse(self.before))
            except InvalidLsn:
                moments.append(parse_timestamp_us(self.before))
        return PruneLimit(upto, min(moments, default=None))


@dataclass(frozen=True, slots=True)
class PruneLimit:
    """Up to where may be pruned: by position, and by time in microseconds since 1970."""

    upto: Lsn
    committed_by: int | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What would go, and who still needs what of the log."""

    change_log: ChangeLog
    needs: tuple[LogRequirement, ...]
    segments: tuple[Segment, ...]

    @property
    def neediest(self) -> LogRequirement | None:
        """The subscription that needs most."""
        return min(self.needs, key=lambda need: need.lsn, default=None)

    @property
    def needed(self) -> Lsn:
        """From where on the log is needed."""
        return self.change_log.end_lsn if self.neediest is None else self.neediest.lsn

    def result(self, publisher: PublisherConfig) -> PruneResult:
        """What a dry run tells."""
        from_time, to_time = _times(self.change_log, self.segments)
        return PruneResult(
            publisher=publisher.name,
            from_lsn=self.change_log.start_lsn,
            to_lsn=Lsn(
                max((s.max_commit_lsn for s in self.segments), default=self.change_log.start_lsn.value)
            ),
            seconds=0.0,
            needed_lsn=self.needed,
            needed_by=None if self.neediest is None else self.neediest.subscription,
            segments=len(self.segments),
            messages=sum(segment.rows for segment in self.segments),
            bytes=sum(segment.size_bytes for segment in self.segments),
            from_time=from_time,
            to_time=to_time,
            files=0,
            merged=0,
            dry_run=True,
        )


def prune(
    config: Config,
    publisher: str,
    *,
    before: str | None = None,
    keep_hours: float | None = None,
    dry_run: bool = False,
    confirm: Callable[[PruneResult], None] | None = None,
) -> PruneResult:
    """Drop what no subscription of the configuration needs; merge small segments of the rest.

    Args:
        config: the configuration, which must name all subscriptions that use the log.
        publisher: whose log; what was committed within its `keep` stays, unless the next two say otherwise.
        before: keep what commits after this WAL position or timestamp.
        keep_hours: keep what was committed in the last so many hours.
        dry_run: only tell.
        confirm: is told what is to go, before anything does; an exception of it ends the command.

    Raises:
        ChangeLogMissing: before `setup`.
        RetentionUnknown: if a subscription cannot be asked what it needs; nothing is pruned.
        InvalidConfiguration: if there is no subscription, and the caller does not say what to keep; or if
            that cannot be understood.
        ChangeLogConflict: if another process prunes the log.
        ChangeLogDamaged: if a segment has to be read to know when it was committed, and cannot be.
    """
    began = time.monotonic()
    if keep_hours is not None and not 0 <= keep_hours < math.inf:
        raise InvalidConfiguration(
            f"{keep_hours:g} hours cannot be kept", hint="Give `--keep-hours` a number, 0 or more."
        )
    found = config.publisher(publisher)
    retention = _Retention(before, keep_hours)
    plan = _plan(config, found, retention)
    result = plan.result(found)
    _log("would prune", result)
    if not dry_run:
        if plan.segments and confirm is not None:
            confirm(result)
            # The answer may have taken a while: what was shown goes, as far as nobody needs it meanwhile.
            shown = set(plan.segments)
            again = _plan(config, found, retention)
            plan = dataclasses.replace(again, segments=tuple(s for s in again.segments if s in shown))
            result = plan.result(found)
        result = _pruned(plan, result, found)
        _log("pruned", result)
    return dataclasses.replace(result, seconds=time.monotonic() - began)


def _plan(config: Config, publisher: PublisherConfig, retention: _Retention) -> _Plan:
    # Before the subscribers are asked: what they begin to copy from now on does not reach below its end.
    change_log = ChangeLog.open(publisher.change_log)
    needs = _needs(config, publisher, change_log)
    if not needs and not retention.is_given:
        raise InvalidConfiguration(
            f'publisher "{publisher.name}" has no subscription, so nothing says what of its log is needed',
            hint="Say what to keep with `--before` or `--keep-hours`.",
        )
    known = _Plan(change_log, needs, ())
    limit = retention.limit(publisher, known.needed)
    segments = change_log.prunable_segments(limit.upto, committed_by=limit.committed_by)
    return dataclasses.replace(known, segments=segments)


def _pruned(plan: _Plan, told: PruneResult, publisher: PublisherConfig) -> PruneResult:
    files = plan.change_log.prune(plan.segments, keep_files=any(need.is_busy for need in plan.needs))
    files += plan.change_log.delete_removed()
    return dataclasses.replace(
        told, files=files, merged=compact_log(publisher.change_log, publisher.name).removed, dry_run=False
    )


def _times(change_log: ChangeLog, segments: Sequence[Segment]) -> tuple[str | None, str | None]:
    # Where nobody needs to know the times, a segment that cannot be read may go.
    with contextlib.suppress(ChangeLogDamaged):
        if (times := change_log.commit_times(segments)) is not None:
            return timestamp_text(times[0]), timestamp_text(times[1])
    return None, None


def _log(what: str, result: PruneResult) -> None:
    logger.info(
        "%s the change log of %s (%s, %s]: %d segments, %d messages, %d bytes, committed from %s to %s;"
        " needed from %s by %s",
        what, result.publisher, result.from_lsn, result.to_lsn,
        result.segments, result.messages, result.bytes, result.from_time or "-", result.to_time or "-",
        result.needed_lsn, result.needed_by or "no subscription",
    )  # fmt: skip


def _needs(config: Config, publisher: PublisherConfig, change_log: ChangeLog) -> tuple[LogRequirement, ...]:
    subscriptions = config.subscriptions.values()
    return tuple(
        _need(config, found, change_log)
        for found in subscriptions
        if found.subscription.publisher == publisher.name
    )


def _need(config: Config, found: SubscriptionConfig, change_log: ChangeLog) -> LogRequirement:
    name = found.name
    try:
        with connect(config.dsn_of(found), purpose=f"prune {name}") as connection:
            state_schema.upgrade(connection)
            _check_publisher(connection, name, change_log)
            is_busy = _is_busy(connection, name)
            states = _holding(subscription_tables.known_tables(connection, name))
    except PruneLimitUnknown:
        raise
    except (CdcReplayError, psycopg.Error) as error:
        raise PruneLimitUnknown(
            f'subscription "{name}" cannot be asked what it still needs, so nothing is pruned',
            detail=str(error).strip(),
            hint="Bring its subscriber back, or take the subscription out of the configuration.",
        ) from error
    if is_busy and (not states or any(isinstance(each, Pending) for each in states)):
        raise PruneLimitUnknown(
            f'subscription "{name}" may be about to copy tables, so nothing is pruned',
            detail="A job of it runs, and it has tables that wait for their snapshot.",
            hint="Run the command again when the job has ended.",
        )
    return LogRequirement(name, _needed_lsn(name, states, change_log), is_busy)


def _holding(known: Iterable[KnownTable]) -> list[TableState]:
    """The states that keep changes in the log.

    Replay stops at the next change of a Ready table that was dropped on the subscriber (R8.1).
    """
    return [each.state for each in known if each.name is not None or isinstance(each.state, Ready)]


def _check_publisher(connection: Connection, name: str, change_log: ChangeLog) -> None:
    header = change_log.header
    try:
        subscription_records.check_publisher(connection, name, header.system_identifier, header.database)
    except AnotherPublisher as error:
        raise PruneLimitUnknown(
            f"{error.message}, so nothing is pruned", detail=error.detail, hint="Correct the configuration."
        ) from error


def _is_busy(connection: Connection, name: str) -> bool:
    try:
        with subscription_lock.lock(connection, name):
            return False
    except SubscriptionInUse:
        return True


def _needed_lsn(name: str, states: Iterable[TableState], change_log: ChangeLog) -> Lsn:
    reached = []
    for found in states:
        match found:
            case Ready(lsn) | Parked(lsn, _) | Copying(lsn):
                reached.append(lsn)
            case Pending():
                continue
    if behind := [lsn for lsn in reached if lsn < change_log.start_lsn]:
        logger.warning(
            "%d tables of subscription %s end before the change log starts: they need a snapshot",
            len(behind),
            name,
        )
    return min((lsn for lsn in reached if lsn >= change_log.start_lsn), default=change_log.end_lsn)
