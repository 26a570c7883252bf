"""Entries of the configuration as the values that stages take."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import psycopg

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.capture.setup import SetupRequest
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError, InvalidConfiguration
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.subscription import Subscription
from cdc_replay.postgres.answers import SERVERS_AT_ONCE
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.snapshot.refresh import RefreshRequest
from cdc_replay.snapshot.run import SnapshotOptions
from cdc_replay.subscriber.session import SubscriptionSession, lock_session, open_session

logger = logging.getLogger(__name__)


def capture_source(config: Config, publisher: str, report: Report = unreported) -> CaptureSource:
    """The slot and the change log of a publisher.

    Raises:
        InvalidConfiguration: if there is no such publisher, or its connection is not known.
    """
    configured = config.publisher(publisher)
    return CaptureSource(
        publisher=configured.name,
        dsn=config.dsn_of(configured),
        slot=configured.slot,
        change_log=configured.change_log,
        streaming=configured.streaming,
        two_phase=configured.two_phase,
        max_changes_per_pull=configured.max_changes_per_pull,
        origin_none=config.wants_origin_none(configured.name),
        max_retained_wal=configured.max_retained_wal,
        report=report,
    )


def common_source(config: Config, subscriptions: Sequence[str], report: Report = unreported) -> CaptureSource:
    """The `capture_source` of the publisher of all these subscriptions.

    Raises:
        InvalidConfiguration: if there is none, or more than one.
    """
    names = {config.subscription(name).subscription.publisher for name in subscriptions}
    if len(names) != 1:
        raise InvalidConfiguration(
            "the subscriptions must have one publisher",
            detail=f"Given: {', '.join(subscriptions) or 'none'}; their publishers: "
            f"{', '.join(sorted(names)) or 'none'}.",
        )
    return capture_source(config, names.pop(), report)


@contextlib.contextmanager
def open_subscription(
    config: Config,
    name: str,
    purpose: str,
    *,
    writes: bool = True,
    installs: bool = True,
    report: Report = unreported,
) -> Iterator[SubscriptionSession]:
    """A session for the configured subscription `name`.

    Raises:
        InvalidConfiguration: if there is no such subscription.
        CdcReplayError: as `open_session`.
    """
    configured = config.subscription(name)
    dsn = config.dsn_of(configured)
    with open_session(
        configured.subscription, dsn, purpose, writes=writes, installs=installs, report=report
    ) as session:
        yield session


def open_subscriptions(
    config: Config, names: Iterable[str], purpose: str, stack: contextlib.ExitStack, report: Report
) -> tuple[list[SubscriptionSession], dict[str, Exception]]:
    """Sessions, which `stack` closes, and by name why the other subscriptions could not be opened.

    All subscribers are connected to at the same time, so that several that do not answer delay the others
    once. The locks are taken one by one, in the order of the names: two processes with the same subscriptions
    would otherwise wait for each other.
    """
    failures: dict[str, Exception] = {}

    @contextlib.contextmanager
    def left_out(name: str) -> Iterator[None]:
        try:
            yield
        except (CdcReplayError, psycopg.Error) as error:
            logger.info("subscription %s is left out: %s", name, error)
            failures[name] = error

    connecting: dict[str, tuple[Subscription, str, Future[Connection]]] = {}
    with ThreadPoolExecutor(SERVERS_AT_ONCE, thread_name_prefix="connect") as threads:
        for name in names:
            with left_out(name):
                configured = config.subscription(name)
                dsn = config.dsn_of(configured)
                future = threads.submit(connect, dsn, purpose=f"{purpose} {name}")
                connecting[name] = configured.subscription, dsn, future
    sessions: list[SubscriptionSession] = []
    for name, (subscription, dsn, future) in connecting.items():
        with left_out(name), contextlib.ExitStack() as session_stack:
            connection = session_stack.enter_context(future.result())
            session = SubscriptionSession(subscription, dsn, connection, report=report)
            session_stack.enter_context(lock_session(session))
            sessions.append(session)
            stack.push(session_stack.pop_all())
    return sessions, failures


def snapshot_options(config: Config, subscription: str) -> SnapshotOptions:
    """How rows of a subscription are copied; the subscription lock is released meanwhile.

    Raises:
        InvalidConfiguration: if there is no such subscription.
    """
    configured = config.subscription(subscription)
    return SnapshotOptions(
        release_lock=True,
        chunk_bytes=configured.snapshot_chunk,
        readers=configured.snapshot_readers,
        bytes_per_second=configured.snapshot_rate,
    )


def refresh_request(
    config: Config, subscription: str, *, reconcile: bool, report: Report = unreported
) -> RefreshRequest:
    """What a refresh or a repair of the subscription has to know.

    Raises:
        InvalidConfiguration: if there is no such subscription, or its publisher's connection is not known.
    """
    publisher = config.subscription(subscription).subscription.publisher
    return RefreshRequest(
        source=capture_source(config, publisher, report),
        setup=setup_request(config, publisher),
        configured=configured_subscriptions(config),
        options=snapshot_options(config, subscription),
        reconcile=reconcile,
    )


def configured_subscriptions(config: Config) -> dict[str, Subscription]:
    """All subscriptions by name: several may feed the same tables."""
    return {name: configured.subscription for name, configured in config.subscriptions.items()}


def setup_request(config: Config, publisher: str) -> SetupRequest:
    """What `setup` of a publisher creates: for the union of its subscriptions' publications.

    Raises:
        InvalidConfiguration: if there is no such publisher, or its connection is not known.
    """
    configured = config.publisher(publisher)
    publications = dict.fromkeys(
        publication
        for subscription in config.subscriptions_of(publisher)
        for publication in subscription.subscription.publications
    )
    return SetupRequest(
        publisher=publisher,
        dsn=config.dsn_of(configured),
        slot=configured.slot,
        change_log=configured.change_log,
        publications=tuple(publications),
        two_phase=configured.two_phase,
        origin_none=config.wants_origin_none(publisher),
        event_trigger=configured.event_trigger,
    )
