"""Light commands, which run in the task's own process."""

from __future__ import annotations

import itertools
import sys
import time
from abc import abstractmethod
from collections.abc import Collection, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from airflow.providers.standard.operators.branch import BaseBranchOperator
from airflow.sdk import BaseOperator, BaseOperatorLink, Context
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRuntimeError,
    AirflowSkipException,
    AirflowTaskTimeout,
)

from cdc_replay.airflow import assets, metrics
from cdc_replay.airflow.alarm_watch import tell_alarms
from cdc_replay.airflow.connections import airflow_config
from cdc_replay.airflow.dag_ids import replay_dag
from cdc_replay.airflow.lineage import TellsLineage
from cdc_replay.airflow.links import REPORT, StatusPageLink, ValidationReportLink
from cdc_replay.airflow.operators.failures import fail_fast_on_permanent_error
from cdc_replay.airflow.params import unknown_params
from cdc_replay.airflow.report_links import report_links
from cdc_replay.airflow.task_lineage import Flow, TaskLineage
from cdc_replay.airflow.template_values import is_set, table_names
from cdc_replay.config import Config, GroupConfig
from cdc_replay.errors import (
    CdcReplayError,
    ChangeLogMissing,
    InvalidConfiguration,
    NotConsistent,
    NotValidated,
    ProofTooOld,
)
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ValidationOutcome
from cdc_replay.model.size import parse_size
from cdc_replay.model.validation_scope import ValidationScope, parse_share
from cdc_replay.private_files import private_umask
from cdc_replay.termination import end_now

if TYPE_CHECKING:
    from cdc_replay.changelog.log import ChangeLog
    from cdc_replay.model.results import ValidateResult

SETTLE_SECONDS: Final = 5
"""How long Airflow may take to create the replay run of a capture that has just ended."""

WATCH_PATIENCE_SECONDS: Final = 5
"""How long a capture waits for the slot, which a `CommitTrigger` may be reading."""

Json = dict[str, Any]


def end_unless_timed_out() -> None:
    """End a command that runs in the task's own process; for `on_kill`.

    Airflow calls that on SIGTERM, and does not end the task itself; and after its own timeout, when there is
    nothing left to end.
    """
    if not isinstance(sys.exc_info()[1], AirflowTaskTimeout):
        end_now()


