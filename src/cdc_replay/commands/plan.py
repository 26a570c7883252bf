"""`plan`: what a proposed CREATE, ALTER or DROP PUBLICATION would do to a subscription."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Final

from cdc_replay.config import Config
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.proposed_change import PlanResult
from cdc_replay.model.timestamp import check_zone
from cdc_replay.proposal.run import PlanOptions, PlanRequest, plan_proposal

LONGEST_SCRIPT: Final = 1 << 20
"""Bytes."""

DEFAULT: Final = PlanOptions()


def plan(
    config: Config,
    subscription: str,
    script: str,
    options: PlanOptions = DEFAULT,
    *,
    report: Report = unreported,
) -> PlanResult:
    """The effects of the statements in `script` on the subscription; nothing is executed for good.

    Raises:
        StatementNotAllowed: if the script has anything else.
        InvalidConfiguration: if there is no such subscription, or `since` is not in the log.
        CdcReplayError: as `plan_proposal`.
    """
    check_zone(options.since)
    configured = config.subscription(subscription)
    publisher = config.publisher(configured.subscription.publisher)
    request = PlanRequest(
        subscription=configured.subscription,
        publisher_dsn=config.dsn_of(publisher),
        change_log=publisher.change_log,
        script=script,
        options=options,
        report=report,
    )
    return plan_proposal(request)


def read_script(path: Path) -> str:
    """The text of a script; `-` is standard input.

    Raises:
        InvalidConfiguration: if it cannot be read, is no UTF-8, or is longer than `LONGEST_SCRIPT`.
    """
    try:
        # Standard input stays open: the next command of a batch may want it, too.
        with contextlib.nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
            content = file.read(LONGEST_SCRIPT + 1)
    except OSError as error:
        raise InvalidConfiguration(f'cannot read "{path}": {error.strerror}') from error
    if len(content) > LONGEST_SCRIPT:
        raise InvalidConfiguration(f'"{path}" has more than {LONGEST_SCRIPT} bytes')
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidConfiguration(f'"{path}" is not a text in UTF-8: {error.reason}') from error
