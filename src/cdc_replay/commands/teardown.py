"""`teardown`: remove what `setup` and `snapshot` created, nothing else."""

from __future__ import annotations

import contextlib
import time

from cdc_replay.capture.setup import teardown_publisher
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.opening import open_subscription, setup_request
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError, InvalidConfiguration
from cdc_replay.failpoints import failpoint
from cdc_replay.model.results import TeardownResult
from cdc_replay.replay.apply.stage_table import drop_staging
from cdc_replay.snapshot.staging import drop_leftovers
from cdc_replay.subscriber import subscription_records


def teardown(config: Config, name: str) -> TeardownResult:
    """Remove a subscription's state, or a publisher's slot and capture publications.

    The rows of the subscriber's tables and the change log, which may be the only copy, remain.

    Raises:
        InvalidConfiguration: if nothing has that name, or a publisher and a subscription share it.
    """
    began, lsn = time.monotonic(), None
    is_publisher, is_subscription = name in config.publishers, name in config.subscriptions
    if is_publisher and is_subscription:
        raise InvalidConfiguration(f'"{name}" is a publisher and a subscription', hint="Rename one of them.")
    if is_publisher:
        with contextlib.suppress(CdcReplayError):
            lsn = ChangeLog.open(config.publisher(name).change_log).end_lsn
        removed = teardown_publisher(setup_request(config, name))
    elif is_subscription:
        with open_subscription(config, name, "teardown") as session:
            is_known = subscription_records.subscription_record(session.connection, name) is not None
            lsn = session.position()
            # No other command would remove the staging of a killed run.
            drop_staging(session.connection, name)
            drop_leftovers(session.connection, name)
            failpoint("teardown.after_staging")
            subscription_records.remove_subscription(session.connection, name)
        removed = (f"state of subscription {name}",) if is_known else ()
    else:
        raise InvalidConfiguration(f'no publisher and no subscription is named "{name}"')
    return TeardownResult(
        publisher=name if is_publisher else None,
        subscription=name if is_subscription else None,
        from_lsn=lsn,
        to_lsn=lsn,
        seconds=time.monotonic() - began,
        removed=removed,
    )
