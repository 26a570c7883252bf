"""`refresh`: as ALTER SUBSCRIPTION … REFRESH PUBLICATION, and more with `--reconcile`."""

from __future__ import annotations

from cdc_replay.config import Config
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import RefreshResult
from cdc_replay.opening import open_subscription, refresh_request
from cdc_replay.snapshot.refresh import Confirm, preview_refresh, refresh_subscription


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
    request = refresh_request(config, subscription, reconcile=reconcile, report=report)
    writes = not dry_run
    with open_subscription(
        config, subscription, "refresh", writes=writes, installs=writes, report=report
    ) as session:
        if dry_run:
            return preview_refresh(request, session)
        return refresh_subscription(request, session, confirm)
