"""The reports of a DAG run: the page behind its tab *Validation report*, in anybody's DAG.

Airflow shows the tab on every run of every DAG, so a run that validated nothing says so. Which reports a run
wrote is what its tasks pushed as XCom: input, of which nothing but the names of a configured subscription and
of a report is used.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from sqlalchemy import select

from cdc_replay.airflow.connections import airflow_config
from cdc_replay.airflow.dag_ids import validate_dag
from cdc_replay.airflow.links import REPORT
from cdc_replay.airflow.page.access import readable_dags
from cdc_replay.airflow.page.report_files import PAGE_NAME

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser

REPORTS_SHOWN: Final = 500
"""A run may map over all subscriptions."""

BADGES: Final = {"success": ("consistent", "good"), "failed": ("not consistent", "bad")}
"""By the state of a task that wrote a report: text, and class of the style sheet."""

_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Validation reports</title>
<link rel="stylesheet" href="{root}/static/page.css">
<script src="{root}/static/links.js" defer></script>
</head>
<body>
<header><h1>Validation reports of this run</h1></header>
<main>{content}</main>
</body>
</html>
"""

_NONE: Final = '<p class="soft">No task of this run has written a validation report that you may read.</p>'

_ROW: Final = """\
<section class="card"><div class="head"><h3>{subscription}</h3><span class="badge {kind}">{verdict}</span>
<a href="{href}" target="_top">Open the report</a><span class="soft">task {task}</span></div></section>
"""


@dataclass(frozen=True, slots=True)
class RunReport:
    """A report that a task of a run has written; `page` is its file's name."""

    task: str
    state: str
    subscription: str
    page: str


def reports_of(user: BaseUser, dag_id: str, run_id: str) -> tuple[RunReport, ...]:
    """The run's reports of subscriptions whose validations the user may read, in order of name."""
    written = [report for report in _written(dag_id, run_id) if PAGE_NAME.fullmatch(report.page)]
    known = {report.subscription for report in written} & airflow_config().subscriptions.keys()
    readable = readable_dags(user, [validate_dag(name) for name in sorted(known)])
    return tuple(
        sorted(
            (
                report
                for report in written
                if report.subscription in known and validate_dag(report.subscription) in readable
            ),
            key=lambda report: (report.subscription, report.task),
        )
    )


def render(reports: tuple[RunReport, ...], root: str) -> str:
    """The page; `root` is where the plugin's application is."""
    cards = "".join(
        _ROW.format(
            subscription=html.escape(report.subscription),
            kind=BADGES.get(report.state, ("", "warn"))[1],
            verdict=html.escape(BADGES.get(report.state, (report.state,))[0]),
            href=html.escape(f"{root}/reports/{quote(report.subscription)}/{quote(report.page)}"),
            task=html.escape(report.task),
        )
        for report in reports
    )
    content = f'<div class="cards">{cards}</div>' if cards else _NONE
    return _PAGE.format(root=html.escape(root), content=content)


def _written(dag_id: str, run_id: str) -> Iterator[RunReport]:
    same_task = (
        (TaskInstance.dag_id == XComModel.dag_id)
        & (TaskInstance.run_id == XComModel.run_id)
        & (TaskInstance.task_id == XComModel.task_id)
        & (TaskInstance.map_index == XComModel.map_index)
    )
    query = (
        select(XComModel, TaskInstance.state)
        .join(TaskInstance, same_task)
        .where(XComModel.dag_id == dag_id, XComModel.run_id == run_id, XComModel.key == REPORT)
        .limit(REPORTS_SHOWN)
    )
    with create_session() as session:
        for xcom, state in session.execute(query):
            subscription, _, page = str(XComModel.deserialize_value(xcom)).partition("/")
            yield RunReport(xcom.task_id, str(state or "not started"), subscription, page)
