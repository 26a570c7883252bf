"""The frames that stages exchange: their columns, in Spark's type names.

A value is always PostgreSQL's text. `old` and `new` hold one element per column of the relation version, in
the order of its Relation message; `old_kinds` and `new_kinds` hold one character per column (R1.4): `n` NULL,
`t` text, `u` unchanged and not sent. An element whose kind is not `t` is NULL.

The resolution of unchanged TOAST values (R4.6) marks lost values with `GIVEN_UP`. All other stages treat it
as `u`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

GIVEN_UP: Final = "x"
"""An unsent value that exists nowhere any more: its row or column was removed, or has another value."""


class ChangeKind(enum.Enum):
    """The kind of a change; the value is its message byte."""

    INSERT = "I"
    UPDATE = "U"
    DELETE = "D"
    TRUNCATE = "T"


class NetKind(enum.Enum):
    """What is left to do to one subscriber row after all changes of a window."""

    INSERT = "I"
    """Insert `values`; no row with that key exists, or the same window deletes it."""
    UPDATE = "U"
    """Overwrite the columns sent in the row at `base_key`; the key itself may change."""
    DELETE = "D"
    """Delete the row at `base_key`."""
    TRANSIENT = "N"
    """Inserted and deleted by the window: a row at `base_key` is a conflict, and is deleted."""
    TRANSIT = "P"
    """A row has moved to `base_key` and left it again: another row there is a conflict, and is deleted."""


class ConflictKind(enum.Enum):
    """Conflicts of a change with the subscriber's rows, under the names of PostgreSQL 18."""

    INSERT_EXISTS = "insert_exists"
    """A row with that key already exists."""
    UPDATE_EXISTS = "update_exists"
    """The row's new key belongs to another row."""
    UPDATE_MISSING = "update_missing"
    """The row to update does not exist; never an error (R8.4)."""
    DELETE_MISSING = "delete_missing"
    """The row to delete does not exist; never an error (R8.4)."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Names and Spark SQL types of a frame's columns."""

    columns: tuple[tuple[str, str], ...]

    @property
    def ddl(self) -> str:
        """The columns as a Spark DDL schema string."""
        return ", ".join(f"{name} {kind}" for name, kind in self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """The column names in order."""
        return tuple(name for name, _ in self.columns)


LOG: Final = Frame(
    (
        ("commit_lsn", "bigint"),  # end of the commit record; transactions are in this order
        ("commit_time", "bigint"),  # microseconds since 1970-01-01 UTC, from the commit record
        ("xid", "bigint"),  # top-level transaction id
        ("origin", "string"),  # the transaction's; empty: an origin without a name; NULL: none (R8.19, R8.20)
        ("seq", "int"),  # ordinal of the message in its transaction, from 0
        ("lsn", "bigint"),  # start of the change's WAL record
        ("kind", "string"),  # the message byte: I U D T M
        ("relation_id", "bigint"),  # the leaf's oid; NULL for T (several) and M (none)
        ("relation_version", "bigint"),  # `Relation.version` in force; NULL as relation_id
        ("message", "binary"),  # the server's bytes, without a streamed message's xid
    )
)
"""One row per message of a committed transaction, as a segment of the change log stores it."""

CHANGES: Final = Frame(
    (
        ("commit_lsn", "bigint"),
        ("commit_time", "bigint"),
        ("origin", "string"),
        ("seq", "int"),
        ("lsn", "bigint"),
        ("kind", "string"),  # ChangeKind
        ("relation_id", "bigint"),  # a TRUNCATE is one row per relation, all with the same seq
        ("relation_version", "bigint"),  # NULL for TRUNCATE
        ("catalog_version", "bigint"),  # index of the PublisherCatalog in force (R9.10)
        ("old_kind", "string"),  # K, O, or NULL when no old tuple was sent
        ("old", "array<string>"),
        ("old_kinds", "string"),
        ("new", "array<string>"),
        ("new_kinds", "string"),
        ("truncate_flags", "int"),  # 1 CASCADE, 2 RESTART IDENTITY; NULL unless TRUNCATE
    )
)
"""One row per row change on the publisher: leaf identity, unfiltered."""

ROUTED: Final = Frame(
    (
        ("target", "int"),  # index of the subscribed table
        ("commit_lsn", "bigint"),
        ("commit_time", "bigint"),
        ("seq", "int"),
        ("kind", "string"),  # ChangeKind for the subscriber
        ("transformed", "boolean"),  # an UPDATE on the publisher, an INSERT or DELETE here (R4.4)
        ("search_key", "array<string>"),  # identity columns that locate the row; NULL for I and T
        ("new_key", "array<string>"),  # identity columns after the change; NULL for D and T
        ("values", "array<string>"),  # published columns in the target's routing order; NULL for D and T
        ("kinds", "string"),  # n, t, u per element of values; - for a column that this version did not send
        ("truncate_flags", "int"),
    )
)
"""One row per change for a subscribed table, in the published relation's columns."""

NET: Final = Frame(
    (
        ("target", "int"),
        ("kind", "string"),  # NetKind
        ("base_key", "array<string>"),  # identity of the subscriber's row before the window
        ("values", "array<string>"),
        ("kinds", "string"),
        ("update_missing", "int"),  # UPDATEs that find nothing if the row at base_key is absent
        ("delete_missing", "int"),  # DELETEs that find nothing if the row at base_key is absent
        ("last_lsn", "bigint"),  # commit LSN of the last change of the row
        ("insert_ordinal", "bigint"),  # log order of INSERTs; NULL: another kind, or not of this window
        ("conflicts", "string"),  # JSON: ConflictKind → count, among the window's own changes; NULL: none
    )
)
"""One row per subscriber row and effect, after compaction. Truncations are not rows of it."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """A TRUNCATE of a subscribed table; those of one statement share `commit_lsn` and `seq`."""

    target: int
    commit_lsn: int
    seq: int
    restart_identity: bool
