"""`cdc-replay`: the command line. Parses, calls one function of `commands`, prints its result.

Exit codes: 0 success, 1 a failure (its reason on standard error), 2 a usage or configuration error. With
`--json` there is one JSON object on standard output, after a failure too; logs go to standard error always.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import psycopg
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Table

from cdc_replay.config import Config, load_config
from cdc_replay.errors import CdcReplayError, InvalidConfiguration, InvalidLsn
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import Json, PruneResult, Result
from cdc_replay.private_files import set_private_umask
from cdc_replay.termination import EXIT_CODE, Terminated, end_on_sigterm, is_asked_to_end

app = typer.Typer(
    name="cdc-replay",
    help="Replay PostgreSQL logical replication into any number of subscribers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Configuration file.")]
LogLevelOption = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
ToLsnOption = Annotated[str | None, typer.Option("--to-lsn", help="WAL position, such as 0/16B3748.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask; without a terminal nothing is asked.")]
PublisherArgument = Annotated[str, typer.Argument(metavar="PUBLISHER")]
SubscriptionArgument = Annotated[str, typer.Argument(metavar="SUBSCRIPTION")]
SubscriptionsArgument = Annotated[list[str], typer.Argument(metavar="SUBSCRIPTION...")]

LONGEST_WORD: Final = 40
"""A list with a longer item, such as a statement, is printed line by line."""

_LEVELS: Final = ("debug", "info", "warning", "error")

# What typer returns in the place of a KeyboardInterrupt.
_INTERRUPTED: Final = 130

# Some releases of typer bring a click of their own, so only typer knows the class of all usage errors.
_UsageError: Final = typer.BadParameter.__mro__[1]


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """What a command gives back to `main` or to `batch`."""

    result: dict[str, Json]
    as_json: bool = False
    error: str | None = None
    text: str | None = None
    """What a person sees, where that is not the result in tables."""


def _one(result: Result, *, as_json: bool) -> CommandOutcome:
    form = result.to_dict()
    error = form.get("error")
    return CommandOutcome(form, as_json, str(error) if error else None)


def _several(results: Sequence[Result], *, as_json: bool) -> CommandOutcome:
    """One result as it is, several as a list; the outcome fails if one of them did."""
    forms = [result.to_dict() for result in results]
    errors = [f"{form['subscription']}: {error}" for form in forms if (error := _error_in(form))]
    whole: dict[str, Json] = forms[0] if len(forms) == 1 else {"results": list(forms)}
    return CommandOutcome(whole, as_json, "\n".join(errors) or None)


def _error_in(form: dict[str, Json]) -> Json:
    replayed = form.get("replay")
    return replayed.get("error") if isinstance(replayed, dict) else form.get("error")


def _prepare(config: Path | None, log_level: str) -> Config:
    _set_log_level(log_level)
    return load_config(config)


def _set_log_level(log_level: str) -> None:
    if log_level not in _LEVELS:
        raise InvalidConfiguration(f'log level "{log_level}" is not one of {", ".join(_LEVELS)}')
    logging.getLogger("cdc_replay").setLevel(log_level.upper())


def _has_terminal() -> bool:
    """Whether somebody is there to answer a question.

    The lines of a batch come by standard input, and its standard output is standard error meanwhile.
    """
    return sys.stdin.isatty() and sys.stdout.isatty() and sys.stdout is not sys.stderr


def _confirmed(lines: Sequence[str], question: str) -> bool:
    """Ask on the terminal, after telling what is at stake; standard output is the result's."""
    for line in lines:
        typer.echo(line, err=True)
    return typer.confirm(question, err=True)


