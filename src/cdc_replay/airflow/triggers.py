"""The trigger of the sensors: it asks again and again, in a thread, until its condition is met.

All of its state is in its arguments, so another triggerer continues where one was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from cdc_replay.airflow.conditions import condition_of
from cdc_replay.errors import CdcReplayError, Retry


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
