"""Changes that the subscriber's rows do not allow: how they are named, counted and raised.

| kind           | what the subscriber has           | error         | overwrite            | skip       |
|----------------|-----------------------------------|---------------|----------------------|------------|
| insert_exists  | a row with the inserted key       | ApplyConflict | sent columns go in   | it stays   |
| update_exists  | a row with the key a row moves to | ApplyConflict | it is deleted        | both stay  |
| update_missing | no row to update                  | counted       | counted              | counted    |
| delete_missing | no row to delete                  | counted       | counted              | counted    |

The names are PostgreSQL 18's. What no policy can decide (a value that the target's type or constraints
refuse, another unique index) fails under every policy, as it stops a native worker (R8.5).

What PostgreSQL says is one of these, and each has classes of its own:

| the subscriber                                   | error                            | trying again        |
|--------------------------------------------------|----------------------------------|---------------------|
| refuses this change, whenever it comes           | ApplyConflict                    | after a repair      |
| has no place for it: table, column, privilege    | TargetMismatch, MissingPrivilege | after a repair      |
| takes no changes now: read-only, full            | SubscriberNotWritable            | later               |
| is gone, or somebody cancels the statement       | ServerUnavailable                | later               |
| is used by others: lock, deadlock, serialization | SubscriberLocked                 | at once, then later |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import errors as pg

from cdc_replay.errors import (
    ApplyConflict,
    CdcReplayError,
    MissingPrivilege,
    ServerUnavailable,
    SubscriberLocked,
    SubscriberNotWritable,
    TargetMismatch,
    UnchangedToastLost,
)
from cdc_replay.model.frames import ConflictKind
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import READ_ONLY_REMEDY, translated_errors
from cdc_replay.subscriber.target_tables import TargetColumn

KEYS_SHOWN: Final = 5
"""How many keys of conflicting rows a message lists."""

_NAMES_KEY_ONLY: Final = (pg.UniqueViolation, pg.ExclusionViolation, pg.ForeignKeyViolation)
"""Errors whose DETAIL shows key values; that of others may show whole rows."""

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

_CLASSES: Final = {
    kind.__name__: kind
    for kind in (
        ApplyConflict,
        MissingPrivilege,
        ServerUnavailable,
        SubscriberLocked,
        SubscriberNotWritable,
        TargetMismatch,
        UnchangedToastLost,
    )
}


@dataclass(frozen=True, slots=True)
class SerializedError:
    """An error of ours in a form that survives the way from an executor to the driver."""

    class_name: str
    message: str
    detail: str | None
    hint: str | None
    rule: str | None
    schema: str | None = None
    table: str | None = None

    @classmethod
    def of(cls, error: CdcReplayError) -> SerializedError:
        """The form of `error`."""
        schema, table = error.table or (None, None)
        return cls(type(error).__name__, error.message, error.detail, error.hint, error.rule, schema, table)

    @property
    def texts(self) -> list[str | None]:
        """The fields in order."""
        return [
            self.class_name,
            self.message,
            self.detail,
            self.hint,
            self.rule,
            self.schema,
            self.table,
        ]

    def error(self) -> CdcReplayError:
        """The error to raise."""
        kind = _CLASSES.get(self.class_name, CdcReplayError)
        table = None if self.schema is None or self.table is None else (self.schema, self.table)
        return kind(self.message, detail=self.detail, hint=self.hint, rule=self.rule, table=table)


def failure_of(error: psycopg.Error, target: QualifiedName | None) -> SerializedError:
    """What PostgreSQL's error means for the changes of `target`."""
    try:
        with translated_errors(f"cannot stage changes for {_named(target)}", grant=_GRANT):
            raise error
    except CdcReplayError as known:
        ours = known
    except psycopg.Error:
        ours = to_apply_error(error, target)
    return SerializedError.of(ours)


def to_apply_error(error: psycopg.Error, target: QualifiedName | None) -> CdcReplayError:
    """Our error for what the target does not take; it names the table, and never shows a whole row."""
    about = target or _table_named(error)
    kind, hint, rule = _meaning(error)
    return kind(
        f"cannot apply changes to {_named(about)}: {error.diag.message_primary or str(error).strip()}",
        detail=_detail(error, kind),
        hint=hint,
        rule=rule,
        table=None if about is None else (about.schema, about.name),
    )


def _named(target: QualifiedName | None) -> str:
    if target is None:
        return "the subscriber"
    return f'table "{target.schema}"."{target.name}" of the subscriber'


