"""`validate`: prove that the subscriber equals the publications at one LSN, under live writes.

A run may compare a part: some tables, a sample of their rows, what is due, or what a budget allows. Only that
part gets a new proof.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import time
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.config import Config
from cdc_replay.failpoints import failpoint
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import ValidateResult
from cdc_replay.model.validation_scope import ValidationScope
from cdc_replay.opening import capture_source, configured_subscriptions, open_subscription
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import history, proofs
from cdc_replay.validate.at_fence import open_at_fence
from cdc_replay.validate.records import record_validation, select_again, select_by_proofs
from cdc_replay.validate.report_context import Repair, ReportContext, ReportLinks
from cdc_replay.validate.result import to_result
from cdc_replay.validate.run import ValidationRequest, judge_subscription, observe_subscription
from cdc_replay.validate.selection import Selection
from cdc_replay.validate.verdict import Verdict

logger = logging.getLogger(__name__)

EARLIER_SHOWN: Final = 60
"""Earlier validations in the report's trends."""


def validate(
    config: Config,
    subscription: str,
    *,
    scope: ValidationScope | None = None,
    links: ReportLinks | None = None,
    report: Report = unreported,
) -> ValidateResult:
    """Compare the subscriber with the publisher at a fence LSN and write the report, with `links`.

    A `scope` limits what is compared; without one, all tables are.

    Raises:
        NotConsistent: if the subscriber could not be brought to the fence.
        InvalidConfiguration: if the scope names a table that is not in the subscription.
    """
    return ValidationRun(
        config, subscription, scope or ValidationScope(), links or ReportLinks(), report
    ).validate()[0]


@dataclass(frozen=True, slots=True)
class ValidationRun:
    """A run of `validate`: once, or once more after a repair."""

    config: Config
    subscription: str
    scope: ValidationScope
    links: ReportLinks
    report: Report
    began: float = field(default_factory=time.monotonic)

    def validate(
        self, repair: Repair | None = None, before: Selection | None = None
    ) -> tuple[ValidateResult, Verdict, Selection]:
        """One validation, recorded on the subscriber; its report shows the repair before it.

        What was selected `before` is compared again.
        """
        began, name = time.monotonic(), self.subscription
        configured = self.config.subscription(name)
        publisher, publications = configured.subscription.publisher, configured.subscription.publications
        source = capture_source(self.config, publisher, self.report)
        with contextlib.ExitStack() as stack:
            with open_subscription(self.config, name, "validate", report=self.report) as session:
                at = dt.datetime.now(dt.UTC)
                sides = open_at_fence(source, session, configured_subscriptions(self.config), stack)
                if before is not None:
                    selection = select_again(session.connection, name, sides.tables, before)
                else:
                    selection = select_by_proofs(
                        session.connection, name, sides.tables, configured.validation, self.scope, at
                    )
                context = ReportContext(
                    publisher,
                    publications,
                    history.last_validations(session.connection, name, EARLIER_SHOWN),
                    self.links,
                    repair,
                    proofs.table_history(session.connection, name, EARLIER_SHOWN),
                    selection.unknown,
                )
            # Both sides are fixed now: the lock is released, others may work on the subscription meanwhile.
            failpoint("validate.after_fence")
            request = ValidationRequest(
                name,
                sides.fence,
                selection,
                self.config.expectations,
                context,
                with_values=configured.reports_values,
                report=self.report,
                at=at,
            )
            observed = observe_subscription(request)
        # The snapshots are closed: results and pages of all subscriptions wait for one lock.
        verdict = judge_subscription(request, observed)
        failpoint("validate.after_report")
        result = to_result(verdict, sides.tables, sides.from_lsn, time.monotonic() - began)
        published = [table.table.table.name for table in sides.tables]
        with connect(self.config.dsn_of(configured), purpose=f"validate {name}") as connection:
            record_validation(connection, result, verdict, published)
        logger.info(
            "subscription %s: %s at %s, %d tables, %.2f s",
            *(name, verdict.outcome.value, verdict.lsn, len(verdict.tables), result.seconds),
        )
        return result, verdict, selection
