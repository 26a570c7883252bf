"""The plugin's pages in Airflow: status and reports.

Airflow does not protect the applications of plugins. Every route here requires a valid token, as a header or
as the UI's cookie, and shows only objects whose DAG the user may read (`access`):

| object                         | DAG                       |
|--------------------------------|---------------------------|
| a publisher                    | `capture__<publisher>`    |
| a subscription, its tables     | `validate__<subscription>`|
| the report of a validation     | `validate__<subscription>`|
| the last replay run of a group | `replay__<group>`         |

The status is read from the servers, at most once every few seconds for all users together. A server that does
not answer within `timeouts.page` is shown with its last answer. Airflow's database adds how the last run of
each replay DAG ended, also of one that did not reach its subscribers.

Pages of Great Expectations are not served: they need scripts, and they cover all subscriptions.
"""

from __future__ import annotations

import html
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse
from sqlalchemy import Select, select

from cdc_replay.airflow.access import User, readable_dags, require_readable
from cdc_replay.airflow.connections import airflow_config
from cdc_replay.airflow.dag_ids import capture_dag, replay_dag, validate_dag
from cdc_replay.airflow.policy import HEADERS, REPORT_HEADERS, framed_headers
from cdc_replay.airflow.report_files import read_report

if TYPE_CHECKING:
    from cdc_replay.commands.status import ServerAnswers

FRESH_SECONDS: Final = 5.0

STYLE: Final = """
 :root { color-scheme: light dark; }
 body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; }
 h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
 table { border-collapse: collapse; min-width: 50%; }
 th, td { border-bottom: 1px solid #8884; padding: .3rem .9rem .3rem 0; }
 th, td { text-align: left; vertical-align: top; }
 th { font-weight: 600; color: #888; }
 td.number { text-align: right; font-variant-numeric: tabular-nums; }
 td.error { color: #c0392b; white-space: pre-wrap; }
"""

PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="15">
<title>CDC replay</title>
<style>{style}</style></head><body><h1>CDC replay</h1>{sections}</body></html>"""

NOTHING: Final = "<p>There is nothing that you may see: this requires the right to read a DAG.</p>"


def status_for(user: User, answers: ServerAnswers) -> dict[str, Any]:
    """The parts of `StatusResult` that the user may read, as JSON values, and `replay_runs`."""
    from cdc_replay.commands.status import status_of

    config = airflow_config()
    of_publishers = {name: capture_dag(name) for name in config.publishers}
    of_subscriptions = {name: validate_dag(name) for name in config.subscriptions}
    of_groups = {name: replay_dag(name) for name in config.groups}
    readable = readable_dags(user, [*of_publishers.values(), *of_subscriptions.values(), *of_groups.values()])

    def readable_names(dags: Mapping[str, str]) -> list[str]:
        return [name for name, dag_id in dags.items() if dag_id in readable]

    status = status_of(config, answers, readable_names(of_publishers), readable_names(of_subscriptions))
    return status.to_dict() | {"replay_runs": last_replay_runs(readable_names(of_groups))}


def last_replay_runs(groups: Sequence[str]) -> list[dict[str, Any]]:
    """The newest run of each group's replay DAG, as Airflow's database has it."""
    with create_session() as session:
        runs = [session.scalar(_newest_run(replay_dag(group))) for group in groups]
        return [
            {
                "group": group,
                "state": run.state,
                "run_id": run.run_id,
                "started": None if run.start_date is None else run.start_date.isoformat(timespec="seconds"),
                "ended": None if run.end_date is None else run.end_date.isoformat(timespec="seconds"),
            }
            for group, run in zip(groups, runs, strict=True)
            if run is not None
        ]


def _newest_run(dag_id: str) -> Select[DagRun]:
    return select(DagRun).where(DagRun.dag_id == dag_id).order_by(DagRun.run_after.desc()).limit(1)


def create_app() -> FastAPI:
    """The application that Airflow mounts."""
    from cdc_replay.commands.status import ServerAnswers

    app = FastAPI(title="CDC replay", docs_url=None, redoc_url=None, openapi_url=None)
    answers = ServerAnswers(airflow_config().timeouts.page.total_seconds(), FRESH_SECONDS)

    @app.middleware("http")
    async def restrict(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    @app.get("/")
    def page(user: User) -> HTMLResponse:
        return HTMLResponse(render(status_for(user, answers)), headers=dict(framed_headers(STYLE)))

    @app.get("/data")
    def data(user: User) -> dict[str, Any]:
        return status_for(user, answers)

    @app.get("/reports/{subscription}/{page_name}")
    def report(user: User, subscription: str, page_name: str) -> HTMLResponse:
        require_readable(user, validate_dag(subscription))
        config = airflow_config()
        known = subscription in config.subscriptions
        content = read_report(config.expectations, subscription, page_name) if known else None
        if content is None:
            raise HTTPException(404, "there is no such report")
        return HTMLResponse(content, headers=dict(REPORT_HEADERS))

    return app


def render(status: Mapping[str, Any]) -> str:
    """One table for each list of the status."""
    sections = (
        f"<h2>{_cell_text(_title(title))}</h2>{_table(rows)}" for title, rows in status.items() if rows
    )
    return PAGE.format(style=STYLE, sections="".join(sections) or NOTHING)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = [name for name in rows[0] if any(row.get(name) is not None for row in rows)]
    head = "".join(f"<th>{_cell_text(_title(name))}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(_cell(name, row.get(name)) for name in columns)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(column: str, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{value:,.0f}</td>'
    failed = column == "error" or str(value).startswith(("failed", "not consistent", "parked"))
    return f"<td{' class=error' if failed else ''}>{'' if value is None else _cell_text(value)}</td>"


def _cell_text(value: object) -> str:
    return html.escape(str(value))


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()
