"""`refresh`: as ALTER SUBSCRIPTION … REFRESH PUBLICATION, and more with `--reconcile`."""

from __future__ import annotations

from cdc_replay.commands.opening import capture_source, open_subscription, setup_request, snapshot_options
from cdc_replay.config import Config
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import RefreshResult
from cdc_replay.snapshot.refresh import Confirm, RefreshRequest, preview_refresh, refresh_subscription


def refresh(
    config: Config,
    subscription: str,
    *,
    reconcile: bool = False,
    dry_run: bool = False,
    confirm: Confirm | None = None,
    report: Report = unreported,
) -> RefreshResult:
    """Bring the subscription's list of tables up to date and copy the new ones.

    With `dry_run` nothing is changed.

    Raises:
        CdcReplayError: as `refresh_subscription`.
    """
    publisher = config.subscription(subscription).subscription.publisher
    request = RefreshRequest(
        source=capture_source(config, publisher, report),
        setup=setup_request(config, publisher),
        configured={name: configured.subscription for name, configured in config.subscriptions.items()},
        options=snapshot_options(config, subscription),
        reconcile=reconcile,
    )
    writes = not dry_run
    with open_subscription(
        config, subscription, "refresh", writes=writes, installs=writes, report=report
    ) as session:
        if dry_run:
            return preview_refresh(request, session)
        return refresh_subscription(request, session, confirm)
