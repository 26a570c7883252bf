"""The result of a replay for one subscription.

A replay run has one position: the end of the log when it starts. With a group of two subscriptions:

    replay (one Spark application) ──▶ report.nsw  ──▶ asset of nsw
                                   └─▶ report.act  ──▶ asset of act

A subscription that fails does not stop the others. After a transient error the application applies the other
subscriptions, then fails, so that Airflow retries it, up to the end of the log by then. A permanent error is
reported by the subscription's own report task: a retry would start Spark in vain. Reports run after the last
try of the application, also if it failed, because most subscriptions may be applied. Each reads the result
that its subscription recorded on its own subscriber. A result that ends before the run's position is from an
earlier run.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import Context, TriggerRule

from cdc_replay.airflow import assets, metrics
from cdc_replay.airflow.lineage import TellsLineage
from cdc_replay.airflow.links import WINDOW, StatusPageLink, WindowLink
from cdc_replay.airflow.operators.in_process import CommandOperator, Json
from cdc_replay.airflow.task_arguments import DEFAULT_ARGS
from cdc_replay.airflow.task_lineage import Flow, TaskLineage
from cdc_replay.airflow.window_summary import WindowSummary
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.lsn import Lsn


class ResultOutdated(CdcReplayError):
    """A subscription has no result of this run."""


class ReportOperator(TellsLineage, CommandOperator):
    """Report the result of this run's replay for one subscription, and announce its new position.

    Fails if the subscription failed or is parked, or if it has no result of this run. Retries are short: the
    next run cannot start before this one has ended.

    :param subscription: name of the subscription in the configuration
    :param replay_task_id: the run's `ReplayOperator`
    """

    operator_extra_links = (WindowLink(), StatusPageLink())

    def __init__(self, *, subscription: str, replay_task_id: str, **kwargs: Any) -> None:
        kwargs.setdefault("trigger_rule", TriggerRule.ALL_DONE)
        super().__init__(**{**kwargs, "max_retry_delay": DEFAULT_ARGS["retry_delay"]})
        self.subscription = subscription
        self.replay_task_id = replay_task_id
        self.asset = assets.subscription(subscription)
        self.outlets = [*self.outlets, self.asset]

    def run_command(self, config: Config, context: Context) -> Json:
        from cdc_replay.commands.status import subscription_result

        result = subscription_result(config, self.subscription)
        applied = Lsn.parse(str(result["to_lsn"]))
        self._refuse_older(applied, context)
        assets.announce(context, self.asset, applied, after=Lsn.parse(str(result["from_lsn"])))
        metrics.of_replay(result)
        context["ti"].xcom_push(key=WINDOW, value=WindowSummary.of_result(result).to_json())
        self.results = (result,)
        return result

    def lineage(self) -> TaskLineage:
        return TaskLineage(Flow.REPLAY, (self.subscription,), results=self.results)

    def _refuse_older(self, applied: Lsn, context: Context) -> None:
        target = context["ti"].xcom_pull(task_ids=self.replay_task_id, key=assets.TO_LSN)
        if target is None or applied < Lsn.parse(target):
            raise ResultOutdated(
                f'subscription "{self.subscription}" has no result of this run',
                detail=f"Its last result ends at {applied}, the run was to reach {target or 'a later LSN'}.",
                hint=f'See the log of task "{self.replay_task_id}"; the next run continues from {applied}.',
            )
