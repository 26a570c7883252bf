"""The pipeline's DAGs, one class each. `dags/*.py` make them for all that the configuration names.

A class takes the name of its object, and any argument of Airflow's `DAG`, which overrides ours: another
`dag_id`, `schedule`, `default_args` (pool, owner, callbacks), `tags`. Made in a DAG file, it is found by
Airflow, also without a variable.

Display names sort the DAGs of a publisher: those that run every day come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import DAG

from cdc_replay.airflow import assets
from cdc_replay.airflow.alarm_notifiers import alarm_callbacks
from cdc_replay.airflow.dag_docs import publisher_doc, replay_doc, subscription_doc
from cdc_replay.airflow.dag_ids import capture_dag, replay_dag, validate_dag
from cdc_replay.airflow.operators.in_process import (
    CaptureOperator,
    EmitAssetEventOperator,
    PlanBackfillOperator,
    ResumeOperator,
    SetupOperator,
    ValidateOperator,
    WatchOperator,
)
from cdc_replay.airflow.operators.spark import BackfillOperator, RefreshOperator, SnapshotOperator
from cdc_replay.airflow.params import (
    backfill_params,
    capture_params,
    refresh_params,
    replay_params,
    resume_params,
    snapshot_params,
    validate_params,
)
from cdc_replay.airflow.replay_tasks import add_replay_tasks
from cdc_replay.airflow.schedules import START, capture_schedule, event_intervals, watch_schedule
from cdc_replay.airflow.task_arguments import (
    DEFAULT_ARGS,
    FOLLOWING_ARGS,
    WATCH_ARGS,
    check_one_publisher,
    in_pool,
    with_timeout,
)
from cdc_replay.config import Config, GroupConfig, load_config
from cdc_replay.errors import InvalidConfiguration

ORDER: Final = ("capture", "replay", "validate", "snapshot", "refresh", "backfill", "resume", "watch")
"""The verbs in the order of the display names."""


class PipelineDag(DAG):
    """A DAG of one publisher: one run at a time, no catch-up, the configured timeouts, and tags."""

    def __init__(
        self,
        config: Config,
        publisher: str,
        title: tuple[str, str],
        task_arguments: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> None:
        """`title` is verb and object; `arguments` are the DAG's, with those of the caller."""
        given = dict(arguments)
        verb, name = title
        defaults: dict[str, Any] = {
            "dag_display_name": f"{publisher} · {ORDER.index(verb) + 1} {verb} {name}".rstrip(),
            "start_date": START,
            "catchup": False,
            "dagrun_timeout": config.timeouts.run or None,
            "max_active_runs": 1,
        }
        super().__init__(
            given.pop("dag_id"),
            default_args=with_timeout(config, task_arguments)
            | alarm_callbacks(config)
            | given.pop("default_args", {}),
            tags=["cdc-replay", publisher, verb, *given.pop("tags", ())],
            **defaults | given,
        )


class SubscriptionDag(PipelineDag):
    """A DAG of one subscription, which a person starts or a write to the subscriber."""

    def __init__(
        self, config: Config, verb: str, subscription: str, text: str, arguments: Mapping[str, Any]
    ) -> None:
        """`text` says what the DAG does."""
        configured = config.subscription(subscription)
        super().__init__(
            config,
            configured.subscription.publisher,
            (verb, subscription),
            DEFAULT_ARGS | in_pool(config.groups[configured.group].pool),
            {
                "doc_md": subscription_doc(text, config, configured),
                "schedule": None,
                **arguments,
            },
        )


class CaptureDag(PipelineDag):
    """Set up the slot of a publisher if it is missing, then pull its changes into the change log."""

    def __init__(self, publisher: str, *, config: Config | None = None, **kwargs: Any) -> None:
        config = config or load_config()
        text = (
            f"Set up the slot of publisher `{publisher}` if it is missing, then pull its changes into the"
            " change log. One run at a time. A run that finds nothing new is skipped."
        )
        arguments = {
            "dag_id": capture_dag(publisher),
            "description": f"Slot of {publisher} → change log",
            "doc_md": publisher_doc(text, config.publisher(publisher)),
            "schedule": capture_schedule(publisher),
            "params": capture_params(),
        }
        task_arguments = FOLLOWING_ARGS | in_pool(config.publisher(publisher).pool)
        super().__init__(config, publisher, ("capture", ""), task_arguments, arguments | kwargs)
        with self:
            on_events = event_intervals() is not None
            capture = CaptureOperator(
                task_id="capture",
                publisher=publisher,
                to_lsn="{{ params.to_lsn or '' }}",
                sets_up=on_events,
            )
            if not on_events:
                SetupOperator(task_id="setup", publisher=publisher) >> capture


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


