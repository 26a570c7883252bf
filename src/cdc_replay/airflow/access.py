"""Read access: a user may read an object if Airflow's auth manager lets them read its DAG (`dag_ids`).

The id of the DAG is made from the requested object, never taken from the request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeAlias

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import DagDetails
from airflow.api_fastapi.core_api.security import get_user
from airflow.models.dag import DagModel
from fastapi import Depends, HTTPException

User: TypeAlias = Annotated[BaseUser, Depends(get_user)]
"""The authenticated user; a request without one is answered with 401."""


def readable_dags(user: BaseUser, dag_ids: Iterable[str]) -> frozenset[str]:
    """The ids, of `dag_ids`, that the user may read, whether or not the DAGs exist."""
    unique_ids = list(dict.fromkeys(dag_ids))
    teams = DagModel.get_dag_id_to_team_name_mapping(unique_ids)
    auth_manager = get_auth_manager()
    return frozenset(
        dag_id
        for dag_id in unique_ids
        if auth_manager.is_authorized_dag(
            method="GET", details=DagDetails(id=dag_id, team_name=teams.get(dag_id)), user=user
        )
    )


def require_readable(user: BaseUser, dag_id: str) -> None:
    """Answer 403 unless the user may read the DAG."""
    if dag_id not in readable_dags(user, [dag_id]):
        raise HTTPException(403, "Forbidden")
