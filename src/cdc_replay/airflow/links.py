"""Links from tasks to the pages of the plugin, and to Spark's history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit

from airflow.sdk import BaseHook, BaseOperator, BaseOperatorLink
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowNotFoundException

if TYPE_CHECKING:
    from airflow.sdk.types import TaskInstanceKey

PREFIX: Final = "/cdc-replay"
"""The path of the plugin's pages below Airflow's base URL."""

REPORT: Final = "report"
"""The XCom with the report of a validate task, also of one that fails after it wrote the report."""

WINDOW: Final = "window"
"""The XCom with what a replay did for a subscription, of its report task."""

HISTORY_SERVER: Final = "history-server"
"""The key in the extra of a Spark connection: the address at which people reach Spark's history server."""

SPARK_APPLICATION: Final = "spark_application"
"""The XCom with Spark's id of a task's application."""


class ValidationReportLink(BaseOperatorLink):
    """From a validate task to the report that it wrote; no link if it wrote none."""

    name = "Validation report"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        from airflow.sdk.execution_time.xcom import XCom  # reads the configuration when it is imported

        report = XCom.get_value(ti_key=ti_key, key=REPORT)
        if report is None:
            return ""
        return f"{base_url()}{PREFIX}/reports/{quote(report)}"


class WindowLink(BaseOperatorLink):
    """From a report task to the windows of the log that its run applied; no link if it applied none."""

    name = "Window in the log"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        from airflow.sdk.execution_time.xcom import XCom

        if XCom.get_value(ti_key=ti_key, key=WINDOW) is None:
            return ""
        run = f"{quote(ti_key.dag_id, safe='')}/{quote(ti_key.run_id, safe='')}"
        return f"{base_url()}{PREFIX}/runs/{run}"


class SparkHistoryLink(BaseOperatorLink):
    """From a Spark task to its application in Spark's history server, where its connection names one.

    An application that was killed told no id: its link leads to the list.
    """

    name = "Spark history"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        from airflow.sdk.execution_time.xcom import XCom

        server = history_server(str(getattr(operator, "_conn_id", "")))
        if server is None:
            return ""
        application = XCom.get_value(ti_key=ti_key, key=SPARK_APPLICATION)
        return f"{server}/history/{quote(application, safe='')}/" if application else f"{server}/"


def history_server(conn_id: str) -> str | None:
    """The address in the extra of a Spark connection; None if it has none, or one that no link may show."""
    try:
        extra = BaseHook.get_connection(conn_id).extra_dejson
    except AirflowNotFoundException:
        return None
    address = urlsplit(str(extra.get(HISTORY_SERVER) or ""))
    if address.scheme not in {"http", "https"} or not address.hostname or "@" in address.netloc:
        return None
    return f"{address.scheme}://{address.netloc}{address.path}".rstrip("/")


class StatusPageLink(BaseOperatorLink):
    """From any task to the page with the state of publishers and subscriptions."""

    name = "CDC replay status"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        return status_page()


def status_page() -> str:
    """The address of the page inside Airflow's."""
    return f"{base_url()}/plugin{PREFIX}"


def base_url() -> str:
    """Airflow's address for people."""
    return str(conf.get("api", "base_url", fallback="")).rstrip("/")
