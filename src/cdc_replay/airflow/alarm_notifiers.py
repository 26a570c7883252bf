"""Notifiers for the callbacks of tasks: a failure, after the last retry, and its end.

    default_args={
        "on_failure_callback": AlarmNotifier(),
        "on_success_callback": ResolvedNotifier(),
        "on_skipped_callback": ResolvedNotifier(),
    }

The shipped DAGs have them if channels are configured. A task that fails again is not told again until it has
succeeded, or was skipped as there was nothing to do. What the watch sees on a subscriber (parked, failed, not
consistent) the watch tells; the shipped DAGs do not tell it twice.

The text names the task, its publisher or subscription, and the error's hint. It has the error's message only
if that cannot have values of rows.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from airflow.sdk.bases.notifier import BaseNotifier

from cdc_replay.airflow.alarm_watch import VariableMemory, task_scope, telling
from cdc_replay.airflow.connections import airflow_config
from cdc_replay.airflow.links import base_url
from cdc_replay.errors import (
    CdcReplayError,
    ChangeLogConflict,
    ChangeLogMismatch,
    ChangeLogMissing,
    ChangeLogNotWritable,
    ChangeLogPruned,
    ChangeLogUnavailable,
    InvalidConfiguration,
    MissingPrivilege,
    NotConsistent,
    PublicationMissing,
    PublisherNotReady,
    ReplayFailed,
    ServerUnavailable,
    SlotActive,
    SlotLost,
    SlotMissing,
    SubscriptionInUse,
    SubscriptionParked,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

    from cdc_replay.alarm.tell import Telling
    from cdc_replay.config import Config
    from cdc_replay.model.alarm import Alarm

TOLD_BY_WATCH: Final = (SubscriptionParked, ReplayFailed, NotConsistent)
"""States of a subscriber, which the watch sees there."""

WITHOUT_VALUES: Final = (
    *(ChangeLogConflict, ChangeLogMismatch, ChangeLogMissing, ChangeLogNotWritable, ChangeLogPruned),
    *(ChangeLogUnavailable, InvalidConfiguration, MissingPrivilege, PublicationMissing, PublisherNotReady),
    *(ServerUnavailable, SlotActive, SlotLost, SlotMissing, SubscriptionInUse),
)
"""Errors whose message names servers, files, slots and privileges, never rows."""


def alarm_callbacks(config: Config) -> dict[str, Any]:
    """Arguments of the tasks of the shipped DAGs; none without a channel."""
    if not config.alarms.notify:
        return {}
    return {
        "on_failure_callback": AlarmNotifier(leaves_to_watch=True),
        "on_success_callback": ResolvedNotifier(),
        "on_skipped_callback": ResolvedNotifier(),
    }


class _TaskNotifier(BaseNotifier):
    """Tells the channels of `alarms.notify` about the task of the context; never raises."""

    def notify(self, context: Context) -> None:
        try:
            config = airflow_config()
            if config.alarms.notify:
                self._tell(config, context)
        except Exception:
            self.log.exception("an alarm is not told")

    @abstractmethod
    def _tell(self, config: Config, context: Context) -> None:
        """Tell the channels what has become of the task."""


class AlarmNotifier(_TaskNotifier):
    """For `on_failure_callback`: tell that a task has failed, once until it succeeds.

    :param leaves_to_watch: do not tell what the watch tells of a subscription: for DAGs beside a watch
    """

    def __init__(self, *, leaves_to_watch: bool = False) -> None:
        super().__init__()
        self.leaves_to_watch = leaves_to_watch

    def _tell(self, config: Config, context: Context) -> None:
        from cdc_replay.model.alarm import Observed

        if self.leaves_to_watch and isinstance(_own_error(context), TOLD_BY_WATCH):
            return
        alarm = task_alarm(context)
        _look(config, context).tell(Observed((alarm,)), dt.datetime.now(dt.UTC))


class ResolvedNotifier(_TaskNotifier):
    """For `on_success_callback` and `on_skipped_callback`: tell that a failure that was told is over."""

    def _tell(self, config: Config, context: Context) -> None:
        from cdc_replay.model.alarm import Observed

        if _memory(config, context).read() is not None:
            _look(config, context).tell(Observed(()), dt.datetime.now(dt.UTC))


def _look(config: Config, context: Context) -> Telling:
    # The watch looks at the memory of tasks, too (`alarm_watch`).
    sent = telling(config, _memory(config, context), dt.timedelta())
    return dataclasses.replace(sent, writes_first=False)


def _memory(config: Config, context: Context) -> VariableMemory:
    return VariableMemory.of(task_scope(_publisher(config, context), _task_name(context)))


def _task_name(context: Context) -> str:
    task: Any = context["ti"]
    index = getattr(task, "map_index", -1)
    return f"{task.dag_id}.{task.task_id}" + (f"[{index}]" if index is not None and index >= 0 else "")


def _publisher(config: Config, context: Context) -> str:
    """The publisher of the task's operator; empty if it is none of ours."""
    operator: Any = context.get("task")
    if (publisher := getattr(operator, "publisher", None)) is not None:
        return str(publisher)
    for name in _subscriptions(context):
        if name in config.subscriptions:
            return config.subscriptions[name].subscription.publisher
    return ""


def _subscriptions(context: Context) -> Iterator[str]:
    operator: Any = context.get("task")
    if (name := getattr(operator, "subscription", None)) is not None:
        yield str(name)
    yield from map(str, getattr(operator, "subscriptions", ()))


def _own_error(context: Context) -> CdcReplayError | None:
    """The error of ours behind the task's exception; `AirflowFailException` has it as its cause."""
    error: Any = context.get("exception")
    while isinstance(error, BaseException):
        if isinstance(error, CdcReplayError):
            return error
        error = error.__cause__
    return None


def task_alarm(context: Context) -> Alarm:
    """The alarm of a task that has failed."""
    from cdc_replay.model.alarm import Alarm, AlarmKey, AlarmKind, Severity
    from cdc_replay.model.lsn import Lsn

    task: Any = context["ti"]
    error = _own_error(context)
    names = list(_subscriptions(context))
    of = f" of subscription {', '.join(names)}" if names else ""
    given: Any = context.get("exception")
    kind = type(error or given).__name__ if isinstance(given, BaseException) else "it was ended from outside"
    why = f"{kind}: {error.message}" if isinstance(error, WITHOUT_VALUES) else kind
    lsn = getattr(error, "commit_lsn", None)
    run = quote(str(task.run_id), safe="")
    return Alarm(
        AlarmKey(f"task {_task_name(context)}", AlarmKind.TASK_FAILED.value),
        Severity.WARNING,
        f"failed{of} in run {task.run_id}: {why}",
        (error.hint if error is not None else None) or "The log of the task has the error.",
        lsn=None if lsn is None else Lsn(lsn),
        link=f"{base_url()}/dags/{quote(task.dag_id, safe='')}/runs/{run}",
    )
