"""Which segments `prune` drops: those that no subscription needs and that are old enough.

Segments stay that a subscription still needs, and those committed within the publisher's `keep`, or what
`--before` and `--keep-hours` set in its place: for backfills, and for a subscriber that is restored.

Files of pruned segments are deleted once the commit is durable. A concurrent replay needs none of them. A
backfill may: if a job of a subscription runs then, they stay for a day, and a later run deletes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.maintenance import compact_log
from cdc_replay.errors import ChangeLogDamaged, InvalidConfiguration, InvalidLsn, PruneLimitUnknown
from cdc_replay.model.log_requirement import LogExtent, LogRequirement
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import PruneResult
from cdc_replay.model.timestamp import parse_timestamp_us, timestamp_text

if TYPE_CHECKING:
    from cdc_replay.changelog.segment import Segment

logger = logging.getLogger(__name__)

Confirm: TypeAlias = Callable[[PruneResult], None]
ReadRequirements: TypeAlias = Callable[[LogExtent], tuple[LogRequirement, ...]]


@dataclass(frozen=True, slots=True)
class PruneRequest:
    """Whose log is pruned, and which transactions stay although no subscription needs them.

    `before` is a WAL position or a timestamp: transactions that commit after it are kept. `keep_hours` keeps
    those committed within this time. Without both, `keep` does.
    """

    publisher: str
    change_log: str
    keep: dt.timedelta
    before: str | None = None
    keep_hours: float | None = None

    def __post_init__(self) -> None:
        if self.keep_hours is not None and not 0 <= self.keep_hours < math.inf:
            raise InvalidConfiguration(
                f"{self.keep_hours:g} hours cannot be kept",
                hint="Give `--keep-hours` a number, 0 or more.",
            )

    @property
    def is_explicit(self) -> bool:
        """The caller sets what is kept."""
        return self.before is not None or self.keep_hours is not None

    def limit(self, needed: Lsn) -> PruneLimit:
        """Up to where the log may be pruned if subscriptions need what commits after `needed`."""
        upto, timestamps = needed, []
        hours = self.keep_hours if self.is_explicit else self.keep.total_seconds() / 3600
        if hours:
            timestamps.append(round(max(0.0, time.time() - hours * 3600) * 1_000_000))
        if self.before is not None:
            try:
                upto = min(needed, Lsn.parse(self.before))
            except InvalidLsn:
                timestamps.append(parse_timestamp_us(self.before))
        return PruneLimit(upto, min(timestamps, default=None))


@dataclass(frozen=True, slots=True)
class PruneLimit:
    """Up to where the log may be pruned: by position, and by time in microseconds since 1970."""

    upto: Lsn
    committed_by: int | None


@dataclass(frozen=True, slots=True)
class _PrunePlan:
    """The segments to drop, what the log holds before, and the subscriptions' requirements."""

    change_log: ChangeLog
    extent: LogExtent
    requirements: tuple[LogRequirement, ...]
    segments: tuple[Segment, ...] = ()

    @property
    def earliest(self) -> LogRequirement | None:
        return min(self.requirements, key=lambda requirement: requirement.lsn, default=None)

    @property
    def needed_lsn(self) -> Lsn:
        return self.change_log.end_lsn if self.earliest is None else self.earliest.lsn

    def result(self, publisher: str) -> PruneResult:
        """The result of a dry run."""
        from_time, to_time = _commit_times(self.change_log, self.segments)
        start = self.change_log.start_lsn
        return PruneResult(
            publisher=publisher,
            from_lsn=start,
            to_lsn=Lsn(max((segment.max_commit_lsn for segment in self.segments), default=start.value)),
            seconds=0.0,
            needed_lsn=self.needed_lsn,
            needed_by=None if self.earliest is None else self.earliest.subscription,
            segments=len(self.segments),
            messages=sum(segment.rows for segment in self.segments),
            bytes=sum(segment.size_bytes for segment in self.segments),
            from_time=from_time,
            to_time=to_time,
            files=0,
            merged=0,
            dry_run=True,
        )


