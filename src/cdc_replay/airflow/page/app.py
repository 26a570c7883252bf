"""The routes of the plugin's application."""

from __future__ import annotations

import importlib.resources
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse

from cdc_replay.airflow.connections import airflow_config
from cdc_replay.airflow.dag_ids import validate_dag
from cdc_replay.airflow.page.access import User, require_readable, require_triggerable
from cdc_replay.airflow.page.data import FRESH_SECONDS, details_for, status_for
from cdc_replay.airflow.page.policy import HEADERS, PAGE_HEADERS, REPORT_HEADERS
from cdc_replay.airflow.page.report_files import read_report
from cdc_replay.airflow.page.row_question import RowQuestion, answer
from cdc_replay.airflow.page.run_page import render, summary_of

STATIC_FILES: Final = {
    "links.js": "text/javascript",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "uPlot.iife.min.js": "text/javascript",
    "uPlot.min.css": "text/css",
    "why.js": "text/javascript",
}


def create_app() -> FastAPI:
    """The application that Airflow mounts."""
    app = FastAPI(title="CDC replay", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def restrict(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    _add_page(app)
    _add_data(app)
    _add_reports(app)
    return app


def _add_page(app: FastAPI) -> None:
    files = importlib.resources.files("cdc_replay.airflow.page") / "static"

    @app.get("/")
    def page(user: User) -> HTMLResponse:  # noqa: ARG001 - its token is required
        return HTMLResponse((files / "page.html").read_bytes(), headers=dict(PAGE_HEADERS))

    @app.get("/static/{name}")
    def static(user: User, name: str) -> Response:  # noqa: ARG001 - its token is required
        if name not in STATIC_FILES:
            raise HTTPException(404, "there is no such file")
        return Response((files / name).read_bytes(), media_type=STATIC_FILES[name])


def _add_data(app: FastAPI) -> None:
    # Imported here: the plugin is loaded by processes that never ask a server.
    from cdc_replay.commands.status import ServerAnswers
    from cdc_replay.monitoring.subscription_details import SubscriptionDetails
    from cdc_replay.postgres.answers import Answers
    from cdc_replay.subscriber.history import TimeRange

    seconds = airflow_config().timeouts.page.total_seconds()
    answers = ServerAnswers(seconds, FRESH_SECONDS)
    details = Answers[SubscriptionDetails](seconds, FRESH_SECONDS)

    @app.get("/data")
    def data(user: User) -> dict[str, Any]:
        return status_for(user, answers)

    @app.get("/subscriptions/{subscription}")
    def subscription_data(user: User, subscription: str, time_range: str = "24h") -> dict[str, Any]:
        require_readable(user, validate_dag(subscription))
        known = {time_range.value: time_range for time_range in TimeRange}
        if subscription not in airflow_config().subscriptions or time_range not in known:
            raise HTTPException(404, "there is no such subscription or range")
        return details_for(user, details, subscription, known[time_range])

    # A POST with JSON: no other site can send it, and keys of rows stay out of logs of addresses.
    @app.post("/subscriptions/{subscription}/why")
    def why(user: User, subscription: str, question: RowQuestion) -> dict[str, str]:
        require_triggerable(user, validate_dag(subscription))
        if subscription not in airflow_config().subscriptions:
            raise HTTPException(404, "there is no such subscription")
        return answer(subscription, question)


def _add_reports(app: FastAPI) -> None:
    @app.get("/reports/{subscription}/{page_name}")
    def report(user: User, subscription: str, page_name: str) -> HTMLResponse:
        require_readable(user, validate_dag(subscription))
        config = airflow_config()
        known = subscription in config.subscriptions
        content = read_report(config.expectations, subscription, page_name) if known else None
        if content is None:
            raise HTTPException(404, "there is no such report")
        return HTMLResponse(content, headers=dict(REPORT_HEADERS))

    @app.get("/runs/{dag_id}/{run_id:path}")
    def run_summary(request: Request, user: User, dag_id: str, run_id: str) -> HTMLResponse:
        require_readable(user, dag_id)
        root = str(request.scope.get("root_path", ""))
        return HTMLResponse(render(summary_of(user, dag_id, run_id), root), headers=dict(PAGE_HEADERS))
