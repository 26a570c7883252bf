"""The key of a refused row is named from what the server says and what was staged, never another value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import psycopg
import pytest
from psycopg import errors as pg

from cdc_replay.replay.apply.refused_rows import CopiedLines, key_in_detail
from cdc_replay.replay.apply.stage_table import StageTable
from cdc_replay.subscriber.target_tables import TargetColumn


def column(name: str, type_name: str) -> TargetColumn:
    return cast("TargetColumn", SimpleNamespace(name=name, base_type_sql=type_name))


ID, NAME, BORN = column("id", "integer"), column("name", "text"), column("born", "date")


def refusal(kind: type[psycopg.Error], **diagnostics: str) -> psycopg.Error:
    shown = SimpleNamespace(**{"message_detail": None, "context": None} | diagnostics)
    error: psycopg.Error = type(kind.__name__, (kind,), {"diag": shown})("refused")
    return error


@pytest.mark.parametrize(
    ("detail", "columns", "keys", "expected"),
    [
        ("Failing row contains (2, two, null).", (ID, NAME, BORN), (ID,), "(id)=(2)"),
        ("Fehlgeschlagene Zeile enthält (2, two, null).", (ID, NAME, BORN), (ID,), "(id)=(2)"),
        ("Failing row contains (2, a, b, null).", (ID, NAME, BORN), (ID,), "(id)=(2)"),
        ("Failing row contains (a, b, 2, null).", (NAME, ID, BORN), (ID,), None),
        ("Failing row contains (x, 2, null).", (NAME, ID, BORN), (ID, NAME), "(id, name)=(2, x)"),
        ("of a trigger", (ID, BORN), (BORN,), None),
        ("", (ID, NAME), (ID,), None),
        ("Failing row contains (id, name) = (2, two).", (ID, NAME, BORN), (ID,), None),
    ],
)
def test_key_is_read_where_no_value_can_be_taken_for_two(
    detail: str, columns: tuple[TargetColumn, ...], keys: tuple[TargetColumn, ...], expected: str | None
) -> None:
    error = refusal(pg.CheckViolation, message_detail=detail)
    assert key_in_detail(error, columns, keys) == expected


def test_only_details_with_a_row_are_read() -> None:
    error = refusal(pg.ForeignKeyViolation, message_detail="Key (a)=(7) is not present.")
    assert key_in_detail(error, (ID, NAME), (ID,)) is None


def table(*, is_keyed: bool = True) -> StageTable:
    staged = SimpleNamespace(keys=(ID,), values=(NAME, ID), key_positions=(1,), is_keyed=is_keyed)
    return cast("StageTable", staged)


LINES = memoryview(b'1,I,,,,,,"a\nb",7\n1,U,,,,,8,c,\n1,D,,,,,9,,\n')
"""Inserts 7, with a line break in a value; updates 8 without sending its key; deletes 9."""


@pytest.mark.parametrize(("line", "key"), [(2, "(id)=(7)"), (3, "(id)=(8)"), (4, "(id)=(9)"), (5, None)])
def test_key_of_a_line_that_copy_refuses(line: int, key: str | None) -> None:
    lines = CopiedLines()
    lines.add(LINES)
    for context in (f"COPY stage_1, line {line}, column v0: x", f"COPY stage_1, Zeile {line}, Spalte v0: x"):
        assert lines.refused_key(refusal(pg.DataError, context=context), table()) == key


def test_no_key_is_named_without_one() -> None:
    lines = CopiedLines()
    lines.add(LINES)
    error = refusal(pg.DataError, context="COPY stage_1, line 3")
    assert lines.refused_key(error, table(is_keyed=False)) is None
    assert lines.refused_key(refusal(pg.DataError), table()) is None


def test_a_long_copy_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdc_replay.replay.apply.refused_rows.KEPT_BYTES", len(LINES))
    lines = CopiedLines()
    lines.add(LINES)
    lines.add(LINES)
    assert lines.refused_key(refusal(pg.DataError, context="COPY s, line 3"), table()) is None
