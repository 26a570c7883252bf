"""Our Expectations for a Great Expectations project of your own.

    from cdc_replay import expectations as cdc

Importing this module registers the Expectations, so that a suite that was saved as JSON can be loaded. They
judge a data frame, the comparison of a subscription's tables with their publisher at one WAL position under
live writes, which `read_comparison` makes; they are in `docs/how-to/own-suite.md`.

A suite has the names of tables, and the results have counts and keys of rows that differ. Connections are in
neither: they are resolved when the comparison is made.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cdc_replay.compare.comparison import compare_table
from cdc_replay.config import Config, load_config
from cdc_replay.model.relation import QualifiedName
from cdc_replay.opening import capture_source, configured_subscriptions, open_subscription
from cdc_replay.postgres.environment_connection import connection_from_environment
from cdc_replay.validate.at_fence import open_at_fence
from cdc_replay.validate.expectations import (
    ExpectContentToEqualPublisher,
    ExpectKeysToBeUnique,
    ExpectRowCountToEqualPublisher,
    ExpectRowsToSatisfyRowFilter,
)
from cdc_replay.validate.gx import exception_message
from cdc_replay.validate.suites import ObservedTable, comparison_frame

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ExpectContentToEqualPublisher",
    "ExpectKeysToBeUnique",
    "ExpectRowCountToEqualPublisher",
    "ExpectRowsToSatisfyRowFilter",
    "error_of",
    "read_comparison",
    "relation",
]

LISTED_KEYS = 20
"""Most keys of each kind of difference in a comparison."""


class _ConfigProvider(Protocol):
    def get_values(self) -> dict[str, Any]: ...


class DataContext(Protocol):
    """The part of a Data Context of Great Expectations that is used here."""

    @property
    def config_provider(self) -> _ConfigProvider:
        """Its config variables."""


class Judged(Protocol):
    """The part of a result of Great Expectations that is used here."""

    @property
    def exception_info(self) -> Mapping[str, Any]:
        """Whether and why an Expectation raised."""


def read_comparison(
    subscription: str, *, config: str | Path | None = None, context: DataContext | None = None
) -> pd.DataFrame:
    """Compare the tables of a subscription with its publisher, as `cdc-replay validate` does.

    The publisher's changes are captured and replayed up to the position of the comparison first.

    Args:
        subscription: its name in the configuration.
        config: the configuration file; by default that of `CDC_REPLAY_CONFIG`.
        context: a Data Context, whose config variables have the DSN of each `conn_id`; by default, and for
            those that it does not have, they are in the environment as `AIRFLOW_CONN_<ID>`.

    Returns:
        The frame that the Expectations judge. A table that could not be compared has its error in it, so that
        its Expectations raise.

    Raises:
        InvalidConfiguration: if there is no such subscription or connection.
        NotConsistent: if the subscriber could not be brought to one position.
    """
    loaded = load_config(config, connections=lambda conn_id: _dsn(conn_id, context))
    with contextlib.ExitStack() as stack:
        return comparison_frame(_observe(loaded, subscription, stack), (), dt.datetime.now(dt.UTC))


def _observe(config: Config, subscription: str, stack: contextlib.ExitStack) -> tuple[ObservedTable, ...]:
    source = capture_source(config, config.subscription(subscription).subscription.publisher)
    with open_subscription(config, subscription, "validate") as session:
        sides = open_at_fence(source, session, configured_subscriptions(config), stack)
    return tuple(
        ObservedTable(table, compare_table(sides.fence, table, LISTED_KEYS)) for table in sides.tables
    )


def _dsn(conn_id: str, context: DataContext | None) -> str:
    values = {} if context is None else context.config_provider.get_values()
    dsn = values.get(conn_id)
    return str(dsn) if dsn else connection_from_environment(conn_id)


def relation(schema: str, table: str) -> str:
    """The name of a table for the argument `relation`, with characters of HTML as entities.

    Great Expectations copies names into its pages as they are.
    """
    return html.escape(str(QualifiedName(schema, table)))


def error_of(result: Judged) -> str | None:
    """Why an Expectation could not be judged; None if it was.

    Its `success` is False either way: an error is no difference.
    """
    return exception_message(result.exception_info)
