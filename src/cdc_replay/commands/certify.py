"""`certify`: prove a subscription by a native one beside it, on a throw-away server."""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc_replay.capture.slot_continuity import reachable_lsn
from cdc_replay.certify.run import CertifyRequest, certify_subscription
from cdc_replay.commands.sync import sync
from cdc_replay.config import Config
from cdc_replay.errors import InvalidConfiguration, ReplayFailed, Retry, ServerUnavailable
from cdc_replay.model.certificate import CertifyResult
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.progress import Report, unreported
from cdc_replay.opening import capture_source, configured_subscriptions, open_subscription
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import recorded_results
from cdc_replay.validate.report_context import reports_folder

logger = logging.getLogger(__name__)

DEFAULT_TIME: Final = dt.timedelta(minutes=1)
"""How long both follow the publisher if nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class CertifyOptions:
    """How long both follow, and where the programs of the throw-away server are."""

    time: dt.timedelta | None = None
    transactions: int | None = None
    bin_folder: Path | None = None


def certify(
    config: Config,
    subscription: str,
    options: CertifyOptions = CertifyOptions(),
    *,
    stop: threading.Event | None = None,
    report: Report = unreported,
) -> CertifyResult:
    """Certify a subscription; once `stop` is set, what was followed by then is compared.

    Raises:
        InvalidConfiguration: if there is no such subscription.
        CdcReplayError: as `certify_subscription`.
    """
    if options.transactions is not None and options.transactions < 1:
        raise InvalidConfiguration("the number of transactions must be at least 1")
    configured = config.subscription(subscription)
    source = capture_source(config, configured.subscription.publisher)
    if options.time is None and options.transactions is None:
        options = dataclasses.replace(options, time=DEFAULT_TIME)
    request = CertifyRequest(
        subscription=configured.subscription,
        configured=configured_subscriptions(config),
        source=source,
        open_session=lambda: open_subscription(config, subscription, "certify"),
        advance=_Advance(config, subscription, source.dsn),
        report_folder=reports_folder(config.expectations, subscription),
        seconds=None if options.time is None else options.time.total_seconds(),
        transactions=options.transactions,
        bin_folder=options.bin_folder,
        stop=stop or threading.Event(),
        report=report,
    )
    result = certify_subscription(request)
    dsn = config.dsn_of(configured)
    with connect(dsn, purpose=f"certify {subscription}") as connection, connection.transaction():
        recorded_results.record_result(connection, subscription, "certify", result.to_dict())
    logger.info(
        "subscription %s beside a native one: %s at %s, %d tables, %d transactions, %.1f s",
        *(subscription, "certified" if result.success else "NOT certified", result.to_lsn),
        *(len(result.tables), result.transactions, result.seconds),
    )
    return result


@dataclass(slots=True)
class _Advance:
    """Syncs the subscription if the publisher has written WAL since the last time."""

    config: Config
    subscription: str
    publisher_dsn: str
    synced_to: Lsn = ZERO

    def __call__(self) -> None:
        """Raise what a sync raises, and the error of its replay."""
        with connect(self.publisher_dsn, purpose=f"certify {self.subscription}") as publisher:
            position = reachable_lsn(publisher, None)
        if position <= self.synced_to:
            return
        (result,) = sync(self.config, [self.subscription], to_lsn=position)
        if result.replay.error is None:
            self.synced_to = position
        elif result.replay.retry is Retry.NEVER:
            raise ReplayFailed(
                f'subscription "{self.subscription}" cannot be certified: its replay fails',
                detail=result.replay.error,
            )
        else:
            raise ServerUnavailable(f'replay of subscription "{self.subscription}": {result.replay.error}')
