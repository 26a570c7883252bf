"""The program's name, version and panels of commands; each module beside this has the commands of a panel."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from cdc_replay.config import Config, load_config
from cdc_replay.terminal.options import (
    set_log_level,
)

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


def load(config: Path | None, log_level: str | None) -> Config:
    """The configuration; sets the level of the logs before it is read."""
    set_log_level(log_level)
    return load_config(config)


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