def _confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal before something is deleted; elsewhere, and with `--yes`, nobody is asked.

    Raises:
        typer.Abort: if the answer is no.
    """
    if not yes and _has_terminal():
        typer.confirm(question, abort=True, err=True)


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


def _table_name(text: str) -> QualifiedName:
    schema, dot, name = text.partition(".")
    if not dot or not schema or not name:
        raise InvalidConfiguration(f'"{text}" is not a table name', hint="Give it as SCHEMA.TABLE.")
    return QualifiedName(schema, name)


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
    from cdc_replay.commands.setup import script_of, setup, subscriber_script

    if subscription is not None and not dry_run:
        raise InvalidConfiguration(
            "--subscription goes with --dry-run: a subscriber is set up by `cdc-replay snapshot`"
        )
    loaded = _prepare(config, log_level)
    if subscription is not None:
        result = subscriber_script(loaded, publisher, subscription)
    else:
        result = setup(loaded, publisher, dry_run=dry_run)
    outcome = _one(result, as_json=as_json)
    return dataclasses.replace(outcome, text=script_of(result)) if dry_run else outcome


@app.command("capture")
def _capture(
    publisher: PublisherArgument,
    to_lsn: ToLsnOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Pull slot changes into the change log."""
    from cdc_replay.commands.capture import capture

    loaded = _prepare(config, log_level)
    with _progress("capture") as bar:
        task = bar.add_task("WAL", total=None)

        def show(done: Lsn, target: Lsn) -> None:
            bar.update(task, completed=done.value, total=target.value)

        return _one(capture(loaded, publisher, to_lsn=_lsn(to_lsn), progress=show), as_json=as_json)


