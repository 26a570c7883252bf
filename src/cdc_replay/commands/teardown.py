"""`teardown`: remove what `setup` and `snapshot` created, nothing else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from cdc_replay.capture.setup import teardown_publisher
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError, InvalidConfiguration
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import TeardownResult
from cdc_replay.model.suggestion import did_you_mean
from cdc_replay.opening import open_subscription, setup_request
from cdc_replay.replay.apply.stage_table import drop_staging
from cdc_replay.snapshot.staging import drop_leftovers
from cdc_replay.subscriber import state_schema, subscription_records
from cdc_replay.subscriber.session import snapshot_lock


def teardown(config: Config, name: str, *, confirm: Callable[[str], None] | None = None) -> TeardownResult:
    """Remove a subscription's state, or a publisher's slot and capture publications.

    The rows of the subscriber's tables and the change log, which may be the only copy, remain. `confirm` is
    called before anything is removed, with what goes and what follows; its exception ends the command.

    Raises:
        InvalidConfiguration: if nothing has that name, or a publisher and a subscription share it.
        SubscriptionInUse: if another process works on the subscription, or copies its tables.
    """
    began = time.monotonic()
    lsn: Lsn | None = None
    is_publisher, is_subscription = name in config.publishers, name in config.subscriptions
    if is_publisher and is_subscription:
        raise InvalidConfiguration(f'"{name}" is a publisher and a subscription', hint="Rename one of them.")
    if not is_publisher and not is_subscription:
        known = (*config.publishers, *config.subscriptions)
        raise InvalidConfiguration(
            f'no publisher and no subscription is named "{name}"',
            detail=f"{config.path} has: {', '.join(known)}.",
            hint=did_you_mean(name, known),
        )
    if confirm is not None:
        confirm(_consequence(config, name))
    if is_publisher:
        with contextlib.suppress(CdcReplayError):
            lsn = ChangeLog.open(config.publisher(name).change_log).end_lsn
        removed = teardown_publisher(setup_request(config, name))
    else:
        lsn, removed = _remove_subscription(config, name)
    return TeardownResult(
        publisher=name if is_publisher else None,
        subscription=name if is_subscription else None,
        from_lsn=lsn,
        to_lsn=lsn,
        seconds=time.monotonic() - began,
        removed=removed,
    )


def _remove_subscription(config: Config, name: str) -> tuple[Lsn | None, tuple[str, ...]]:
    """Where the subscription was, and what of it is gone now; a database without our schema gets none."""
    with open_subscription(config, name, "teardown", installs=False) as session:
        state_schema.upgrade(session.connection)
        if not state_schema.is_installed(session.connection):
            return None, ()
        # A copy that runs meanwhile would go on to stage its chunks, and nobody would remove them.
        with snapshot_lock(session):
            is_known = subscription_records.subscription_record(session.connection, name) is not None
            lsn = session.position()
            # No other command would remove the staging of a killed run.
            drop_staging(session.connection, name)
            drop_leftovers(session.connection, name)
            failpoint("teardown.after_staging")
            subscription_records.remove_subscription(session.connection, name)
    return lsn, (f"state of subscription {name}",) if is_known else ()


def _consequence(config: Config, name: str) -> str:
    """What a teardown removes, and what that means."""
    if name in config.subscriptions:
        return (
            f"This removes the state of subscription {name}. Its tables keep their rows and get no more"
            " changes; to use it again, their rows have to be copied again."
        )
    copied_again = ", ".join(subscription.name for subscription in config.subscriptions_of(name)) or "none"
    return (
        f'This drops replication slot "{config.publisher(name).slot}" of publisher {name}, its capture'
        " publications and its event triggers. Changes from now on are not captured; after another setup,"
        f" every table of its subscriptions ({copied_again}) has to be copied again."
    )
