"""Native and ours at one position, while the publisher continues to write.

| step | who        | what                                                                      |
|------|------------|---------------------------------------------------------------------------|
| 1    | native     | catches up with the publisher                                             |
| 2    | we         | take the subscription's lock: wait for whoever works on it                |
| 3    | native     | passes our position, and is stopped; where it stopped is the fence        |
| 4    | we         | capture and replay to exactly that position                               |
| 5    | both       | a snapshot of each; the lock is released, others go on with our tables    |

Rows that other subscriptions have brought into our tables are looked for after the snapshots, so that all row
filters by which they came are known.

If replay goes further than asked (a window ends at a later position to read unsent values, R4.6), native is
resumed and all is repeated.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Final, TypeAlias

from psycopg import sql

from cdc_replay.capture.capture_to import ensure_captured
from cdc_replay.capture.pull import CaptureSource
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.certify.native_side import NativeSubscriber
from cdc_replay.compare.fence import ComparisonFence, open_subscriber
from cdc_replay.compare.other_feeds import LogState, identified_rows_of_other_feeds, other_feeds
from cdc_replay.errors import NotConsistent, SubscriptionInUse
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.postgres.connection import connect, open_snapshot
from cdc_replay.replay.engine import replay_sessions
from cdc_replay.subscriber.owners import Rights
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.subscription_tables import table_states

logger = logging.getLogger(__name__)

OpenSession: TypeAlias = Callable[[], AbstractContextManager[SubscriptionSession]]
"""Opens our subscription, with its lock held."""

TRIES: Final = 5

Claims: TypeAlias = Mapping[QualifiedName, sql.Composed]
"""By table, the condition for rows of ours that other subscriptions may have inserted."""

LOCK_TRIES: Final = 10
"""Each waits for a minute, so long for another process that works on the subscription."""


@contextlib.contextmanager
def open_at_fence(
    source: CaptureSource,
    open_session: OpenSession,
    native: NativeSubscriber,
    server_dsn: str,
    configured: Mapping[str, Subscription],
) -> Iterator[tuple[ComparisonFence, Claims]]:
    """Both sides at the fence, native as the publisher of the comparison; native stays stopped.

    `configured` are all subscriptions by name: they may feed the same tables.

    Raises:
        NotConsistent: if ours cannot be replayed to the fence.
        NativeSubscriptionFailed: if native does not reach it.
        SubscriptionInUse: if another process keeps the subscription.
    """
    for _ in range(TRIES):
        native.await_position(native.present_position())
        with contextlib.ExitStack() as stack:
            with locked_session(open_session) as session:
                fence_lsn = _bring_together(source, session, native)
                is_at_fence = max(session.ready_tables().values(), default=ZERO) <= fence_lsn
                fence = _open(fence_lsn, session, server_dsn, stack) if is_at_fence else None
                claims = _claims(source, session, configured) if is_at_fence else {}
            if fence is not None:
                failpoint("certify.at_fence")
                yield fence, claims
                return
        logger.info("subscription %s was replayed past the fence; trying again", session.subscription.name)
        native.resume()
    raise NotConsistent(
        f"the subscription could not be stopped where a native one was, in {TRIES} tries",
        hint="Run the command again while fewer rows enter the row filters with unsent values (R4.6).",
    )


@contextlib.contextmanager
def locked_session(open_session: OpenSession) -> Iterator[SubscriptionSession]:
    """Our subscription, with its lock; another process that has it is waited for.

    Raises:
        SubscriptionInUse: if it keeps the lock for minutes.
    """
    with contextlib.ExitStack() as stack:
        session: SubscriptionSession | None = None
        for _ in range(LOCK_TRIES - 1):
            with contextlib.suppress(SubscriptionInUse):
                session = stack.enter_context(open_session())
                break
        yield session or stack.enter_context(open_session())


def _bring_together(source: CaptureSource, session: SubscriptionSession, native: NativeSubscriber) -> Lsn:
    """Stop native at or after our position, and replay ours to where it stopped."""
    native.await_position(native.present_position())
    fence_lsn = native.stop()
    logger.info("native is stopped at %s", fence_lsn)
    ensure_captured(source, fence_lsn)
    (replayed,) = replay_sessions(source, [session], fence_lsn)
    if replayed.error is not None:
        raise NotConsistent(
            f'subscription "{session.subscription.name}" could not be replayed to {fence_lsn}, where a native'
            " subscription is",
            detail=replayed.error,
        )
    return fence_lsn


def _open(
    fence_lsn: Lsn, session: SubscriptionSession, server_dsn: str, stack: contextlib.ExitStack
) -> ComparisonFence:
    name = session.subscription.name
    acting = (target.acting for target in session.read_targets(session.table_states()).values())
    has_tables_of_others = any(role.rights is not Rights.OWN for role in acting)
    subscriber = stack.enter_context(
        open_subscriber(session.dsn, f"certify {name}", read_only=not has_tables_of_others)
    )
    server = stack.enter_context(open_snapshot(server_dsn, purpose=f"certify {name}"))
    return ComparisonFence(fence_lsn, server, subscriber, table_states(subscriber, name))


def _claims(
    source: CaptureSource, session: SubscriptionSession, configured: Mapping[str, Subscription]
) -> Claims:
    shared = other_feeds(session, session.table_states())
    if not shared:
        return {}
    with connect(source.dsn, purpose=f"certify {session.subscription.name}") as publisher:
        log_state = LogState(source.change_log, read_catalog(publisher), configured)
    return identified_rows_of_other_feeds(session, log_state, shared)
