"""`plan`: has a proposal parsed, and puts its effects on one subscription together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import CdcReplayError, ChangeLogMissing, PublicationRefused, ServerProgramsMissing
from cdc_replay.model.lsn import ZERO, Window
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.proposed_change import (
    FailingStatement,
    PlanResult,
    ProposalRefused,
)
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.timestamp import timestamp_text
from cdc_replay.proposal.effects import BothDefinitions, planned_tables
from cdc_replay.proposal.elsewhere import parse_elsewhere
from cdc_replay.proposal.execution import Definitions
from cdc_replay.proposal.logged_changes import CountedChanges, CountRequest, count_changes
from cdc_replay.proposal.publisher import parse_on_publisher
from cdc_replay.proposal.row_counts import count_rows
from cdc_replay.proposal.statements import Statement, parse_script
from cdc_replay.proposal.write_checks import failing_statements
from cdc_replay.publication.capture_coverage import uncaptured_leaves
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.publication.restrictions import check_publications, warnings_for
from cdc_replay.replay.backfill import parse_range

DAY_US: Final = 86_400_000_000
"""Microseconds."""

_NOTHING_COUNTED: Final = CountedChanges({}, {})


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """From which WAL position or timestamp changes are counted, and who parses the script.

    `since`: None for the last 24 hours of the log. With `throwaway`, a throw-away server does, also if the
    publisher could; `bin_folder` has the programs of such a server.
    """

    since: str | None = None
    throwaway: bool = False
    bin_folder: Path | None = None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A proposal for a subscription's publisher."""

    subscription: Subscription
    publisher_dsn: str = field(repr=False)
    change_log: str
    script: str
    options: PlanOptions = PlanOptions()
    report: Report = unreported

    @property
    def purpose(self) -> str:
        """Of connections."""
        return f"plan {self.subscription.name}"


def plan_proposal(request: PlanRequest) -> PlanResult:
    """The effects of the proposal. Nothing is changed anywhere.

    Raises:
        StatementNotAllowed: if the script has anything but statements about publications.
        InvalidConfiguration: if `since` is no position, or not in the log.
        ServerProgramsMissing, ThrowawayServerFailed: if a throw-away server is needed, and there is none.
        CdcReplayError: if the publisher or the log cannot be read.
    """
    began = time.monotonic()
    statements = parse_script(request.script)
    log_range = _LogRange.read(request)
    definitions = _definitions(request, statements)
    result = _result(request, definitions, log_range)
    return dataclasses.replace(result, seconds=time.monotonic() - began)


def _definitions(request: PlanRequest, statements: Sequence[Statement]) -> Definitions:
    because = "it was asked for"
    if not request.options.throwaway:
        parsed = parse_on_publisher(request.publisher_dsn, request.purpose, statements)
        if isinstance(parsed, Definitions):
            return parsed
        because = parsed
    try:
        return parse_elsewhere(
            request.publisher_dsn, request.purpose, statements, because, request.options.bin_folder
        )
    except ServerProgramsMissing as error:
        raise ServerProgramsMissing(
            f"the publisher cannot parse the proposal: {because}; and {error.message}",
            detail=error.detail,
            hint=error.hint,
        ) from error


@dataclass(frozen=True, slots=True)
class _LogRange:
    """The range whose changes are counted, and its length in days by commit times; no log: an empty one."""

    change_log: ChangeLog | None
    window: Window
    days: float

    @classmethod
    def read(cls, request: PlanRequest) -> _LogRange:
        try:
            change_log = ChangeLog.open(request.change_log)
        except ChangeLogMissing:
            return cls(None, Window(ZERO, ZERO), 0)
        times = change_log.commit_times()
        if times is None:
            return cls(change_log, Window(change_log.end_lsn, change_log.end_lsn), 0)
        since = request.options.since or timestamp_text(times[1] - DAY_US)
        window = parse_range(change_log, since, str(change_log.end_lsn))
        window = Window(max(window.after, change_log.start_lsn), window.upto)
        first = change_log.first_commit(window)
        return cls(change_log, window, 0 if first is None else max(0, times[1] - first.commit_time) / DAY_US)


