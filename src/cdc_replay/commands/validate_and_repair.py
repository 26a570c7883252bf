"""`validate --repair`: write the rows that differ as they are published, and make the proof again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TypeAlias

from cdc_replay.commands.validate import ValidationRun
from cdc_replay.compare.buckets import Buckets
from cdc_replay.config import Config
from cdc_replay.errors import NotConfirmed
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.proof import BUCKET_BITS
from cdc_replay.model.results import TableReconciled, ValidateResult
from cdc_replay.model.validation_scope import ValidationScope
from cdc_replay.opening import open_subscription, refresh_request
from cdc_replay.snapshot.refresh import preview_repair, repair_tables
from cdc_replay.validate.report_context import Repair, ReportLinks
from cdc_replay.validate.verdict import TableVerdict

ConfirmRepair: TypeAlias = Callable[[tuple[TableReconciled, ...]], bool]
"""Called before rows are deleted, with what would be written."""


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
    run = ValidationRun(config, subscription, scope or ValidationScope(), links or ReportLinks(), report)
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
