"""Replay as tasks of a DAG, or as a task group inside of anybody's DAG.

    setup → capture →  replay  ┬→ report.nsw → validate.nsw
                               └→ report.act → validate.act

The tasks before and after `replay` and its reports are optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import TaskGroup

from cdc_replay.airflow.operators.in_process import CaptureOperator, SetupOperator, ValidateOperator
from cdc_replay.airflow.operators.report import ReportOperator
from cdc_replay.airflow.operators.spark import ReplayOperator
from cdc_replay.airflow.task_arguments import (
    FOLLOWING_ARGS,
    check_one_publisher,
    in_pool,
    with_timeout,
)
from cdc_replay.config import Config, load_config


def add_replay_tasks(
    config: Config,
    subscriptions: Sequence[str],
    defaults: Mapping[str, Any],
    *,
    capture: bool,
    validate: bool,
    to_lsn: str | None = None,
) -> None:
    """Add the tasks to the DAG and the task group of the context.

    `defaults` are default arguments that somebody gave. A pool among them is that of all tasks; without one,
    tasks that read the slot are in the publisher's pool, not in the group's.
    """
    publisher = check_one_publisher(config, subscriptions)
    replay = ReplayOperator(task_id="replay", subscriptions=subscriptions, config=config, to_lsn=to_lsn)
    if capture:
        # Also if nothing is new: an earlier run may have captured what is not applied yet.
        pool = {} if "pool" in defaults else in_pool(config.publisher(publisher).pool)
        captured = CaptureOperator(task_id="capture", publisher=publisher, skip_if_announced=False, **pool)
        SetupOperator(task_id="setup", publisher=publisher, **pool) >> captured >> replay
    for name in subscriptions:
        report = ReportOperator(task_id=f"report.{name}", subscription=name, replay_task_id=replay.task_id)
        replay >> report
        if validate:
            report >> ValidateOperator(task_id=f"validate.{name}", subscription=name)


class ReplayTaskGroup(TaskGroup):
    """Bring subscriptions up to date inside of a DAG: what follows the group finds their tables applied.

    Retries, timeouts and pools are those of the shipped DAGs, unless the DAG or the group sets them.

    :param subscriptions: names in the configuration, all of one publisher
    :param config: the configuration at parse time; default: that of `CDC_REPLAY_CONFIG`
    :param capture: first capture the publisher's changes until now
    :param validate: afterwards prove that the subscribers are consistent, before anything follows
    """

    def __init__(
        self,
        group_id: str = "cdc_replay",
        *,
        subscriptions: Sequence[str],
        config: Config | None = None,
        capture: bool = True,
        validate: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(group_id=group_id, **kwargs)
        config = config or load_config()
        check_one_publisher(config, subscriptions)
        group = config.groups[config.subscription(subscriptions[0]).group]
        given = self.dag.default_args | self.default_args
        self.default_args = with_timeout(config, FOLLOWING_ARGS) | in_pool(group.pool) | given
        with self:
            add_replay_tasks(config, subscriptions, given, capture=capture, validate=validate)
