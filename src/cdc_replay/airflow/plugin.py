"""The one plugin: a status page in Airflow's menu, and links from tasks and runs to their reports.

Airflow executes this file in every process that loads plugins, so it imports nothing heavy: the page's
application is created on its first request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from airflow.plugins_manager import AirflowPlugin

from cdc_replay.airflow.links import (
    PREFIX,
    SparkHistoryLink,
    StatusPageLink,
    ValidationReportLink,
    WindowLink,
)

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class StatusPages:
    """An ASGI application that creates the real one on its first call."""

    def __init__(self) -> None:
        self._application: Application | None = None

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if self._application is None:
            from cdc_replay.airflow.page.app import create_app

            self._application = create_app()
        await self._application(scope, receive, send)


APPLICATIONS: Final = [{"app": StatusPages(), "url_prefix": PREFIX, "name": "CDC replay"}]

VIEWS: Final = [
    {
        "name": "CDC replay",
        "href": f"{PREFIX}/",
        "destination": "nav",
        "url_route": "cdc-replay",
        "category": "browse",
    },
    {
        "name": "Windows and reports",
        "href": f"{PREFIX}/runs/{{DAG_ID}}/{{RUN_ID}}",
        "destination": "dag_run",
        "url_route": "cdc-replay-report",
    },
]

LINKS: Final = [ValidationReportLink(), WindowLink(), SparkHistoryLink(), StatusPageLink()]


class CdcReplayPlugin(AirflowPlugin):
    """The project's part of Airflow's UI."""

    name = "cdc_replay"
    fastapi_apps = APPLICATIONS
    external_views = VIEWS
    operator_extra_links = LINKS
