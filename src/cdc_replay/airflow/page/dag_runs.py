"""What Airflow's database knows of the DAGs of an object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from sqlalchemy import select

from cdc_replay.airflow.page.access import readable_dags, triggerable_dags

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser

RUNS_SHOWN: Final = 10


def known_dags(user: BaseUser, dag_ids: Sequence[str]) -> dict[str, dict[str, bool]]:
    """The DAGs that exist and that the user may read, and whether the user may trigger them."""
    readable, triggerable = readable_dags(user, dag_ids), triggerable_dags(user, dag_ids)
    with create_session() as session:
        query = select(DagModel.dag_id, DagModel.is_paused).where(
            DagModel.dag_id.in_(readable), ~DagModel.is_stale
        )
        paused = {dag_id: bool(is_paused) for dag_id, is_paused in session.execute(query)}
    return {
        dag_id: {"is_paused": paused[dag_id], "may_trigger": dag_id in triggerable}
        for dag_id in dag_ids
        if dag_id in paused
    }


def last_runs(dag_ids: Sequence[str], limit: int = RUNS_SHOWN) -> list[dict[str, Any]]:
    """The newest runs of these DAGs, the newest first."""
    with create_session() as session:
        query = (
            select(DagRun).where(DagRun.dag_id.in_(dag_ids)).order_by(DagRun.run_after.desc()).limit(limit)
        )
        return [_to_json(run) for run in session.scalars(query)]


def _to_json(run: DagRun) -> dict[str, Any]:
    return {
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "state": run.state,
        "started": None if run.start_date is None else run.start_date.isoformat(timespec="seconds"),
        "ended": None if run.end_date is None else run.end_date.isoformat(timespec="seconds"),
    }
