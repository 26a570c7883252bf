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
import importlib.metadata
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import psycopg
import typer

from cdc_replay.config import Config, load_config
from cdc_replay.config_file import config_path
from cdc_replay.errors import CdcReplayError, InvalidConfiguration, InvalidLsn
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import Json, PruneResult, SyncResult
from cdc_replay.model.timestamp import check_zone
from cdc_replay.private_files import set_private_umask
from cdc_replay.terminal.output import (
    CommandOutcome,
    ask,
    confirm_or_abort,
    is_interactive,
    outcome_of,
    outcome_of_all,
    print_json,
    print_outcome,
    progress_bar,
)
from cdc_replay.termination import EXIT_CODE, Terminated, end_on_sigterm, finish_on_sigterm, is_asked_to_end

if TYPE_CHECKING:
    from rich.progress import TaskID

app = typer.Typer(
    name="cdc-replay",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

SET_UP: Final = "Set up"
REPLICATE: Final = "Replicate"
LOOK: Final = "Look and prove"
REPAIR: Final = "Repair"
REMOVE: Final = "Remove"
SCRIPT: Final = "Scripts"

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Configuration file.")]
LogLevelOption = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
ToLsnOption = Annotated[str | None, typer.Option("--to-lsn", help="WAL position, such as 0/16B3748.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask; without a terminal nothing is asked.")]


def _names(kind: str) -> Callable[[], list[str]]:
    """For completion: the configured publishers or subscriptions; none without a valid configuration."""

    def complete() -> list[str]:
        try:
            return list(getattr(load_config(), kind))
        except CdcReplayError:
            return []

    return complete


PublisherArgument = Annotated[str, typer.Argument(metavar="PUBLISHER", autocompletion=_names("publishers"))]
SubscriptionArgument = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", autocompletion=_names("subscriptions"))
]
SubscriptionsArgument = Annotated[
    list[str], typer.Argument(metavar="SUBSCRIPTION...", autocompletion=_names("subscriptions"))
]

_LEVELS: Final = ("debug", "info", "warning", "error")

# typer returns this code in place of a KeyboardInterrupt.
_INTERRUPTED: Final = 130

# Some releases of typer vendor click, so the base class of usage errors is looked up in typer.
_UsageError: Final = typer.BadParameter.__mro__[1]


def _load(config: Path | None, log_level: str) -> Config:
    _set_log_level(log_level)
    return load_config(config)


def _set_log_level(log_level: str) -> None:
    if log_level not in _LEVELS:
        raise InvalidConfiguration(f'log level "{log_level}" is not one of {", ".join(_LEVELS)}')
    logging.getLogger("cdc_replay").setLevel(log_level.upper())


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


def _table_name(text: str) -> QualifiedName:
    schema, dot, name = text.partition(".")
    if not dot or not schema or not name:
        raise InvalidConfiguration(f'"{text}" is not a table name', hint="Give it as SCHEMA.TABLE.")
    return QualifiedName(schema, name)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"cdc-replay {importlib.metadata.version('cdc-replay')}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Replay PostgreSQL logical replication into any number of subscribers."""


