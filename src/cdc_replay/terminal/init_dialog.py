"""The questions of `init`, and its result. What is given as an option is not asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import ProgrammingError
from rich.console import Group, RenderableType
from rich.text import Text

from cdc_replay.commands.init import InitResult, draft, publication_names, read_publications, write
from cdc_replay.config_draft import Endpoint, check_name
from cdc_replay.config_file import expand_references, has_reference
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.printable import printable
from cdc_replay.terminal.layout import BAD, HEADING, labelled, text
from cdc_replay.terminal.output import is_interactive

EXAMPLE: Final = "postgresql://replicator@db1.example:5432/shop"
PROMPT: Final = "> "
"""On a line of its own: the question has an example, and a DSN is long."""


@dataclass(frozen=True, slots=True)
class InitOptions:
    """What was given; None is asked on a terminal."""

    file: Path
    publisher_dsn: str | None
    subscriber_dsn: str | None
    publisher_name: str | None
    subscription_name: str | None
    publications: tuple[str, ...]
    overwrite: bool


def initialize(options: InitOptions) -> InitResult:
    """Ask for what was not given, read both sides, and write the file.

    Raises:
        InvalidConfiguration: if something is missing and there is nobody to ask, or the file exists.
        CdcReplayError: if a side does not answer.
    """
    overwrite = options.overwrite
    if options.file.exists() and not overwrite:
        if not is_interactive():
            hint = "Give --overwrite to replace it, or --config with another path."
            raise InvalidConfiguration(f'"{options.file}" exists already', hint=hint)
        overwrite = typer.confirm(f"{options.file} exists. Replace it?", abort=True, err=True)
    publisher, publisher_dsn = _endpoint("publisher", options.publisher_dsn, options.publisher_name)
    catalog = read_publications(publisher_dsn)
    subscription, subscriber_dsn = _endpoint("subscriber", options.subscriber_dsn, options.subscription_name)
    publications = options.publications or _ask_publications(publication_names(catalog))
    drafted = draft(catalog, publisher, subscription, subscriber_dsn, publications)
    return write(options.file, drafted, overwrite=overwrite)


def initialized(result: InitResult) -> RenderableType:
    """What was written, and the next commands."""
    parts: list[RenderableType] = [
        Text.assemble("Wrote ", text(str(result.config), HEADING), "."),
        labelled(
            (
                ("publisher", text(result.publisher)),
                ("subscription", text(result.subscription)),
                ("publications", text(", ".join(result.publications))),
                ("tables", text(", ".join(result.tables) or "none")),
            )
        ),
    ]
    if result.missing_tables:
        parts += [
            Text.assemble(text("missing on the subscriber: ", BAD), text(", ".join(result.missing_tables))),
            labelled(
                [("→", text("Create them there first, such as with `pg_dump --schema-only --table …`."))]
            ),
        ]
    return Group(*parts, text("Next:"), *(text(f"  {command}") for command in result.next_commands))


def _endpoint(side: str, dsn: str | None, name: str | None) -> tuple[Endpoint, str]:
    """The side for the file, and the DSN to connect to now."""
    if dsn is None:
        return _ask_endpoint(side, name)
    parts = _parts(side, expand_references(dsn))
    if parts.get("password") and not has_reference(dsn):
        raise InvalidConfiguration(
            f"the DSN of the {side} contains a password, which other users see among the processes",
            hint="Set it in the environment, and give ${NAME} in its place, in single quotes.",
        )
    return Endpoint(check_name(name or str(parts.get("dbname") or side)), dsn), expand_references(dsn)


def _ask_endpoint(side: str, name: str | None) -> tuple[Endpoint, str]:
    if not is_interactive():
        raise InvalidConfiguration(
            f"the DSN of the {side} is missing", hint=f"Give --{side}-dsn, such as {EXAMPLE}."
        )
    dsn = typer.prompt(f"DSN of the {side}, such as {EXAMPLE}\n", prompt_suffix=PROMPT, err=True)
    parts = _parts(side, dsn)
    if not parts.get("password"):
        question = "Password (empty: none is needed, or ~/.pgpass has it)"
        parts["password"] = typer.prompt(question, default="", hide_input=True, show_default=False, err=True)
    kind = "publisher" if side == "publisher" else "subscription"
    name = name or typer.prompt(f"Name of the {kind}", default=str(parts.get("dbname") or side), err=True)
    has_password = bool(parts["password"])
    endpoint = Endpoint.with_password(check_name(name), dsn, has_password=has_password)
    return endpoint, make_conninfo("", **{key: value for key, value in parts.items() if value})


def _parts(side: str, dsn: str) -> dict[str, str | int]:
    try:
        parts = conninfo_to_dict(dsn)
    except ProgrammingError:  # its text may repeat the password
        raise InvalidConfiguration(
            f"the DSN of the {side} is not readable", hint=f"Give {EXAMPLE}."
        ) from None
    return {key: value for key, value in parts.items() if value is not None}


def _ask_publications(known: tuple[str, ...]) -> tuple[str, ...]:
    if len(known) == 1 or not is_interactive():
        return known
    all_known = ",".join(known)
    question = f"Publications, with commas between them [{printable(all_known)}]"
    answer = typer.prompt(question, default=all_known, show_default=False, err=True)
    return tuple(name.strip() for name in str(answer).split(",") if name.strip())
