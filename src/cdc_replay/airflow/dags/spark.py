"""DAGs with a task that is a Spark application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdc_replay.airflow import assets
from cdc_replay.airflow.dag_docs import replay_doc
from cdc_replay.airflow.dag_ids import replay_dag
from cdc_replay.airflow.dags.pipeline import PipelineDag, SubscriptionDag
from cdc_replay.airflow.operators.in_process import EmitAssetEventOperator, PlanBackfillOperator
from cdc_replay.airflow.operators.spark import BackfillOperator, RefreshOperator, SnapshotOperator
from cdc_replay.airflow.params import backfill_params, refresh_params, replay_params, snapshot_params
from cdc_replay.airflow.replay_tasks import add_replay_tasks
from cdc_replay.airflow.task_arguments import FOLLOWING_ARGS, check_one_publisher, in_pool
from cdc_replay.config import Config, GroupConfig, load_config
from cdc_replay.errors import InvalidConfiguration


class ReplayDag(PipelineDag):
    """Apply the change log to subscriptions of one publisher, by one Spark application.

    :param subscriptions: names in the configuration; those of a whole group make `replay__<group>`
    :param capture: first capture the publisher's changes until now
    :param validate: afterwards prove that the subscribers are consistent
    """

    def __init__(
        self,
        subscriptions: Sequence[str],
        *,
        config: Config | None = None,
        capture: bool = False,
        validate: bool = False,
        **kwargs: Any,
    ) -> None:
        config = config or load_config()
        publisher = check_one_publisher(config, subscriptions)
        group = _whole_group(config, subscriptions)
        if group is None and "dag_id" not in kwargs:
            raise InvalidConfiguration(
                "the subscriptions are no whole group", hint="Give the DAG a `dag_id` of its own."
            )
        arguments = self._defaults(config, subscriptions, group) | kwargs
        name = "" if group is not None and group.name == publisher else str(arguments["dag_id"])
        first_group = config.groups[config.subscription(subscriptions[0]).group]
        task_arguments = FOLLOWING_ARGS | in_pool(first_group.pool)
        title = ("replay", name.removeprefix("replay__"))
        super().__init__(config, publisher, title, task_arguments, arguments)
        has_param = "to_lsn" in self.params
        with self:
            add_replay_tasks(
                config,
                subscriptions,
                kwargs.get("default_args", {}),
                capture=capture,
                validate=validate,
                to_lsn="{{ params.to_lsn or '' }}" if has_param else None,
            )

    @staticmethod
    def _defaults(config: Config, subscriptions: Sequence[str], group: GroupConfig | None) -> dict[str, Any]:
        shown = group or config.groups[config.subscription(subscriptions[0]).group]
        publisher = shown.publisher
        text = (
            f"One Spark application applies the change log of `{publisher}` to the subscriptions. The next"
            " run applies all changes that arrive while one is active. Every subscription has its own"
            " report task, which fails while the subscription is failed or parked."
        )
        return {
            **({"dag_id": replay_dag(group.name)} if group else {}),
            "description": f"Change log of {publisher} → {', '.join(subscriptions)}",
            "doc_md": replay_doc(text, config, subscriptions),
            "schedule": shown.schedule or [assets.change_log(publisher)],
            "params": replay_params(),
            # The reports of a run that followed are no reason for the next one to wait.
            **({"max_active_runs": 2} if shown.follow else {}),
        }


def _whole_group(config: Config, subscriptions: Sequence[str]) -> GroupConfig | None:
    return next(
        (group for group in config.groups.values() if set(group.subscriptions) == set(subscriptions)), None
    )


class SnapshotDag(SubscriptionDag):
    """Copy the tables of a subscription that need it, or those named, under one exported snapshot."""

    def __init__(self, subscription: str, *, config: Config | None = None, **kwargs: Any) -> None:
        config = config or load_config()
        text = (
            f"Copy the tables of `{subscription}` that need it, or those named, under one exported snapshot."
            " Replay skips the tables that are being copied; they catch up from the snapshot's LSN"
            " afterwards. The other tables do not wait."
        )
        arguments = {
            "dag_id": f"snapshot__{subscription}",
            "description": f"Initial state of {subscription}",
            "params": snapshot_params(),
        }
        super().__init__(config, "snapshot", subscription, text, arguments | kwargs)
        with self:
            SnapshotOperator(
                task_id="snapshot",
                subscription=subscription,
                config=config,
                tables="{{ params.tables | tojson }}",
                refuse_unknown_params=True,
            )


class RefreshDag(SubscriptionDag):
    """Read the publications of a subscription again, as REFRESH PUBLICATION does."""

    def __init__(self, subscription: str, *, config: Config | None = None, **kwargs: Any) -> None:
        config = config or load_config()
        text = (
            f"Read the publications of `{subscription}` again, as REFRESH PUBLICATION does: new tables are"
            " copied, dropped ones are removed from the subscription. With *Reconcile* the subscriber then"
            " equals the publications: rows are inserted and updated, and rows that the publisher does not"
            " have or that the row filter excludes are deleted without confirmation. With *Dry run* nothing"
            " is changed, and the result of the task has the counts."
        )
        arguments = {
            "dag_id": f"refresh__{subscription}",
            "description": f"Publications of {subscription}, read again",
            "params": refresh_params(),
        }
        super().__init__(config, "refresh", subscription, text, arguments | kwargs)
        with self:
            refresh = RefreshOperator(
                task_id="refresh",
                subscription=subscription,
                config=config,
                reconcile="{{ params.reconcile }}",
                is_dry_run="{{ params.dry_run }}",
                refuse_unknown_params=True,
            )
            refresh >> EmitAssetEventOperator(
                task_id="announce", subscription=subscription, unless=["dry_run"]
            )


class BackfillDag(SubscriptionDag):
    """Apply a past range of the change log again, in a subscriber or in another database."""

    def __init__(self, subscription: str, *, config: Config | None = None, **kwargs: Any) -> None:
        config = config or load_config()
        text = (
            f"Apply a past range of the change log again, with the filters of `{subscription}`. In the"
            " subscriber it repairs rows: those that the range has changed get their state of the applied"
            " LSN. In another database the range is applied unchanged. The task `plan` shows the range as"
            " LSNs and what the log holds of it; a dry run, the default, then counts and writes nothing."
        )
        arguments = {
            "dag_id": f"backfill__{subscription}",
            "description": f"A past range of the log, again, for {subscription}",
            "params": backfill_params(),
        }
        super().__init__(config, "backfill", subscription, text, arguments | kwargs)
        shared: dict[str, Any] = {
            "subscription": subscription,
            "tables": "{{ params.tables | tojson }}",
            "into_conn_id": "{{ params.into_conn_id or '' }}",
            "is_dry_run": "{{ params.dry_run }}",
            "refuse_unknown_params": True,
        }
        with self:
            plan = PlanBackfillOperator(
                task_id="plan",
                start="{{ params['from'] or '' }}",
                end="{{ params.to or '' }}",
                **shared,
            )
            backfill = BackfillOperator(
                task_id="backfill",
                config=config,
                start="{{ ti.xcom_pull(task_ids='plan')['from_lsn'] }}",
                end="{{ ti.xcom_pull(task_ids='plan')['to_lsn'] }}",
                **shared,
            )
            announce = EmitAssetEventOperator(
                task_id="announce", subscription=subscription, unless=["into_conn_id", "dry_run"]
            )
            plan >> backfill >> announce
