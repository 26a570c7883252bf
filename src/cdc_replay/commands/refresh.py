"""`refresh`: as ALTER SUBSCRIPTION … REFRESH PUBLICATION.

The publications are read again. New tables are copied, dropped ones are forgotten, rows that are already
there stay (R7.13, R9.12).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from cdc_replay.capture.setup import setup_publisher
from cdc_replay.commands.opened import Opened, opened
from cdc_replay.commands.replay import applied_lsn
from cdc_replay.commands.results import RefreshResult
from cdc_replay.commands.setup import setup_request
from cdc_replay.commands.snapshot import enter_tables, published_tables, remembered, snapshot_opened
from cdc_replay.config import Config
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.exported_snapshot import export_snapshot
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.subscriber import state


def refresh(config: Config, subscription: str) -> RefreshResult:
    """Bring the subscription's list of tables up to date and copy the new ones.

    With `copy_data: false` the new ones start as they are, with what is committed from now on. A parked
    subscription is replayed again.

    Raises:
        PublicationRefused, PublicationMissing, SubscriberNotReady: with nothing changed.
    """
    began = time.monotonic()
    publisher = config.publisher(config.subscription(subscription).subscription.publisher)
    with opened(config, subscription, "refresh") as at_work:
        with export_snapshot(config.dsn_of(publisher)) as exported:
            published = published_tables(at_work, exported).tables
        # The slot must carry the new tables' changes before their rows are copied, or what happens in between
        # would be in neither.
        setup_publisher(setup_request(config, publisher), dry_run=False)
        remembered(config, at_work)
        added, removed = _change_tables(at_work, published)
        # Also where no table is new: a refresh that was killed may have left some waiting.
        copied = snapshot_opened(config, at_work)
        # The table that stopped it may have left; otherwise the next replay parks it again.
        state.unpark(at_work.connection, subscription)
        return RefreshResult(
            subscription=subscription,
            from_lsn=applied_lsn(at_work),
            to_lsn=applied_lsn(at_work),
            seconds=time.monotonic() - began,
            added=tuple(map(str, added)),
            removed=tuple(map(str, removed)),
            snapshot=copied,
        )


def _change_tables(
    at_work: Opened, published: Mapping[QualifiedName, SyncedTable]
) -> tuple[tuple[QualifiedName, ...], tuple[QualifiedName, ...]]:
    states = at_work.table_states()
    name = at_work.subscription.name
    added = {table: each for table, each in published.items() if table not in states}
    removed = tuple(table for table in states if table not in published)
    enter_tables(at_work, added)
    for table in removed:
        state.forget_table(at_work.connection, name, table)
    return tuple(added), removed
