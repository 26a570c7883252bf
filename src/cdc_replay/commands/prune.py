"""`prune`: drop the segments of a publisher's change log that no subscription needs any more.

| a table of a subscription is | it needs what commits after                                               |
|------------------------------|---------------------------------------------------------------------------|
| ready, or parked             | its applied LSN                                                           |
| being copied                 | the consistent point of its snapshot                                      |
| waiting for its snapshot     | that snapshot, which is taken at the log's end or later; if a job runs    |
|                              | that may have taken it already, nobody can tell, and nothing is pruned    |
| behind the log's start       | its next snapshot                                                         |

`--before` and `--keep-hours` only ever keep more, for backfills. Where one subscription cannot be asked,
nothing is pruned. The publisher need not answer: a full disk is when it may not.

Files of pruned segments are deleted once the commit is durable. A replay that runs meanwhile needs none of
them; a backfill may, so while a job of a subscription runs they stay for a day, and a later run deletes them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psycopg

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.compaction import compacted
from cdc_replay.commands.moments import moment_of
from cdc_replay.commands.results import PruneResult
from cdc_replay.config import Config, PublisherConfig, SubscriptionConfig
from cdc_replay.errors import (
    CdcReplayError,
    InvalidConfiguration,
    InvalidLsn,
    RetentionUnknown,
    SubscriptionBusy,
)
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready, TableState
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import state
from cdc_replay.subscriber.state import KnownTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Need:
    """What a subscription still needs: what commits after `lsn`."""

    subscription: str
    lsn: Lsn
    is_busy: bool
    """A job of it runs, which may read more than it needs."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """Up to where may be pruned: by position, and by time in microseconds since 1970."""

    upto: Lsn
    committed_by: int | None


def prune(
    config: Config,
    publisher: str,
    *,
    before: str | None = None,
    keep_hours: float | None = None,
    dry_run: bool = False,
) -> PruneResult:
    """Drop what no subscription of the configuration needs; merge small segments of the rest.

    Args:
        config: the configuration, which must name all subscriptions that use the log.
        publisher: whose log.
        before: keep what commits after this WAL position or timestamp, too.
        keep_hours: keep what was committed in the last so many hours, too.
        dry_run: only tell.

    Raises:
        ChangeLogMissing: before `setup`.
        RetentionUnknown: if a subscription cannot be asked what it needs; nothing is pruned.
        InvalidConfiguration: if there is no subscription, and nothing else says what to keep; or if that
            cannot be understood.
        ChangeLogConflict: if another process prunes the log.
    """
    began = time.monotonic()
    if keep_hours is not None and not 0 <= keep_hours < math.inf:
        raise InvalidConfiguration(
            f"{keep_hours:g} hours cannot be kept", hint="Give `--keep-hours` a number, 0 or more."
        )
    found = config.publisher(publisher)
    # Before the subscribers are asked: what they begin to copy from now on does not reach below its end.
    change_log = ChangeLog.open(found.change_log)
    needs = _needs(config, found, change_log)
    if not needs and before is None and keep_hours is None:
        raise InvalidConfiguration(
            f'publisher "{publisher}" has no subscription, so nothing says what of its change log is needed',
            hint="Say what to keep with `--before` or `--keep-hours`.",
        )
    neediest = min(needs, key=lambda need: need.lsn, default=None)
    needed = change_log.end_lsn if neediest is None else neediest.lsn
    limit = _limit(needed, before, keep_hours)
    segments = change_log.prunable(limit.upto, committed_by=limit.committed_by)
    start = Lsn(max((segment.max_commit_lsn for segment in segments), default=change_log.start_lsn.value))
    files = merged = 0
    from_lsn = change_log.start_lsn
    if not dry_run:
        files = change_log.prune(segments, keep_files=any(need.is_busy for need in needs))
        files += change_log.delete_removed()
        merged = compacted(found).removed
    result = PruneResult(
        publisher=publisher,
        from_lsn=from_lsn,
        to_lsn=start,
        seconds=time.monotonic() - began,
        needed_lsn=needed,
        needed_by=None if neediest is None else neediest.subscription,
        segments=len(segments),
        messages=sum(segment.rows for segment in segments),
        bytes=sum(segment.size_bytes for segment in segments),
        files=files,
        merged=merged,
        dry_run=dry_run,
    )
    log.info(
        "%s the change log of %s (%s, %s]: %d segments, %d messages, %d bytes, needed from %s by %s, %.2f s",
        "would prune" if dry_run else "pruned", publisher, from_lsn, start, result.segments, result.messages,
        result.bytes, needed, result.needed_by or "no subscription", result.seconds,
    )  # fmt: skip
    return result


def _limit(needed: Lsn, before: str | None, keep_hours: float | None) -> _Limit:
    upto, moments = needed, []
    if keep_hours is not None:
        moments.append(round(max(0.0, time.time() - keep_hours * 3600) * 1_000_000))
    if before is not None:
        try:
            upto = min(needed, Lsn.parse(before))
        except InvalidLsn:
            moments.append(moment_of(before))
    return _Limit(upto, min(moments, default=None))


def _needs(config: Config, publisher: PublisherConfig, change_log: ChangeLog) -> tuple[Need, ...]:
    subscriptions = config.subscriptions.values()
    return tuple(
        _need(config, found, change_log)
        for found in subscriptions
        if found.subscription.publisher == publisher.name
    )


def _need(config: Config, found: SubscriptionConfig, change_log: ChangeLog) -> Need:
    name = found.name
    try:
        with connect(config.dsn_of(found), purpose=f"prune {name}") as connection:
            _check_publisher(connection, name, change_log)
            is_busy = _is_busy(connection, name)
            states = _holding(state.known_tables(connection, name))
    except RetentionUnknown:
        raise
    except (CdcReplayError, psycopg.Error) as error:
        raise RetentionUnknown(
            f'subscription "{name}" cannot be asked what it still needs, so nothing is pruned',
            detail=str(error).strip(),
            hint="Bring its subscriber back, or take the subscription out of the configuration.",
        ) from error
    if is_busy and (not states or any(isinstance(each, Pending) for each in states)):
        raise RetentionUnknown(
            f'subscription "{name}" may be about to copy tables, so nothing is pruned',
            detail="A job of it runs, and it has tables that wait for their snapshot.",
            hint="Run the command again when the job has ended.",
        )
    return Need(name, _needed_lsn(name, states, change_log), is_busy)


def _holding(known: Iterable[KnownTable]) -> list[TableState]:
    """The states that keep changes in the log.

    Replay stops at the next change of a Ready table that was dropped on the subscriber (R8.1).
    """
    return [each.state for each in known if each.name is not None or isinstance(each.state, Ready)]


def _check_publisher(connection: Connection, name: str, change_log: ChangeLog) -> None:
    record = state.subscription_record(connection, name)
    ours = change_log.header.system_identifier
    if record is not None and record.publisher_system_identifier != ours:
        raise RetentionUnknown(
            f'subscription "{name}" belongs to another publisher, so nothing is pruned',
            detail=f"Its rows come from the cluster with system identifier"
            f" {record.publisher_system_identifier}, the change log from {ours}.",
            hint="Correct the configuration.",
        )


def _is_busy(connection: Connection, name: str) -> bool:
    try:
        with state.lock(connection, name):
            return False
    except SubscriptionBusy:
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
        log.warning(
            "%d tables of subscription %s end before the change log starts: they need a snapshot",
            len(behind),
            name,
        )
    return min((lsn for lsn in reached if lsn >= change_log.start_lsn), default=change_log.end_lsn)
