"""`cdc-replay`: the command line. Parses options, calls one function of `commands`, prints its result.

| exit code | meaning                                         |
|-----------|-------------------------------------------------|
| 0         | success                                         |
| 1         | a failure; its reason is on standard error      |
| 2         | a usage or configuration error                  |
| 143       | terminated by SIGTERM                           |

With `--json` there is one JSON object on standard output, also after a failure. Logs go to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import psycopg
import typer

from cdc_replay.config import Config, load_config
from cdc_replay.errors import CdcReplayError, InvalidConfiguration, InvalidLsn
from cdc_replay.model.results import Json, PruneResult, SyncResult
from cdc_replay.model.size import size_in_words
from cdc_replay.private_files import set_private_umask
from cdc_replay.terminal.options import (
    ConfigOption,
    JsonOption,
    LogLevelOption,
    PublisherArgument,
    SubscriptionArgument,
    SubscriptionsArgument,
    ToLsnOption,
    YesOption,
    parse_lsn,
    parse_table,
    set_log_level,
)
from cdc_replay.terminal.output import (
    CommandOutcome,
    LogHandler,
    ask,
    confirm_or_abort,
    is_interactive,
    outcome_of,
    outcome_of_all,
    print_error,
    print_json,
    print_outcome,
)
from cdc_replay.terminal.progress import show_progress
from cdc_replay.termination import EXIT_CODE, Terminated, end_on_sigterm, finish_on_sigterm, is_asked_to_end

app = typer.Typer(
    name="cdc-replay",
    help="Replay PostgreSQL logical replication into any number of subscribers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# typer returns this code in place of a KeyboardInterrupt.
_INTERRUPTED: Final = 130

# Some releases of typer vendor click, so the base class of usage errors is looked up in typer.
_UsageError: Final = typer.BadParameter.__mro__[1]


def _load(config: Path | None, log_level: str | None) -> Config:
    set_log_level(log_level)
    return load_config(config)


@app.command("setup")
def _setup(
    publisher: PublisherArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the SQL and do nothing.")] = False,
    subscription: Annotated[
        str | None, typer.Option("--subscription", help="With --dry-run: the SQL for its subscriber.")
    ] = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Check the publisher; create its capture publications, slot and change log."""
    from cdc_replay.commands.setup import setup, subscriber_script, to_script

    if subscription is not None and not dry_run:
        raise InvalidConfiguration(
            "--subscription goes with --dry-run: a subscriber is set up by `cdc-replay snapshot`"
        )
    loaded = _load(config, log_level)
    if subscription is not None:
        result = subscriber_script(loaded, publisher, subscription)
    else:
        result = setup(loaded, publisher, dry_run=dry_run)
    outcome = outcome_of(result, as_json=as_json)
    return dataclasses.replace(outcome, text=to_script(result)) if dry_run else outcome


