"""Spark applications: one module of `cdc_replay.jobs` each, on the group's Spark connection.

| type of the connection | the application runs                                                           |
|------------------------|--------------------------------------------------------------------------------|
| `spark`                | in a process of its own, which `spark-submit` starts                           |
| `spark_connect`        | in the task, on a running Spark Connect server (`warm_spark`)                  |
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowException

from cdc_replay.airflow import assets
from cdc_replay.airflow.connections import airflow_config, connections_in_environment
from cdc_replay.airflow.lineage import TellsLineage
from cdc_replay.airflow.links import SPARK_APPLICATION, SparkHistoryLink, StatusPageLink
from cdc_replay.airflow.operators.failures import fail_fast_on_permanent_error, job_failure
from cdc_replay.airflow.operators.in_process import (
    Json,
    check_params,
    end_unless_timed_out,
    open_change_log,
)
from cdc_replay.airflow.operators.warm_spark import connect_url, run_on_server
from cdc_replay.airflow.params import JobRequest
from cdc_replay.airflow.task_arguments import check_one_publisher
from cdc_replay.airflow.task_lineage import Flow, TaskLineage
from cdc_replay.airflow.template_values import is_set, table_names
from cdc_replay.config import Config, load_config
from cdc_replay.model.lsn import Lsn
from cdc_replay.private_files import private_umask
from cdc_replay.spark.java import JVM_OPTIONS
from cdc_replay.spark.job_outcome import OUTCOME_FILE, JobOutcome, read_outcome

if TYPE_CHECKING:
    from airflow.sdk import Context

JOBS: Final = Path(__file__).resolve().parents[2] / "jobs"
SPARK_CONF: Final = {"spark.log.level": "WARN", "spark.driver.extraJavaOptions": JVM_OPTIONS}
"""Defaults, below the group's `spark_conf`, of settings that only the submission can make."""

END_SECONDS: Final = 3
"""How long a Spark application may take to end after SIGTERM."""


class SparkJobOperator(TellsLineage, SparkSubmitOperator):
    """A command as a Spark application on the group's Spark connection.

    In a process of its own, the driver gets the connections of the configuration in its environment
    (`cdc_replay.airflow.connections`). With `deploy-mode` cluster it runs elsewhere, and the cluster must
    provide `AIRFLOW_CONN_<ID>` and the configuration file. On a Spark Connect server, settings other than
    `spark.sql.…` are the server's, and arguments of `spark-submit` have no effect.

    :param subscriptions: its subscriptions, all of one publisher; the group of the first one decides
    :param config: the configuration at parse time, for the group's Spark connection and settings
    :param refuse_unknown_params: fail if the run's configuration has keys that are no Params of the DAG
    """

    job: ClassVar[str]
    flow: ClassVar[Flow]
    operator_extra_links = (SparkHistoryLink(), StatusPageLink())

    def __init__(
        self,
        *,
        subscriptions: Sequence[str],
        config: Config | None = None,
        refuse_unknown_params: bool = False,
        **kwargs: Any,
    ) -> None:
        config = config or load_config()
        check_one_publisher(config, subscriptions)
        group = config.groups[config.subscription(subscriptions[0]).group]
        own_conf = SPARK_CONF | dict(group.spark_conf) | (kwargs.pop("conf", None) or {})
        super().__init__(
            application=str(JOBS / f"{self.job}.py"),
            name=f"cdc_replay {self.job} {subscriptions[0] if len(subscriptions) == 1 else group.name}",
            conf=own_conf,
            **{"conn_id": group.spark_conn_id} | kwargs,
        )
        self.subscriptions = tuple(subscriptions)
        self.group = group
        self.refuse_unknown_params = refuse_unknown_params
        self._is_in_process = False

    @abstractmethod
    def job_request(self, config: Config, context: Context) -> JobRequest:
        """The arguments and connections of this run."""

    def execute(self, context: Context) -> Json | None:  # type: ignore[override]
        if self.refuse_unknown_params:
            check_params(self, context)
        with private_umask(), fail_fast_on_permanent_error():
            config = airflow_config()
            request = self.job_request(config, context)
            self.application_args = [f"--config={config.path}", *self.subscriptions, *request.arguments]
            outcome = self._run(context, self._conn_ids(config) | request.conn_ids)
        self.results = outcome.results
        return self.finish(outcome, context)

    def lineage(self) -> TaskLineage:
        return TaskLineage(self.flow, self.subscriptions, results=self.results)

    def finish(self, outcome: JobOutcome, context: Context) -> Json | None:
        """The task's XCom: the application's result."""
        return dict(outcome.results[0]) if outcome.results else None

    def _run(self, context: Context, conn_ids: frozenset[str]) -> JobOutcome:
        url = connect_url(self._conn_id)
        if url is None:
            return self._submit(context, conn_ids)
        self._is_in_process = True
        self.log.info('running in this task, on the Spark Connect server of connection "%s"', self._conn_id)
        settings = {key: value for key, value in (self.conf or {}).items() if key not in SPARK_CONF}
        arguments = [str(argument) for argument in self.application_args or ()]
        with connections_in_environment(conn_ids):
            return run_on_server(self.job, arguments, url=url, name=self.name, settings=settings)

    def _submit(self, context: Context, conn_ids: frozenset[str]) -> JobOutcome:
        with tempfile.TemporaryDirectory(prefix="cdc_replay_") as folder:
            file = Path(folder) / "outcome.json"
            with connections_in_environment(conn_ids, {OUTCOME_FILE: str(file)}):
                try:
                    super().execute(context)
                except AirflowException as error:
                    outcome = self._read_outcome(file, context)
                    failure = job_failure(error, outcome)
                    if failure is None:
                        raise
                    raise failure from error
            return self._read_outcome(file, context)

    @staticmethod
    def _read_outcome(file: Path, context: Context) -> JobOutcome:
        outcome = read_outcome(file)
        if outcome.application is not None:
            context["ti"].xcom_push(key=SPARK_APPLICATION, value=outcome.application)
        return outcome

    def on_kill(self) -> None:
        if self._is_in_process:
            end_unless_timed_out()
            return
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
    """Replay of subscriptions of one publisher, up to one position.

    The report tasks get the position as XCom `to_lsn`, and tell the results. With the group's `follow`, the
    task goes on with what is committed meanwhile, and announces the change log if it has captured something.

    :param to_lsn: default: the end of the change log when the task starts (templated); given, nothing is
        followed
    """

    job = "replay"
    flow = Flow.REPLAY
    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "to_lsn")

    def __init__(self, *, to_lsn: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.to_lsn = to_lsn
        self.follow_seconds = self.group.follow.total_seconds()
        self._followed_from: Lsn | None = None
        if self.follow_seconds:
            # One run is reported while the next one follows; two would follow in turns.
            self.max_active_tis_per_dag = 1
            self.outlets = [*self.outlets, assets.followed_log(self.group.publisher)]

    def job_request(self, config: Config, context: Context) -> JobRequest:
        end = None if self.to_lsn else open_change_log(config, self.group.publisher).end_lsn
        to_lsn = self.to_lsn or str(end)
        context["ti"].xcom_push(key=assets.TO_LSN, value=to_lsn)
        arguments = (f"--to-lsn={to_lsn}",)
        if end is None or not self.follow_seconds:
            return JobRequest(arguments)
        self._followed_from = end
        return JobRequest((*arguments, f"--follow-for={self.follow_seconds}"))

    def finish(self, outcome: JobOutcome, context: Context) -> None:
        """Announce what was captured; no result: there may be hundreds."""
        if (after := self._followed_from) is None:
            return
        end = open_change_log(airflow_config(), self.group.publisher).end_lsn
        if end > after:
            assets.announce_followed(context, self.group.publisher, end, after=after)


class SnapshotOperator(SparkJobOperator):
    """Copy the tables of a subscription that need it, or those named, and emit the subscription's asset.

    :param subscription: name of the subscription in the configuration
    :param tables: copy these again, each as schema.table; a text is a JSON array (templated)
    """

    job = "snapshot"
    flow = Flow.COPY
    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "tables")

    def __init__(self, *, subscription: str, tables: Sequence[str] | str = (), **kwargs: Any) -> None:
        super().__init__(subscriptions=[subscription], **kwargs)
        self.tables = tables
        self.outlets = [*self.outlets, assets.subscription(subscription)]

    def job_request(self, config: Config, context: Context) -> JobRequest:
        return JobRequest(tuple(f"--table={table}" for table in table_names(self.tables)))


