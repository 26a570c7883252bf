"""`why`: the history of one row, and what a subscription made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cdc_replay.config import Config
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.explain_row.run import WhyRequest, explain_row
from cdc_replay.model.explained_row import WhyResult
from cdc_replay.model.relation import QualifiedName
from cdc_replay.opening import configured_subscriptions

LAST_CHANGES: Final = 100
"""The number of changes that are explained by default."""


def why(
    config: Config,
    subscription: str,
    table: QualifiedName,
    key: Sequence[str],
    *,
    last: int = LAST_CHANGES,
    with_values: bool = False,
) -> WhyResult:
    """The history of the row of `table` with this key.

    Raises:
        InvalidConfiguration: if there is no such subscription or table, or the key is not one of the table.
        CdcReplayError: if the change log or the subscriber cannot be read.
    """
    if last < 1:
        raise InvalidConfiguration("the number of changes must be at least 1")
    configured = config.subscription(subscription)
    publisher = config.publisher(configured.subscription.publisher)
    request = WhyRequest(
        subscription=configured.subscription,
        configured=configured_subscriptions(config),
        publisher_dsn=config.dsn_of(publisher),
        subscriber_dsn=config.dsn_of(configured),
        change_log=publisher.change_log,
        table=table,
        key=tuple(key),
        last=last,
        with_values=with_values,
    )
    return explain_row(request)