class ValidateDag(SubscriptionDag):
    """Prove with Great Expectations that a subscriber is consistent, after each write to it."""

    def __init__(self, subscription: str, *, config: Config | None = None, **kwargs: Any) -> None:
        config = config or load_config()
        text = (
            f"Prove with Great Expectations that the subscriber of `{subscription}` is consistent: both sides"
            " are compared at one LSN, under live writes. Runs after each write to the subscriber, and"
            " compares what is due by the configuration's `validation`: without it, everything. The link"
            " *Validation report* of the task leads to the report of its run. With *Repair*, rows that differ"
            " are written as they are published, and the proof is made again; *Dry run*, which is on, only"
            " counts them."
        )
        arguments = {
            "dag_id": validate_dag(subscription),
            "description": f"Is {subscription} what its publications say?",
            "schedule": [assets.subscription(subscription)],
            "params": validate_params(),
        }
        super().__init__(config, "validate", subscription, text, arguments | kwargs)
        with self:
            ValidateOperator(
                task_id="validate",
                subscription=subscription,
                tables="{{ params.tables | tojson }}",
                due="{{ params.due }}",
                sample="{{ params.sample or '' }}",
                max_seconds="{{ params.max_seconds or '' }}",
                max_bytes="{{ params.max_bytes or '' }}",
                repair="{{ params.repair }}",
                is_dry_run="{{ params.dry_run }}",
                refuse_unknown_params=True,
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


class ResumeDag(SubscriptionDag):
    """Let a parked subscription or table be replayed again, with or without what parked it."""

    def __init__(self, subscription: str, *, config: Config | None = None, **kwargs: Any) -> None:
        config = config or load_config()
        text = (
            f"Let `{subscription}`, which is parked, or parked tables of it, be replayed again: with the"
            " transaction before which they are parked, without it (*Skip*), or with NULL for values that"
            " exist nowhere (*Accept NULL*). A skipped transaction is lost for good. Nothing is applied"
            " here: the next replay does that."
        )
        arguments = {
            "dag_id": f"resume__{subscription}",
            "description": f"Replay parked parts of {subscription} again",
            "params": resume_params(),
        }
        super().__init__(config, "resume", subscription, text, arguments | kwargs)
        with self:
            ResumeOperator(
                task_id="resume",
                subscription=subscription,
                tables="{{ params.tables | tojson }}",
                skip="{{ params.skip or '' }}",
                accept_null="{{ params.accept_null }}",
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


class WatchDag(PipelineDag):
    """Trigger the replay of subscriptions that lag behind the change log, and tell alarms."""

    def __init__(self, publisher: str, *, config: Config | None = None, **kwargs: Any) -> None:
        config = config or load_config()
        groups = followed_groups(config, publisher)
        text = (
            "Replay runs when the log has grown. Changes that a run could not apply, because its subscriber"
            " was unavailable until the last retry, would wait for the publisher's next change. So this DAG"
            " reads the lag of every subscription. If a replay can end it, and none is running or queued,"
            f" it triggers {', '.join(f'`{replay_dag(group.name)}`' for group in groups)}. A subscriber that"
            " does not answer costs one attempt to connect. It triggers nothing that is paused."
            if groups
            else "Every group of this publisher is replayed by its own schedule: nothing is triggered."
        )
        if config.alarms.notify:
            text += " It also tells the channels of `alarms.notify` what is new, worse or over."
        arguments = {
            "dag_id": f"watch__{publisher}",
            "description": f"Lagging subscriptions of {publisher} → replay",
            "doc_md": publisher_doc(text, config.publisher(publisher)),
            "schedule": watch_schedule(
                publisher,
                [name for group in groups for name in group.subscriptions],
                tells_alarms=bool(config.alarms.notify),
            ),
            "is_paused_upon_creation": False,
        }
        super().__init__(config, publisher, ("watch", ""), WATCH_ARGS, arguments | kwargs)
        with self:
            watch = WatchOperator(task_id="watch", publisher=publisher, groups=groups)
            for group in groups:
                watch >> TriggerDagRunOperator(
                    task_id=f"replay.{group.name}",
                    trigger_dag_id=replay_dag(group.name),
                    logical_date=None,
                    openlineage_inject_parent_info=False,  # the replay DAG rejects unknown Params
                )


def followed_groups(config: Config, publisher: str) -> tuple[GroupConfig, ...]:
    """The groups of a publisher whose replay follows the change log; the others have a schedule."""
    return tuple(
        group for group in config.groups.values() if group.publisher == publisher and not group.schedule
    )
