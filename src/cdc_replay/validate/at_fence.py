"""Both sides of a subscription at one LSN, and how each of its tables is judged there.

The consistent point of an exported snapshot of the publisher is the fence. The log is captured and replayed
up to exactly that point under the subscription's lock. Other processes may use the subscription until the
snapshot is exported; if they replay past it, it is exported again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from cdc_replay.capture.capture_to import ensure_captured
from cdc_replay.capture.pull import CaptureSource
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.compare.comparison import ValidatedTable
from cdc_replay.compare.fence import ComparisonFence, open_fence
from cdc_replay.compare.other_feeds import LogState, identified_rows_of_other_feeds
from cdc_replay.errors import NotConsistent
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.postgres.exported_snapshot import import_snapshot
from cdc_replay.publication.resolve import synced_tables, why_not_mirrored
from cdc_replay.replay.definition_drift import definition_drifts
from cdc_replay.replay.engine import replay_sessions
from cdc_replay.replay.log_view import LogView
from cdc_replay.replay.table_notice import join_notices
from cdc_replay.replay.table_rewrites import rewritten_tables
from cdc_replay.subscriber.owners import Rights
from cdc_replay.subscriber.session import SubscriptionSession, export_after_applied


@dataclass(frozen=True, slots=True)
class OpenedAtFence:
    """Both sides at the fence, the tables to judge, and the subscription's position before."""

    fence: ComparisonFence
    tables: tuple[ValidatedTable, ...]
    from_lsn: Lsn


def open_at_fence(
    source: CaptureSource,
    session: SubscriptionSession,
    configured: Mapping[str, Subscription],
    stack: contextlib.ExitStack,
) -> OpenedAtFence:
    """Replay the subscription up to a fence and open both sides there; `stack` closes them.

    `configured` are all subscriptions by name: they may feed the same tables.

    Raises:
        NotConsistent: if the subscription could not be replayed to the fence.
    """
    subscription = session.subscription.name
    with export_after_applied(source.dsn, session) as exported:
        fence_lsn = exported.consistent_point
        ensure_captured(source, fence_lsn)
        (replayed,) = replay_sessions(source, [session], fence_lsn, fence=exported)
        if replayed.error is not None:
            raise NotConsistent(
                f'subscription "{subscription}" could not be replayed to the fence {fence_lsn}',
                detail=replayed.error,
            )
        with import_snapshot(exported, purpose="catalog") as connection:
            catalog = read_catalog(connection, fence_lsn)
        log_state = LogState(source.change_log, catalog, configured)
        tables = validated_tables(session, log_state, _notices(source, session, catalog))
        has_tables_of_others = any(
            table.target is not None and table.target.acting.rights is not Rights.OWN for table in tables
        )
        fence = stack.enter_context(
            open_fence(exported, session.dsn, subscription, has_tables_of_others=has_tables_of_others)
        )
    return OpenedAtFence(fence, tables, replayed.from_lsn)


def _notices(
    source: CaptureSource, session: SubscriptionSession, catalog: PublisherCatalog
) -> dict[QualifiedName, str]:
    return join_notices(
        definition_drifts(session.connection, session.subscription, LogView(source.change_log), catalog),
        rewritten_tables(session.connection, session.subscription.name),
    )


def validated_tables(
    session: SubscriptionSession, log_state: LogState, notices: Mapping[QualifiedName, str]
) -> tuple[ValidatedTable, ...]:
    """The subscription's tables, and how each of them is judged.

    A table with a changed filter is judged like any other: PostgreSQL keeps the old rows too (R9.12), but the
    publications exclude them. `notices` explain such rows, also after a rewrite (R11.9). Rows that other
    feeds may have inserted are not judged, if these feeds are known.
    """
    publications, catalog = session.subscription.publications, log_state.catalog
    listed = {synced.table.name: synced for synced in synced_tables(catalog, publications)}
    # A table dropped on the subscriber fails, even if a new one has its name.
    known = {table.name or table.recorded_name for table in session.known_tables()}
    subscribed = {name: synced for name, synced in listed.items() if name in known}
    targets = session.read_targets(subscribed)
    claims = identified_rows_of_other_feeds(session, log_state, targets)
    tables = []
    for name, synced in subscribed.items():
        reason = why_not_mirrored(catalog, publications, synced)
        notice, claimed = notices.get(name, ""), claims.get(name)
        tables.append(
            ValidatedTable(synced, targets.get(name), reason is None, reason or "", notice, claimed)
        )
    return tuple(tables)
