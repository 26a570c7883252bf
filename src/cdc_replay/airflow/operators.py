"""The pipeline's tasks: each is one command of the library.

Light commands (setup, capture, watch, report, validate) run in the task's process. Spark commands run through
`jobs/*.py` on the group's Spark connection.

Retries. A permanent error (`Retry.NEVER`) fails the task at once; other errors, also those of other packages,
are retried with growing delays (`DEFAULT_ARGS`). A Spark application reports the kind by its exit code
(`cdc_replay.spark.exit_codes`). The code arrives only in deploy-mode client; without it every failure is
retried. Every command may be killed and run again at any point: it continues from what is durable.

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

import contextlib
import itertools
import re
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.standard.operators.branch import BaseBranchOperator
from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    AirflowTaskTimeout,
)

from cdc_replay.airflow import assets
from cdc_replay.airflow.connections import airflow_config, connections_in_environment
from cdc_replay.airflow.dag_ids import replay_dag
from cdc_replay.airflow.links import REPORT, ValidationReportLink
from cdc_replay.airflow.params import JobRequest, unknown_params
from cdc_replay.airflow.report_links import report_links
from cdc_replay.config import Config, GroupConfig
from cdc_replay.errors import CdcReplayError, ChangeLogMissing, NotConsistent, Retry
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.private_files import private_umask
from cdc_replay.spark.exit_codes import ExitCode
from cdc_replay.spark.java import JVM_OPTIONS
from cdc_replay.termination import end_now

if TYPE_CHECKING:
    from cdc_replay.changelog.log import ChangeLog

JOBS: Final = Path(__file__).resolve().parents[1] / "jobs"
SPARK_CONF: Final = {"spark.log.level": "WARN", "spark.driver.extraJavaOptions": JVM_OPTIONS}
"""Defaults, below the group's `spark_conf`, of settings that only the submission can make."""

DEFAULT_ARGS: Final[dict[str, Any]] = {
    "owner": "cdc-replay",
    "retries": 3,
    "retry_delay": timedelta(seconds=10),
    "retry_exponential_backoff": 3,
    "max_retry_delay": timedelta(minutes=10),
}
"""For the DAGs that a person starts: tries after 10, 30 and 90 seconds, or up to twice that."""

FOLLOWING_ARGS: Final[dict[str, Any]] = DEFAULT_ARGS | {"max_retry_delay": timedelta(seconds=30)}
"""For the DAGs that follow the publisher: retries follow soon after a server is back."""

WATCH_ARGS: Final[dict[str, Any]] = {
    "owner": DEFAULT_ARGS["owner"],
    "retries": 0,
    "execution_timeout": timedelta(minutes=10),
}
"""For the DAG that runs again soon in any case."""

SETTLE_SECONDS: Final = 5
"""How long Airflow may take to create the replay run of a capture that has just ended."""

END_SECONDS: Final = 3
"""How long a Spark application may take to end after SIGTERM."""

EXIT_CODE: Final = re.compile(r"Error code is: (\d+)\.")
"""In the error of the Spark provider's hook, which has the exit code of `spark-submit` nowhere else."""

Json = dict[str, Any]


