"""A first configuration file as text: commented, with references to passwords in the environment."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import yaml
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.relation import QualifiedName

_FILE: Final = """\
# cdc-replay: what is captured from where, and replayed to where.
# Next: {next}
# All keys: docs/configuration.md. ${{NAME}} is replaced by that environment variable.

publishers:
  {publisher}:
{publisher_password}    dsn: {publisher_dsn}
    # The changes of the published tables, unfiltered. A folder, or s3://, gs://, az://.
    change_log: ./var/change_log/{publisher}
    # If capture stops, the slot keeps WAL on the publisher. Above this size it is dropped:
    # max_retained_wal: 50GB

subscriptions:
  {subscription}:
    publisher: {publisher}
    publications: [{publications}]
{subscriber_password}    dsn: {subscriber_dsn}
    # What a row that is in the way does: error (stop), overwrite, or skip. It is always counted.
    on_conflict: error
{tables}"""

_REFERENCE: Final = """\
    # The environment variable {variable} has the password, with a backslash before each ' and backslash.
"""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One side: `dsn` as it will be in the file, and the variable that it takes the password from, if any."""

    name: str
    dsn: str
    password_variable: str | None = None

    @classmethod
    def with_password(cls, name: str, dsn: str, *, has_password: bool) -> Endpoint:
        """The endpoint of a DSN whose password, if there is one, moves to an environment variable."""
        if not has_password:
            return cls(name, dsn)
        variable = re.sub(r"[^A-Z0-9_]", "_", f"{name.upper()}_PASSWORD")
        variable = f"_{variable}" if variable[0].isdigit() else variable
        parts = {key: value for key, value in conninfo_to_dict(dsn).items() if key != "password"}
        return cls(name, f"{make_conninfo('', **parts)} password='${{{variable}}}'", variable)


@dataclass(frozen=True, slots=True)
class ConfigDraft:
    """One publisher and one subscription; `tables` says of each published table whether both have it."""

    publisher: Endpoint
    subscription: Endpoint
    publications: tuple[str, ...]
    tables: Mapping[QualifiedName, bool]

    @property
    def missing_tables(self) -> tuple[str, ...]:
        """The published tables that the subscriber lacks."""
        return tuple(str(name) for name, exists in self.tables.items() if not exists)

    @property
    def next_commands(self) -> tuple[str, ...]:
        """What to run with the file."""
        variables = (self.publisher.password_variable, self.subscription.password_variable)
        return (
            *(f"export {variable}=…" for variable in dict.fromkeys(variables) if variable),
            "cdc-replay doctor",
            f"cdc-replay setup {self.publisher.name}",
            f"cdc-replay sync {self.subscription.name}",
            f"cdc-replay validate {self.subscription.name}",
            "cdc-replay status",
        )

    def to_yaml(self) -> str:
        """The text of the file."""
        return _FILE.format(
            next=", ".join(command for command in self.next_commands if command.startswith("cdc-replay")),
            publisher=_quoted(self.publisher.name),
            publisher_dsn=_quoted(self.publisher.dsn),
            publisher_password=_password_comment(self.publisher),
            subscription=_quoted(self.subscription.name),
            subscriber_dsn=_quoted(self.subscription.dsn),
            subscriber_password=_password_comment(self.subscription),
            publications=", ".join(map(_quoted, self.publications)),
            tables="".join(
                f"    # table {_quoted(str(name))}{'' if exists else ': missing on the subscriber'}\n"
                for name, exists in self.tables.items()
            ),
        )


def check_name(name: str) -> str:
    """`name`, if it can name a publisher or subscription.

    Raises:
        InvalidConfiguration: if it cannot.
    """
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,59}", name) is None:
        raise InvalidConfiguration(
            f'"{name}" is not a name', hint="Give up to 60 letters, digits, underscores and dashes."
        )
    return name


def _password_comment(endpoint: Endpoint) -> str:
    return _REFERENCE.format(variable=endpoint.password_variable) if endpoint.password_variable else ""


def _quoted(value: str) -> str:
    """A YAML scalar in one line of ASCII; in quotes unless it is plain."""
    if re.fullmatch(r"[a-z_][a-z0-9_.]*", value) and value not in _WORDS:
        return value
    return yaml.safe_dump(value, default_style='"', width=sys.maxsize).rstrip("\n")


_WORDS: Final = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
