"""Changes that the subscriber's rows do not allow: how they are named, counted and raised.

| kind           | what the subscriber has           | error         | overwrite            | skip          |
|----------------|-----------------------------------|---------------|----------------------|---------------|
| insert_exists  | a row with the inserted key       | ApplyConflict | sent columns are set | it stays      |
| update_exists  | a row with the updated row's key  | ApplyConflict | it is deleted        | both stay     |
| update_missing | no row to update                  | counted       | counted              | counted       |
| delete_missing | no row to delete                  | counted       | counted              | counted       |

The names are PostgreSQL 18's. What no policy can decide (a value that the target's type or constraints
refuse, another unique index) fails under every policy, as it stops a native worker (R8.5).

PostgreSQL's errors, and ours:

| the subscriber                                   | error                            | retry               |
|--------------------------------------------------|----------------------------------|---------------------|
| refuses this change permanently                  | ApplyConflict                    | after a repair      |
| lacks a table, column or privilege for it        | TargetMismatch, MissingPrivilege | after a repair      |
| takes no changes now: read-only, full            | SubscriberNotWritable            | later               |
| is down, or somebody cancels the statement       | ServerUnavailable                | later               |
| is used by others: lock, deadlock, serialization | SubscriberLocked                 | at once, then later |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import psycopg
from psycopg import errors as pg

from cdc_replay.errors import (
    ApplyConflict,
    CdcReplayError,
    ServerUnavailable,
    SubscriberLocked,
    SubscriberNotWritable,
    TargetMismatch,
    UnchangedToastLost,
)
from cdc_replay.model.count import count_in_words
from cdc_replay.model.frames import ConflictKind
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import READ_ONLY_REMEDY, translated_errors
from cdc_replay.subscriber.target_tables import TargetColumn

KEYS_SHOWN: Final = 5
"""Maximum number of keys of conflicting rows in a message."""

_NAMES_KEY_ONLY: Final = (pg.UniqueViolation, pg.ExclusionViolation, pg.ForeignKeyViolation)
"""Errors whose DETAIL shows key values; the DETAIL of others may show whole rows."""

_REFUSED: Final = (
    pg.IntegrityError,
    pg.DataError,
    pg.WithCheckOptionViolation,
    pg.ProgramLimitExceeded,
    pg.RaiseException,
    pg.TriggeredActionException,
)
"""The change itself is refused: by type, constraint, index size, or a trigger that fires in replica mode."""

_MISMATCHED: Final = (
    pg.UndefinedTable,
    pg.UndefinedColumn,
    pg.UndefinedFunction,
    pg.UndefinedObject,
    pg.InvalidSchemaName,
    pg.FeatureNotSupported,
    pg.GeneratedAlways,
    pg.WrongObjectType,
    pg.DatatypeMismatch,
)

_GRANT: Final = (
    "On the subscriber, grant the role SELECT, INSERT, UPDATE and DELETE on the table, TRUNCATE where it is"
    " published, and USAGE on its schema."
)

_NOT_WRITABLE: Final = (
    pg.ReadOnlySqlTransaction,
    pg.InsufficientResources,
    pg.DiskFull,
    pg.OutOfMemory,
    pg.ConfigurationLimitExceeded,
)

_LOCKED: Final = (pg.LockNotAvailable, pg.DeadlockDetected, pg.SerializationFailure)


def staging_error(
    error: psycopg.Error, target: QualifiedName | None, key: str | None = None
) -> CdcReplayError:
    """Our error for changes of `target` that could not be staged; `key` is that of the refused row."""
    try:
        with translated_errors(f"cannot stage changes for {_named(target)}", grant=_GRANT):
            raise error
    except CdcReplayError as translated:
        return translated
    except psycopg.Error:
        failure = to_apply_error(error, target)
        if key is not None and failure.detail is None:
            failure.detail = which_row(key)
        return failure


def to_apply_error(error: psycopg.Error, target: QualifiedName | None) -> CdcReplayError:
    """Our error for a change that the target refuses; names the table, and never shows a whole row."""
    table = target or _table_named(error)
    kind, hint, rule = _meaning(error)
    return kind(
        f"cannot apply changes to {_named(table)}: {error.diag.message_primary or str(error).strip()}",
        detail=_detail(error, kind),
        hint=hint,
        rule=rule,
        table=None if table is None else (table.schema, table.name),
    )


def _named(target: QualifiedName | None) -> str:
    if target is None:
        return "the subscriber"
    return f'table "{target.schema}"."{target.name}" of the subscriber'


def _meaning(error: psycopg.Error) -> tuple[type[CdcReplayError], str | None, str | None]:
    unapplied = "Nothing of the window is applied."  # yet: what is refused for good is tried in parts
    if isinstance(error, _NOT_WRITABLE):
        is_read_only = isinstance(error, pg.ReadOnlySqlTransaction)
        remedy = READ_ONLY_REMEDY if is_read_only else "Run it again once the subscriber can be written."
        return SubscriberNotWritable, f"{unapplied} {remedy}", None
    if isinstance(error, pg.QueryCanceled):
        return ServerUnavailable, f"{unapplied} Somebody cancelled the statement: run it again.", None
    if isinstance(error, _LOCKED):
        return SubscriberLocked, f"{unapplied} Run it again once the other session has ended.", None
    if isinstance(error, _MISMATCHED):
        return TargetMismatch, "Correct the table on the subscriber.", "R8.1"
    if isinstance(error, _REFUSED):
        return ApplyConflict, "Change the row or the constraint on the subscriber.", "R8.5"
    return CdcReplayError, None, None


def _detail(error: psycopg.Error, kind: type[CdcReplayError]) -> str | None:
    if kind is CdcReplayError:
        return f"SQLSTATE {error.sqlstate}"
    if kind is ApplyConflict and not isinstance(error, _NAMES_KEY_ONLY):
        return None
    return error.diag.message_detail


def _table_named(error: psycopg.Error) -> QualifiedName | None:
    """The table whose constraint is violated; a deferred constraint is checked at COMMIT."""
    schema, table = error.diag.schema_name, error.diag.table_name
    return None if schema is None or table is None else QualifiedName(schema, table)


@contextlib.contextmanager
def apply_errors(target: QualifiedName | None) -> Iterator[None]:
    """Raise PostgreSQL's errors as ours, naming the table that the statements inside change.

    Raises:
        CdcReplayError: its class by SQLSTATE, as in the table above.
    """
    try:
        with translated_errors(f"cannot apply changes to {_named(target)}", grant=_GRANT):
            yield
    except psycopg.Error as error:
        raise to_apply_error(error, target) from error


def duplicate_key(
    kind: ConflictKind, target: QualifiedName, constraint: str | None, count: int, keys: list[str]
) -> ApplyConflict:
    """The error for rows that exist although the publisher's key is free (R8.5)."""
    more = "" if count <= len(keys) else f", and {count - len(keys)} more"
    return ApplyConflict(
        f'duplicate key value violates unique constraint "{constraint}"'
        f' of table "{target.schema}"."{target.name}"',
        detail=f"{kind.value}: key {', '.join(keys)} already exists{more}.",
        hint="Remove the rows, or set `on_conflict` to overwrite or skip.",
        rule="R8.5",
        table=(target.schema, target.name),
    )