class CommandOperator(BaseOperator):
    """A command that runs in the task's own process; its result is the task's XCom.

    :param refuse_unknown_params: fail if the run's configuration has keys that are no Params of the DAG
    """

    operator_extra_links: Collection[BaseOperatorLink] = (StatusPageLink(),)

    def __init__(self, *, refuse_unknown_params: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.refuse_unknown_params = refuse_unknown_params

    @abstractmethod
    def run_command(self, config: Config, context: Context) -> Json:
        """Call the library."""

    def execute(self, context: Context) -> Json:
        if self.refuse_unknown_params:
            check_params(self, context)
        with private_umask(), fail_fast_on_permanent_error():
            return self.run_command(airflow_config(), context)

    def on_kill(self) -> None:
        end_unless_timed_out()


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


class CaptureOperator(TellsLineage, CommandOperator):
    """Pull the publisher's changes into its change log, and announce them.

    The task is skipped, and the asset gets no event, if all transactions of the log are announced already.
    The log decides, not this pull: changes captured by a killed task, or by a person at the command line, are
    announced by the next run.

    :param publisher: name of the publisher in the configuration (templated)
    :param to_lsn: capture up to this LSN; default: the publisher's WAL position at the start (templated)
    :param skip_if_announced: else the task succeeds, so that a replay in the same DAG follows in any case
    :param sets_up: first do what `SetupOperator` does; another task would take seconds to start
    """

    template_fields: Sequence[str] = ("publisher", "to_lsn")

    def __init__(
        self,
        *,
        publisher: str,
        to_lsn: str | None = None,
        skip_if_announced: bool = True,
        sets_up: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.publisher = publisher
        self.to_lsn = to_lsn
        self.skip_if_announced = skip_if_announced
        self.sets_up = sets_up
        self.asset = assets.change_log(publisher)
        self.inlets = [*self.inlets, self.asset]
        self.outlets = [*self.outlets, self.asset]

    def run_command(self, config: Config, context: Context) -> Json:
        from cdc_replay.commands.capture import capture
        from cdc_replay.commands.setup import setup

        if self.sets_up:
            setup(config, self.publisher, checks_roles=False)
        captured = capture(
            config,
            self.publisher,
            to_lsn=Lsn.parse(self.to_lsn) if self.to_lsn else None,
            patience_seconds=WATCH_PATIENCE_SECONDS,
        )
        change_log = open_change_log(config, self.publisher)
        announced = assets.announced_lsn(context, self.asset)
        # Airflow may have no event, or one of another log, or one from before the log was pruned.
        after = change_log.start_lsn
        if announced is not None and after <= announced <= captured.to_lsn:
            after = announced
        unannounced = Window(after, captured.to_lsn)
        metrics.of_capture(captured)
        self.results = (captured.to_dict(),)
        if self.skip_if_announced and change_log.summary(unannounced).transactions == 0:
            raise AirflowSkipException(f"no transaction in {unannounced}: nothing to replay")
        assets.announce(context, self.asset, captured.to_lsn, after=after)
        return captured.to_dict()

    def lineage(self) -> TaskLineage:
        return TaskLineage(Flow.CAPTURE, publisher=self.publisher, results=self.results)


class WatchOperator(BaseBranchOperator):
    """Trigger the replay of groups that have a lagging subscription which can be replayed now; tell alarms.

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
        try:
            due = self._due_groups() if self.members else []
        finally:
            # Also if the log cannot be read: somebody has to be told.
            tell_alarms(airflow_config(), self.publisher)
        metrics.of_watch(airflow_config(), self.publisher, itertools.chain(*self.members.values()))
        if due:
            time.sleep(SETTLE_SECONDS)
        return [f"replay.{group}" for group in due if self._is_idle(group, context)]

    def _due_groups(self) -> list[str]:
        from cdc_replay.monitoring.due_replays import due_replays

        names = itertools.chain.from_iterable(self.members.values())
        try:
            due = due_replays(airflow_config(), self.publisher, names)
        except ChangeLogMissing as missing:
            self.log.info("nothing is captured yet: %s", missing)
            return []
        return [group for group, members in self.members.items() if not due.keys().isdisjoint(members)]

    def _is_idle(self, group: str, context: Context) -> bool:
        """Whether the group's replay DAG is known, not paused, and has no queued or running run."""
        dag_id = replay_dag(group)
        task: Any = context["ti"]
        try:
            is_paused = task.get_dag(dag_id).is_paused
        except AirflowRuntimeError as error:
            if (error.error.detail or {}).get("status_code") != HTTPStatus.NOT_FOUND:
                raise
            self.log.warning("Airflow knows no DAG %s: group %s is not replayed", dag_id, group)
            return False
        return not is_paused and not task.get_dr_count(dag_id, states=["queued", "running"])


class ValidateOperator(TellsLineage, CommandOperator):
    """Prove with Great Expectations that the subscriber is consistent; fail if it is not.

    Something that could not be judged is retried; a difference, or a proof that is too old, is not.

    :param subscription: name of the subscription in the configuration (templated)
    :param tables: only these, each as schema.table; a text is a JSON array (templated)
    :param due: without tables, only what is due by the configuration; default: all tables (templated)
    :param sample: only this share of each table's rows, such as 5% (templated)
    :param max_seconds: budget in seconds of comparing (templated)
    :param max_bytes: budget in bytes of the publisher's tables, such as 50GB (templated)
    :param repair: if rows differ, write them as they are published, and prove it again (templated)
    :param is_dry_run: of a repair, only count what would be written (templated)
    """

    template_fields: Sequence[str] = (
        *("subscription", "tables", "due", "sample", "max_seconds", "max_bytes", "repair", "is_dry_run"),
    )
    operator_extra_links = (ValidationReportLink(), StatusPageLink())

    def __init__(  # noqa: PLR0913 - the options of the command
        self,
        *,
        subscription: str,
        tables: Sequence[str] | str = (),
        due: bool | str = False,
        sample: str | None = None,
        max_seconds: float | str | None = None,
        max_bytes: str | None = None,
        repair: bool | str = False,
        is_dry_run: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.subscription = subscription
        self.tables = tables
        self.due = due
        self.sample = sample
        self.max_seconds = max_seconds
        self.max_bytes = max_bytes
        self.repair = repair
        self.is_dry_run = is_dry_run

    def run_command(self, config: Config, context: Context) -> Json:
        from cdc_replay.commands.validate import validate
        from cdc_replay.commands.validate_and_repair import validate_and_repair
        from cdc_replay.terminal.results import repair_rows

        links, scope = report_links(self.subscription, context), self.scope()
        if is_set(self.repair):
            is_dry_run = is_set(self.is_dry_run)
            result = validate_and_repair(
                config, self.subscription, scope=scope, dry_run=is_dry_run, links=links
            )
        else:
            result = validate(config, self.subscription, scope=scope, links=links)
        for text in result.not_reached:
            self.log.warning("not reached: %s", text)
        for label, text in repair_rows(result):
            self.log.info("%s: %s", label, text)
        context["ti"].xcom_push(key=REPORT, value=f"{self.subscription}/{result.report.name}")
        metrics.of_validation(result)
        self.results = (result.to_dict(),)
        if result.error is not None:
            raise _failure(result)
        return result.to_dict()

    def lineage(self) -> TaskLineage:
        return TaskLineage(Flow.VALIDATE, (self.subscription,), results=self.results)

    def scope(self) -> ValidationScope:
        """What the run compares.

        Raises:
            InvalidConfiguration: if an argument has another form.
        """
        tables = table_names(self.tables)
        try:
            return ValidationScope(
                tables,
                parse_share(self.sample) if self.sample else None,
                float(self.max_seconds) if self.max_seconds else None,
                parse_size(self.max_bytes) if self.max_bytes else None,
                is_due=is_set(self.due) and not tables,
            )
        except ValueError as error:
            raise InvalidConfiguration(f"a validation cannot be limited like this: {error}") from None


def _failure(result: ValidateResult) -> CdcReplayError:
    """The error of a validation that did not succeed."""
    error_class, text = {
        ValidationOutcome.ERROR: (NotValidated, "could not be judged"),
        ValidationOutcome.TOO_OLD: (ProofTooOld, "has a proof that is too old"),
    }.get(result.outcome, (NotConsistent, "is not consistent"))
    return error_class(
        f'subscription "{result.subscription}" {text} at {result.to_lsn}',
        detail=result.error,
        hint=f"The report is {result.report}.",
    )


class ResumeOperator(CommandOperator):
    """Let a parked subscription, or parked tables, be replayed again; the next replay applies the changes.

    :param subscription: name of the subscription in the configuration
    :param tables: parked tables, as schema.table; default: the subscription (templated, as a JSON array)
    :param skip: end of the transaction to leave out; default: it is tried again (templated)
    :param accept_null: store NULL for values that exist nowhere (templated)
    """

    template_fields: Sequence[str] = ("tables", "skip", "accept_null")

    def __init__(
        self,
        *,
        subscription: str,
        tables: Sequence[str] | str = (),
        skip: str | None = None,
        accept_null: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.subscription = subscription
        self.tables = tables
        self.skip = skip
        self.accept_null = accept_null

    def run_command(self, config: Config, context: Context) -> Json:
        from cdc_replay.commands.resume import resume

        return resume(
            config,
            self.subscription,
            tables=[QualifiedName.parse(name) for name in table_names(self.tables)],
            skip=Lsn.parse(self.skip) if self.skip else None,
            accept_null=is_set(self.accept_null),
        ).to_dict()


class PlanBackfillOperator(CommandOperator):
    """Show which range of the change log a backfill would apply, and where; its XCom has the range as LSNs.

    :param subscription: name of the subscription in the configuration
    :param start: after this LSN or time; default: from the start of the log (templated)
    :param end: up to and with this LSN or time; default: what is applied, or the end of the log (templated)
    :param tables: only these, each as schema.table; a text is a JSON array (templated)
    :param into_conn_id: connection of another database to fill; default: repair the subscriber (templated)
    :param is_dry_run: whether the backfill only counts (templated)
    """

    template_fields: Sequence[str] = ("start", "end", "tables", "into_conn_id", "is_dry_run")

    def __init__(
        self,
        *,
        subscription: str,
        start: str | None = None,
        end: str | None = None,
        tables: Sequence[str] | str = (),
        into_conn_id: str | None = None,
        is_dry_run: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.subscription = subscription
        self.start = start
        self.end = end
        self.tables = tables
        self.into_conn_id = into_conn_id
        self.is_dry_run = is_dry_run

    def run_command(self, config: Config, context: Context) -> Json:
        from cdc_replay.commands.backfill import plan_backfill

        into = self.into_conn_id
        plan = plan_backfill(
            config,
            self.subscription,
            self.start,
            self.end,
            tables=[QualifiedName.parse(name) for name in table_names(self.tables)],
            into_subscriber=not into,
        )
        effect = "only counted" if is_set(self.is_dry_run) else "applied"
        target = f'connection "{into}"' if into else f'the subscriber of "{self.subscription}"'
        self.log.info("the change log holds %s", plan.log_range)
        self.log.info(
            "%d transactions with %d changes, after %s up to %s, will be filtered and %s; tables: %s;"
            " target: %s",
            plan.transactions, plan.changes, plan.from_lsn, plan.to_lsn, effect,
            ", ".join(plan.tables) or "all", target,
        )  # fmt: skip
        return plan.to_dict()


class EmitAssetEventOperator(BaseOperator):
    """Emit an event of a subscription's asset, unless the run did not write to the subscriber.

    :param subscription: name of the subscription in the configuration
    :param unless: Params any of which, when set, means that the run did not write to the subscriber
    """

    def __init__(self, *, subscription: str, unless: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.outlets = [*self.outlets, assets.subscription(subscription)]
        self.unless = tuple(unless)

    def execute(self, context: Context) -> None:
        if set_params := [name for name in self.unless if context["params"][name]]:
            raise AirflowSkipException(f"the subscriber was not written: {', '.join(set_params)} is set")


def check_params(operator: BaseOperator, context: Context) -> None:
    """Fail the task if the run's configuration has keys that are no Params of the DAG."""
    # Not `context["params"]`: Airflow adds the whole configuration of the run to it.
    known = operator.dag.params
    if unknown := unknown_params(context["dag_run"].conf, known):
        raise AirflowFailException(f"unknown Params {unknown}: the DAG has {sorted(known)}")


def open_change_log(config: Config, publisher: str) -> ChangeLog:
    """The change log of a publisher."""
    from cdc_replay.changelog.log import ChangeLog

    return ChangeLog.open(config.publisher(publisher).change_log)
