"""Commands that mend a subscription."""

from __future__ import annotations

from typing import Annotated

import typer

from cdc_replay.cli.app import REPAIR, app, load
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.timestamp import check_zone
from cdc_replay.terminal.options import (
    ConfigOption,
    JsonOption,
    LogLevelOption,
    SubscriptionArgument,
    YesOption,
    parse_lsn,
)
from cdc_replay.terminal.output import (
    CommandOutcome,
    confirm_deletions,
    is_interactive,
    outcome_of,
)
from cdc_replay.terminal.progress import show_progress


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
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Resume a parked subscription or table, with or without the transaction that it is parked before."""
    from cdc_replay.commands.resume import resume

    loaded = load(config, log_level)
    names = [QualifiedName.parse(name) for name in table or []]
    result = resume(loaded, subscription, tables=names, skip=parse_lsn(skip), accept_null=accept_null)
    return outcome_of(result, as_json=as_json)


@app.command("backfill", rich_help_panel=REPAIR)
def _backfill(
    subscription: SubscriptionArgument,
    start: Annotated[
        str, typer.Option("--from", callback=check_zone, help="WAL position, or time with zone.")
    ],
    to: Annotated[str, typer.Option("--to", callback=check_zone, help="WAL position, or time with zone.")],
    table: Annotated[
        list[str] | None, typer.Option("--table", help="Only SCHEMA.TABLE of the subscriber; repeatable.")
    ] = None,
    into: Annotated[str | None, typer.Option("--into", help="DSN of another database, no password.")] = None,
    into_conn_id: Annotated[str | None, typer.Option("--into-conn-id", help="Its connection.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Replay a past part of the change log again."""
    from cdc_replay.commands.backfill import backfill

    loaded = load(config, log_level)
    names = [QualifiedName.parse(name) for name in table or []]
    if into_conn_id is not None:
        if into is not None:
            raise typer.BadParameter("give --into or --into-conn-id, not both")
        into = loaded.dsn_of_connection(into_conn_id)
    with show_progress(f"backfill {subscription}") as report:
        result = backfill(
            loaded, subscription, start, to, tables=names, into=into, dry_run=dry_run, report=report
        )
    return outcome_of(result, as_json=as_json)


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
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Read the publications again; copy new tables, remove dropped ones. Rows stay, without --reconcile."""
    from cdc_replay.commands.refresh import refresh

    loaded, asks = load(config, log_level), not yes and is_interactive()
    with show_progress(f"refresh {subscription}") as report:
        result = refresh(
            loaded,
            subscription,
            reconcile=reconcile,
            dry_run=dry_run,
            confirm=(lambda planned: confirm_deletions(report, planned.reconciled)) if asks else None,
            report=report,
        )
    return outcome_of(result, as_json=as_json)
