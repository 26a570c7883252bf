"""The addresses in Airflow that a report of a validation has."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from cdc_replay.airflow.dag_ids import validate_dag
from cdc_replay.airflow.links import PREFIX, base_url

if TYPE_CHECKING:
    from airflow.sdk import Context

    from cdc_replay.validate.report_context import ReportLinks


def report_links(subscription: str, context: Context) -> ReportLinks:
    """The links of a validation that this run makes."""
    from cdc_replay.validate.report_context import ReportLinks

    base = base_url()
    run = context["dag_run"]
    return ReportLinks(
        page=f"{base}/plugin{PREFIX}",
        run=f"{base}/dags/{quote(run.dag_id, safe='')}/runs/{quote(run.run_id, safe='')}",
        repair=f"{base}/dags/{quote(validate_dag(subscription), safe='')}",
    )
