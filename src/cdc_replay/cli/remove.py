"""Commands that take something away."""

from __future__ import annotations

from typing import Annotated

import typer

from cdc_replay.cli.app import REMOVE, app, load
from cdc_replay.model.count import count_in_words
from cdc_replay.model.results import PruneResult
from cdc_replay.model.size import size_in_words
from cdc_replay.model.timestamp import check_zone
from cdc_replay.terminal.options import (
    ConfigOption,
    JsonOption,
    LogLevelOption,
    PublisherArgument,
    YesOption,
)
from cdc_replay.terminal.output import (
    CommandOutcome,
    confirm_or_abort,
    outcome_of,
)


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
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Drop segments that no subscription needs and that are older than `keep` or these options."""
    from cdc_replay.commands.prune import prune

    def confirm(planned: PruneResult) -> None:
        history = f"what was committed from {planned.from_time} to {planned.to_time}"
        confirm_or_abort(
            f"This drops {history}: the changes in ({planned.from_lsn}, {planned.to_lsn}] of {publisher},"
            f" {count_in_words(planned.segments, 'segment')}, {size_in_words(planned.bytes)}. Continue?",
            yes=yes,
        )

    loaded = load(config, log_level)
    result = prune(loaded, publisher, before=before, keep_hours=keep_hours, dry_run=dry_run, confirm=confirm)
    return outcome_of(result, as_json=as_json)


@app.command("teardown", rich_help_panel=REMOVE)
def _teardown(
    name: Annotated[str, typer.Argument(metavar="PUBLISHER|SUBSCRIPTION")],
    yes: YesOption = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Remove what setup or snapshot created, nothing else."""
    from cdc_replay.commands.teardown import teardown

    loaded = load(config, log_level)
    result = teardown(loaded, name, confirm=lambda text: confirm_or_abort(f"{text} Continue?", yes=yes))
    return outcome_of(result, as_json=as_json)
