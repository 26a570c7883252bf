"""Options and arguments that several commands have, and their values."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from cdc_replay.config import load_config
from cdc_replay.errors import CdcReplayError, InvalidConfiguration
from cdc_replay.model.lsn import Lsn

_T = TypeVar("_T")

_LEVELS: Final = ("debug", "info", "warning", "error")

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Configuration file.")]
LogLevelOption = Annotated[
    str | None,
    typer.Option(
        "--log-level", help="debug, info, warning or error; default: warning on a terminal, else info."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
ToLsnOption = Annotated[str | None, typer.Option("--to-lsn", help="WAL position, such as 0/16B3748.")]
BinFolderOption = Annotated[
    Path | None,
    typer.Option("--bin", metavar="FOLDER", help="Programs of a server of the publisher's version."),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask; without a terminal nothing is asked.")]


ValidatedTablesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tables", metavar="SCHEMA.TABLE[,…]", help="Only these tables of the subscriber; repeatable."
    ),
]
SampleOption = Annotated[
    str | None,
    typer.Option(
        "--sample",
        metavar="PERCENT",
        help="Only this share of each table's rows, such as 5%: those that were compared longest ago.",
    ),
]
DueOption = Annotated[
    bool,
    typer.Option("--due", help="Only what is due by the intervals and samples of the configuration."),
]
MaxSecondsOption = Annotated[
    float | None,
    typer.Option(
        "--max-seconds", help="Compare for about so long; what is not reached comes first next time.", min=0
    ),
]
MaxBytesOption = Annotated[
    str | None,
    typer.Option("--max-bytes", help="The same for bytes of the publisher's tables, such as 50GB."),
]
RepairOption = Annotated[
    bool,
    typer.Option(
        "--repair",
        help="If rows differ, insert, update and DELETE rows of the subscriber until it holds what is"
        " published, then prove it again. --dry-run counts them.",
    ),
]
RepairDryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="With --repair: write no row; report counts and first keys.")
]


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
OptionalSubscriptionArgument = Annotated[
    str | None, typer.Argument(metavar="SUBSCRIPTION", autocompletion=_names("subscriptions"))
]
SubscriptionsArgument = Annotated[
    list[str], typer.Argument(metavar="SUBSCRIPTION", autocompletion=_names("subscriptions"))
]


def parse_option(name: str, parse: Callable[[str], _T], text: str | None) -> _T | None:
    """The value of the option of that name; None if it is omitted.

    Raises:
        typer.BadParameter: if `parse` raises ValueError.
    """
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from None


def parse_lsn(text: str | None) -> Lsn | None:
    """The position; None if the option is omitted."""
    return None if text is None else Lsn.parse(text)


def set_log_level(log_level: str | None) -> None:
    """Set the level of our logs; by default progress and the result take the place of lines on a terminal."""
    if log_level is None:
        log_level = "warning" if sys.stderr.isatty() else "info"
    if log_level not in _LEVELS:
        raise InvalidConfiguration(f'log level "{log_level}" is not one of {", ".join(_LEVELS)}')
    logging.getLogger("cdc_replay").setLevel(log_level.upper())