def unique_violation(kind: ConflictKind, target: QualifiedName, error: pg.UniqueViolation) -> ApplyConflict:
    """The error for a duplicate value in a unique index other than the key's (R8.5)."""
    server_message = error.diag.message_detail or error.diag.message_primary or "a value is taken."
    return ApplyConflict(
        f'duplicate key value violates unique constraint "{error.diag.constraint_name}"'
        f' of table "{target.schema}"."{target.name}"',
        detail=f"{kind.value}: {server_message}",
        hint="`on_conflict` does not decide this: change the row or the constraint on the subscriber.",
        rule="R8.5",
        table=(target.schema, target.name),
    )


def ambiguous_key(target: QualifiedName, count: int, keys: list[str]) -> ApplyConflict:
    """The error for a change known by its leaf's key, if several rows have that key (R8.12)."""
    more = "" if count <= len(keys) else f", and {count - len(keys)} more"
    return ApplyConflict(
        f'several rows of table "{target.schema}"."{target.name}" have the key of one row of the publisher',
        detail=f"The publisher's partition sends {', '.join(keys)} of the old row{more}, and partitions have"
        " rows with equal keys.",
        hint="On the publisher, give the partitions REPLICA IDENTITY FULL,"
        " or an index that contains the partition key, and copy the table again with"
        f" `cdc-replay snapshot SUBSCRIPTION --table {target.argument}`.",
        rule="R8.12",
        table=(target.schema, target.name),
    )


def which_row(*keys: str) -> str:
    """The sentence that names the refused row, or the rows that it is one of."""
    return f"The row has {keys[0]}." if len(keys) == 1 else f"The row is one of {', '.join(keys)}."


def key_text(columns: Sequence[TargetColumn], values: Sequence[object]) -> str:
    """A key as in PostgreSQL's messages."""
    return f"({', '.join(column.name for column in columns)})=({', '.join(map(str, values))})"


def unknown_value(
    target: QualifiedName, columns: Sequence[str], key: str, commit_lsn: int, rows: int
) -> UnchangedToastLost:
    """The error for rows that would be inserted without values that the publisher did not send (R4.6)."""
    names = ", ".join(f'"{column}"' for column in columns)
    more = "" if rows == 1 else f" There are {rows - 1} more such rows in this part of the window."
    return UnchangedToastLost(
        f'a row enters table "{target.schema}"."{target.name}" without a value of column {names}',
        detail=f"Key {key}, last changed by the transaction that committed at {Lsn(commit_lsn)}. An UPDATE"
        " moved the row into the row filter of the publications, and a publisher does not send unchanged"
        " TOAST values. The change log does not have the value, and on the publisher the row is deleted or"
        f" the value has changed.{more}",
        hint="No NULL is stored instead. If the table is published,"
        f" copy it again: `cdc-replay snapshot SUBSCRIPTION --table {target.argument}`.",
        rule="R4.6",
        table=(target.schema, target.name),
    )


def conflicting_changes(kind: ConflictKind, target: QualifiedName, count: int) -> ApplyConflict:
    """The error for rows of one window that claim the same key of a target (R8.5)."""
    return ApplyConflict(
        f'changes of one window claim the same keys of table "{target.schema}"."{target.name}":'
        " duplicate key value violates unique constraint",
        detail=f"{kind.value}: {count_in_words(count, 'change')}.",
        hint="Give the subscriber's table a key that tells the published rows apart,"
        " or set `on_conflict` to overwrite or skip.",
        rule="R8.5",
        table=(target.schema, target.name),
    )
