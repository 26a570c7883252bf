"""The triggers, which ask again and again, in a thread of the triggerer.

| trigger            | of              | until                                                               |
|--------------------|-----------------|---------------------------------------------------------------------|
| `ConditionTrigger` | the sensors     | its condition is met                                                |
| `CommitTrigger`    | an AssetWatcher | for ever: an event whenever the publisher has something to capture  |
| `LagTrigger`       | an AssetWatcher | for ever: an event whenever a subscription stays behind the log     |

All of their state is in their arguments and on the servers, so another triggerer continues where one was
killed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from cdc_replay.airflow.conditions import condition_of
from cdc_replay.airflow.connections import airflow_config
from cdc_replay.errors import CdcReplayError, ChangeLogMissing, Retry

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0


class ConditionTrigger(BaseTrigger):
    """Fires when a condition of `cdc_replay.airflow.conditions` is met, or can only fail.

    A server that does not answer is asked again. The event is None, or the text of a permanent error.
    """

    def __init__(self, kind: str, arguments: dict[str, Any], poll_seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind
        self.arguments = arguments
        self.poll_seconds = poll_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {"kind": self.kind, "arguments": self.arguments, "poll_seconds": self.poll_seconds},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        condition = condition_of(self.kind, self.arguments)
        is_met = sync_to_async(condition.is_met, thread_sensitive=False)
        while True:
            try:
                if await is_met():
                    yield TriggerEvent(None)  # type: ignore[no-untyped-call]
                    return
            except CdcReplayError as error:
                if error.retry is Retry.NEVER:
                    yield TriggerEvent(str(error))  # type: ignore[no-untyped-call]
                    return
                self.log.warning("asking again in %s s: %s", self.poll_seconds, error)
            await asyncio.sleep(self.poll_seconds)


class CommitTrigger(BaseEventTrigger):
    """Fires whenever a publisher has committed something that its change log lacks (`capture.commit_watch`).

    All watchers of a publisher that have the same arguments share one loop and one connection. While the
    publisher does not answer, it is asked again after pauses of up to `LONGEST_PAUSE_SECONDS`.

    :param publisher: name of the publisher in the configuration
    :param least_seconds: between two events
    :param greatest_seconds: until an event that no capture has followed is repeated
    """

    def __init__(
        self, publisher: str, least_seconds: float = 1.0, greatest_seconds: float = 60.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.publisher = publisher
        self.least_seconds = least_seconds
        self.greatest_seconds = greatest_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", self._arguments()

    def shared_stream_key(self) -> Hashable:
        return ("cdc_replay", *self._arguments().values())

    @classmethod
    async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[str]:
        pause_seconds = LOOK_SECONDS
        watch: Any = None
        # Not one of the event loop's few threads, in which servers that do not answer keep other triggers.
        thread = ThreadPoolExecutor(1, thread_name_prefix="watch")
        try:
            while True:
                try:
                    if watch is None:
                        watch = await _in(thread, _open_watch)(**kwargs)
                    position = await _in(thread, watch.look)()
                # Whatever is wrong, the next look may find it mended; the schedule captures meanwhile.
                except Exception as error:  # noqa: BLE001
                    # It may be the configuration, or the publisher may be another server now.
                    watch = None
                    pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)
                    logger.warning("asking again in %s s: %s", pause_seconds, error)
                else:
                    pause_seconds = LOOK_SECONDS
                    if position is not None:
                        yield str(position)
                await asyncio.sleep(pause_seconds)
        finally:
            if watch is not None:
                watch.close()
            thread.shutdown(wait=False)

    async def filter_shared_stream(self, shared_stream: AsyncIterator[str]) -> AsyncIterator[TriggerEvent]:
        async for position in shared_stream:
            yield TriggerEvent({"to_lsn": position})  # type: ignore[no-untyped-call]

    async def run(self) -> AsyncIterator[TriggerEvent]:
        async for event in self.filter_shared_stream(self.open_shared_stream(self._arguments())):
            yield event

    def _arguments(self) -> dict[str, Any]:
        return {
            "publisher": self.publisher,
            "least_seconds": self.least_seconds,
            "greatest_seconds": self.greatest_seconds,
        }


class LagTrigger(BaseEventTrigger):
    """Fires when a subscription lags behind the change log, and has made no progress since the last question.

    :param publisher: name of the publisher in the configuration
    :param subscriptions: those of its groups whose replay follows the change log
    :param poll_seconds: between two questions to the subscribers
    """

    def __init__(
        self, publisher: str, subscriptions: list[str], poll_seconds: float = 30.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.publisher = publisher
        self.subscriptions = subscriptions
        self.poll_seconds = poll_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "publisher": self.publisher,
                "subscriptions": self.subscriptions,
                "poll_seconds": self.poll_seconds,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        ask = sync_to_async(_due_replays, thread_sensitive=False)
        lagged: frozenset[tuple[str, str]] = frozenset()
        while True:
            await asyncio.sleep(self.poll_seconds)
            try:
                lagging = await ask(self.publisher, self.subscriptions)
            # As above: nothing is as bad as a watch that has ended.
            except Exception as error:  # noqa: BLE001
                logger.warning("asking again in %s s: %s", self.poll_seconds, error)
                continue
            # Under steady traffic there is always something that a running replay has not applied yet.
            if stuck := {name for name, _ in lagging & lagged}:
                yield TriggerEvent({"subscriptions": sorted(stuck)})  # type: ignore[no-untyped-call]
            lagged = lagging


def _in(thread: ThreadPoolExecutor, function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    return sync_to_async(function, thread_sensitive=False, executor=thread)


def _due_replays(publisher: str, subscriptions: list[str]) -> frozenset[tuple[str, str]]:
    """The subscriptions for which a replay is due, each with the time of its oldest missing transaction."""
    from cdc_replay.monitoring.due_replays import due_replays

    try:
        due = due_replays(airflow_config(), publisher, subscriptions)
    except ChangeLogMissing:
        return frozenset()
    return frozenset((name, str(lag.since)) for name, lag in due.items())


def _open_watch(publisher: str, least_seconds: float, greatest_seconds: float) -> Any:  # noqa: ANN401 - imported late
    from cdc_replay.monitoring.watch_commits import watch_commits

    return watch_commits(
        airflow_config(), publisher, least_seconds=least_seconds, greatest_seconds=greatest_seconds
    )
