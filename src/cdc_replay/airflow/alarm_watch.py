"""What the watch of a publisher tells, and where Airflow remembers it.

The memory is a Variable in Airflow's metadata database: it is there on every worker, and when a publisher, a
subscriber or a change log is not. If Airflow is down, nobody looks. A Variable has names, positions and texts
of alarms, never a value of a row; the Variable of a task is deleted when the task's alarm is over.

Nothing here fails a task: an error is logged, and the next look tries again.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from airflow.sdk import BaseHook, Variable
from airflow.sdk.exceptions import AirflowNotFoundException, AirflowRuntimeError

from cdc_replay.airflow.dag_ids import validate_dag
from cdc_replay.airflow.links import PREFIX, base_url
from cdc_replay.errors import AlarmsNotRemembered, InvalidConfiguration
from cdc_replay.model.alarm import AlarmKey, AlarmKind

if TYPE_CHECKING:
    from cdc_replay.alarm.channel_connection import ChannelConnection
    from cdc_replay.alarm.tell import Telling
    from cdc_replay.config import Config

VARIABLE: Final = "cdc_replay_alarms__"
LONGEST_KEY: Final = 200

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VariableMemory:
    """A Variable of Airflow; see `cdc_replay.alarm.memory.Memory`."""

    key: str

    @classmethod
    def of(cls, scope: str) -> VariableMemory:
        """The Variable of a publisher, or of a task."""
        key = VARIABLE + scope
        if len(key) > LONGEST_KEY:
            digest = hashlib.sha256(scope.encode()).hexdigest()
            key = f"{key[: LONGEST_KEY - len(digest)]}{digest}"
        return cls(key)

    def read(self) -> str | None:
        """See `Memory`."""
        try:
            text = Variable.get(self.key, default=None)
        except AirflowRuntimeError as error:
            raise AlarmsNotRemembered(f'variable "{self.key}" cannot be read: {error}') from None
        return None if text is None else str(text)

    def write(self, text: str) -> None:
        """See `Memory`."""
        try:
            if text == "[]":
                Variable.delete(self.key)
            else:
                Variable.set(self.key, text, description="What was told of alarms; written by cdc-replay.")
        except AirflowRuntimeError as error:
            raise AlarmsNotRemembered(f'variable "{self.key}" cannot be written: {error}') from None


def channel_connection(conn_id: str) -> ChannelConnection:
    """The Airflow connection of a channel.

    Raises:
        InvalidConfiguration: if Airflow does not have it.
    """
    from cdc_replay.alarm.channel_connection import ChannelConnection

    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        raise InvalidConfiguration(f'connection "{conn_id}" of a channel is not known') from None
    return ChannelConnection(
        kind=connection.conn_type or "",
        host=connection.host or "",
        port=connection.port,
        login=connection.login or "",
        password=connection.password or "",
        schema=connection.schema or "",
        extra=connection.extra_dejson,
    )


def tell_alarms(config: Config, publisher: str) -> None:
    """Look at a publisher and its subscriptions, and tell the channels what is new, worse or over."""
    if not config.alarms.notify:
        return
    try:
        _tell(config, publisher)
        _tell_again(config, publisher)
    except Exception:
        logger.exception("alarms of publisher %s are not told", publisher)


def _tell(config: Config, publisher: str) -> None:
    from cdc_replay.commands.alarms import look

    names = [configured.name for configured in config.subscriptions_of(publisher)]
    observed = look(config, [publisher], names, link_of)
    telling(config, publisher).tell(observed, dt.datetime.now(dt.UTC))


def _tell_again(config: Config, publisher: str) -> None:
    """Tell channels that were not reachable of the tasks that failed then."""
    from cdc_replay.model.alarm import Observed

    for key in Variable.keys(prefix=f"{VARIABLE}{task_scope(publisher, '')}"):
        # Only the task itself can say whether its alarm is over.
        observed = Observed((), is_all_unknown=True)
        telling(config, VariableMemory(key), dt.timedelta()).tell(observed, dt.datetime.now(dt.UTC))


def telling(config: Config, memory: VariableMemory | str, patience: dt.timedelta | None = None) -> Telling:
    """The configured channels, with a memory or the one of a publisher."""
    from cdc_replay.alarm.tell import Telling
    from cdc_replay.commands.alarms import channels_of

    kept = VariableMemory.of(memory) if isinstance(memory, str) else memory
    limit = config.alarms.patience if patience is None else patience
    return Telling(channels_of(config, channel_connection), kept, limit)


def task_scope(publisher: str, task: str) -> str:
    """The scope of the memory of a task, whose DAG works for a publisher."""
    return f"task__{publisher}__{task}"


def link_of(key: AlarmKey) -> str:
    """The runs of validations, which have the reports, or the page of the plugin."""
    name = key.subject.removeprefix("subscription ")
    if key.kind in _OF_VALIDATION and name != key.subject:
        return f"{base_url()}/dags/{quote(validate_dag(name), safe='')}"
    return f"{base_url()}/plugin{PREFIX}"


_OF_VALIDATION: Final = frozenset({AlarmKind.NOT_CONSISTENT.value, AlarmKind.PROOF_AGE.value})
