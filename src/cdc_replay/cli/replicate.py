"""Commands that bring rows to the subscribers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated

import typer

from cdc_replay.cli.app import REPLICATE, app, load
from cdc_replay.config import Config
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import SyncResult
from cdc_replay.terminal.options import (
    ConfigOption,
    JsonOption,
    LogLevelOption,
    PublisherArgument,
    SubscriptionArgument,
    SubscriptionsArgument,
    ToLsnOption,
    parse_lsn,
)
from cdc_replay.terminal.output import (
    CommandOutcome,
    outcome_of,
    outcome_of_all,
)
from cdc_replay.terminal.progress import show_progress
from cdc_replay.termination import finish_on_sigterm


@app.command("capture", rich_help_panel=REPLICATE)
def _capture(
    publisher: PublisherArgument,
    to_lsn: ToLsnOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Pull slot changes into the change log."""
    from cdc_replay.commands.capture import capture

    loaded = load(config, log_level)
    with show_progress(f"capture {publisher}") as report:
        result = capture(loaded, publisher, to_lsn=parse_lsn(to_lsn), report=report)
    return outcome_of(result, as_json=as_json)


@app.command("snapshot", rich_help_panel=REPLICATE)
def _snapshot(
    subscription: SubscriptionArgument,
    table: Annotated[list[str] | None, typer.Option("--table", help="SCHEMA.TABLE to copy again.")] = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Copy the tables that need it, or the named ones again."""
    from cdc_replay.commands.snapshot import snapshot

    loaded = load(config, log_level)
    names = [QualifiedName.parse(name) for name in table or []]
    with show_progress(f"snapshot {subscription}") as report:
        result = snapshot(loaded, subscription, tables=names, report=report)
    return outcome_of(result, as_json=as_json)


@app.command("replay", rich_help_panel=REPLICATE)
def _replay(
    subscriptions: SubscriptionsArgument,
    to_lsn: ToLsnOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Apply the change log to the subscribers."""
    from cdc_replay.commands.replay import replay

    loaded = load(config, log_level)
    with show_progress(f"replay {' '.join(subscriptions)}") as report:
        results = replay(loaded, subscriptions, to_lsn=parse_lsn(to_lsn), report=report)
    return outcome_of_all(results, as_json=as_json)


@app.command("sync", rich_help_panel=REPLICATE)
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
        return outcome_of_all(_follow(load(config, log_level or "info"), subscriptions), as_json=as_json)
    from cdc_replay.commands.sync import sync

    loaded = load(config, log_level)
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
