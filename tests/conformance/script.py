"""SQL as scenarios give it: scripts run statement by statement, results as the server's own text."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psycopg
from psycopg import sql

from cdc_replay.postgres.connection import Connection
from conformance.scenario import Row

# What may hold a semicolon that ends no statement, and the one that does.
_TOKENS = re.compile(
    r"""--[^\n]* | /\*.*?\*/
      | (?<![\w$])[eE]'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' | "(?:[^"]|"")*"
      | (?<![\w$])(?P<dollar>\$(?:[^\W\d]\w*)?\$).*?(?P=dollar)
      | (?P<end>;)""",
    re.DOTALL | re.VERBOSE,
)


def statements(script: str) -> Iterator[str]:
    """The statements of a script: each is a transaction of its own unless the script says BEGIN."""
    start = 0
    for token in _TOKENS.finditer(script):
        if token["end"]:
            yield script[start : token.start()]
            start = token.end()
    yield script[start:]


def run_script(connection: Connection, script: str) -> None:
    """Run all statements.

    Raises:
        psycopg.Error: from the first that fails, with its text as a note.
    """
    for statement in statements(script):
        if not statement.strip():
            continue
        try:
            connection.execute(statement.encode(), prepare=False)
        except psycopg.Error as error:
            error.add_note(f"in: {statement.strip()[:200]}")
            raise


def text_rows(connection: Connection, query: str | sql.Composed) -> list[Row]:
    """The rows of a query, each value as PostgreSQL prints it."""
    cursor = connection.execute(query.encode() if isinstance(query, str) else query, prepare=False)
    result = cursor.pgresult
    assert result is not None
    return [
        tuple(_text(result.get_value(row, column)) for column in range(result.nfields))
        for row in range(result.ntuples)
    ]


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="surrogateescape")