def _meaning(error: psycopg.Error) -> tuple[type[CdcReplayError], str | None, str | None]:
    """The class of our error, its hint and its rule."""
    nothing = "Nothing of it is applied."
    if isinstance(error, _NOT_WRITABLE):
        is_read_only = isinstance(error, pg.ReadOnlySqlTransaction)
        remedy = READ_ONLY_REMEDY if is_read_only else "Run it again once the subscriber can be written."
        return SubscriberNotWritable, f"{nothing} {remedy}", None
    if isinstance(error, pg.QueryCanceled):
        return ServerUnavailable, f"{nothing} Somebody cancelled the statement: run it again.", None
    if isinstance(error, _LOCKED):
        return SubscriberLocked, f"{nothing} Run it again once the other session has ended.", None
    if isinstance(error, _MISMATCHED):
        return TargetMismatch, f"{nothing} Correct the table on the subscriber, then run it again.", "R8.1"
    if isinstance(error, _REFUSED):
        remedy = "Change the row or the constraint on the subscriber, then run `cdc-replay replay` again."
        return ApplyConflict, f"{nothing} {remedy}", "R8.5"
    return CdcReplayError, None, None


def _detail(error: psycopg.Error, kind: type[CdcReplayError]) -> str | None:
    if kind is CdcReplayError:
        return f"SQLSTATE {error.sqlstate}"
    if kind is ApplyConflict and not isinstance(error, _NAMES_KEY_ONLY):
        return None
    return error.diag.message_detail


def _table_named(error: psycopg.Error) -> QualifiedName | None:
    """The table whose constraint was violated, as the server names it; a deferred one shows at COMMIT."""
    schema, table = error.diag.schema_name, error.diag.table_name
    return None if schema is None or table is None else QualifiedName(schema, table)


@contextlib.contextmanager
def apply_errors(target: QualifiedName | None) -> Iterator[None]:
    """Raise PostgreSQL's errors as ours, naming the table that the statements inside change.

    Raises:
        CdcReplayError: its class by SQLSTATE, as the table above says.
    """
    try:
        with translated_errors(f"cannot apply changes to {_named(target)}", grant=_GRANT):
            yield
    except psycopg.Error as error:
        raise to_apply_error(error, target) from error


def duplicate_key(
    kind: ConflictKind, target: QualifiedName, constraint: str | None, count: int, keys: list[str]
) -> ApplyConflict:
    """The error for rows that are there although the publisher says that they are not (R8.5)."""
    more = "" if count <= len(keys) else f", and {count - len(keys)} more"
    return ApplyConflict(
        f'duplicate key value violates unique constraint "{constraint}"'
        f' of table "{target.schema}"."{target.name}"',
        detail=f"{kind.value}: key {', '.join(keys)} already exists{more}.",
        hint="Nothing of it is applied. Remove the rows, or set `on_conflict` to overwrite or skip.",
        rule="R8.5",
        table=(target.schema, target.name),
    )


def unique_violation(kind: ConflictKind, target: QualifiedName, error: pg.UniqueViolation) -> ApplyConflict:
    """The error for a row whose value in another unique index than the key's is taken (R8.5)."""
    said = error.diag.message_detail or error.diag.message_primary or "a value is taken."
    return ApplyConflict(
        f'duplicate key value violates unique constraint "{error.diag.constraint_name}"'
        f' of table "{target.schema}"."{target.name}"',
        detail=f"{kind.value}: {said}",
        hint="Nothing of it is applied. `on_conflict` does not decide this: change the row or the constraint"
        " on the subscriber, then run `cdc-replay replay` again.",
        rule="R8.5",
        table=(target.schema, target.name),
    )


def ambiguous_key(target: QualifiedName, count: int, keys: list[str]) -> ApplyConflict:
    """The error for a change that is known by its leaf's key, where several rows have that key (R8.12)."""
    more = "" if count <= len(keys) else f", and {count - len(keys)} more"
    return ApplyConflict(
        f'several rows of table "{target.schema}"."{target.name}" have the key of one row of the publisher',
        detail=f"The publisher's partition sends {', '.join(keys)} of the old row{more}, and partitions have"
        " rows with equal keys.",
        hint="Nothing of it is applied. On the publisher, give the partitions REPLICA IDENTITY FULL,"
        " or an index that has the partition key too, and copy the table again with"
        f" `cdc-replay snapshot SUBSCRIPTION --table {target}`.",
        rule="R8.12",
        table=(target.schema, target.name),
    )


def key_text(columns: Sequence[TargetColumn], values: Sequence[object]) -> str:
    """A key as PostgreSQL writes it in its messages."""
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
        " has brought the row into the filter of the publications, and a publisher does not send an unchanged"
        " value that is stored out of line. The change log does not have it, and on the publisher that row is"
        f" gone or its value is another.{more}",
        hint="Nothing of the window is applied, and no NULL is stored instead. If the table is published,"
        f" copy it again: `cdc-replay snapshot SUBSCRIPTION --table {target}`.",
        rule="R4.6",
        table=(target.schema, target.name),
    )


def conflicting_changes(kind: ConflictKind, target: QualifiedName, count: int) -> ApplyConflict:
    """The error for rows of one window that claim the same key of a target (R8.5)."""
    return ApplyConflict(
        f'changes of one window claim the same keys of table "{target.schema}"."{target.name}":'
        " duplicate key value violates unique constraint",
        detail=f"{kind.value}: {count} changes.",
        hint="Give the subscriber's table a key that tells the published rows apart,"
        " or set `on_conflict` to overwrite or skip.",
        rule="R8.5",
        table=(target.schema, target.name),
    )
