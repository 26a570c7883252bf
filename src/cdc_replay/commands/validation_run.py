"""One validation of a subscription: open both sides, select, compare and judge, record what was seen."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.compare.comparison import ValidatedTable
from cdc_replay.config import Config
from cdc_replay.failpoints import failpoint
from cdc_replay.model.progress import Report
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ValidateResult
from cdc_replay.model.validation_scope import ValidationScope
from cdc_replay.opening import capture_source, open_subscription
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import history, proofs, recorded_results
from cdc_replay.validate.at_fence import open_at_fence
from cdc_replay.validate.report_context import Repair, ReportContext, ReportLinks
from cdc_replay.validate.result import summarize, tables_seen, to_result
from cdc_replay.validate.run import ValidationRequest, validate_subscription
from cdc_replay.validate.selection import Selection, select_tables
from cdc_replay.validate.verdict import Verdict

logger = logging.getLogger(__name__)

EARLIER_SHOWN: Final = 60
"""Earlier validations in the report's trends."""


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
                sides = open_at_fence(source, session, stack)
                selection = self._select(session.connection, sides.tables, before, at)
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
            verdict = validate_subscription(request)
            failpoint("validate.after_report")
        result = to_result(verdict, sides.tables, sides.from_lsn, time.monotonic() - began)
        self._record(result, verdict, [table.table.table.name for table in sides.tables])
        logger.info(
            "subscription %s: %s at %s, %d tables, %.2f s",
            *(name, verdict.outcome.value, verdict.lsn, len(verdict.tables), result.seconds),
        )
        return result, verdict, selection

    def _select(
        self,
        connection: Connection,
        tables: tuple[ValidatedTable, ...],
        before: Selection | None,
        now: dt.datetime,
    ) -> Selection:
        stored = proofs.read_proofs(connection, self.subscription)
        by_name = {entry.name: entry.proof for entry in stored}
        if before is not None:
            return before.again(tables, by_name)
        plan = self.config.subscription(self.subscription).validation
        selection = select_tables(tables, by_name, plan, self.scope, now)
        for unknown in selection.unknown:
            logger.warning(
                "subscription %s: validate.tables plans %s, which is no published table of it",
                *(self.subscription, unknown),
            )
        return selection

    def _record(self, result: ValidateResult, verdict: Verdict, published: Collection[QualifiedName]) -> None:
        name = self.subscription
        dsn = self.config.dsn_of(self.config.subscription(name))
        with connect(dsn, purpose=f"validate {name}") as connection, connection.transaction():
            recorded_results.record_result(connection, name, "validate", result.to_dict())
            history.append_validation(connection, name, result.to_lsn, summarize(verdict))
            proofs.record_proofs(
                connection,
                name,
                result.to_lsn,
                tables_seen(verdict),
                published=published,
                owed={left.name: left.owed for left in verdict.left_out if left.owed},
            )
