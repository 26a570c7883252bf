"""Encoder of messages after R1.1 to R1.9; random messages; LOG batches and their expected changes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from cdc_replay.changelog.segment import LOG_SCHEMA
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import (
    QualifiedName,
    Relation,
    RelationColumn,
    RelationId,
    ReplicaIdentity,
)
from cdc_replay.pgoutput import messages as m
from cdc_replay.pgoutput.reader import decode

EPOCH = 946_684_800_000_000  # R1.1: 946 684 800 s before PostgreSQL's


def encode(message: m.Message, *, in_stream: bool = False) -> bytes:
    """The bytes of a message; those that may be streamed carry their `xid` if `in_stream`."""
    xid = b""
    if in_stream and isinstance(message, m.StreamedMessage):
        assert message.xid is not None
        xid = struct.pack(">I", message.xid)
    return message.type.value.encode() + xid + _BODIES[type(message)](message)


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def name(value: QualifiedName) -> bytes:
    return text("" if value.schema == "pg_catalog" else value.schema) + text(value.name)


def tuple_data(row: m.TupleData) -> bytes:
    parts = [struct.pack(">h", len(row.kinds))]
    for kind, value in zip(row.kinds, row.values, strict=True):
        parts.append(kind.value.encode())
        if value is not None:
            parts.append(struct.pack(">i", len(value)) + value)
    return b"".join(parts)


def old_tuple(kind: m.OldTuple | None, row: m.TupleData | None) -> bytes:
    return b"" if kind is None or row is None else kind.value.encode() + tuple_data(row)


def relation_column(column: RelationColumn) -> bytes:
    return (
        struct.pack(">B", column.is_key)
        + text(column.name)
        + struct.pack(">Ii", column.type_oid, column.typmod)
    )


def lsn_lsn_time(first: Lsn, second: Lsn, time: int) -> bytes:
    return struct.pack(">QQq", first.value, second.value, time - EPOCH)


_BODIES: dict[type, Callable[[Any], bytes]] = {
    m.Begin: lambda x: struct.pack(">QqI", x.commit_lsn.value, x.commit_time - EPOCH, x.xid),
    m.Commit: lambda x: b"\0" + lsn_lsn_time(x.commit_lsn, x.end_lsn, x.commit_time),
    m.Origin: lambda x: struct.pack(">Q", x.commit_lsn.value) + text(x.name),
    m.RelationMessage: lambda x: (
        struct.pack(">I", x.relation)
        + name(x.name)
        + x.replica_identity.value.encode()
        + struct.pack(">h", len(x.columns))
        + b"".join(map(relation_column, x.columns))
    ),
    m.TypeMessage: lambda x: struct.pack(">I", x.type_oid) + name(x.name),
    m.Insert: lambda x: struct.pack(">I", x.relation) + b"N" + tuple_data(x.new),
    m.Update: lambda x: (
        struct.pack(">I", x.relation) + old_tuple(x.old_kind, x.old) + b"N" + tuple_data(x.new)
    ),
    m.Delete: lambda x: struct.pack(">I", x.relation) + old_tuple(x.old_kind, x.old),
    m.Truncate: lambda x: (
        struct.pack(">iB", len(x.relations), x.flags) + struct.pack(f">{len(x.relations)}I", *x.relations)
    ),
    m.LogicalMessage: lambda x: (
        struct.pack(">BQ", x.is_transactional, x.lsn.value)
        + text(x.prefix)
        + struct.pack(">i", len(x.content))
        + x.content
    ),
    m.StreamStart: lambda x: struct.pack(">IB", x.xid, x.is_first),
    m.StreamStop: lambda _: b"",
    m.StreamCommit: lambda x: (
        struct.pack(">IB", x.xid, 0) + lsn_lsn_time(x.commit_lsn, x.end_lsn, x.commit_time)
    ),
    m.StreamAbort: lambda x: (
        struct.pack(">II", x.xid, x.subxid)
        + (b"" if x.abort_lsn is None else struct.pack(">Qq", x.abort_lsn.value, x.abort_time - EPOCH))
    ),
    m.BeginPrepare: lambda x: (
        lsn_lsn_time(x.prepare_lsn, x.end_lsn, x.prepare_time) + struct.pack(">I", x.xid) + text(x.gid)
    ),
    m.Prepare: lambda x: b"\0" + _BODIES[m.BeginPrepare](x),
    m.StreamPrepare: lambda x: b"\0" + _BODIES[m.BeginPrepare](x),
    m.CommitPrepared: lambda x: (
        b"\0" + lsn_lsn_time(x.commit_lsn, x.end_lsn, x.commit_time) + struct.pack(">I", x.xid) + text(x.gid)
    ),
    m.RollbackPrepared: lambda x: (
        b"\0"
        + lsn_lsn_time(x.prepare_end_lsn, x.end_lsn, x.prepare_time)
        + struct.pack(">qI", x.rollback_time - EPOCH, x.xid)
        + text(x.gid)
    ),
}

lsns = st.integers(0, 2**64 - 1).map(Lsn)
times = st.integers(-(2**63) + EPOCH, 2**63 - 1)
oids = st.integers(0, 2**32 - 1).map(RelationId)
xids = st.integers(0, 2**32 - 1)
texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)
names = st.builds(QualifiedName, texts.filter(bool), texts)
values = texts.map(str.encode)


def tuples(columns: int | None = None, *, binary: bool = True) -> st.SearchStrategy[m.TupleData]:
    kinds = list(m.TupleKind) if binary else [kind for kind in m.TupleKind if kind is not m.TupleKind.BINARY]
    sent = {m.TupleKind.TEXT, m.TupleKind.BINARY}
    column = st.sampled_from(kinds).flatmap(
        lambda kind: st.tuples(st.just(kind), values if kind in sent else st.none())
    )
    rows = st.lists(column, min_size=columns or 0, max_size=5 if columns is None else columns)
    return rows.map(lambda row: m.TupleData(tuple(k for k, _ in row), tuple(v for _, v in row)))


def row_changes(
    xid: st.SearchStrategy[int | None],
    relation: st.SearchStrategy[RelationId] = oids,
    row: st.SearchStrategy[m.TupleData] | None = None,
) -> st.SearchStrategy[m.Insert | m.Update | m.Delete]:
    row = tuples() if row is None else row
    old = st.sampled_from(m.OldTuple)
    return st.one_of(
        st.builds(m.Insert, xid, relation, row),
        st.builds(m.Update, xid, relation, st.none(), st.none(), row),
        st.builds(m.Update, xid, relation, old, row, row),
        st.builds(m.Delete, xid, relation, old, row),
    )


def streamable(xid: st.SearchStrategy[int | None]) -> st.SearchStrategy[m.StreamedMessage]:
    """Messages that carry an xid inside a streamed block (R1.9)."""
    column = st.builds(RelationColumn, texts, xids, st.integers(-(2**31), 2**31 - 1), st.booleans())
    columns = st.lists(column, max_size=4).map(tuple)
    return st.one_of(
        row_changes(xid),
        st.builds(m.RelationMessage, xid, oids, names, st.sampled_from(ReplicaIdentity), columns),
        st.builds(m.TypeMessage, xid, xids, names),
        st.builds(
            m.Truncate, xid, st.integers(0, 3).map(m.TruncateFlag), st.lists(oids, max_size=4).map(tuple)
        ),
        st.builds(m.LogicalMessage, xid, st.booleans(), lsns, texts, st.binary(max_size=8)),
    )


def unstreamable(*, parallel: bool) -> st.SearchStrategy[m.Message]:
    """All other messages; StreamAbort in the form of `streaming = parallel` if `parallel` (R1.3)."""
    abort = (lsns, times) if parallel else (st.none(), st.none())
    return st.one_of(
        st.builds(m.Begin, lsns, times, xids),
        st.builds(m.Commit, lsns, lsns, times),
        st.builds(m.Origin, lsns, texts),
        st.builds(m.StreamStart, xids, st.booleans()),
        st.just(m.StreamStop()),
        st.builds(m.StreamCommit, xids, lsns, lsns, times),
        st.builds(m.StreamAbort, xids, xids, *abort),
        st.builds(m.BeginPrepare, lsns, lsns, times, xids, texts),
        st.builds(m.Prepare, lsns, lsns, times, xids, texts),
        st.builds(m.CommitPrepared, lsns, lsns, times, xids, texts),
        st.builds(m.RollbackPrepared, lsns, lsns, times, times, xids, texts),
        st.builds(m.StreamPrepare, lsns, lsns, times, xids, texts),
    )


def relation(columns: int, relation_id: int = 16384, version: int = 7) -> Relation:
    return Relation(
        RelationId(relation_id),
        version,
        QualifiedName("public", f"t{relation_id}"),
        ReplicaIdentity.FULL,
        tuple(RelationColumn(f"c{number}", 25, -1, is_key=False) for number in range(columns)),
    )


def log_row(message: bytes, **columns: object) -> dict[str, object]:
    """A LOG row of a row change of the relation 16384, version 7, with the given columns replaced."""
    return {
        "commit_lsn": 100,
        "commit_time": 1,
        "xid": 700,
        "origin": None,
        "seq": 0,
        "lsn": 50,
        "kind": chr(message[0]) if message else "I",
        "relation_id": 16384,
        "relation_version": 7,
        "message": message,
    } | columns


def log_batch(rows: Sequence[Mapping[str, object]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=LOG_SCHEMA)


def reference_changes(
    log: pa.RecordBatch, window: Window, catalogs: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """The CHANGES rows of well-formed LOG rows, through the reference reader.

    `catalogs` are (owner, from LSN) of the catalog versions.
    """
    changes = []
    for row in log.to_pylist():
        if Lsn(row["commit_lsn"]) not in window:
            continue
        kept = (
            "commit_lsn",
            "commit_time",
            "origin",
            "seq",
            "lsn",
            "kind",
            "relation_id",
            "relation_version",
        )
        change = {key: row[key] for key in kept} | {
            "catalog_version": catalog_version(catalogs, row["commit_lsn"], row["lsn"]),
            "truncate_flags": None,
        }
        match decode(row["message"]):
            case m.Insert(_, _, new):
                changes.append(change | _side("old", None) | _side("new", new) | {"old_kind": None})
            case m.Update(_, _, kind, old, new):
                letter = kind.value if kind else None
                changes.append(change | _side("old", old) | _side("new", new) | {"old_kind": letter})
            case m.Delete(_, _, kind, old):
                changes.append(change | _side("old", old) | _side("new", None) | {"old_kind": kind.value})
            case m.Truncate(_, flags, relations):
                empty = _side("old", None) | _side("new", None) | {"old_kind": None}
                changes += [
                    change | empty | {"truncate_flags": int(flags), "relation_id": relation}
                    for relation in relations
                ]
            case m.LogicalMessage():
                pass
            case other:
                raise AssertionError(other)
    return changes


def _side(side: str, row: m.TupleData | None) -> dict[str, Any]:
    if row is None:
        return {side: None, f"{side}_kinds": None}
    return {
        side: [None if value is None else value.decode() for value in row.values],
        f"{side}_kinds": "".join(kind.value for kind in row.kinds),
    }


def catalog_version(catalogs: Sequence[tuple[int, int]], commit_lsn: int, lsn: int) -> int:
    """The place of the version that is in force for a change (R9.10): one of its own first."""
    for owner in (commit_lsn, 0):
        before = [
            (from_lsn, place)
            for place, (of, from_lsn) in enumerate(catalogs)
            if of == owner and from_lsn <= lsn
        ]
        if before:
            return max(before)[1]
    return min((from_lsn, place) for place, (of, from_lsn) in enumerate(catalogs) if of == 0)[1]
