"""Commands that come first."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from cdc_replay.cli.app import SET_UP, app, load
from cdc_replay.config_file import config_path
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.terminal.options import (
    ConfigOption,
    JsonOption,
    LogLevelOption,
    PublisherArgument,
    set_log_level,
)
from cdc_replay.terminal.output import (
    CommandOutcome,
    outcome_of,
)


@app.command("init", rich_help_panel=SET_UP)
def _init(
    publisher_dsn: Annotated[
        str | None, typer.Option("--publisher-dsn", help="Without password, or with ${NAME} in its place.")
    ] = None,
    subscriber_dsn: Annotated[str | None, typer.Option("--subscriber-dsn", help="In the same form.")] = None,
    publisher_name: Annotated[
        str | None, typer.Option("--publisher-name", help="Default: its database's name.")
    ] = None,
    subscription_name: Annotated[
        str | None,
        typer.Option("--subscription-name", help="Default: the name of the subscriber's database."),
    ] = None,
    publication: Annotated[
        list[str] | None, typer.Option("--publication", help="To subscribe to; default: all.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Write a first configuration file, after asking both databases what there is."""
    from cdc_replay.terminal.init_dialog import InitOptions, initialize, initialized

    set_log_level(log_level)
    file, names = config_path(config), (publisher_name, subscription_name)
    options = InitOptions(
        file, publisher_dsn, subscriber_dsn, *names, tuple(publication or ()), overwrite=overwrite
    )
    result = initialize(options)
    return outcome_of(result, as_json=as_json, view=initialized(result))


@app.command("doctor", rich_help_panel=SET_UP)
def _doctor(
    config: ConfigOption = None, log_level: LogLevelOption = None, as_json: JsonOption = False
) -> CommandOutcome:
    """Check this machine, the configuration and both sides; say what to do."""
    from cdc_replay.commands.doctor import doctor
    from cdc_replay.terminal.doctor_view import diagnosis

    set_log_level(log_level)
    result = doctor(config)
    return outcome_of(result, as_json=as_json, view=diagnosis(result))


@app.command("setup", rich_help_panel=SET_UP)
def _setup(
    publisher: PublisherArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the SQL and do nothing.")] = False,
    subscription: Annotated[
        str | None, typer.Option("--subscription", help="With --dry-run: the SQL for its subscriber.")
    ] = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = False,
) -> CommandOutcome:
    """Check the publisher; create its capture publications, slot and change log."""
    from cdc_replay.commands.setup import setup, subscriber_script
    from cdc_replay.terminal.setup_view import set_up, to_script

    if subscription is not None and not dry_run:
        raise InvalidConfiguration(
            "--subscription goes with --dry-run: a subscriber is set up by `cdc-replay snapshot`"
        )
    loaded = load(config, log_level)
    if subscription is not None:
        result = subscriber_script(loaded, publisher, subscription)
    else:
        result = setup(loaded, publisher, dry_run=dry_run)
    outcome = outcome_of(result, as_json=as_json)
    if dry_run:
        return dataclasses.replace(outcome, text=to_script(result))
    names = [configured.name for configured in loaded.subscriptions_of(publisher)]
    return dataclasses.replace(outcome, view=set_up(result, names))
