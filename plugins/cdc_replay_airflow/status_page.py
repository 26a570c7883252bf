"""The pages behind the plugin's entry in Airflow's menu: the state of everything, and reports.

Airflow does not protect the applications of plugins. Every route here asks for what the REST API asks for:
a valid token, as a header or as the UI's cookie, of a user who may read DAGs.

The status is asked from the servers themselves, at most once every few seconds however many people look.
Beside it is what only Airflow knows: how the last run of each replay DAG ended, whether or not it reached its
subscribers.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from airflow.api_fastapi.core_api.security import requires_access_dag
from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import FileResponse, HTMLResponse
from sqlalchemy import Select, select

from cdc_replay.config import Config
from cdc_replay_airflow.connections import airflow_config

FRESH_SECONDS: Final = 5.0

PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="15">
<title>CDC replay</title>
<style>
 :root {{ color-scheme: light dark; }}
 body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2rem; }}
 h2 {{ font-size: 1.1rem; margin: 1.6rem 0 .4rem; }}
 table {{ border-collapse: collapse; min-width: 50%; }}
 th, td {{ border-bottom: 1px solid #8884; padding: .3rem .9rem .3rem 0; }}
 th, td {{ text-align: left; vertical-align: top; }}
 th {{ font-weight: 600; color: #888; }}
 td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
 td.error {{ color: #c0392b; white-space: pre-wrap; }}
</style></head><body><h1>CDC replay</h1>{sections}</body></html>"""


class CurrentStatus:
    """The status, asked again when older than `FRESH_SECONDS`; one caller asks, the others wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._found: dict[str, Any] = {}

    def get(self) -> dict[str, Any]:
        """`StatusResult` as JSON values, and `replay_runs`."""
        from cdc_replay.commands.status import status

        with self._lock:
            if time.monotonic() - self._asked > FRESH_SECONDS:
                config = airflow_config()
                self._found = status(config).to_dict() | {"replay_runs": last_replay_runs(config)}
                self._asked = time.monotonic()
            return self._found


def last_replay_runs(config: Config) -> list[dict[str, Any]]:
    """The newest run of each group's replay DAG, as Airflow's database has it."""
    with create_session() as session:
        runs = [session.scalar(_newest_run(f"replay__{group}")) for group in config.groups]
        return [
            {
                "group": group,
                "state": run.state,
                "run_id": run.run_id,
                "started": None if run.start_date is None else run.start_date.isoformat(timespec="seconds"),
                "ended": None if run.end_date is None else run.end_date.isoformat(timespec="seconds"),
            }
            for group, run in zip(config.groups, runs, strict=True)
            if run is not None
        ]


def _newest_run(dag_id: str) -> Select[DagRun]:
    return select(DagRun).where(DagRun.dag_id == dag_id).order_by(DagRun.run_after.desc()).limit(1)


def create_app() -> FastAPI:
    """The application that Airflow mounts."""
    app = FastAPI(title="CDC replay", docs_url=None, redoc_url=None, openapi_url=None)
    current = CurrentStatus()
    protected = [Depends(requires_access_dag("GET"))]

    @app.get("/", dependencies=protected)
    def page() -> HTMLResponse:
        return HTMLResponse(render(current.get()))

    @app.get("/data", dependencies=protected)
    def data() -> dict[str, Any]:
        return current.get()

    @app.get("/reports/{path:path}", dependencies=protected)
    def report(path: str) -> FileResponse:
        return _file("reports", path)

    @app.get("/data_docs/{path:path}", dependencies=protected)
    def data_docs(path: str) -> FileResponse:
        return _file("data_docs", path)

    return app


def _file(folder: str, path: str) -> FileResponse:
    """A file of the validations' output; nothing beside the folder, which holds GX's own configuration."""
    root = (airflow_config().expectations / "gx" / "uncommitted" / folder).resolve()
    file = (root / path).resolve()
    if not file.is_relative_to(root) or not file.is_file():
        raise HTTPException(404, "there is no such report")
    return FileResponse(file)


def render(status: Mapping[str, Any]) -> str:
    """One table for each list of the status."""
    sections = (
        f"<h2>{_cell_text(_words(title))}</h2>{_table(rows)}" for title, rows in status.items() if rows
    )
    return PAGE.format(sections="".join(sections))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = [name for name in rows[0] if any(row.get(name) is not None for row in rows)]
    head = "".join(f"<th>{_cell_text(_words(name))}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(_cell(name, row.get(name)) for name in columns)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(column: str, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{value:,.0f}</td>'
    failed = column == "error" or str(value).startswith(("failed", "not consistent", "parked"))
    return f"<td{' class=error' if failed else ''}>{'' if value is None else _cell_text(value)}</td>"


def _cell_text(value: object) -> str:
    return html.escape(str(value))


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()
