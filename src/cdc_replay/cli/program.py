"""`cdc-replay`: the command line. Parses options, calls one function of `commands`, prints its result.

| exit code | meaning                                         |
|-----------|-------------------------------------------------|
| 0         | success                                         |
| 1         | a failure; its reason is on standard error      |
| 2         | a usage or configuration error                  |
| 3         | a validation that could not judge something     |
| 143       | terminated by SIGTERM                           |

With `--json` there is one JSON object on standard output, also after a failure. Logs go to standard error.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psycopg
import typer

from cdc_replay.cli.app import SCRIPT, app
from cdc_replay.errors import CdcReplayError, InvalidConfiguration, InvalidLsn
from cdc_replay.model.printable import LogLineFormatter
from cdc_replay.model.results import Json
from cdc_replay.private_files import set_private_umask
from cdc_replay.terminal.options import (
    ConfigOption,
    JsonOption,
    LogLevelOption,
    set_log_level,
)
from cdc_replay.terminal.output import (
    CommandOutcome,
    LogHandler,
    print_error,
    print_json,
    print_outcome,
)
from cdc_replay.termination import (
    EXIT_CODE,
    Terminated,
    end_on_sigterm,
    end_without_collecting,
    is_asked_to_end,
)

# typer returns this code in place of a KeyboardInterrupt.
_INTERRUPTED: Final = 130

# Some releases of typer vendor click, so the base class of usage errors is looked up in typer.
_UsageError: Final = typer.BadParameter.__mro__[1]

# Built once: each line of a batch would build the options of every command again.
_get_command = functools.cache(typer.main.get_command)


@app.command("batch", rich_help_panel=SCRIPT)
def _batch(
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    as_json: JsonOption = True,  # noqa: ARG001 - a batch prints JSON only
) -> None:
    """Run one command per line of standard input in this process and its Spark session."""
    from cdc_replay.commands.batch import batch

    set_log_level(log_level)
    given = {"--config": config, "--log-level": log_level}
    options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    # A command that reads its standard input must not read the lines of the next ones.
    lines = sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as sys.stdin:
        batch(lines, sys.stdout, functools.partial(run_line, options=options))


def run_line(line: str, *, options: Sequence[str] = ()) -> tuple[dict[str, Json] | None, str | None]:
    """Run one command line in this process: its result, its error, or both.

    It prints nothing on standard output, which is for results. Each line gets `options`.
    """
    try:
        arguments = shlex.split(line)
    except ValueError as error:
        return None, f"the line cannot be split into words: {error}"
    if arguments[:1] == ["batch"]:
        return None, "a batch cannot run another one"
    # An option of the line itself comes later, and wins.
    arguments[1:1] = options
    try:
        with contextlib.redirect_stdout(sys.stderr):
            outcome = _invoke(arguments)
    except Exception as error:
        if (reason := _describe_error(error)) is None:
            raise
        return None, reason[0]
    return (outcome.result, outcome.error) if outcome else ({}, None)


def _invoke(arguments: Sequence[str]) -> CommandOutcome | None:
    returned = _get_command(app).main(list(arguments), "cdc-replay", standalone_mode=False)
    if returned == _INTERRUPTED:
        raise KeyboardInterrupt
    return returned if isinstance(returned, CommandOutcome) else None


def _describe_error(error: BaseException) -> tuple[str, int] | None:
    """The message and exit code for a command that raised `error`; None if the error is a bug."""
    match error:
        case Terminated():
            return "terminated by SIGTERM", EXIT_CODE
        case typer.Abort() | KeyboardInterrupt():
            # A question that was answered with no, or not at all, aborts.
            return "interrupted" if isinstance(error, KeyboardInterrupt) else "nothing was done", 1
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
    _open_missing_streams()
    end_without_collecting()
    set_private_umask()
    end_on_sigterm()
    _take_any_text()
    handler = LogHandler()
    handler.setFormatter(LogLineFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _open_missing_streams() -> None:
    """Open those standard streams nowhere that are closed.

    Else the next file or connection gets the descriptor, and what is written there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _run(arguments: Sequence[str]) -> int:
    """The exit code of a command, whose result may have no reader any more, or no room."""
    try:
        code = _exit_code(arguments)
        sys.stdout.flush()
    except OSError as error:
        # The interpreter writes what is left when it ends, and would fail again.
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        print_error(f"the result cannot be written to standard output: {error.strerror}")
        return 1
    return code


def _take_any_text() -> None:
    """Let what is no UTF-8, such as a file's name, be an argument, a line of a batch, and a part of a result.

    Its bytes are lone surrogates within Python, and escapes in the output; in JSON they mean the same.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


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
    return outcome.exit_code if outcome.error else 0