@app.command("capture")
def _capture(
    publisher: PublisherArgument,
    to_lsn: ToLsnOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Pull slot changes into the change log."""
    from cdc_replay.commands.capture import capture

    loaded = _load(config, log_level)
    with show_progress(f"capture {publisher}") as report:
        result = capture(loaded, publisher, to_lsn=parse_lsn(to_lsn), report=report)
    return outcome_of(result, as_json=as_json)


@app.command("snapshot")
def _snapshot(
    subscription: SubscriptionArgument,
    table: Annotated[list[str] | None, typer.Option("--table", help="SCHEMA.TABLE to copy again.")] = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Copy the tables that need it, or the named ones again."""
    from cdc_replay.commands.snapshot import snapshot

    loaded = _load(config, log_level)
    names = [parse_table(name) for name in table or []]
    with show_progress(f"snapshot {subscription}") as report:
        result = snapshot(loaded, subscription, tables=names, report=report)
    return outcome_of(result, as_json=as_json)


@app.command("replay")
def _replay(
    subscriptions: SubscriptionsArgument,
    to_lsn: ToLsnOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Apply the change log to the subscribers."""
    from cdc_replay.commands.replay import replay

    loaded = _load(config, log_level)
    with show_progress(f"replay {' '.join(subscriptions)}") as report:
        results = replay(loaded, subscriptions, to_lsn=parse_lsn(to_lsn), report=report)
    return outcome_of_all(results, as_json=as_json)


@app.command("resume")
def _resume(
    subscription: SubscriptionArgument,
    table: Annotated[list[str] | None, typer.Option("--table", help="SCHEMA.TABLE that is parked.")] = None,
    skip: Annotated[
        str | None, typer.Option("--skip", help="End of the transaction to leave out, such as 0/16B3748.")
    ] = None,
    accept_null: Annotated[
        bool,
        typer.Option("--accept-null", help="Store NULL for its values that were not sent and exist nowhere."),
    ] = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Resume a parked subscription or table, with or without the transaction that it is parked before."""
    from cdc_replay.commands.resume import resume

    loaded = _load(config, log_level)
    names = [parse_table(name) for name in table or []]
    result = resume(loaded, subscription, tables=names, skip=parse_lsn(skip), accept_null=accept_null)
    return outcome_of(result, as_json=as_json)


@app.command("sync")
def _sync(
    subscriptions: SubscriptionsArgument,
    to_lsn: ToLsnOption = None,
    follows: Annotated[
        bool, typer.Option("--follow", help="Continue as changes are committed, until SIGTERM or Ctrl-C.")
    ] = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Snapshot where needed, capture, replay."""
    if follows:
        if to_lsn is not None:
            raise typer.BadParameter("--follow has no end: give it or --to-lsn, not both")
        return outcome_of_all(_follow(_load(config, log_level or "info"), subscriptions), as_json=as_json)
    from cdc_replay.commands.sync import sync

    loaded = _load(config, log_level)
    with show_progress(f"sync {' '.join(subscriptions)}") as report:
        results = sync(loaded, subscriptions, to_lsn=parse_lsn(to_lsn), report=report)
    return outcome_of_all(results, as_json=as_json)


def _follow(config: Config, subscriptions: Sequence[str]) -> Sequence[SyncResult]:
    from cdc_replay.commands import follow

    if logging.getLogger("cdc_replay").level == logging.INFO:
        # One line every ten seconds, not several for each round.
        logging.getLogger("cdc_replay").setLevel(logging.WARNING)
        logging.getLogger(follow.__name__).setLevel(logging.INFO)
    with finish_on_sigterm() as stop:
        return follow.follow(config, subscriptions, stop)


@app.command("backfill")
def _backfill(
    subscription: SubscriptionArgument,
    start: Annotated[str, typer.Option("--from", help="WAL position or timestamp.")],
    to: Annotated[str, typer.Option("--to", help="WAL position or timestamp.")],
    into: Annotated[str | None, typer.Option("--into", help="DSN of another database, no password.")] = None,
    into_conn_id: Annotated[str | None, typer.Option("--into-conn-id", help="Its connection.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Replay a past part of the change log again."""
    from cdc_replay.commands.backfill import backfill

    loaded = _load(config, log_level)
    if into_conn_id is not None:
        if into is not None:
            raise typer.BadParameter("give --into or --into-conn-id, not both")
        into = loaded.dsn_of_connection(into_conn_id)
    with show_progress(f"backfill {subscription}") as report:
        result = backfill(loaded, subscription, start, to, into=into, dry_run=dry_run, report=report)
    return outcome_of(result, as_json=as_json)


@app.command("refresh")
def _refresh(
    subscription: SubscriptionArgument,
    reconcile: Annotated[
        bool,
        typer.Option(
            "--reconcile",
            help="Then make every table equal what is published: insert and update rows, and DELETE all rows"
            " of the subscriber that the publisher does not have or that the row filter excludes. --dry-run"
            " counts them.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; report counts and first keys.")
    ] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Read the publications again; copy new tables, remove dropped ones. Rows stay, without --reconcile."""
    from cdc_replay.commands.refresh import refresh
    from cdc_replay.model.results import RefreshResult

    def confirm(planned: RefreshResult) -> bool:
        lines = [
            f"{table.table}: {table.deleted} rows will be deleted, such as {', '.join(table.deleted_keys)}"
            for table in planned.reconciled
            if table.deleted
        ]
        with report.paused():
            return ask(lines, f"Delete {planned.deleted} rows of the subscriber?")

    loaded, asks = _load(config, log_level), not yes and is_interactive()
    with show_progress(f"refresh {subscription}") as report:
        result = refresh(
            loaded,
            subscription,
            reconcile=reconcile,
            dry_run=dry_run,
            confirm=confirm if asks else None,
            report=report,
        )
    return outcome_of(result, as_json=as_json)


@app.command("validate")
def _validate(
    subscription: SubscriptionArgument,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Prove that the subscriber is consistent, at one WAL position."""
    from cdc_replay.commands.validate import validate

    loaded = _load(config, log_level)
    with show_progress(f"validate {subscription}") as report:
        result = validate(loaded, subscription, report=report)
    return outcome_of(result, as_json=as_json)


@app.command("explain")
def _explain(
    subscription: SubscriptionArgument,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Show per table what is published, how it is filtered and where the filter is evaluated."""
    from cdc_replay.commands.explain import explain

    return outcome_of(explain(_load(config, log_level), subscription), as_json=as_json)


@app.command("status")
def _status(
    config: ConfigOption = None, log_level: LogLevelOption = "info", as_json: JsonOption = False
) -> CommandOutcome:
    """Show slots, change logs and subscriptions."""
    from cdc_replay.commands.status import status

    return outcome_of(status(_load(config, log_level)), as_json=as_json)


@app.command("verify-log")
def _verify_log(
    publisher: PublisherArgument,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Read the whole change log: checksums, continuity, order, every message."""
    from cdc_replay.commands.verify_log import verify_log

    loaded = _load(config, log_level)
    with show_progress(f"verify-log {publisher}") as report:
        result = verify_log(loaded, publisher, report=report)
    return outcome_of(result, as_json=as_json)


@app.command("prune")
def _prune(
    publisher: PublisherArgument,
    before: Annotated[
        str | None, typer.Option("--before", help="Keep what commits after this WAL position or timestamp.")
    ] = None,
    keep_hours: Annotated[
        float | None, typer.Option("--keep-hours", help="Keep what was committed in the last hours.", min=0)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; report what would be dropped.")
    ] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Drop segments that no subscription needs and that are older than `keep` or these options."""
    from cdc_replay.commands.prune import prune

    def confirm(planned: PruneResult) -> None:
        history = f"what was committed from {planned.from_time} to {planned.to_time}"
        confirm_or_abort(
            f"This drops {history}: the changes in ({planned.from_lsn}, {planned.to_lsn}] of {publisher},"
            f" {planned.segments} segments, {size_in_words(planned.bytes)}. Continue?",
            yes=yes,
        )

    loaded = _load(config, log_level)
    result = prune(loaded, publisher, before=before, keep_hours=keep_hours, dry_run=dry_run, confirm=confirm)
    return outcome_of(result, as_json=as_json)


@app.command("teardown")
def _teardown(
    name: Annotated[str, typer.Argument(metavar="PUBLISHER|SUBSCRIPTION")],
    yes: YesOption = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Remove what setup or snapshot created, nothing else."""
    from cdc_replay.commands.teardown import teardown

    loaded = _load(config, log_level)
    result = teardown(loaded, name, confirm=lambda text: confirm_or_abort(f"{text} Continue?", yes=yes))
    return outcome_of(result, as_json=as_json)


@app.command("batch")
def _batch(
    config: ConfigOption = None,
    log_level: LogLevelOption = "warning",
    as_json: JsonOption = True,  # noqa: ARG001 - a batch prints JSON only
) -> None:
    """Run one command per line of standard input in this process and its Spark session."""
    from cdc_replay.commands.batch import batch

    set_log_level(log_level)
    batch(sys.stdin, sys.stdout, functools.partial(run_line, config=config))


def run_line(line: str, *, config: Path | None = None) -> tuple[dict[str, Json] | None, str | None]:
    """Run one command line in this process: its result, its error, or both.

    It prints nothing on standard output, which is for results. A line without `--config` gets `config`.
    """
    try:
        arguments = shlex.split(line)
    except ValueError as error:
        return None, f"the line cannot be split into words: {error}"
    if arguments[:1] == ["batch"]:
        return None, "a batch cannot run another one"
    if config is not None:
        # An option of the line itself comes later, and wins.
        arguments[1:1] = ["--config", str(config)]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            outcome = _invoke(arguments)
    except Exception as error:
        if (reason := _describe_error(error)) is None:
            raise
        return None, reason[0]
    return (outcome.result, outcome.error) if outcome else ({}, None)


def _invoke(arguments: Sequence[str]) -> CommandOutcome | None:
    returned = typer.main.get_command(app).main(list(arguments), "cdc-replay", standalone_mode=False)
    if returned == _INTERRUPTED:
        raise KeyboardInterrupt
    return returned if isinstance(returned, CommandOutcome) else None


def _describe_error(error: BaseException) -> tuple[str, int] | None:
    """The message and exit code for a command that raised `error`; None if the error is a bug."""
    match error:
        case Terminated():
            return "terminated by SIGTERM", EXIT_CODE
        case typer.Abort() | KeyboardInterrupt():
            return "interrupted", 1
        case InvalidConfiguration() | InvalidLsn():
            return str(error), 2
        case CdcReplayError() | psycopg.Error() | OSError():
            return str(error).strip(), 1
        case _ if isinstance(error, _UsageError):
            return getattr(error, "format_message", error.__str__)(), 2
        case _:
            return None


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    set_private_umask()
    end_on_sigterm()
    logging.basicConfig(
        handlers=[LogHandler()], level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    sys.exit(_exit_code(sys.argv[1:] if arguments is None else arguments))


def _exit_code(arguments: Sequence[str]) -> int:
    try:
        outcome = _invoke(arguments)
    except BaseException as error:
        reason = _describe_error(Terminated() if is_asked_to_end() else error)
        if reason is None:
            raise
        if isinstance(error, _UsageError) and hasattr(error, "show"):
            error.show()
        elif not is_asked_to_end():  # which is reported already
            print_error(reason[0])
        if "--json" in arguments:
            print_json({"error": reason[0]})
        return reason[1]
    if outcome is None:
        return 0
    print_outcome(outcome)
    if outcome.error:
        print_error(outcome.error)
    return 1 if outcome.error else 0


if __name__ == "__main__":
    main()
