"""Changes, relations and publications written down by hand, for the routing of rows.

    changes = Changes()
    changes.update(ORDERS, ["20", "1"], key=["5", None])

A row is a list of texts; None is NULL, `UNSENT` a value that was not sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pyarrow as pa

from cdc_replay.model.frames import CHANGES
from cdc_replay.model.publication import Membership, RowFilter, Table
from cdc_replay.model.relation import QualifiedName, Relation, RelationColumn, RelationId, ReplicaIdentity
from cdc_replay.pgoutput.columnar import CHANGES_SCHEMA
from fixtures.catalogs import listed

UNSENT: Final = "<unsent>"

Row = Sequence[str | None]

# `attnum > value` over int4, as PostgreSQL 18 stores it.
_GREATER: Final = (
    "{{OPEXPR :opno 521 :opfuncid 147 :opresulttype 16 :opretset false :opcollid 0 :inputcollid 0 :args ("
    "{{VAR :varno 1 :varattno {attnum} :vartype 23 :vartypmod -1 :varcollid 0 :varnullingrels (b)"
    " :varlevelsup 0 :varreturningtype 0 :varnosyn 1 :varattnosyn {attnum} :location -1}} "
    "{{CONST :consttype 23 :consttypmod -1 :constcollid 0 :constlen 4 :constbyval true :constisnull false"
    " :location -1 :constvalue 4 [ {value} 0 0 0 0 0 0 0 ]}}) :location -1}}"
)


def greater(table: Table, column: str, value: int) -> RowFilter:
    """The stored filter `column > value`, for a value below 128."""
    attnum = table.column(column).attnum
    return RowFilter(_GREATER.format(attnum=attnum, value=value), f"({column} > {value})")


def filtered(table: Table, row_filter: RowFilter, columns: str | None = None) -> Membership:
    """FOR TABLE …(columns) WHERE row_filter."""
    return dataclasses.replace(listed(table.id, columns=columns), row_filter=row_filter)


def relation(
    oid: int,
    columns: str,
    *,
    key: str = "id",
    identity: ReplicaIdentity = ReplicaIdentity.DEFAULT,
    version: int | None = None,
) -> Relation:
    """A Relation message of table s.t<oid>; with FULL every column is flagged as key."""
    is_full = identity is ReplicaIdentity.FULL
    return Relation(
        id=RelationId(oid),
        version=oid if version is None else version,
        name=QualifiedName("s", f"t{oid}"),
        replica_identity=identity,
        columns=tuple(
            RelationColumn(name, 23, -1, is_key=is_full or name in key.split()) for name in columns.split()
        ),
    )


class Changes:
    """A transaction's changes; each gets the next `seq` and, unless said, commit LSN 200."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def insert(self, of: Relation, new: Row, **common: Any) -> int:
        return self._add("I", of, new=new, **common)

    def update(self, of: Relation, new: Row, *, old: Row | None = None, **common: Any) -> int:
        return self._add("U", of, old=old, new=new, **common)

    def delete(self, of: Relation, old: Row | None, **common: Any) -> int:
        return self._add("D", of, old=old, **common)

    def truncate(self, of: Relation, **common: Any) -> int:
        return self._add("T", of, relation_version=None, truncate_flags=0, **common)

    def batch(self) -> pa.RecordBatch:
        """All changes as CHANGES."""
        return pa.RecordBatch.from_pylist(self._rows, schema=CHANGES_SCHEMA)

    def _add(
        self, kind: str, of: Relation, *, old: Row | None = None, new: Row | None = None, **common: Any
    ) -> int:
        is_full = of.replica_identity is ReplicaIdentity.FULL
        row = dict.fromkeys(CHANGES.names) | {
            "commit_lsn": 200,
            "commit_time": 0,
            "seq": len(self._rows),
            "lsn": 150,
            "kind": kind,
            "relation_id": of.id,
            "relation_version": of.version,
            "catalog_version": 0,
            "old_kind": None if old is None else "O" if is_full else "K",
            "old": _values(old),
            "old_kinds": _kinds(old),
            "new": _values(new),
            "new_kinds": _kinds(new),
        }
        self._rows.append(row | common)
        return len(self._rows) - 1


def _values(row: Row | None) -> list[str | None] | None:
    return None if row is None else [None if value == UNSENT else value for value in row]


def _kinds(row: Row | None) -> str | None:
    return None if row is None else "".join(map(_kind, row))


def _kind(value: str | None) -> str:
    return "n" if value is None else "u" if value == UNSENT else "t"


def by_seq(rows: Iterable[Any], *names: str) -> dict[int, tuple[object, ...]]:
    """The named columns of ROUTED rows by `seq`."""
    return {row["seq"]: tuple(row[name] for name in names) for row in rows}
