"""Links from tasks to the pages of the plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from airflow.sdk import BaseOperator, BaseOperatorLink
from airflow.sdk.configuration import conf

if TYPE_CHECKING:
    from airflow.sdk.types import TaskInstanceKey

PREFIX: Final = "/cdc-replay"
"""The path of the plugin's pages below Airflow's base URL."""

REPORT: Final = "report"
"""The XCom with the report of a validate task, also of one that fails after it wrote the report."""


class ValidationReportLink(BaseOperatorLink):
    """From a validate task to the report that it wrote; no link if it wrote none."""

    name = "Validation report"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        from airflow.sdk.execution_time.xcom import XCom  # reads the configuration when it is imported

        report = XCom.get_value(ti_key=ti_key, key=REPORT)
        if report is None:
            return ""
        return f"{_base_url()}{PREFIX}/reports/{quote(report)}"


class StatusPageLink(BaseOperatorLink):
    """From any task to the page with the state of publishers and subscriptions."""

    name = "CDC replay status"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        return f"{_base_url()}/plugin{PREFIX}"


def _base_url() -> str:
    return str(conf.get("api", "base_url", fallback="")).rstrip("/")
