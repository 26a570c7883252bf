"""`setup` on a screen, and its dry run as a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from cdc_replay.model.results import SetupResult
from cdc_replay.terminal.layout import DOUBTFUL, HEADING, labelled, text


def set_up(result: SetupResult, subscriptions: Sequence[str]) -> RenderableType:
    """The outcome, with the command that copies the publisher's subscriptions."""
    triggers = "follow every change of a definition" if result.event_trigger else "are not installed"
    done = f"{len(result.statements)} statements executed" if result.statements else "nothing was missing"
    parts: list[RenderableType] = [
        Text.assemble("publisher ", text(result.publisher, HEADING), f" is set up: {done}"),
        labelled((("log starts", text(str(result.from_lsn))), ("event triggers", text(triggers)))),
    ]
    parts += [Text.assemble(text("warning: ", DOUBTFUL), text(warning)) for warning in result.warnings]
    if subscriptions:
        parts += [text(f"Next: cdc-replay sync {' '.join(subscriptions)}")]
    return Group(*parts)


_SECTIONS: Final = (
    (("grant ", "alter role "), "Privileges that the configured role lacks."),
    (('create schema "cdc_replay" ',), "The schema of the subscriptions' state."),
    (("select lsn",), "The replication slot. This waits for the transactions that are open."),
    (("begin",), "One transaction creates everything, or nothing if an object belongs to somebody else."),
    (
        ("do $cdc_replay_guard$",),
        "Fails if objects with these names belong to a role that must not own them.",
    ),
    (("do ",), "Where the change log starts, as a comment on a publication."),
    (
        ("create publication", "alter publication", "drop publication", "comment on publication"),
        "Capture publications: every change of the subscribed tables, whatever their filters.",
    ),
    (("",), "Event triggers: they write changed definitions into the WAL, and extend the publications."),
)
"""What statements with these beginnings are for; the first that matches."""


def to_script(result: SetupResult) -> str:
    """The statements of a dry run as a script for psql, which a superuser runs in that database."""
    lines = [f"-- {' '.join(warning.split())}" for warning in result.warnings]
    if not result.statements:
        return "\n".join([*lines, "-- Nothing is missing.", ""])
    lines += ["-- Run this with psql as a superuser, in the database of the configuration's DSN. Use"]
    lines += ["-- psql --set=ON_ERROR_STOP=1: after an error nothing else may be executed."]
    section = ""
    for statement in map(str.strip, result.statements):
        previous, section = section, _section(statement, section)
        if section != previous:
            lines += ["", f"-- {section}"]
        lines.append(f"{statement};")
    return "\n".join([*lines, ""])


def _section(statement: str, previous: str) -> str:
    section = next(text for beginnings, text in _SECTIONS if statement.startswith(beginnings))
    # The role is also granted what the event triggers write to.
    is_of_triggers = statement.startswith("grant ") and '"cdc_replay_capture"' in statement
    is_of_transaction = statement.startswith(("set local ", "commit"))
    return previous if is_of_triggers or is_of_transaction else section