class RefreshOperator(SparkJobOperator):
    """Read the publications of a subscription again, as REFRESH PUBLICATION does.

    :param subscription: name of the subscription in the configuration
    :param reconcile: also change and delete rows until every table equals what is published (templated)
    :param is_dry_run: change nothing, and return what would be changed (templated)
    """

    job = "refresh"
    flow = Flow.RECONCILE
    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "reconcile", "is_dry_run")

    def __init__(
        self,
        *,
        subscription: str,
        reconcile: bool | str = False,
        is_dry_run: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(subscriptions=[subscription], **kwargs)
        self.reconcile = reconcile
        self.is_dry_run = is_dry_run

    def job_request(self, config: Config, context: Context) -> JobRequest:
        options = {"--reconcile": self.reconcile, "--dry-run": self.is_dry_run}
        return JobRequest(tuple(option for option, value in options.items() if is_set(value)))

    def lineage(self) -> TaskLineage:
        return replace(super().lineage(), is_dry_run=is_set(self.is_dry_run))


class BackfillOperator(SparkJobOperator):
    """Apply a past range of the change log again.

    :param subscription: name of the subscription in the configuration
    :param start: after this LSN or time (templated)
    :param end: up to and with this LSN or time (templated)
    :param tables: only these, each as schema.table; a text is a JSON array (templated)
    :param into_conn_id: connection of another database to fill; default: repair the subscriber (templated)
    :param is_dry_run: only count what would be applied (templated)
    """

    job = "backfill"
    flow = Flow.REPLAY
    template_fields: Sequence[str] = (
        *SparkSubmitOperator.template_fields, "start", "end", "tables", "into_conn_id", "is_dry_run",
    )  # fmt: skip

    def __init__(
        self,
        *,
        subscription: str,
        start: str,
        end: str,
        tables: Sequence[str] | str = (),
        into_conn_id: str | None = None,
        is_dry_run: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(subscriptions=[subscription], **kwargs)
        self.start = start
        self.end = end
        self.tables = tables
        self.into_conn_id = into_conn_id
        self.is_dry_run = is_dry_run

    def job_request(self, config: Config, context: Context) -> JobRequest:
        into = self.into_conn_id
        return JobRequest(
            (
                f"--from={self.start}",
                f"--to={self.end}",
                *(f"--table={table}" for table in table_names(self.tables)),
                *((f"--into-conn-id={into}",) if into else ()),
                *(("--dry-run",) if is_set(self.is_dry_run) else ()),
            ),
            frozenset({into} if into else ()),
        )

    def lineage(self) -> TaskLineage:
        return replace(
            super().lineage(), into_conn_id=self.into_conn_id or None, is_dry_run=is_set(self.is_dry_run)
        )