def _result(request: PlanRequest, definitions: Definitions, log_range: _LogRange) -> PlanResult:
    result = PlanResult(
        subscription=request.subscription.name,
        from_lsn=log_range.window.after,
        to_lsn=log_range.window.upto,
        seconds=0.0,
        publications=request.subscription.publications,
        parsed_by=definitions.parsed_by,
        because=definitions.because,
        days=log_range.days,
    )
    if (refused := _refused(definitions, request.subscription.publications)) is not None:
        return dataclasses.replace(
            result, refused=refused, error=f"PostgreSQL would refuse the proposal: {refused.message}"
        )
    if definitions.proposed is None:
        raise AssertionError("a proposal without a refusal has definitions")
    now, warnings = _present(definitions.present, request.subscription.publications)
    both = BothDefinitions(now, definitions.proposed, request.subscription.publications)
    changes, log_error = _count_changes(request, both, log_range)
    rows = count_rows(request.publisher_dsn, request.purpose, both.copies, request.report)
    failing = failing_statements(definitions.present, definitions.proposed)
    return dataclasses.replace(
        result,
        tables=planned_tables(both, rows, changes),
        failing=failing,
        warnings=(*warnings, *_warnings(both, request.subscription)),
        log_error=log_error,
        error=_failing_error(failing),
    )


def _refused(definitions: Definitions, publications: Sequence[str]) -> ProposalRefused | None:
    """A statement that fails, or publications that cannot be decoded together (R1.36)."""
    if definitions.proposed is not None:
        try:
            check_publications(definitions.proposed, publications)
        except PublicationRefused as error:
            return ProposalRefused(error.message, None, error.detail, error.hint, error.rule)
    return definitions.refusal


def _failing_error(failing: Sequence[FailingStatement]) -> str | None:
    if not failing:
        return None
    tables = dict.fromkeys(f"{statement.action.upper()} of {statement.table}" for statement in failing)
    return f"after the proposal the publisher would refuse every {', every '.join(tables)}"


def _present(
    catalog: PublisherCatalog, publications: Sequence[str]
) -> tuple[PublisherCatalog, tuple[str, ...]]:
    """The present definitions; nothing is published if PostgreSQL refuses to decode for them."""
    try:
        check_publications(catalog, publications)
    except PublicationRefused as error:
        others = {name: entry for name, entry in catalog.publications.items() if name not in publications}
        return dataclasses.replace(catalog, publications=others), (
            f"nothing is sent now, since PostgreSQL refuses to decode: {error.message} [{error.rule}]",
        )
    return catalog, ()


def _count_changes(
    request: PlanRequest, both: BothDefinitions, log_range: _LogRange
) -> tuple[CountedChanges, str | None]:
    if log_range.change_log is None:
        return _NOTHING_COUNTED, "there is no change log yet"
    if log_range.window.is_empty:
        return _NOTHING_COUNTED, "the change log has no transaction yet"
    count = CountRequest(
        change_log=log_range.change_log,
        window=log_range.window,
        publications=both.publications,
        origin=request.subscription.origin,
        now=both.now,
        then=both.then,
        publisher_dsn=request.publisher_dsn,
        report=request.report,
    )
    try:
        return count_changes(count), None
    except CdcReplayError as error:
        return _NOTHING_COUNTED, error.message


def _warnings(both: BothDefinitions, subscription: Subscription) -> Iterator[str]:
    """What the publications would do that they do not do now, and its owner may not expect."""
    now = set(warnings_for(both.now, both.publications))
    yield from (warning for warning in warnings_for(both.then, both.publications) if warning not in now)
    uncaptured = set(_uncaptured(both.then, subscription)) - set(_uncaptured(both.now, subscription))
    if uncaptured:
        yield (
            f"not captured yet: {', '.join(sorted(uncaptured))}; `cdc-replay refresh {subscription.name}`, or"
            f" `cdc-replay setup {subscription.publisher}`, after the proposal [R2.3]"
        )


def _uncaptured(catalog: PublisherCatalog, subscription: Subscription) -> list[str]:
    return uncaptured_leaves(catalog, subscription, synced_tables(catalog, subscription.publications))
