"""Commands that look, and change nothing unless they are asked to."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cdc_replay.cli.app import LOOK, app, load
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.size import parse_size
from cdc_replay.model.validation_scope import ValidationScope, parse_share
from cdc_replay.terminal.options import (
    BinFolderOption,
    ConfigOption,
    DueOption,
    JsonOption,
    LogLevelOption,
    MaxBytesOption,
    MaxSecondsOption,
    OptionalSubscriptionArgument,
    PublisherArgument,
    RepairDryRunOption,
    RepairOption,
    SampleOption,
    SubscriptionArgument,
    ValidatedTablesOption,
    YesOption,
    parse_option,
)
from cdc_replay.terminal.output import (
    UNDECIDED,
    CommandOutcome,
    confirm_deletions,
    is_interactive,
    outcome_of,
)
from cdc_replay.terminal.progress import show_progress
from cdc_replay.termination import finish_on_sigterm


@app.command("validate", rich_help_panel=LOOK)
def _validate(
    subscription: SubscriptionArgument,
    tables: ValidatedTablesOption = None,
    sample: SampleOption = None,
    due: DueOption = False,
    max_seconds: MaxSecondsOption = None,
    max_bytes: MaxBytesOption = None,
    repair: RepairOption = False,
    dry_run: RepairDryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Prove that the subscriber is consistent, at one WAL position; with --repair, make it so."""
    from cdc_replay.commands.validate import validate
    from cdc_replay.commands.validate_and_repair import validate_and_repair

    if dry_run and not repair:
        raise typer.BadParameter("--dry-run needs --repair: without it nothing is written anyway")
    if due and tables:
        raise typer.BadParameter("--due chooses the tables: leave out --tables")
    scope = _scope(tables or (), sample, max_seconds, max_bytes, is_due=due)
    loaded = load(config, log_level)
    with show_progress(f"validate {subscription}") as report:
        if repair:
            asks = not yes and is_interactive()
            confirm = functools.partial(confirm_deletions, report) if asks else None
            result = validate_and_repair(
                loaded, subscription, scope=scope, dry_run=dry_run, confirm=confirm, report=report
            )
        else:
            result = validate(loaded, subscription, scope=scope, report=report)
    outcome = outcome_of(result, as_json=as_json)
    return dataclasses.replace(outcome, exit_code=UNDECIDED if result.is_undecided else outcome.exit_code)


def _scope(
    tables: Sequence[str],
    sample: str | None,
    max_seconds: float | None,
    max_bytes: str | None,
    *,
    is_due: bool,
) -> ValidationScope:
    """What is to be compared.

    Raises:
        typer.BadParameter: if a share or a size cannot be read.
    """
    return ValidationScope(
        tuple(tables),
        parse_option("--sample", parse_share, sample),
        max_seconds,
        parse_option("--max-bytes", parse_size, max_bytes),
        is_due=is_due,
    )


@app.command("certify", rich_help_panel=LOOK)
def _certify(
    subscription: SubscriptionArgument,
    time: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="Follow the publisher for so long, such as 10m."),
    ] = None,
    transactions: Annotated[
        int | None,
        typer.Option("--transactions", help="Follow so many transactions of the publisher.", min=1),
    ] = None,
    bin_folder: BinFolderOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Compare a subscription with a native one beside it, on a throw-away PostgreSQL server."""
    from cdc_replay.commands.certify import CertifyOptions, certify
    from cdc_replay.model.duration import parse_short_duration
    from cdc_replay.terminal.certify_view import certified

    options = CertifyOptions(parse_option("--for", parse_short_duration, time), transactions, bin_folder)
    loaded = load(config, log_level)
    with finish_on_sigterm() as stop, show_progress(f"certify {subscription}") as report:
        result = certify(loaded, subscription, options, stop=stop, report=report)
    return outcome_of(result, as_json=as_json, view=certified(result))


@app.command("explain", rich_help_panel=LOOK)
def _explain(
    subscription: SubscriptionArgument,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Show per table what is published, how it is filtered and where the filter is evaluated."""
    from cdc_replay.commands.explain import explain
    from cdc_replay.terminal.explain_view import explained

    result = explain(load(config, log_level), subscription)
    return outcome_of(result, as_json=as_json, view=explained(result))


