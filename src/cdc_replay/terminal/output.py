"""Results as JSON, in words or as screens, and questions on a terminal."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TextIO

import typer
from rich.console import Console, RenderableType

from cdc_replay.model.count import count_in_words
from cdc_replay.model.printable import printable
from cdc_replay.model.results import Json, Result, TableReconciled
from cdc_replay.terminal.progress import ShownProgress
from cdc_replay.terminal.results import summarize, wrap

UNDECIDED: Final = 3
"""The exit code of a validation that could not judge something, and saw no difference in the rest."""


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The result of a command, for `main` or `batch`."""

    result: dict[str, Json]
    as_json: bool = False
    error: str | None = None
    text: str | None = None
    """The result in words."""
    view: RenderableType | None = None
    """The result as a screen, with colours on a terminal."""
    exit_code: int = 1
    """If there is an error."""


def outcome_of(result: Result, *, as_json: bool, view: RenderableType | None = None) -> CommandOutcome:
    """The outcome of one result, with its `view`; it fails if the result has an error."""
    form = result.to_dict()
    error = form.get("error")
    return CommandOutcome(form, as_json, str(error) if error else None, _in_words([result]), view)


def outcome_of_all(results: Sequence[Result], *, as_json: bool) -> CommandOutcome:
    """The outcome of one result, or of a list of several; it fails if one of them has an error."""
    forms = [result.to_dict() for result in results]
    errors = [f"{form['subscription']}: {error}" for form in forms if (error := _error_of(form))]
    whole: dict[str, Json] = forms[0] if len(forms) == 1 else {"results": list(forms)}
    return CommandOutcome(whole, as_json, "\n".join(errors) or None, _in_words(results))


def _in_words(results: Sequence[Result]) -> str | None:
    width = shutil.get_terminal_size().columns
    summaries = [summary for result in results if (summary := summarize(result)) is not None]
    return "".join(summary.to_text(width) for summary in summaries) or None


def _error_of(form: dict[str, Json]) -> Json:
    replayed = form.get("replay")
    return replayed.get("error") if isinstance(replayed, dict) else form.get("error")


def print_json(form: dict[str, Json]) -> None:
    """Print one JSON object on a line of standard output."""
    _write(json.dumps(form, ensure_ascii=False) + "\n")


def _write(text: str) -> None:
    """Write to standard output; a program gets each name as it is, a terminal without what would steer it."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)


def print_outcome(outcome: CommandOutcome) -> None:
    """Print the result as JSON, in words, or as its view; a command that did nothing prints nothing."""
    if outcome.as_json:
        print_json(outcome.result)
        return
    if outcome.text is not None:
        _write(outcome.text)
        return
    if outcome.view is None:
        return
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(outcome.view)
        return
    with console.capture() as capture:
        console.print(outcome.view)
    # Tables are padded to their width: of no use in a file.
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def print_error(text: str) -> None:
    """Print why a command failed; on a terminal no word is broken."""
    lines = printable(f"cdc-replay: {text}").splitlines()
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = [part for line in lines for part in wrap(line, width)]
    sys.stderr.write("\n".join(lines) + "\n")


class LogHandler(logging.StreamHandler[TextIO]):
    """Logs to what standard error is at that time, so that lines do not run into a live display."""

    @property
    def stream(self) -> TextIO:
        """Standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, _stream: TextIO) -> None:
        """It is never another one."""


def is_interactive() -> bool:
    """Whether a person can answer a question.

    A batch reads its lines from standard input, and redirects standard output to standard error.
    """
    return sys.stdin.isatty() and sys.stdout.isatty() and sys.stdout is not sys.stderr


def ask(lines: Sequence[str], question: str) -> bool:
    """Print `lines` and ask; on standard error, as standard output is for the result."""
    for line in lines:
        typer.echo(line, err=True)
    return typer.confirm(question, err=True)


def confirm_deletions(report: ShownProgress, tables: Sequence[TableReconciled]) -> bool:
    """Say which rows of the subscriber will be deleted, and ask; the progress display makes way."""
    lines = [
        f"{table.table}: {count_in_words(table.deleted, 'row')} will be deleted,"
        f" such as {', '.join(table.deleted_keys)}"
        for table in tables
        if table.deleted
    ]
    deleted = count_in_words(sum(table.deleted for table in tables), "row")
    with report.paused():
        return ask([printable(line) for line in lines], f"Delete {deleted} of the subscriber?")


def confirm_or_abort(question: str, *, yes: bool) -> None:
    """Ask for confirmation on a terminal; elsewhere, and with `--yes`, do not ask.

    Raises:
        typer.Abort: if the answer is no.
    """
    if not yes and is_interactive():
        typer.confirm("\n".join(wrap(question, shutil.get_terminal_size().columns)), abort=True, err=True)
