"""`plan`: what a proposed CREATE, ALTER or DROP PUBLICATION would do to a subscription."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from cdc_replay.config import Config
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.proposed_change import PlanResult
from cdc_replay.model.timestamp import check_zone
from cdc_replay.proposal.run import PlanRequest, plan_proposal

LONGEST_SCRIPT: Final = 1 << 20
"""Bytes."""


def plan(
    config: Config,
    subscription: str,
    script: str,
    *,
    since: str | None = None,
    throwaway: bool = False,
    report: Report = unreported,
) -> PlanResult:
    """The effects of the statements in `script`, of which nothing is executed for good.

    Args:
        config: the configuration.
        subscription: the subscription whose tables, rows and changes are counted.
        script: CREATE, ALTER and DROP PUBLICATION statements.
        since: WAL position or timestamp from which the log's changes are counted; default: its last 24 hours.
        throwaway: let a throw-away server parse the script, also if the publisher could.
        report: called while it runs.

    Raises:
        StatementNotAllowed: if the script has anything else.
        InvalidConfiguration: if there is no such subscription, or `since` is not in the log.
        CdcReplayError: as `plan_proposal`.
    """
    configured = config.subscription(subscription)
    publisher = config.publisher(configured.subscription.publisher)
    request = PlanRequest(
        subscription=configured.subscription,
        publisher_dsn=config.dsn_of(publisher),
        change_log=publisher.change_log,
        script=script,
        since=check_zone(since),
        throwaway=throwaway,
        report=report,
    )
    return plan_proposal(request)


def read_script(path: Path) -> str:
    """The text of a script; `-` is standard input.

    Raises:
        InvalidConfiguration: if it cannot be read, is no UTF-8, or is longer than `LONGEST_SCRIPT`.
    """
    try:
        with sys.stdin.buffer if str(path) == "-" else path.open("rb") as file:
            content = file.read(LONGEST_SCRIPT + 1)
    except OSError as error:
        raise InvalidConfiguration(f'cannot read "{path}": {error.strerror}') from error
    if len(content) > LONGEST_SCRIPT:
        raise InvalidConfiguration(f'"{path}" has more than {LONGEST_SCRIPT} bytes')
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidConfiguration(f'"{path}" is not a text in UTF-8: {error.reason}') from error
