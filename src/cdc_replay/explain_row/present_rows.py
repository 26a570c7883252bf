"""What publisher and subscriber hold under a key now.

Both are read in a repeatable-read transaction of their own, after the same checks as in a comparison: on the
publisher the table is locked as it is in the catalog that was read, on the subscriber statements run with the
rights of the table's owner (R8.21). The texts of values are those of the types' output functions, as in the
log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import errors as pg
from psycopg import sql

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.errors import CdcReplayError, InvalidConfiguration
from cdc_replay.explain_row.row_key import RowKey
from cdc_replay.model.publication import PublisherCatalog, Table
from cdc_replay.postgres.connection import Connection, open_snapshot, translated_errors
from cdc_replay.postgres.identifiers import commas, table_reference
from cdc_replay.postgres.planned_tables import (
    PlannedTable,
    lock_planned_tables,
    publisher_read_errors,
    same_key,
)
from cdc_replay.subscriber.as_owner import act_on
from cdc_replay.subscriber.target_statements import target_reference
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables

ROWS_READ: Final = 2
"""Rows of one key that are read: a second one shows that the key is not unique."""

_CUT_SILENTLY: Final = ("name", '"char"')
"""Types whose input functions themselves cut a text that is too long."""

_UNLIMITED: Final = "select pg_catalog.format_type(pg_catalog.pg_typeof(null::{type}), -1)"
"""The type without a length or precision; with -1, the name of a type that has a default one is quoted."""

_PRINTED: Final = "select format('%s', {text}::{type}), {text}::{type} = {text}::{whole}"
_PRINTED_WHOLE: Final = "select format('%s', {text}::{type}), true"
"""Not every type without a length has an equality."""

_TEXT: Final = "case when num_nulls({0}) = 0 then format('%s', {0}) end"
"""Not `is null`, which is also true of a row of NULLs."""

_ROWS: Final = """
    select rows.tableoid::bigint as leaf, rows.xmin::text as xmin, array[{values}]::text[] as shown,
        array[{converted}]::text[] as converted
    from {table} as rows where {same} limit {limit}
"""

_CONDITIONS: Final = "select array[{answers}]::boolean[] as answers from {table} as rows where {same}"


@dataclass(frozen=True, slots=True)
class HeldRows:
    """The number of rows under the key, `ROWS_READ` at most.

    Of the first one its leaf's oid, its values, the same as the subscriber's columns would have them, and the
    transaction that wrote it.
    """

    count: int
    leaf: int | None
    values: Mapping[str, str | None]
    converted: Mapping[str, str | None]
    xid: int | None = None


NO_ROWS: Final = HeldRows(0, None, {}, {})


@contextlib.contextmanager
def open_publisher(dsn: str, purpose: str) -> Iterator[tuple[Connection, PublisherCatalog]]:
    """A read-only snapshot of the publisher, and its catalog there.

    Raises:
        ServerUnavailable, MissingPrivilege: if it does not answer.
    """
    with open_snapshot(dsn, purpose=purpose) as connection:
        yield connection, read_catalog(connection)


@contextlib.contextmanager
def open_subscriber(dsn: str, purpose: str) -> Iterator[Connection]:
    """A snapshot of the subscriber; what the session creates to act as an owner is rolled back.

    Raises:
        ServerUnavailable, MissingPrivilege: if it does not answer.
    """
    with open_snapshot(dsn, purpose=purpose, read_only=None) as connection:
        yield connection


def canonical_key(connection: Connection, table: TargetTable, key: RowKey) -> RowKey:
    """The key with the texts that the types of its columns print, as far as they are types of pg_catalog.

    Raises:
        InvalidConfiguration: if a text is not a value of its column's type: also if a cast would cut or round
            it, since the row of another key is not the one that was asked for.
    """
    types = {column.name: column.base_type_sql for column in table.columns}
    texts: dict[str, str | None] = {}
    for name, text in key.by_column.items():
        # Other types are looked up by name, which their owners can give away.
        if name not in types or "." in types[name]:
            continue
        try:
            with connection.transaction():
                printed, is_equal = _print_as(connection, types[name], text)
        except (pg.DataError, pg.ProgrammingError, pg.NotSupportedError) as error:
            raise InvalidConfiguration(
                f'"{text}" is not a value of column "{name}"', detail=error.diag.message_primary
            ) from error
        if not is_equal:
            raise InvalidConfiguration(
                f'"{text}" is not a value of column "{name}"', detail=f'As {types[name]} it is "{printed}".'
            )
        texts[name] = printed
    return key.with_texts(texts)


def _print_as(connection: Connection, type_sql: str, text: str) -> tuple[str, bool]:
    """What a type of pg_catalog prints for a text, and whether it is equal without the type's length."""
    ((unlimited,),) = connection.execute(sql.SQL(_UNLIMITED).format(type=sql.SQL(type_sql))).fetchall()
    whole = "text" if type_sql in _CUT_SILENTLY else unlimited
    query = sql.SQL(_PRINTED if whole != type_sql else _PRINTED_WHOLE).format(
        text=sql.Literal(text), type=sql.SQL(type_sql), whole=sql.SQL(whole)
    )
    ((printed, is_equal),) = connection.execute(query).fetchall()
    return printed, is_equal


