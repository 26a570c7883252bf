"""Links from tasks to the pages of the plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from airflow.sdk import BaseOperator, BaseOperatorLink
from airflow.sdk.configuration import conf

if TYPE_CHECKING:
    from airflow.sdk.types import TaskInstanceKey

PREFIX: Final = "/cdc-replay"
"""Where the plugin's pages are, below Airflow's base URL."""


class ValidationReportLink(BaseOperatorLink):
    """From a validate task to the report of the subscription."""

    name = "Validation report"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        base = conf.get("api", "base_url", fallback="").rstrip("/")
        return f"{base}{PREFIX}/reports/{ti_key.dag_id.removeprefix('validate__')}/latest.html"
