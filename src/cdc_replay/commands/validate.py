"""`validate`: prove that the subscriber holds what the publications say, at one LSN, under live writes.

A snapshot of the publisher is exported; its consistent point is the fence. The log is captured and replayed
up to exactly that point while the subscription's lock is held, then both sides are compared. Others may go on
with the subscription until the snapshot is there; if they pass it, it is exported again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cdc_replay.commands.opening import capture_source, open_subscription
from cdc_replay.compare.comparison import ValidatedTable
from cdc_replay.config import Config
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import Json, Result
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import recorded_results
from cdc_replay.validate.at_fence import open_at_fence
from cdc_replay.validate.run import ValidationRequest, validate_subscription
from cdc_replay.validate.verdict import TableVerdict, Verdict

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ValidateResult(Result):
    """The verdict of one validation; `error` is set where the subscriber is not consistent."""

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    success: bool
    tables: tuple[Mapping[str, Json], ...]
    report: Path
    data_docs: Path
    error: str | None


def validate(config: Config, subscription: str) -> ValidateResult:
    """Compare the subscriber with the publisher at a fence LSN and write the report.

    Raises:
        NotConsistent: if the subscriber could not be brought to the fence.
    """
    began = time.monotonic()
    source = capture_source(config, config.subscription(subscription).subscription.publisher)
    with contextlib.ExitStack() as stack:
        with open_subscription(config, subscription, "validate") as session:
            opened = open_at_fence(source, session, stack)
        request = ValidationRequest(subscription, opened.fence, opened.tables, config.expectations)
        # Both sides are fixed now: others may go on with the subscription while it is compared.
        failpoint("validate.after_fence")
        verdict = validate_subscription(request)
        failpoint("validate.after_report")
    result = _result(verdict, request.tables, opened.from_lsn, began)
    dsn = config.dsn_of(config.subscription(subscription))
    with connect(dsn, purpose=f"validate {subscription}") as connection:
        recorded_results.record_result(connection, subscription, "validate", result.to_dict())
    logger.info(
        "subscription %s: %s at %s, %d tables, %.2f s",
        subscription,
        "consistent" if verdict.success else "NOT consistent",
        verdict.lsn,
        len(verdict.tables),
        result.seconds,
    )
    return result


def _result(
    verdict: Verdict, tables: Sequence[ValidatedTable], from_lsn: Lsn, began: float
) -> ValidateResult:
    failed = {each.name for each in verdict.tables if not each.success}
    failures = (
        *verdict.describe_failures(),
        *(
            f"{each.table.table.name}: {each.notice}"
            for each in tables
            if each.notice and each.table.table.name in failed
        ),
    )
    return ValidateResult(
        subscription=verdict.subscription,
        from_lsn=from_lsn,
        to_lsn=verdict.lsn,
        seconds=time.monotonic() - began,
        success=verdict.success,
        tables=tuple(_table(each) for each in verdict.tables),
        report=verdict.report,
        data_docs=verdict.data_docs,
        error=None if verdict.success else "\n".join(failures) or "not consistent",
    )


def _table(verdict: TableVerdict) -> dict[str, Json]:
    return {
        "table": str(verdict.name),
        "success": verdict.success,
        "publisher_rows": verdict.publisher_rows,
        "subscriber_rows": verdict.subscriber_rows,
        "differences": {kind.value: count for kind, count in verdict.counts},
        "notes": list(verdict.notes),
    }