def dag_arguments(config: Config, publisher: str, task_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that all DAGs have: one run at a time, the configured timeouts, and tags.

    A try that exceeds its timeout is like one that is killed: the next continues from what is durable.
    """
    timeouts = {"execution_timeout": config.timeouts.task} if config.timeouts.task else {}
    return {
        "catchup": False,
        "dagrun_timeout": config.timeouts.run or None,
        "default_args": timeouts | dict(task_arguments),
        "max_active_runs": 1,
        "tags": ["cdc-replay", publisher],
    }


class ResultOutdated(CdcReplayError):
    """A subscription has no result of this run."""


@contextlib.contextmanager
def fail_fast_on_permanent_error() -> Iterator[None]:
    """Fail the task without retries on a permanent error."""
    try:
        yield
    except CdcReplayError as error:
        if error.retry is Retry.NEVER:
            raise AirflowFailException(str(error)) from error
        raise


@contextlib.contextmanager
def fail_fast_on_permanent_exit() -> Iterator[None]:
    """Fail the task without retries if its Spark application exits with the code of a permanent error."""
    try:
        yield
    except AirflowException as error:
        matched = EXIT_CODE.search(str(error))
        if matched and int(matched[1]) == ExitCode.NEVER:
            raise AirflowFailException(str(error)) from error
        raise


class CommandOperator(BaseOperator):
    """A command that runs in the task's own process; its result is the task's XCom."""

    @abstractmethod
    def run_command(self, config: Config, context: Context) -> Json:
        """Call the library."""

    def execute(self, context: Context) -> Json:
        with private_umask(), fail_fast_on_permanent_error():
            return self.run_command(airflow_config(), context)

    def on_kill(self) -> None:
        # Airflow calls this on SIGTERM, and does not end the task itself; and after its own timeout, when
        # there is nothing left to end.
        if not isinstance(sys.exc_info()[1], AirflowTaskTimeout):
            end_now()


class SetupOperator(CommandOperator):
    """Check the publisher; create missing capture publications and slot.

    :param publisher: name of the publisher in the configuration (templated)
    """

    template_fields: Sequence[str] = ("publisher",)

    def __init__(self, *, publisher: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.publisher = publisher

    def run_command(self, config: Config, context: Context) -> Json:
        from cdc_replay.commands.setup import setup

        return setup(config, self.publisher, checks_roles=False).to_dict()


class CaptureOperator(CommandOperator):
    """Pull the publisher's changes into its change log, and announce them.

    The task is skipped, and the asset gets no event, if all transactions of the log are announced already.
    The log decides, not this pull: changes captured by a killed task, or by a person at the command line, are
    announced by the next run.

    :param publisher: name of the publisher in the configuration (templated)
    :param to_lsn: capture up to this LSN; default: the publisher's WAL position at the start (templated)
    """

    template_fields: Sequence[str] = ("publisher", "to_lsn")

    def __init__(self, *, publisher: str, to_lsn: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.publisher = publisher
        self.to_lsn = to_lsn
        self.asset = assets.change_log(publisher)
        self.inlets = [self.asset]
        self.outlets = [self.asset]

    def run_command(self, config: Config, context: Context) -> Json:
        from cdc_replay.commands.capture import capture

        captured = capture(config, self.publisher, to_lsn=Lsn.parse(self.to_lsn) if self.to_lsn else None)
        change_log = _change_log(config, self.publisher)
        announced = assets.announced_lsn(context, self.asset)
        # Airflow may have no event, or one of another log, or one from before the log was pruned.
        after = change_log.start_lsn
        if announced is not None and after <= announced <= captured.to_lsn:
            after = announced
        unannounced = Window(after, captured.to_lsn)
        if change_log.summary(unannounced).transactions == 0:
            raise AirflowSkipException(f"no transaction in {unannounced}: nothing to replay")
        assets.announce(context, self.asset, captured.to_lsn)
        return captured.to_dict()


class WatchOperator(BaseBranchOperator):
    """Trigger the replay of groups that have a lagging subscription which can be replayed now.

    Of the downstream tasks, `replay.<group>` runs for these groups; the others are skipped. A group whose
    replay DAG is paused, or has a run already, is skipped too. Events of the change log are not enough: the
    event of a failed run is not repeated.

    :param publisher: name of the publisher in the configuration
    :param groups: its groups whose replay DAG follows the change log
    """

    def __init__(self, *, publisher: str, groups: Sequence[GroupConfig], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.publisher = publisher
        self.members = {group.name: tuple(group.subscriptions) for group in groups}

    def choose_branch(self, context: Context) -> list[str]:
        due = self._due_groups()
        if due:
            time.sleep(SETTLE_SECONDS)
        return [f"replay.{group}" for group in due if self._is_idle(group, context)]

    def _due_groups(self) -> list[str]:
        from cdc_replay.commands.due_replays import due_replays

        names = itertools.chain.from_iterable(self.members.values())
        try:
            due = due_replays(airflow_config(), self.publisher, names)
        except ChangeLogMissing as missing:
            self.log.info("nothing is captured yet: %s", missing)
            return []
        return [group for group, members in self.members.items() if not due.keys().isdisjoint(members)]

    @staticmethod
    def _is_idle(group: str, context: Context) -> bool:
        """Whether the group's replay DAG is not paused, and has no queued or running run."""
        dag_id = replay_dag(group)
        task: Any = context["ti"]
        if task.get_dag(dag_id).is_paused:
            return False
        return not task.get_dr_count(dag_id, states=["queued", "running"])


class ReportOperator(CommandOperator):
    """Report the result of this run's replay for one subscription, and announce its new position.

    Fails if the subscription failed or is parked, or if it has no result of this run. Retries are short: the
    next run cannot start before this one has ended.

    :param subscription: name of the subscription in the configuration
    :param replay_task_id: the run's `ReplayOperator`
    """

    def __init__(self, *, subscription: str, replay_task_id: str, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "max_retry_delay": DEFAULT_ARGS["retry_delay"]})
        self.subscription = subscription
        self.replay_task_id = replay_task_id
        self.asset = assets.subscription(subscription)
        self.outlets = [self.asset]

    def run_command(self, config: Config, context: Context) -> Json:
        from cdc_replay.commands.status import subscription_result

        result = subscription_result(config, self.subscription)
        applied = Lsn.parse(str(result["to_lsn"]))
        self._refuse_older(applied, context)
        assets.announce(context, self.asset, applied)
        return result

    def _refuse_older(self, applied: Lsn, context: Context) -> None:
        target = context["ti"].xcom_pull(task_ids=self.replay_task_id, key=assets.TO_LSN)
        if target is None or applied < Lsn.parse(target):
            raise ResultOutdated(
                f'subscription "{self.subscription}" has no result of this run',
                detail=f"Its last result ends at {applied}, the run was to reach {target or 'a later LSN'}.",
                hint=f'See the log of task "{self.replay_task_id}"; the next run continues from {applied}.',
            )