def prune_log(
    request: PruneRequest,
    read_requirements: ReadRequirements,
    *,
    dry_run: bool = False,
    confirm: Confirm | None = None,
) -> PruneResult:
    """Drop the segments that no subscription needs, then merge small segments of the rest.

    `confirm` is called with the planned result before anything is dropped; its exception ends the command.

    Raises:
        ChangeLogMissing: before `setup`.
        PruneLimitUnknown: if the requirements cannot be read; nothing is pruned.
        InvalidConfiguration: if there is no subscription and the request is not explicit, or if `before` is
            neither a WAL position nor a timestamp.
        ChangeLogConflict: if another process prunes the log.
        ChangeLogDamaged: if a segment has to be read to know when it was committed, and cannot be.
    """
    began = time.monotonic()
    plan = _plan_prune(request, read_requirements)
    result = plan.result(request.publisher)
    _log_result("would prune", result)
    if not dry_run:
        if plan.segments and confirm is not None:
            confirm(result)
            # The answer may have taken a while: drop only shown segments that still no subscription needs.
            shown = set(plan.segments)
            plan = _plan_prune(request, read_requirements)
            plan = dataclasses.replace(plan, segments=tuple(s for s in plan.segments if s in shown))
            result = plan.result(request.publisher)
        result = _execute(plan, result, request, read_requirements)
        _log_result("pruned", result)
    return dataclasses.replace(result, seconds=time.monotonic() - began)


def _plan_prune(request: PruneRequest, read_requirements: ReadRequirements) -> _PrunePlan:
    # Opened before the subscribers are asked: a copy that begins from now on needs nothing before its end.
    change_log = ChangeLog.open(request.change_log)
    header = change_log.header
    extent = LogExtent(header.system_identifier, header.database, change_log.start_lsn, change_log.end_lsn)
    requirements = read_requirements(extent)
    if not requirements and not request.is_explicit:
        raise InvalidConfiguration(
            f'publisher "{request.publisher}" has no subscription, so nothing says what of its log is needed',
            hint="Say what to keep with `--before` or `--keep-hours`.",
        )
    plan = _PrunePlan(change_log, extent, requirements)
    limit = request.limit(plan.needed_lsn)
    segments = change_log.prunable_segments(limit.upto, committed_by=limit.committed_by)
    return dataclasses.replace(plan, segments=segments)


def _execute(
    plan: _PrunePlan, planned: PruneResult, request: PruneRequest, read_requirements: ReadRequirements
) -> PruneResult:
    def may_be_read() -> bool:
        """Whether a job runs that may have opened the log before the segments left it."""
        try:
            return any(requirement.is_busy for requirement in read_requirements(plan.extent))
        except PruneLimitUnknown:
            return True

    files = plan.change_log.prune(plan.segments, keep_files=may_be_read)
    files += plan.change_log.delete_removed()
    merged = compact_log(request.change_log, request.publisher).removed
    return dataclasses.replace(planned, files=files, merged=merged, dry_run=False)


def _commit_times(change_log: ChangeLog, segments: Sequence[Segment]) -> tuple[str | None, str | None]:
    # A segment that cannot be read may be dropped where its times decide nothing.
    with contextlib.suppress(ChangeLogDamaged):
        if (times := change_log.commit_times(segments)) is not None:
            return timestamp_text(times[0]), timestamp_text(times[1])
    return None, None


def _log_result(action: str, result: PruneResult) -> None:
    logger.info(
        "%s the change log of %s (%s, %s]: %d segments, %d messages, %d bytes, committed from %s to %s;"
        " needed from %s by %s",
        action, result.publisher, result.from_lsn, result.to_lsn,
        result.segments, result.messages, result.bytes, result.from_time or "-", result.to_time or "-",
        result.needed_lsn, result.needed_by or "no subscription",
    )  # fmt: skip