@app.command("why", rich_help_panel=LOOK)
def _why(
    subscription: SubscriptionArgument,
    table: Annotated[
        str, typer.Argument(metavar="SCHEMA.TABLE", help="A published table, or a partition of it.")
    ],
    key: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY", help="The row: COLUMN=VALUE of its key, or the values in the key's order."
        ),
    ],
    values: Annotated[bool, typer.Option("--values", help="Show the values of the row's columns.")] = False,
    last: Annotated[int, typer.Option("--last", help="Explain at most this many changes.", min=1)] = 100,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Show the history of one row, and why publisher and subscriber differ in it."""
    from cdc_replay.commands.why import why
    from cdc_replay.terminal.why_view import row_explained

    name = QualifiedName.parse(table)
    result = why(load(config, log_level), subscription, name, key, last=last, with_values=values)
    return outcome_of(result, as_json=as_json, view=row_explained(result))


@app.command("plan", rich_help_panel=LOOK)
def _plan(
    subscription: SubscriptionArgument,
    publications: Annotated[
        Path,
        typer.Option(
            "--publications",
            metavar="FILE",
            help="A script of CREATE, ALTER and DROP PUBLICATION; - reads standard input.",
            dir_okay=False,
            allow_dash=True,
        ),
    ],
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            help="Count changes of the log from this WAL position or timestamp on;"
            " default: the last 24 hours that the log holds.",
        ),
    ] = None,
    throwaway: Annotated[
        bool,
        typer.Option(
            "--throwaway", help="Let a throw-away server parse the script: the publisher locks nothing."
        ),
    ] = False,
    bin_folder: BinFolderOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Show what a proposed change of publications would do, before it is executed."""
    from cdc_replay.commands.plan import plan, read_script
    from cdc_replay.proposal.run import PlanOptions
    from cdc_replay.terminal.plan_view import planned

    loaded = load(config, log_level)
    script, options = read_script(publications), PlanOptions(since, throwaway, bin_folder)
    with show_progress(f"plan {subscription}") as report:
        result = plan(loaded, subscription, script, options, report=report)
    return outcome_of(result, as_json=as_json, view=planned(result))


@app.command("status", rich_help_panel=LOOK)
def _status(
    subscription: OptionalSubscriptionArgument = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print only what is wrong, with exit code 1 if anything is.")
    ] = False,
    max_lag: Annotated[
        str | None, typer.Option("--max-lag", help="More is wrong: a time or a size, such as 5m or 1GB.")
    ] = None,
    max_proof_age: Annotated[
        str | None,
        typer.Option("--max-proof-age", help="An older proof of a subscription is wrong, such as 24h."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", help="Seconds, with --watch.", min=0.5)] = 5,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome | None:
    """Show publishers and subscriptions, or the tables of one, and what is wrong."""
    from cdc_replay.commands.status import repeated_status
    from cdc_replay.model.duration import parse_short_duration
    from cdc_replay.model.problems import Bounds
    from cdc_replay.terminal.status_view import status_outcome, status_view
    from cdc_replay.terminal.watch import watch as watch_screen

    bounds = dataclasses.replace(
        parse_option("--max-lag", Bounds.of_lag, max_lag) or Bounds(),
        proof_age=parse_option("--max-proof-age", parse_short_duration, max_proof_age),
    )
    if watch and (as_json or check or not sys.stdout.isatty()):
        raise typer.BadParameter("--watch needs a terminal, and goes without --json and --check")
    with repeated_status(load(config, log_level), subscription, bounds) as read:
        if watch:
            watch_screen(lambda: status_view(read(), of_one=subscription is not None), interval)
            return None
        return status_outcome(read(), of_one=subscription is not None, check=check, as_json=as_json)


@app.command("alarms", rich_help_panel=LOOK)
def _alarms(
    test: Annotated[
        bool, typer.Option("--test", help="Send a test message to every channel, and look at nothing.")
    ] = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Tell the channels of `alarms.notify` what is new, worse or over since the last time; for cron."""
    from cdc_replay.commands.alarms import alarms, try_channels
    from cdc_replay.terminal.alarms_view import alarms_view

    loaded = load(config, log_level)
    result = try_channels(loaded) if test else alarms(loaded)
    return outcome_of(result, as_json=as_json, view=alarms_view(result))


@app.command("verify-log", rich_help_panel=LOOK)
def _verify_log(
    publisher: PublisherArgument,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Read the whole change log: checksums, continuity, order, every message."""
    from cdc_replay.commands.verify_log import verify_log

    loaded = load(config, log_level)
    with show_progress(f"verify-log {publisher}") as report:
        result = verify_log(loaded, publisher, report=report)
    return outcome_of(result, as_json=as_json)