@app.command("snapshot")
def _snapshot(
    subscription: SubscriptionArgument,
    table: Annotated[list[str] | None, typer.Option("--table", help="SCHEMA.TABLE to copy again.")] = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Copy the tables that need it, or the named ones again."""
    from cdc_replay.commands.snapshot import snapshot

    loaded = _prepare(config, log_level)
    names = [_table_name(each) for each in table or []]
    with _progress("snapshot") as bar:
        tasks: dict[QualifiedName, TaskID] = {}

        def show(name: QualifiedName, rows: int, size: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(str(name), total=None)
            bar.update(tasks[name], completed=size, description=f"{name}: {rows} rows")

        return _one(snapshot(loaded, subscription, tables=names, progress=show), as_json=as_json)


@app.command("replay")
def _replay(
    subscriptions: SubscriptionsArgument,
    to_lsn: ToLsnOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Apply the change log to the subscribers."""
    from cdc_replay.commands.replay import replay

    results = replay(_prepare(config, log_level), subscriptions, to_lsn=_lsn(to_lsn))
    return _several(results, as_json=as_json)


@app.command("resume")
def _resume(
    subscription: SubscriptionArgument,
    table: Annotated[list[str] | None, typer.Option("--table", help="SCHEMA.TABLE that is parked.")] = None,
    skip: Annotated[
        str | None, typer.Option("--skip", help="End of the transaction to leave out, such as 0/16B3748.")
    ] = None,
    accept_null: Annotated[
        bool,
        typer.Option("--accept-null", help="Store NULL for values of it that were not sent and nobody has."),
    ] = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Go on with a parked subscription or table, with or without the transaction that it is parked before."""
    from cdc_replay.commands.resume import resume

    loaded = _prepare(config, log_level)
    names = [_table_name(each) for each in table or []]
    result = resume(loaded, subscription, tables=names, skip=_lsn(skip), accept_null=accept_null)
    return _one(result, as_json=as_json)


@app.command("sync")
def _sync(
    subscriptions: SubscriptionsArgument,
    to_lsn: ToLsnOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Snapshot where needed, capture, replay."""
    from cdc_replay.commands.sync import sync

    results = sync(_prepare(config, log_level), subscriptions, to_lsn=_lsn(to_lsn))
    return _several(results, as_json=as_json)


@app.command("backfill")
def _backfill(
    subscription: SubscriptionArgument,
    from_: Annotated[str, typer.Option("--from", help="WAL position or timestamp.")],
    to: Annotated[str, typer.Option("--to", help="WAL position or timestamp.")],
    into: Annotated[str | None, typer.Option("--into", help="DSN of another database, no password.")] = None,
    into_conn_id: Annotated[str | None, typer.Option("--into-conn-id", help="Its connection.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Replay a past part of the change log again."""
    from cdc_replay.commands.backfill import backfill

    loaded = _prepare(config, log_level)
    if into_conn_id is not None:
        if into is not None:
            raise typer.BadParameter("give --into or --into-conn-id, not both")
        into = loaded.dsn_of_connection(into_conn_id)
    return _one(backfill(loaded, subscription, from_, to, into=into, dry_run=dry_run), as_json=as_json)


@app.command("refresh")
def _refresh(
    subscription: SubscriptionArgument,
    reconcile: Annotated[
        bool,
        typer.Option(
            "--reconcile",
            help="Then make every table what is published: insert and update rows, and DELETE all rows of"
            " the subscriber that the publisher does not have, or the row filter shuts out. --dry-run counts"
            " them.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what would be done, with counts and first keys.")
    ] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Read the publications again; copy new tables, forget dropped ones. Rows stay, without --reconcile."""
    from cdc_replay.commands.refresh import refresh
    from cdc_replay.model.results import RefreshResult

    def confirm(told: RefreshResult) -> bool:
        lines = [
            f"{table.table}: {table.deleted} rows will be deleted, such as {', '.join(table.deleted_keys)}"
            for table in told.reconciled
            if table.deleted
        ]
        return _confirmed(lines, f"Delete {told.deleted} rows of the subscriber?")

    asks = not yes and _has_terminal()
    result = refresh(
        _prepare(config, log_level),
        subscription,
        reconcile=reconcile,
        dry_run=dry_run,
        confirm=confirm if asks else None,
    )
    return _one(result, as_json=as_json)


@app.command("validate")
def _validate(
    subscription: SubscriptionArgument,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Prove that the subscriber is consistent, at one WAL position."""
    from cdc_replay.commands.validate import validate

    return _one(validate(_prepare(config, log_level), subscription), as_json=as_json)


@app.command("explain")
def _explain(
    subscription: SubscriptionArgument,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Show per table what is published, how it is filtered and where the filter is evaluated."""
    from cdc_replay.commands.explain import explain

    return _one(explain(_prepare(config, log_level), subscription), as_json=as_json)


@app.command("status")
def _status(
    config: ConfigOption = None, log_level: LogLevelOption = "info", as_json: JsonOption = False
) -> CommandOutcome:
    """Show slots, change logs and subscriptions."""
    from cdc_replay.commands.status import status

    return _one(status(_prepare(config, log_level)), as_json=as_json)


@app.command("verify-log")
def _verify_log(
    publisher: PublisherArgument,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Read the whole change log: checksums, continuity, order, every message."""
    from cdc_replay.commands.verify_log import verify_log

    loaded = _prepare(config, log_level)
    with _progress("verify-log") as bar:
        task = bar.add_task(publisher, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return _one(verify_log(loaded, publisher, progress=show), as_json=as_json)


@app.command("prune")
def _prune(
    publisher: PublisherArgument,
    before: Annotated[
        str | None, typer.Option("--before", help="Keep what commits after this WAL position or timestamp.")
    ] = None,
    keep_hours: Annotated[
        float | None, typer.Option("--keep-hours", help="Keep what was committed in the last hours.", min=0)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would go.")] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Drop what no subscription needs any more and is older than `keep`, or than these options say."""
    from cdc_replay.commands.prune import prune

    def confirm(going: PruneResult) -> None:
        history = f"what was committed from {going.from_time} to {going.to_time}"
        _confirm(
            f"This drops {history}: the changes in ({going.from_lsn}, {going.to_lsn}] of {publisher},"
            f" {going.segments} segments, {going.bytes} bytes. Go on?",
            yes=yes,
        )

    loaded = _prepare(config, log_level)
    result = prune(loaded, publisher, before=before, keep_hours=keep_hours, dry_run=dry_run, confirm=confirm)
    return _one(result, as_json=as_json)


@app.command("teardown")
def _teardown(
    name: Annotated[str, typer.Argument(metavar="PUBLISHER|SUBSCRIPTION")],
    config: ConfigOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Remove what setup or snapshot created, nothing else."""
    from cdc_replay.commands.teardown import teardown

    return _one(teardown(_prepare(config, log_level), name), as_json=as_json)


@app.command("batch")
def _batch(
    config: ConfigOption = None,
    log_level: LogLevelOption = "warning",
    as_json: JsonOption = True,  # noqa: ARG001 - it never prints anything else
) -> None:
    """Run one command per line of standard input in this process and its Spark session."""
    from cdc_replay.commands.batch import batch

    _set_log_level(log_level)
    batch(sys.stdin, sys.stdout, functools.partial(run_line, config=config))


def run_line(line: str, *, config: Path | None = None) -> tuple[dict[str, Json] | None, str | None]:
    """Run one command line in this process: its result, its error, or both.

    Nothing of it goes to standard output, where the results are. A line without `--config` gets `config`.
    """
    try:
        arguments = shlex.split(line)
    except ValueError as error:
        return None, f"the line cannot be split into words: {error}"
    if arguments[:1] == ["batch"]:
        return None, "a batch cannot run another one"
    if config is not None:
        # What the line itself says comes later, and counts.
        arguments[1:1] = ["--config", str(config)]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            outcome = _invoke(arguments)
    except Exception as error:
        if (reason := _reason(error)) is None:
            raise
        return None, reason[0]
    return (outcome.result, outcome.error) if outcome else ({}, None)


def _invoke(arguments: Sequence[str]) -> CommandOutcome | None:
    returned = typer.main.get_command(app).main(list(arguments), "cdc-replay", standalone_mode=False)
    if returned == _INTERRUPTED:
        raise KeyboardInterrupt
    return returned if isinstance(returned, CommandOutcome) else None


def _reason(error: BaseException) -> tuple[str, int] | None:
    """What to tell about a command that ended with `error`, and the exit code; None if it is a bug."""
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
        reason = _reason(Terminated() if is_asked_to_end() else error)
        if reason is None:
            raise
        if isinstance(error, _UsageError) and hasattr(error, "show"):
            error.show()
        elif not is_asked_to_end():  # that is told already
            _complain(reason[0])
        if "--json" in arguments:
            _print_json({"error": reason[0]})
        return reason[1]
    if outcome is None:
        return 0
    _print(outcome)
    if outcome.error:
        _complain(outcome.error)
    return 1 if outcome.error else 0


def _complain(text: str) -> None:
    sys.stderr.write(f"cdc-replay: {text}\n")


def _print_json(form: dict[str, Json]) -> None:
    sys.stdout.write(json.dumps(form, ensure_ascii=False) + "\n")


def _print(outcome: CommandOutcome) -> None:
    if outcome.as_json:
        _print_json(outcome.result)
        return
    if outcome.text is not None:
        sys.stdout.write(outcome.text)
        return
    console = Console(highlight=False)
    for title, rows in _sections(outcome.result):
        console.print(_aligned(title, rows))


def _sections(result: dict[str, Json], title: str = "") -> Iterator[tuple[str, list[dict[str, Json]]]]:
    """The result as titled tables: its plain values first, then each list of objects."""
    plain: dict[str, Json] = {}
    nested: list[tuple[str, list[dict[str, Json]]]] = []
    for key, value in result.items():
        rows = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
        if rows:
            nested.append((key, rows))
        elif isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
            nested.extend(_sections(value, key))
        else:
            plain[key] = value
    if plain:
        yield title, [plain]
    yield from nested


def _aligned(title: str, rows: list[dict[str, Json]]) -> Table:
    """One object as two columns, several as one row each."""
    if len(rows) == 1:
        table = Table("", "", title=title or None, show_header=False, box=None, title_justify="left")
        for key, value in rows[0].items():
            table.add_row(key, _cell(value))
        return table
    names = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*names, title=title or None, box=None, title_justify="left")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    return table


def _cell(value: Json) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.2f}"
        case dict():
            return ", ".join(f"{key} {_cell(item)}" for key, item in value.items() if item) or "-"
        case list():
            items = [_cell(item) for item in value]
            is_prose = any(len(item) > LONGEST_WORD for item in items)
            return ("\n" if is_prose else ", ").join(items) or "-"
        case _:
            return str(value)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """A progress bar on a terminal, nothing elsewhere: there the log lines speak."""
    console = Console(stderr=True)
    columns = (TextColumn(what), TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        yield bar


if __name__ == "__main__":
    main()
