"""Rights: what a user may do with an object is what Airflow's auth manager permits with its DAG (`dag_ids`).

The id of the DAG is made from the requested object, never taken from the request, unless that object is a run
of a DAG.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, TypeAlias

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import get_user
from airflow.models.dag import DagModel
from fastapi import Depends, HTTPException

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.base_auth_manager import ResourceMethod

User: TypeAlias = Annotated[BaseUser, Depends(get_user)]
"""The authenticated user; a request without one is answered with 401."""


def readable_dags(user: BaseUser, dag_ids: Iterable[str]) -> frozenset[str]:
    """The ids, of `dag_ids`, that the user may read, whether or not the DAGs exist."""
    return _permitted(user, dag_ids, "GET", None)


def triggerable_dags(user: BaseUser, dag_ids: Iterable[str]) -> frozenset[str]:
    """The ids, of `dag_ids`, that the user may trigger, whether or not the DAGs exist."""
    return _permitted(user, dag_ids, "POST", DagAccessEntity.RUN)


def require_readable(user: BaseUser, dag_id: str) -> None:
    """Answer 403 unless the user may read the DAG."""
    if dag_id not in readable_dags(user, [dag_id]):
        raise HTTPException(403, "Forbidden")


def require_triggerable(user: BaseUser, dag_id: str) -> None:
    """Answer 403 unless the user may trigger the DAG."""
    if dag_id not in triggerable_dags(user, [dag_id]):
        raise HTTPException(403, "Forbidden")


def _permitted(
    user: BaseUser, dag_ids: Iterable[str], method: ResourceMethod, entity: DagAccessEntity | None
) -> frozenset[str]:
    unique_ids = list(dict.fromkeys(dag_ids))
    teams = DagModel.get_dag_id_to_team_name_mapping(unique_ids)
    auth_manager = get_auth_manager()
    return frozenset(
        dag_id
        for dag_id in unique_ids
        if auth_manager.is_authorized_dag(
            method=method,
            access_entity=entity,
            details=DagDetails(id=dag_id, team_name=teams.get(dag_id)),
            user=user,
        )
    )
