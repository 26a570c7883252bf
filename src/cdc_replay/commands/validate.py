"""`validate`: prove that the subscriber equals the publications at one LSN, under live writes.

A run may compare a part: some tables, a sample of their rows, what is due, or what a budget allows. Only that
part gets a new proof. With a repair, the rows that differ are written as they are published, and the proof is
made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from cdc_replay.compare.buckets import Buckets
from cdc_replay.compare.comparison import ValidatedTable
from cdc_replay.config import Config
from cdc_replay.errors import NotConfirmed
from cdc_replay.failpoints import failpoint
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.proof import BUCKET_BITS
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import TableReconciled, ValidateResult
from cdc_replay.model.validation_scope import ValidationScope
from cdc_replay.opening import capture_source, open_subscription, refresh_request
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.snapshot.refresh import preview_repair, repair_tables
from cdc_replay.subscriber import history, proofs, recorded_results
from cdc_replay.validate.at_fence import open_at_fence
from cdc_replay.validate.report_context import Repair, ReportContext, ReportLinks
from cdc_replay.validate.result import summarize, tables_seen, to_result
from cdc_replay.validate.run import ValidationRequest, validate_subscription
from cdc_replay.validate.selection import Selection, select_tables
from cdc_replay.validate.verdict import TableVerdict, Verdict

logger = logging.getLogger(__name__)

EARLIER_SHOWN: Final = 60
"""Earlier validations in the report's trends."""

ConfirmRepair: TypeAlias = Callable[[tuple[TableReconciled, ...]], bool]
"""Called before rows are deleted, with what would be written."""


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
    return _ValidationRun(
        config, subscription, scope or ValidationScope(), links or ReportLinks(), report
    ).validate()[0]


def validate_and_repair(  # noqa: PLR0913 - the options of the command
    config: Config,
    subscription: str,
    *,
    scope: ValidationScope | None = None,
    dry_run: bool = False,
    confirm: ConfirmRepair | None = None,
    links: ReportLinks | None = None,
    report: Report = unreported,
) -> ValidateResult:
    """Validate; if rows differ, write them as they are published, and validate again.

    Only rows that were compared are written, and these are compared again. With `dry_run` nothing is written,
    and the result has what would be.

    Raises:
        NotConsistent: if the subscriber could not be brought to the fence.
        NotConfirmed, ReconcileRefused: if rows are not to be deleted, or may not be; nothing is changed.
    """
    run = _ValidationRun(config, subscription, scope or ValidationScope(), links or ReportLinks(), report)
    result, before, selection = run.validate()
    if before.success:
        return result
    tables = {table.name: _repaired_buckets(table) for table in before.tables if table.can_be_repaired}
    left = before.left_by_repair()
    if not tables:
        return dataclasses.replace(result, not_repaired=left, dry_run=dry_run)
    with open_subscription(config, subscription, "repair", report=report) as session:
        request = refresh_request(config, subscription, reconcile=True, report=report)
        if dry_run or confirm is not None:
            planned = preview_repair(request, session, tables)
            if dry_run:
                return dataclasses.replace(result, repaired=planned, not_repaired=left, dry_run=True)
            if confirm is not None and any(table.deleted for table in planned) and not confirm(planned):
                raise NotConfirmed(f'subscription "{subscription}" was not repaired: nothing was changed')
        repaired = repair_tables(request, session, tables)
    again, _, _ = run.validate(Repair(before, repaired, left), selection)
    return dataclasses.replace(
        again,
        seconds=time.monotonic() - run.began,
        repaired=repaired,
        not_repaired=left,
        first_report=before.report,
    )


def _repaired_buckets(table: TableVerdict) -> Buckets | None:
    """The buckets that were compared; None: all of them."""
    if not table.is_partial or table.evidence is None:
        return None
    return Buckets(BUCKET_BITS, tuple(sorted(table.evidence.compared)))


@dataclass(frozen=True, slots=True)
class _ValidationRun:
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
