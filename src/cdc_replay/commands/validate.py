"""`validate`: prove that the subscriber equals the publications at one LSN, under live writes.

With a repair, the rows that differ are written as they are published, and the proof is made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from cdc_replay.commands.opening import capture_source, open_subscription, refresh_request
from cdc_replay.config import Config
from cdc_replay.errors import NotConfirmed
from cdc_replay.failpoints import failpoint
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import TableReconciled, ValidateResult
from cdc_replay.postgres.connection import connect
from cdc_replay.snapshot.refresh import preview_repair, repair_tables
from cdc_replay.subscriber import history, recorded_results
from cdc_replay.validate.at_fence import open_at_fence
from cdc_replay.validate.report_context import Repair, ReportContext, ReportLinks
from cdc_replay.validate.result import summarize, to_result
from cdc_replay.validate.run import ValidationRequest, validate_subscription
from cdc_replay.validate.verdict import Verdict

logger = logging.getLogger(__name__)

EARLIER_SHOWN: Final = 60
"""Earlier validations in the report's trend."""

ConfirmRepair: TypeAlias = Callable[[tuple[TableReconciled, ...]], bool]
"""Called before rows are deleted, with what would be written."""


def validate(
    config: Config, subscription: str, *, links: ReportLinks | None = None, report: Report = unreported
) -> ValidateResult:
    """Compare the subscriber with the publisher at a fence LSN and write the report, with `links`.

    Raises:
        NotConsistent: if the subscriber could not be brought to the fence.
    """
    return _Run(config, subscription, links or ReportLinks(), report).validate()[0]


def validate_and_repair(
    config: Config,
    subscription: str,
    *,
    dry_run: bool = False,
    confirm: ConfirmRepair | None = None,
    links: ReportLinks | None = None,
    report: Report = unreported,
) -> ValidateResult:
    """Validate; if rows differ, write them as they are published, and validate again.

    With `dry_run` nothing is written, and the result has what would be.

    Raises:
        NotConsistent: if the subscriber could not be brought to the fence.
        NotConfirmed, ReconcileRefused: if rows are not to be deleted, or may not be; nothing is changed.
    """
    run = _Run(config, subscription, links or ReportLinks(), report)
    result, before = run.validate()
    if before.success:
        return result
    names = frozenset(table.name for table in before.tables if table.can_be_repaired)
    left = before.left_by_repair()
    if not names:
        return dataclasses.replace(result, not_repaired=left, dry_run=dry_run)
    with open_subscription(config, subscription, "repair", report=report) as session:
        request = refresh_request(config, subscription, reconcile=True, report=report)
        if dry_run or confirm is not None:
            planned = preview_repair(request, session, names)
            if dry_run:
                return dataclasses.replace(result, repaired=planned, not_repaired=left, dry_run=True)
            if confirm is not None and any(table.deleted for table in planned) and not confirm(planned):
                raise NotConfirmed(f'subscription "{subscription}" was not repaired: nothing was changed')
        repaired = repair_tables(request, session, names)
    again, _ = run.validate(Repair(before, repaired, left))
    return dataclasses.replace(
        again,
        seconds=time.monotonic() - run.began,
        repaired=repaired,
        not_repaired=left,
        first_report=before.report,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    config: Config
    subscription: str
    links: ReportLinks
    report: Report
    began: float = dataclasses.field(default_factory=time.monotonic)

    def validate(self, repair: Repair | None = None) -> tuple[ValidateResult, Verdict]:
        """One validation, recorded on the subscriber; its report shows the repair before it."""
        began, name = time.monotonic(), self.subscription
        configured = self.config.subscription(name)
        publisher, publications = configured.subscription.publisher, configured.subscription.publications
        source = capture_source(self.config, publisher, self.report)
        with contextlib.ExitStack() as stack:
            with open_subscription(self.config, name, "validate", report=self.report) as session:
                sides = open_at_fence(source, session, stack)
                earlier = history.last_validations(session.connection, name, EARLIER_SHOWN)
            # Both sides are fixed now: the lock is released, others may work on the subscription meanwhile.
            failpoint("validate.after_fence")
            verdict = validate_subscription(
                ValidationRequest(
                    name,
                    sides.fence,
                    sides.tables,
                    self.config.expectations,
                    ReportContext(publisher, publications, earlier, self.links, repair),
                    with_values=configured.reports_values,
                    report=self.report,
                )
            )
            failpoint("validate.after_report")
        result = to_result(verdict, sides.tables, sides.from_lsn, time.monotonic() - began)
        dsn = self.config.dsn_of(configured)
        with connect(dsn, purpose=f"validate {name}") as connection, connection.transaction():
            recorded_results.record_result(connection, name, "validate", result.to_dict())
            history.append_validation(connection, name, result.to_lsn, summarize(verdict))
        logger.info(
            "subscription %s: %s at %s, %d tables, %.2f s",
            name,
            "consistent" if verdict.success else "NOT consistent",
            verdict.lsn,
            len(verdict.tables),
            result.seconds,
        )
        return result, verdict
