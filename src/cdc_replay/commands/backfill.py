"""`backfill`: replay a past range of the log again.

| into             | the range is                       | and ends with                                             |
|------------------|------------------------------------|-----------------------------------------------------------|
| the subscriber   | repaired: every row that it        | those rows as of the subscriber's applied LSN: a row is   |
|                  | touches is applied again           | never taken back in time                                  |
| another database | applied as it was                  | the state at the end of the range, if the tables held     |
|                  |                                    | the state at its start; empty tables get the range's rows |

A row that is already there is overwritten and counted as a conflict; a whole row that is missing is inserted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc_replay.apply.window import Applied, ApplyRequest, apply_window
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.opened import Opened, opened
from cdc_replay.commands.replay import catalog_history, decode_window, replay_opened
from cdc_replay.commands.results import BackfillResult
from cdc_replay.commands.spark_errors import translated_spark_errors
from cdc_replay.compact import Survey, net_changes, survey, upserted
from cdc_replay.config import Config
from cdc_replay.errors import InvalidConfiguration, InvalidLsn, SubscriberNotReady
from cdc_replay.model.change import NetKind
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.subscription import ConflictPolicy, Subscription
from cdc_replay.postgres.connection import connect
from cdc_replay.route.router import Routed, route
from cdc_replay.route.routes import Routes, Target, plan_routes
from cdc_replay.spark_session import spark_session
from cdc_replay.subscriber import state
from cdc_replay.subscriber.tables import read_target_tables


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where the range goes: `subscription` is the name under which its progress is kept meanwhile."""

    subscription: Subscription
    dsn: str
    tables: tuple[Opened, Window]


def backfill(
    config: Config,
    subscription: str,
    from_: str,
    to: str,
    *,
    into: str | None = None,
    dry_run: bool = False,
) -> BackfillResult:
    """Apply the transactions in `(from_, to]`, WAL positions or timestamps, again; with `dry_run` only count.

    Args:
        config: the configuration.
        subscription: whose publications the range is seen through.
        from_: the range's start; a timestamp stands for the last transaction committed until then.
        to: the range's end, likewise.
        into: DSN of another database; default: the subscriber.
        dry_run: read and compact the range, write nothing.

    Raises:
        InvalidConfiguration: if the range is empty, or not in the log.
    """
    began = time.monotonic()
    publisher = config.publisher(config.subscription(subscription).subscription.publisher)
    change_log = ChangeLog.open(publisher.change_log)
    window = range_of(change_log, from_, to)
    with opened(config, subscription, "backfill") as at_work:
        reach = window if into is not None else _until_applied(config, at_work, window)
        with _destination(at_work, change_log, into) as (name, dsn):
            routes = _routes(change_log, at_work, reach, dsn)
            with translated_spark_errors(f'backfill of subscription "{subscription}"'):
                routed, applied = _apply(
                    change_log, routes, dataclasses.replace(at_work.subscription, name=name), dsn, window, reach
                )
    return BackfillResult()