def read_published(
    connection: Connection, table: Table, key: RowKey, converted: Mapping[str, sql.Composed]
) -> HeldRows:
    """The publisher's rows under the key; `converted` are expressions for columns of other types.

    Raises:
        PublisherNotReady, MissingPrivilege, ServerUnavailable: if they cannot be read.
    """
    lock_planned_tables(connection, [PlannedTable.from_catalog(table)])
    (described,) = read_target_tables(connection, [table.name]).values()
    columns = [column.name for column in table.columns]
    reference = table_reference(table.name, is_partitioned=table.is_partitioned)
    query = _select(reference, columns, described, key, converted)
    with publisher_read_errors(table.name):
        rows = connection.execute(query).fetchall()
    return _to_rows(rows, columns)


def read_target(connection: Connection, target: TargetTable, key: RowKey) -> HeldRows:
    """The subscriber's rows under the key.

    Raises:
        InvalidConfiguration: if the target lacks a column of the key.
        CdcReplayError: if they cannot be read.
    """
    columns = [column.name for column in target.columns]
    if missing := sorted(set(key.columns) - set(columns)):
        raise InvalidConfiguration(
            f'table "{target.name}" of the subscriber lacks the column{"s" if len(missing) > 1 else ""}'
            f" {', '.join(missing)} of the key"
        )
    query = _select(target_reference(target), columns, target, key, {})
    with (
        translated_errors(f'cannot read table "{target.name}" of the subscriber'),
        connection.transaction(force_rollback=True),
        act_on(connection, [target], only_reads=True) as sessions,
    ):
        rows = sessions.session_for(target).query(query)
    return _to_rows(rows, columns)


def read_conditions(
    connection: Connection, target: TargetTable, key: RowKey, conditions: Sequence[sql.Composable]
) -> list[bool]:
    """Whether each condition is true of all of the subscriber's rows under the key, and there is one.

    Raises:
        CdcReplayError, psycopg.Error: if they cannot be evaluated.
    """
    query = sql.SQL(_CONDITIONS).format(
        answers=commas(
            sql.SQL("coalesce(bool_and({}), false)").format(condition) for condition in conditions
        ),
        table=target_reference(target),
        same=_same(target, key, "rows"),
    )
    with (
        connection.transaction(force_rollback=True),
        act_on(connection, [target], only_reads=True) as sessions,
    ):
        ((answers,),) = sessions.session_for(target).query(query)
    return list(answers)


def _to_rows(rows: Sequence[Sequence[object]], columns: Sequence[str]) -> HeldRows:
    if not rows:
        return NO_ROWS
    leaf, xmin, *texts = rows[0]
    values, converted = (dict(zip(columns, shown, strict=True)) for shown in texts if isinstance(shown, list))
    return HeldRows(len(rows), int(str(leaf)), values, converted, int(str(xmin)))


def _select(
    reference: sql.Composable,
    columns: Sequence[str],
    table: TargetTable,
    key: RowKey,
    converted: Mapping[str, sql.Composed],
) -> sql.Composed:
    text = sql.SQL(_TEXT)
    return sql.SQL(_ROWS).format(
        values=commas(text.format(sql.Identifier(name)) for name in columns),
        converted=commas(text.format(converted.get(name, sql.Identifier(name))) for name in columns),
        table=reference,
        same=_same(table, key, "rows"),
        limit=sql.Literal(ROWS_READ),
    )


def _same(table: TargetTable, key: RowKey, alias: str) -> sql.Composed:
    """The condition that a row has the key; columns outside of the table's key are compared as text."""
    conditions = []
    for name, text in key.by_column.items():
        column = table.column(name)
        as_text = column.equality is None
        operator = ("", "") if column.equality is None else (column.equality.schema, column.equality.name)
        conditions.append(
            same_key(
                sql.Identifier(alias, name),
                "." if as_text else column.base_type_sql,
                operator,
                sql.Literal(text),
            )
        )
    return sql.SQL(" and ").join(conditions)


def error_text(error: CdcReplayError | psycopg.Error) -> str:
    """Why a side could not be read, in one line."""
    if isinstance(error, CdcReplayError):
        return error.message
    return error.diag.message_primary or str(error).strip()
