"""`validate`: prove that the subscriber equals the publications at one LSN, under live writes."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Final

from cdc_replay.commands.opening import capture_source, open_subscription
from cdc_replay.config import Config
from cdc_replay.failpoints import failpoint
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import ValidateResult
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import history, recorded_results
from cdc_replay.validate.at_fence import open_at_fence
from cdc_replay.validate.report_context import ReportContext, ReportLinks
from cdc_replay.validate.result import summarize, to_result
from cdc_replay.validate.run import ValidationRequest, validate_subscription

logger = logging.getLogger(__name__)

EARLIER_SHOWN: Final = 60
"""Earlier validations in the report's trend."""


def validate(
    config: Config, subscription: str, *, links: ReportLinks | None = None, report: Report = unreported
) -> ValidateResult:
    """Compare the subscriber with the publisher at a fence LSN and write the report, with `links`.

    Raises:
        NotConsistent: if the subscriber could not be brought to the fence.
    """
    began = time.monotonic()
    configured = config.subscription(subscription).subscription
    source = capture_source(config, configured.publisher, report)
    with contextlib.ExitStack() as stack:
        with open_subscription(config, subscription, "validate", report=report) as session:
            sides = open_at_fence(source, session, stack)
            earlier = history.last_validations(session.connection, subscription, EARLIER_SHOWN)
        # Both sides are fixed now: the lock is released, and others may work on the subscription meanwhile.
        failpoint("validate.after_fence")
        verdict = validate_subscription(
            ValidationRequest(
                subscription,
                sides.fence,
                sides.tables,
                config.expectations,
                ReportContext(configured.publisher, configured.publications, earlier, links or ReportLinks()),
                with_values=config.subscription(subscription).reports_values,
                report=report,
            )
        )
        failpoint("validate.after_report")
    result = to_result(verdict, sides.tables, sides.from_lsn, time.monotonic() - began)
    dsn = config.dsn_of(config.subscription(subscription))
    with connect(dsn, purpose=f"validate {subscription}") as connection, connection.transaction():
        recorded_results.record_result(connection, subscription, "validate", result.to_dict())
        history.append_validation(connection, subscription, result.to_lsn, summarize(verdict))
    logger.info(
        "subscription %s: %s at %s, %d tables, %.2f s",
        subscription,
        "consistent" if verdict.success else "NOT consistent",
        verdict.lsn,
        len(verdict.tables),
        result.seconds,
    )
    return result
