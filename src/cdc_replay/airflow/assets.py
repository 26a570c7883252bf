"""The assets that connect the DAGs, and the content of their events.

    commits of the publisher  ──▶  capture__<publisher>          (only if captures follow events)
    lag of the publisher  ──▶  watch__<publisher>                (likewise)
    capture__<publisher>  ──▶  change log of the publisher  ──▶  replay__<group>
    replay__<group>, if it follows  ──▶  change log of the publisher
    replay__<group>, snapshot__…, refresh__…, backfill__…  ──▶  subscription  ──▶  validate__<subscription>

An event's extra is `{"from_lsn": "16/B374D7F0", "to_lsn": "16/B374D848"}`: the window that the task added to
the log or applied. It is for display, and tells `capture` what is announced; the change log and the
subscriber are authoritative. From Airflow 3.3 on, the asset's state has the position as `to_lsn`, too. The
window is no partition key (`docs/decisions/0010-windows-are-no-partition-keys.md`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from airflow.sdk import Asset, AssetAlias, AssetWatcher, Context
from airflow.sdk.exceptions import AirflowRuntimeError

from cdc_replay.airflow.triggers import CommitTrigger, LagTrigger
from cdc_replay.errors import InvalidLsn
from cdc_replay.model.lsn import Lsn

logger = logging.getLogger(__name__)

FROM_LSN: Final = "from_lsn"
TO_LSN: Final = "to_lsn"


def commits(publisher: str, *, least_seconds: float = 1.0, greatest_seconds: float = 60.0) -> Asset:
    """What a publisher commits, with the watcher that a triggerer runs."""
    trigger = CommitTrigger(publisher, least_seconds, greatest_seconds)
    return Asset(
        name=f"commits of {publisher}",
        uri=f"cdc-replay://commits/{publisher}",
        watchers=[AssetWatcher(name=f"commits of {publisher}", trigger=trigger)],
    )


def lag(publisher: str, subscriptions: Sequence[str], poll_seconds: float) -> Asset:
    """Subscriptions that stay behind the change log, with the watcher that a triggerer runs."""
    trigger = LagTrigger(publisher, list(subscriptions), poll_seconds)
    return Asset(
        name=f"lag of {publisher}",
        uri=f"cdc-replay://lag/{publisher}",
        watchers=[AssetWatcher(name=f"lag of {publisher}", trigger=trigger)],
    )


def change_log(publisher: str) -> Asset:
    """The change log of a publisher."""
    return Asset(name=f"change log of {publisher}", uri=f"cdc-replay://change-log/{publisher}")


def followed_log(publisher: str) -> AssetAlias:
    """What a replay that follows the publisher captures: it stands for `change_log`, unless it is nothing."""
    return AssetAlias(name=f"change log of {publisher}, followed")


def subscription(name: str) -> Asset:
    """The tables of a subscription on its subscriber."""
    return Asset(name=f"subscription {name}", uri=f"cdc-replay://subscription/{name}")


def announce(context: Context, asset: Asset, lsn: Lsn, *, after: Lsn) -> None:
    """Set the extra of the event that `asset` gets when the task succeeds: the window `(after, lsn]`.

    The asset's state gets the position.
    """
    context["outlet_events"][asset].extra = {FROM_LSN: str(after), TO_LSN: str(lsn)}
    if (states := context.get("asset_state_store")) is None:  # before Airflow 3.3
        return
    try:
        states[asset].set(TO_LSN, str(lsn))
    except AirflowRuntimeError as error:  # the state is for display: what it says is durable elsewhere
        logger.warning("the state of asset %s was not set: %s", asset.name, error)


def announce_followed(context: Context, publisher: str, lsn: Lsn, *, after: Lsn) -> None:
    """Give `change_log` an event when the task succeeds, which has `followed_log` among its outlets."""
    event = context["outlet_events"][followed_log(publisher)]
    event.add(change_log(publisher), extra={FROM_LSN: str(after), TO_LSN: str(lsn)})


def announced_lsn(context: Context, asset: Asset) -> Lsn | None:
    """The position that the last event of `asset` announced; the task must have it among its inlets.

    None if there is no event, or if its extra is no position: events can be created by hand, with any extra.
    """
    for event in context["inlet_events"][asset].ascending(ascending=False).limit(1):
        with contextlib.suppress(InvalidLsn):
            return Lsn.parse(str((event.extra or {}).get(TO_LSN)))
    return None
