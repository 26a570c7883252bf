"""Scenarios: YAML files that say what to do on a publisher and what a subscriber must then hold.

The format is described in `scenarios/README.md`. A file with an unknown key, an unknown step or a name that
is not the file's is refused, so that a mistake in a scenario cannot make it pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

FOLDER = Path(__file__).parent / "scenarios"

Row: TypeAlias = tuple[str | None, ...]
"""The values of a row as PostgreSQL prints them."""


def _as_text(value: object) -> str | None:
    match value:
        case None:
            return None
        case bool():
            return "t" if value else "f"
        case _:
            return str(value)


def _as_rows(rows: list[Any]) -> tuple[Row, ...]:
    """Rows of a file; a row with one value needs no list."""
    return tuple(tuple(map(_as_text, row if isinstance(row, list) else [row])) for row in rows)


def _as_tuple(value: object) -> object:
    """One text, or a list of them."""
    return (value,) if isinstance(value, str) else value


Rows = Annotated[tuple[Row, ...], BeforeValidator(_as_rows)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class Strict(BaseModel):
    """Immutable, without keys that are not declared."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Subscription(Strict):
    """One subscription; with `error` it must be refused, by us with that text or one of `words`."""

    name: str
    publications: tuple[str, ...]
    options: dict[str, Any] = {}
    error: str | None = None
    words: Texts = ()


class Compare(Strict):
    """A table that both subscribers must hold alike; without `subscription`, in all of them."""

    table: str
    subscription: str | None = None
    columns: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    partitions: bool = False


class Requires(Strict):
    """What the servers must offer; versions as `server_version_num`."""

    server: int = 0
    max_server: int = 999_999
    native: int = 0
    extensions: tuple[str, ...] = ()
    icu: bool = False
    libxml: bool = False


class Publish(Strict):
    """SQL on the publisher, in one of several open sessions."""

    publisher: str
    session: str = "main"
    error: str | None = None


class Subscribe(Strict):
    """SQL on the subscribers."""

    subscriber: str
    on: Literal["native", "candidate"] | None = None
    subscription: str | None = None
    error: str | None = None


class Sync(Strict):
    """Both sides catch up with the publisher; then everything in `compare` must be equal."""

    sync: Literal[True]


class Expectation(Strict):
    """A query and its rows; `candidate_rows` are right for us too."""

    sql: str
    rows: Rows
    candidate_rows: Rows | None = None
    subscription: str | None = None
    on: Literal["publisher"] | None = None
    only: Literal["native", "candidate"] | None = None
    min_server: int = 0
    max_server: int = 999_999


class Expect(Strict):
    """A query that must return the rows known in advance, on both sides."""

    expect: Expectation


class Refreshed(Strict):
    """What a refresh changes before."""

    subscription: str | None = None
    publications: tuple[str, ...] | None = None
    copy_data: bool = True
    error: str | None = None


class Refresh(Strict):
    """REFRESH PUBLICATION, or SET PUBLICATION with another list."""

    refresh: Annotated[Refreshed, BeforeValidator(lambda value: {} if value is True else value)]


class Pause(Strict):
    """Native stops; its changes pile up in its slot."""

    pause: Literal[True]


class Resume(Strict):
    """Native goes on."""

    resume: Literal[True]


class Stalled(Strict):
    """Native logs one of `message`; our sync fails with one of them or of `words`."""

    message: Texts
    words: Texts = ()
    where: Literal["publisher", "subscriber"] = "publisher"


class Stall(Strict):
    """Replication cannot go on."""

    stall: Stalled


class Restart(Strict):
    """A server is restarted; `immediate` is a crash."""

    restart: Literal["publisher", "subscriber"]
    mode: Literal["fast", "immediate"] = "fast"


Step: TypeAlias = Publish | Subscribe | Sync | Expect | Refresh | Pause | Resume | Stall | Restart


class Databases(Strict):
    """Options of CREATE DATABASE. What the scenarios expect of letter cases is that of locale C."""

    publisher: str = "encoding 'UTF8' locale 'C' template template0"
    subscriber: str = "encoding 'UTF8' locale 'C' template template0"


def _as_compare(entries: list[Any]) -> list[Any]:
    return [{"table": entry} if isinstance(entry, str) else entry for entry in entries]


class Scenario(Strict):
    """One file."""

    name: str
    source: str
    visibility: Literal["public", "held-out"]
    tags: tuple[str, ...] = Field(min_length=1)
    rules: tuple[Annotated[str, Field(pattern=r"^R\d+\.\d+$")], ...] = Field(min_length=1)
    notes: str = ""
    requires: Requires = Requires()
    databases: Databases = Databases()
    publisher_conf: dict[str, str | int] = {}
    subscriber_conf: dict[str, str | int] = {}
    publisher: str = ""
    subscriber: str = ""
    subscriptions: tuple[Subscription, ...]
    compare: Annotated[tuple[Compare, ...], BeforeValidator(_as_compare)] = ()
    steps: tuple[Step, ...] = Field(min_length=1)
    cleanup: str = ""

    @model_validator(mode="before")
    @classmethod
    def _one_subscription(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "subscription" in data:
            data = data | {"subscriptions": [data["subscription"]]}
            del data["subscription"]
        return {"subscriptions": []} | data

    @property
    def restarts(self) -> bool:
        """It stops servers, which then must be its own."""
        return any(isinstance(step, Restart) for step in self.steps)


class _Loader(yaml.SafeLoader):
    """1.50, 2024-01-01, no and 0x1F stay the text that they are."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute


for _kind, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("int", r"-?(0|[1-9][0-9]*)", "-0123456789"),
    ("null", r"null|~|", "n~"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), [*_first, *([""] * (_kind == "null"))]
    )


def load_scenario(file: Path) -> Scenario:
    """The scenario of a file.

    Raises:
        pydantic.ValidationError: if the file is not a scenario.
        ValueError: if it has another name than the file.
    """
    scenario = Scenario.model_validate(yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader))
    if scenario.name != file.stem:
        raise ValueError(f"{file} holds the scenario {scenario.name}")
    return scenario


def load_scenarios() -> Iterator[Scenario]:
    """All scenarios, in order of their files."""
    for file in sorted(FOLDER.rglob("*.yaml")):
        yield load_scenario(file)
