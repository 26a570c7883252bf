"""Which row the subscriber has refused: its key, and never another value.

| refused by                          | the key is known from                                             |
|-------------------------------------|-------------------------------------------------------------------|
| CHECK, NOT NULL                     | DETAIL, which shows the row's values in the order of the columns  |
| the type of a column, while staging | the staged line whose number COPY gives                           |
| anything else, such as a trigger    | what is staged of the table, if that is a few rows                |
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import errors as pg
from psycopg import sql

from cdc_replay.errors import ApplyConflict
from cdc_replay.model.frames import NetKind
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.apply.conflicts import KEYS_SHOWN, key_text, which_row
from cdc_replay.replay.apply.stage_table import StageTable
from cdc_replay.subscriber.target_tables import TargetColumn, TargetTable

if TYPE_CHECKING:
    from cdc_replay.replay.apply.staging import StagedTable

_WITHOUT_COMMA: Final = frozenset(("smallint", "integer", "bigint", "uuid", "boolean", "date", "oid"))
"""Types whose values never contain DETAIL's separator."""

_LINE: Final = re.compile(r"COPY \w+, \D*(\d+)")
"""CONTEXT of a COPY, in any language."""

KEPT_BYTES: Final = 1 << 20
"""The lines of a longer COPY are not kept."""

_STAGED_KEYS: Final = sql.SQL(
    "select {keys} from {stage} where attempt = any({attempts}) and kind = any({kinds}) limit {limit}"
)
_WRITTEN: Final = [NetKind.INSERT.value, NetKind.UPDATE.value, NetKind.DELETE.value]


def name_refused_row(
    connection: Connection,
    error: ApplyConflict,
    staged: Iterable[StagedTable],
    targets: Mapping[QualifiedName, TargetTable],
) -> ApplyConflict:
    """The error with the key of the refused row, or of the few rows that it is one of.

    The transaction is rolled back, and `staged` is still there.
    """
    cause = error.__cause__
    if not isinstance(cause, psycopg.Error) or isinstance(cause, pg.UniqueViolation) or error.table is None:
        return error
    name = QualifiedName(*error.table)
    part = next((part for part in staged if part.table.target == name and part.table.is_keyed), None)
    if part is None:
        return error
    key = key_in_detail(cause, targets[name].columns, part.table.keys)
    keys = [key] if key is not None else _staged_keys(connection, part)
    if not keys:
        return error
    detail = which_row(*keys) if error.detail is None else f"{error.detail} {which_row(*keys)}"
    return ApplyConflict(error.message, detail=detail, hint=error.hint, rule=error.rule, table=error.table)


def key_in_detail(
    error: psycopg.Error, columns: Sequence[TargetColumn], keys: Sequence[TargetColumn]
) -> str | None:
    """The key in `Failing row contains (…)`; None if a value with a comma could be taken for two."""
    shown = error.diag.message_detail
    if not isinstance(error, pg.CheckViolation | pg.NotNullViolation) or shown is None or ") = (" in shown:
        return None
    values = shown[shown.find("(") + 1 : shown.rfind(")")].split(", ")
    names = [column.name for column in columns]
    if len(values) < len(names):
        return None  # the owner's code may raise any text
    positions = [names.index(column.name) for column in keys]
    before = columns[: max(positions) + 1]
    if len(values) != len(names) and not all(column.base_type_sql in _WITHOUT_COMMA for column in before):
        return None
    return key_text(keys, [values[position] for position in positions])


def _staged_keys(connection: Connection, staged: StagedTable) -> list[str]:
    """The keys of the rows of the window, as they would be afterwards; none if they are many."""
    table = staged.table
    keys = [
        sql.SQL("coalesce({}::text, {}::text)").format(
            sql.Identifier(f"v{position}"), sql.Identifier(f"b{index}")
        )
        for index, position in enumerate(table.key_positions)
    ]
    statement = _STAGED_KEYS.format(
        keys=sql.SQL(", ").join(keys),
        stage=table.identifier,
        attempts=sql.Literal(staged.attempts),
        kinds=sql.Literal(_WRITTEN),
        limit=sql.Literal(KEYS_SHOWN + 1),
    )
    rows = []
    with contextlib.suppress(psycopg.Error):  # the refusal matters more
        rows = connection.execute(statement).fetchall()
    return [key_text(table.keys, row) for row in rows] if len(rows) <= KEYS_SHOWN else []


@dataclass(slots=True)
class CopiedLines:
    """The lines of a COPY, as long as they are not too many."""

    _texts: list[memoryview] = field(default_factory=list)
    _bytes: int = 0

    def add(self, text: memoryview) -> None:
        """The next lines."""
        self._bytes += len(text)
        if self._bytes > KEPT_BYTES:
            self._texts.clear()
        else:
            self._texts.append(text)

    def refused_key(self, error: psycopg.Error, table: StageTable) -> str | None:
        """The key of the row in the line that COPY has refused, if it is known."""
        line = _LINE.match(error.diag.context or "")
        if line is None or not table.is_keyed:
            return None
        content = b"".join(self._texts).decode(errors="replace")
        rows = csv.reader(io.StringIO(content, newline="\n"))
        with contextlib.suppress(csv.Error, IndexError):
            for row in rows:
                if rows.line_num >= int(line[1]):
                    values = row[-len(table.values) :]
                    base = row[-len(table.values) - len(table.keys) :]
                    pairs = zip(table.key_positions, base, strict=False)
                    return key_text(table.keys, [values[position] or old for position, old in pairs])
        return None
