"""What operators tell OpenLineage; its provider asks, and without it nobody does.

Before a task, and after one that failed without a result, only the change log is told: no server is asked.
The methods run in a child process of the task, after it; an error there is a warning in the task's log.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cdc_replay.airflow.connections import airflow_config
from cdc_replay.airflow.task_lineage import TaskLineage

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage


class TellsLineage:
    """The methods that the provider of OpenLineage looks for."""

    results: Sequence[Mapping[str, Any]] = ()
    """Of the command; empty until it has ended."""

    @abstractmethod
    def lineage(self) -> TaskLineage:
        """What the task does, after templates are rendered."""

    def get_openlineage_facets_on_start(self) -> OperatorLineage[Any, Any]:
        """The change log."""
        from cdc_replay.airflow.openlineage_events import before

        return before(airflow_config(), self.lineage())

    def get_openlineage_facets_on_complete(self, task_instance: object) -> OperatorLineage[Any, Any]:
        """The tables, and the range of the log."""
        from cdc_replay.airflow.openlineage_events import after

        return after(airflow_config(), self.lineage())

    def get_openlineage_facets_on_failure(self, task_instance: object) -> OperatorLineage[Any, Any]:
        """As after a success, if the command had a result."""
        if self.results:
            return self.get_openlineage_facets_on_complete(task_instance)
        return self.get_openlineage_facets_on_start()
