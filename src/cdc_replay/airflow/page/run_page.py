"""What a DAG run did: the windows that it applied, and the reports of its validations.

It is the page behind the tab *Windows and reports* of a run, in anybody's DAG: Airflow shows the tab on every
run of every DAG, so a run that did nothing of this says so. What a run did is what its tasks pushed as XCom:
input, of which nothing but the name of a configured subscription, the name of a report, LSNs and numbers are
used.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from sqlalchemy import select

from cdc_replay.airflow.connections import airflow_config
from cdc_replay.airflow.dag_ids import validate_dag
from cdc_replay.airflow.links import REPORT, WINDOW
from cdc_replay.airflow.page.access import readable_dags
from cdc_replay.airflow.page.report_files import PAGE_NAME
from cdc_replay.airflow.window_summary import COUNTS, WindowSummary

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser

ENTRIES_SHOWN: Final = 500
"""A run may map over all subscriptions."""

BADGES: Final = {"success": ("consistent", "good"), "failed": ("not consistent", "bad")}
"""By the state of a task that wrote a report: text, and class of the style sheet."""

_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Windows and reports</title>
<link rel="stylesheet" href="{root}/static/page.css">
<script src="{root}/static/links.js" defer></script>
</head>
<body>
<header><h1>Windows and reports of this run</h1></header>
<main>{content}</main>
</body>
</html>
"""

_NONE: Final = (
    '<p class="soft">No task of this run has applied a window, or written a validation report,'
    " that you may read.</p>"
)

_REPORT: Final = """\
<section class="card"><div class="head"><h3>{subscription}</h3><span class="badge {kind}">{verdict}</span>
<a href="{href}" target="_top">Open the report</a><span class="soft">task {task}</span></div></section>
"""

_WINDOWS: Final = """\
<section><h2>Windows of the change log</h2><div class="card"><div class="scroll"><table>
<thead><tr><th>Subscription</th><th>After</th><th>Up to</th>{names}</tr></thead>
<tbody>{rows}</tbody></table></div></div></section>
"""


@dataclass(frozen=True, slots=True)
class RunReport:
    """A report that a task of a run has written; `page` is its file's name."""

    task: str
    state: str
    subscription: str
    page: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run did, in order of subscription."""

    windows: tuple[WindowSummary, ...]
    reports: tuple[RunReport, ...]


def summary_of(user: BaseUser, dag_id: str, run_id: str) -> RunSummary:
    """What the run did for subscriptions whose validations the user may read."""
    windows, reports = _read(dag_id, run_id)
    named = {window.subscription for window in windows} | {report.subscription for report in reports}
    known = sorted(named & airflow_config().subscriptions.keys())
    readable = readable_dags(user, map(validate_dag, known))
    shown = {name for name in known if validate_dag(name) in readable}
    return RunSummary(
        tuple(
            sorted(
                (window for window in windows if window.subscription in shown),
                key=lambda window: (window.subscription, window.to_lsn),
            )
        ),
        tuple(
            sorted(
                (report for report in reports if report.subscription in shown),
                key=lambda report: (report.subscription, report.task),
            )
        ),
    )


def render(summary: RunSummary, root: str) -> str:
    """The page; `root` is where the plugin's application is."""
    windows, reports = _windows(summary.windows), _reports(summary.reports, root)
    return _PAGE.format(root=html.escape(root), content=f"{windows}{reports}" or _NONE)


def _windows(windows: Iterable[WindowSummary]) -> str:
    rows = "".join(
        f'<tr><td data-label="Subscription">{html.escape(window.subscription)}</td>'
        f'<td data-label="After">{window.from_lsn}</td><td data-label="Up to">{window.to_lsn}</td>'
        + "".join(_count_cell(name, f"{count:,}") for name, count in window.counts.items())
        + _count_cell("Took", f"{window.seconds:.1f} s")
        + "</tr>"
        for window in windows
    )
    names = "".join(f'<th class="number">{html.escape(name)}</th>' for name in (*COUNTS, "Took"))
    return _WINDOWS.format(names=names, rows=rows) if rows else ""


def _count_cell(label: str, text: str) -> str:
    """A cell; at a phone's width its label takes the place of the head."""
    return f'<td class="number" data-label="{html.escape(label)}">{text}</td>'


def _reports(reports: Iterable[RunReport], root: str) -> str:
    cards = "".join(
        _REPORT.format(
            subscription=html.escape(report.subscription),
            kind=BADGES.get(report.state, ("", "warn"))[1],
            verdict=html.escape(BADGES.get(report.state, (report.state,))[0]),
            href=html.escape(f"{root}/reports/{quote(report.subscription)}/{quote(report.page)}"),
            task=html.escape(report.task),
        )
        for report in reports
    )
    return f'<section><h2>Validation reports</h2><div class="cards">{cards}</div></section>' if cards else ""


def _read(dag_id: str, run_id: str) -> tuple[tuple[WindowSummary, ...], tuple[RunReport, ...]]:
    same_task = (
        (TaskInstance.dag_id == XComModel.dag_id)
        & (TaskInstance.run_id == XComModel.run_id)
        & (TaskInstance.task_id == XComModel.task_id)
        & (TaskInstance.map_index == XComModel.map_index)
    )
    query = (
        select(XComModel, TaskInstance.state)
        .join(TaskInstance, same_task)
        .where(XComModel.dag_id == dag_id, XComModel.run_id == run_id, XComModel.key.in_((REPORT, WINDOW)))
        .limit(ENTRIES_SHOWN)
    )
    windows, reports = list[WindowSummary](), list[RunReport]()
    with create_session() as session:
        for xcom, state in session.execute(query):
            value = _plain(xcom.value)
            if xcom.key == WINDOW:
                windows += _window(value)
            else:
                reports += _report(str(xcom.task_id), str(state or "not started"), value)
    return tuple(windows), tuple(reports)


def _plain(value: object) -> object:
    """An XCom as JSON alone: Airflow's own reader would build objects of classes that the value names."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _window(value: object) -> Iterator[WindowSummary]:
    if isinstance(value, Mapping) and (window := WindowSummary.parse(value)) is not None:
        yield window


def _report(task: str, state: str, value: object) -> Iterator[RunReport]:
    subscription, _, page = str(value).partition("/")
    if PAGE_NAME.fullmatch(page):
        yield RunReport(task, state, subscription, page)