@app.command("init", rich_help_panel=SET_UP)
def _init(
    publisher_dsn: Annotated[
        str | None, typer.Option("--publisher-dsn", help="Without password, or with ${NAME} in its place.")
    ] = None,
    subscriber_dsn: Annotated[str | None, typer.Option("--subscriber-dsn", help="Likewise.")] = None,
    publisher_name: Annotated[str | None, typer.Option("--publisher-name", help="Default: database.")] = None,
    subscription_name: Annotated[
        str | None, typer.Option("--subscription-name", help="Default: database.")
    ] = None,
    publication: Annotated[
        list[str] | None, typer.Option("--publication", help="To subscribe to; default: all.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = "warning",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Write a first configuration file, after asking both databases what there is."""
    from cdc_replay.terminal.init_dialog import InitOptions, initialize, initialized

    _set_log_level(log_level)
    file, names = config_path(config), (publisher_name, subscription_name)
    options = InitOptions(
        file, publisher_dsn, subscriber_dsn, *names, tuple(publication or ()), overwrite=overwrite
    )
    result = initialize(options)
    return dataclasses.replace(outcome_of(result, as_json=as_json), view=initialized(result))


@app.command("doctor", rich_help_panel=SET_UP)
def _doctor(
    config: ConfigOption = None, log_level: LogLevelOption = "warning", as_json: JsonOption = False
) -> CommandOutcome:
    """Check this machine, the configuration and both sides; say what to do."""
    from cdc_replay.commands.doctor import doctor
    from cdc_replay.terminal.doctor_view import diagnosis

    _set_log_level(log_level)
    result = doctor(config)
    return dataclasses.replace(outcome_of(result, as_json=as_json), view=diagnosis(result))


@app.command("setup", rich_help_panel=SET_UP)
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
    from cdc_replay.commands.setup import setup, subscriber_script
    from cdc_replay.terminal.setup_view import set_up, to_script

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
    if dry_run:
        return dataclasses.replace(outcome, text=to_script(result))
    names = [configured.name for configured in loaded.subscriptions_of(publisher)]
    return dataclasses.replace(outcome, view=set_up(result, names))


@app.command("capture", rich_help_panel=REPLICATE)
def _capture(
    publisher: PublisherArgument,
    to_lsn: ToLsnOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Pull slot changes into the change log."""
    from cdc_replay.commands.capture import capture

    loaded = _load(config, log_level)
    with progress_bar("capture") as bar:
        task = bar.add_task("WAL", total=None)

        def show(done: Lsn, target: Lsn) -> None:
            bar.update(task, completed=done.value, total=target.value)

        return outcome_of(capture(loaded, publisher, to_lsn=_lsn(to_lsn), progress=show), as_json=as_json)


@app.command("snapshot", rich_help_panel=REPLICATE)
def _snapshot(
    subscription: SubscriptionArgument,
    table: Annotated[list[str] | None, typer.Option("--table", help="SCHEMA.TABLE to copy again.")] = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Copy the tables that need it, or the named ones again."""
    from cdc_replay.commands.snapshot import snapshot

    loaded = _load(config, log_level)
    names = [_table_name(name) for name in table or []]
    with progress_bar("snapshot") as bar:
        tasks: dict[QualifiedName, TaskID] = {}

        def show(name: QualifiedName, rows: int, size: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(str(name), total=None)
            bar.update(tasks[name], completed=size, description=f"{name}: {rows} rows")

        return outcome_of(snapshot(loaded, subscription, tables=names, progress=show), as_json=as_json)


@app.command("replay", rich_help_panel=REPLICATE)
def _replay(
    subscriptions: SubscriptionsArgument,
    to_lsn: ToLsnOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Apply the change log to the subscribers."""
    from cdc_replay.commands.replay import replay

    results = replay(_load(config, log_level), subscriptions, to_lsn=_lsn(to_lsn))
    return outcome_of_all(results, as_json=as_json)


@app.command("resume", rich_help_panel=REPAIR)
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
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Resume a parked subscription or table, with or without the transaction that it is parked before."""
    from cdc_replay.commands.resume import resume

    loaded = _load(config, log_level)
    names = [_table_name(name) for name in table or []]
    result = resume(loaded, subscription, tables=names, skip=_lsn(skip), accept_null=accept_null)
    return outcome_of(result, as_json=as_json)


@app.command("sync", rich_help_panel=REPLICATE)
def _sync(
    subscriptions: SubscriptionsArgument,
    to_lsn: ToLsnOption = None,
    follows: Annotated[
        bool, typer.Option("--follow", help="Continue as changes are committed, until SIGTERM or Ctrl-C.")
    ] = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Snapshot where needed, capture, replay."""
    if follows:
        if to_lsn is not None:
            raise typer.BadParameter("--follow has no end: give it or --to-lsn, not both")
        return outcome_of_all(_follow(_load(config, log_level), subscriptions), as_json=as_json)
    from cdc_replay.commands.sync import sync

    results = sync(_load(config, log_level), subscriptions, to_lsn=_lsn(to_lsn))
    return outcome_of_all(results, as_json=as_json)


def _follow(config: Config, subscriptions: Sequence[str]) -> Sequence[SyncResult]:
    from cdc_replay.commands import follow

    if logging.getLogger("cdc_replay").level == logging.INFO:
        # One line every ten seconds, not several for each round.
        logging.getLogger("cdc_replay").setLevel(logging.WARNING)
        logging.getLogger(follow.__name__).setLevel(logging.INFO)
    with finish_on_sigterm() as stop:
        return follow.follow(config, subscriptions, stop)


@app.command("backfill", rich_help_panel=REPAIR)
def _backfill(
    subscription: SubscriptionArgument,
    start: Annotated[
        str, typer.Option("--from", callback=check_zone, help="WAL position, or time with zone.")
    ],
    to: Annotated[str, typer.Option("--to", callback=check_zone, help="WAL position, or time with zone.")],
    into: Annotated[str | None, typer.Option("--into", help="DSN of another database, no password.")] = None,
    into_conn_id: Annotated[str | None, typer.Option("--into-conn-id", help="Its connection.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Replay a past part of the change log again."""
    from cdc_replay.commands.backfill import backfill

    loaded = _load(config, log_level)
    if into_conn_id is not None:
        if into is not None:
            raise typer.BadParameter("give --into or --into-conn-id, not both")
        into = loaded.dsn_of_connection(into_conn_id)
    return outcome_of(backfill(loaded, subscription, start, to, into=into, dry_run=dry_run), as_json=as_json)


@app.command("refresh", rich_help_panel=REPAIR)
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
    log_level: LogLevelOption = "info",
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
        return ask(lines, f"Delete {planned.deleted} rows of the subscriber?")

    asks = not yes and is_interactive()
    result = refresh(
        _load(config, log_level),
        subscription,
        reconcile=reconcile,
        dry_run=dry_run,
        confirm=confirm if asks else None,
    )
    return outcome_of(result, as_json=as_json)


@app.command("validate", rich_help_panel=LOOK)
def _validate(
    subscription: SubscriptionArgument,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Prove that the subscriber is consistent, at one WAL position."""
    from cdc_replay.commands.validate import validate

    return outcome_of(validate(_load(config, log_level), subscription), as_json=as_json)


@app.command("explain", rich_help_panel=LOOK)
def _explain(
    subscription: SubscriptionArgument,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Show per table what is published, how it is filtered and where the filter is evaluated."""
    from cdc_replay.commands.explain import explain
    from cdc_replay.terminal.explain_view import explained

    result = explain(_load(config, log_level), subscription)
    return dataclasses.replace(outcome_of(result, as_json=as_json), view=explained(result))


@app.command("status", rich_help_panel=LOOK)
def _status(
    subscription: Annotated[
        str | None, typer.Argument(metavar="SUBSCRIPTION", autocompletion=_names("subscriptions"))
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print only what is wrong, with exit code 1 if anything is.")
    ] = False,
    max_lag: Annotated[
        str | None, typer.Option("--max-lag", help="More is wrong: a time or a size, such as 5m or 1GB.")
    ] = None,
    max_proof_age: Annotated[
        str | None, typer.Option("--max-proof-age", help="An older last validation is wrong, such as 24h.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", help="Seconds, with --watch.", min=0.5)] = 5,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome | None:
    """Show publishers and subscriptions, or the tables of one, and what is wrong."""
    from cdc_replay.commands.status import repeated_status
    from cdc_replay.model.problems import Bounds
    from cdc_replay.terminal.status_view import status_outcome, status_view
    from cdc_replay.terminal.watch import watch as watch_screen

    try:
        bounds = Bounds.parse(max_lag, max_proof_age)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if watch and (as_json or check or not sys.stdout.isatty()):
        raise typer.BadParameter("--watch needs a terminal, and goes without --json and --check")
    with repeated_status(_load(config, log_level), subscription, bounds) as read:
        if watch:
            watch_screen(lambda: status_view(read(), of_one=subscription is not None), interval)
            return None
        return status_outcome(read(), of_one=subscription is not None, check=check, as_json=as_json)


@app.command("verify-log", rich_help_panel=LOOK)
def _verify_log(
    publisher: PublisherArgument,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Read the whole change log: checksums, continuity, order, every message."""
    from cdc_replay.commands.verify_log import verify_log

    loaded = _load(config, log_level)
    with progress_bar("verify-log") as bar:
        task = bar.add_task(publisher, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return outcome_of(verify_log(loaded, publisher, progress=show), as_json=as_json)


@app.command("prune", rich_help_panel=REMOVE)
def _prune(
    publisher: PublisherArgument,
    before: Annotated[
        str | None,
        typer.Option(
            "--before", callback=check_zone, help="Keep what commits after this LSN or time with zone."
        ),
    ] = None,
    keep_hours: Annotated[
        float | None, typer.Option("--keep-hours", help="Keep what was committed in the last hours.", min=0)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; report what would be dropped.")
    ] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Drop segments that no subscription needs and that are older than `keep` or these options."""
    from cdc_replay.commands.prune import prune

    def confirm(planned: PruneResult) -> None:
        history = f"what was committed from {planned.from_time} to {planned.to_time}"
        confirm_or_abort(
            f"This drops {history}: the changes in ({planned.from_lsn}, {planned.to_lsn}] of {publisher},"
            f" {planned.segments} segments, {planned.bytes} bytes. Continue?",
            yes=yes,
        )

    loaded = _load(config, log_level)
    result = prune(loaded, publisher, before=before, keep_hours=keep_hours, dry_run=dry_run, confirm=confirm)
    return outcome_of(result, as_json=as_json)


@app.command("teardown", rich_help_panel=REMOVE)
def _teardown(
    name: Annotated[str, typer.Argument(metavar="PUBLISHER|SUBSCRIPTION")],
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Remove what setup or snapshot created, nothing else."""
    from cdc_replay.commands.teardown import teardown

    return outcome_of(teardown(_load(config, log_level), name), as_json=as_json)


@app.command("batch", rich_help_panel=SCRIPT)
def _batch(
    config: ConfigOption = None,
    log_level: LogLevelOption = "warning",
    as_json: JsonOption = True,  # noqa: ARG001 - a batch prints JSON only
) -> None:
    """Run one command per line of standard input in this process and its Spark session."""
    from cdc_replay.commands.batch import batch

    _set_log_level(log_level)
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
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
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
            _print_error(reason[0])
        if "--json" in arguments:
            print_json({"error": reason[0]})
        return reason[1]
    if outcome is None:
        return 0
    print_outcome(outcome)
    if outcome.error:
        _print_error(outcome.error)
    return 1 if outcome.error else 0


def _print_error(text: str) -> None:
    sys.stderr.write(f"cdc-replay: {text}\n")


if __name__ == "__main__":
    main()