class ValidateOperator(CommandOperator):
    """Prove with Great Expectations that the subscriber is consistent; fail if it is not.

    :param subscription: name of the subscription in the configuration (templated)
    """

    template_fields: Sequence[str] = ("subscription",)
    operator_extra_links = (ValidationReportLink(),)

    def __init__(self, *, subscription: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.subscription = subscription

    def run_command(self, config: Config, context: Context) -> Json:
        from cdc_replay.commands.validate import validate

        result = validate(config, self.subscription, links=report_links(self.subscription, context))
        context["ti"].xcom_push(key=REPORT, value=f"{result.report.parent.name}/{result.report.name}")
        if result.error is not None:
            raise NotConsistent(
                f'subscription "{self.subscription}" is not consistent at {result.to_lsn}',
                detail=result.error,
                hint=f"The report is {result.report}.",
            )
        return result.to_dict()


class EmitAssetEventOperator(BaseOperator):
    """Emit an event of a subscription's asset, unless the run did not write to the subscriber.

    :param subscription: name of the subscription in the configuration
    :param unless: Params any of which, when set, means that the run did not write to the subscriber
    """

    def __init__(self, *, subscription: str, unless: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.outlets = [assets.subscription(subscription)]
        self.unless = tuple(unless)

    def execute(self, context: Context) -> None:
        if set_params := [name for name in self.unless if context["params"][name]]:
            raise AirflowSkipException(f"the subscriber was not written: {', '.join(set_params)} is set")


class SparkJobOperator(SparkSubmitOperator):
    """A command as a Spark application: `jobs/<job>.py` on the group's Spark connection.

    The driver gets the connections of the configuration in its environment
    (`cdc_replay.airflow.connections`). With `deploy-mode` cluster it runs elsewhere, and the cluster must
    provide `AIRFLOW_CONN_<ID>` and the configuration file.

    :param job: name of the script in `jobs/`
    :param subscriptions: its subscriptions, all of one group
    :param config: the configuration at parse time, for the group's Spark connection and settings
    :param request: turns the run's Params into further arguments
    """

    def __init__(
        self,
        *,
        job: str,
        subscriptions: Sequence[str],
        config: Config,
        request: Callable[[Mapping[str, Any]], JobRequest] = lambda _: JobRequest(),
        **kwargs: Any,
    ) -> None:
        group = config.groups[config.subscription(subscriptions[0]).group]
        super().__init__(
            application=str(JOBS / f"{job}.py"),
            name=f"cdc_replay {job} {subscriptions[0] if len(subscriptions) == 1 else group.name}",
            conn_id=group.spark_conn_id,
            conf=SPARK_CONF | dict(group.spark_conf),
            **kwargs,
        )
        self.subscriptions = tuple(subscriptions)
        self.request = request

    def job_request(self, config: Config, context: Context) -> JobRequest:
        """The arguments and connections of this run."""
        return self.request(context["params"])

    def execute(self, context: Context) -> None:
        # Not `context["params"]`: Airflow adds the whole configuration of the run to it.
        if unknown := unknown_params(context["dag_run"].conf, self.dag.params):
            raise AirflowFailException(f"unknown Params {unknown}: the DAG has {sorted(self.dag.params)}")
        with private_umask(), fail_fast_on_permanent_error():
            config = airflow_config()
            request = self.job_request(config, context)
            self.application_args = [f"--config={config.path}", *self.subscriptions, *request.arguments]
            with (
                connections_in_environment(self._conn_ids(config) | request.conn_ids),
                fail_fast_on_permanent_exit(),
            ):
                super().execute(context)

    def on_kill(self) -> None:
        # SIGTERM first: a killed JVM leaves its rows on disk. Airflow waits for five seconds.
        process = None if self._hook is None else self._hook._submit_sp  # noqa: SLF001
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        super().on_kill()

    def _conn_ids(self, config: Config) -> frozenset[str]:
        members = [config.subscription(name) for name in self.subscriptions]
        target = {config.publisher(member.subscription.publisher).conn_id for member in members}
        target.update(member.conn_id for member in members)
        return frozenset(conn_id for conn_id in target if conn_id is not None)


class ReplayOperator(SparkJobOperator):
    """Replay of a whole group, up to one position: `to_lsn` of the run's Params, or the end of the log now.

    The report tasks get the position as XCom `to_lsn`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(job="replay", **kwargs)

    def job_request(self, config: Config, context: Context) -> JobRequest:
        publisher = config.subscription(self.subscriptions[0]).subscription.publisher
        to_lsn = context["params"]["to_lsn"] or str(_change_log(config, publisher).end_lsn)
        context["ti"].xcom_push(key=assets.TO_LSN, value=to_lsn)
        return JobRequest((f"--to-lsn={to_lsn}",))


def _change_log(config: Config, publisher: str) -> ChangeLog:
    from cdc_replay.changelog.log import ChangeLog

    return ChangeLog.open(config.publisher(publisher).change_log)
