"""Merges truncated partitioned tables, which root peeks return, into the log's TRUNCATE rows (R2.13, R2.14).

The WAL has one record per TRUNCATE statement, which names partitioned tables and leaves. A peek returns one
message with the relations that its publications publish: leaves for the capture publications, the partitioned
tables of one depth for a root publication. All these messages have the LSN of that record.

    leaf identity   T(leaf1, leaf2) at 0/15F8   ┐
    depth 0         T(root)         at 0/15F8   ├   one row of the log: T(leaf1, leaf2, root, middle)
    depth 1         T(middle)       at 0/15F8   ┘
    depth 0         T(empty_root)   at 0/1A20   ─   a new row, in LSN order

So each statement is one row, and `seq` of a transaction's rows has no gaps.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.byte_slices import without_views
from cdc_replay.changelog.segment import LOG_SCHEMA
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.relation import RelationId
from cdc_replay.pgoutput.messages import MessageType, Truncate, TruncateFlag
from cdc_replay.pgoutput.reader import decode


@dataclass(frozen=True, slots=True)
class RootTruncate:
    """The partitioned tables of one TRUNCATE; `lsn` is the position of its record."""

    commit_lsn: int
    commit_time: int | None
    xid: int
    origin: str | None
    lsn: int
    flags: TruncateFlag
    relations: tuple[RelationId, ...]

    @property
    def position(self) -> tuple[int, int]:
        """Its position in the log."""
        return self.commit_lsn, self.lsn

    def to_row(self) -> pa.RecordBatch:
        """A new log row for the statement; the caller sets `seq`."""
        columns = {
            "commit_lsn": self.commit_lsn,
            "commit_time": self.commit_time,
            "xid": self.xid,
            "origin": self.origin,
            "seq": 0,
            "lsn": self.lsn,
            "kind": MessageType.TRUNCATE.value,
            "relation_id": None,
            "relation_version": None,
            "message": truncate_message(self.flags, self.relations),
        }
        return pa.RecordBatch.from_pylist([columns], schema=LOG_SCHEMA)

    def add_to(self, row: pa.RecordBatch) -> pa.RecordBatch:
        """The statement's existing log row, with these relations appended."""
        truncate = _parse_truncate(row["message"][0].as_py())
        message = truncate_message(
            truncate.flags, tuple(dict.fromkeys((*truncate.relations, *self.relations)))
        )
        field = row.schema.field("message")
        return row.set_column(row.schema.get_field_index("message"), field, pa.array([message], pa.binary()))


def parse_truncates(rows: pa.RecordBatch) -> Iterator[RootTruncate]:
    """The TRUNCATEs among log rows."""
    are_truncates = _are_truncates(rows)
    if not are_truncates.true_count:
        return
    for row in without_views(rows).filter(are_truncates).to_pylist():
        message = _parse_truncate(row["message"])
        yield RootTruncate(
            row["commit_lsn"], row["commit_time"], row["xid"], row["origin"], row["lsn"],
            message.flags, message.relations,
        )  # fmt: skip


def truncated_relations(rows: pa.RecordBatch) -> frozenset[RelationId]:
    """The relations that TRUNCATEs among log rows name."""
    return frozenset(relation for truncate in parse_truncates(rows) for relation in truncate.relations)


def truncate_message(flags: TruncateFlag, relations: Sequence[RelationId]) -> bytes:
    """A Truncate message as pgoutput writes it (R1.1)."""
    return struct.pack(f">cIB{len(relations)}I", b"T", len(relations), flags, *relations)


def union_truncates(truncates: Iterable[RootTruncate]) -> tuple[RootTruncate, ...]:
    """One per statement, in log order, with the relations of all peeks."""
    by_position: dict[tuple[int, int], RootTruncate] = {}
    for truncate in truncates:
        previous = by_position.get(truncate.position)
        relations = truncate.relations if previous is None else (*previous.relations, *truncate.relations)
        by_position[truncate.position] = replace(truncate, relations=tuple(dict.fromkeys(relations)))
    return tuple(by_position[position] for position in sorted(by_position))


class RootTruncateMerger:
    """Iterates over log rows with the TRUNCATEs of root peeks merged in; can be iterated once.

    Afterwards `messages` and `transactions` are the numbers of added rows and of added transactions.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], truncates: Sequence[RootTruncate]) -> None:
        self.messages = 0
        self.transactions = 0
        self._batches = batches
        self._pending = deque(truncates)
        self._last_commit_lsn = 0
        self._next_seq = 0
        self._counted_commit_lsn = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            due = list(self._pop_due((batch["commit_lsn"][-1].as_py(), batch["lsn"][-1].as_py())))
            yield self._renumber(self._merge(batch, due) if due else batch)
        while self._pending:
            yield self._renumber(self._insert(self._pending.popleft(), has_transaction=False))

    def _pop_due(self, last: tuple[int, int]) -> Iterator[RootTruncate]:
        while self._pending and self._pending[0].position <= last:
            yield self._pending.popleft()

    def _merge(self, batch: pa.RecordBatch, due: Sequence[RootTruncate]) -> pa.RecordBatch:
        commit_lsn, lsn = batch["commit_lsn"].to_numpy(), batch["lsn"].to_numpy()
        truncates = _are_truncates(batch).to_numpy(zero_copy_only=False)
        pieces: list[pa.RecordBatch] = []
        copied = 0
        for truncate in due:
            start, stop = np.searchsorted(commit_lsn, (truncate.commit_lsn, truncate.commit_lsn + 1)).tolist()
            same_statement = np.flatnonzero(truncates[start:stop] & (lsn[start:stop] == truncate.lsn))
            if len(same_statement):
                index = start + int(same_statement[0])
                pieces += [batch.slice(copied, index - copied), truncate.add_to(batch.slice(index, 1))]
                copied = index + 1
                continue
            index = max(copied, start + int(np.count_nonzero(lsn[start:stop] < truncate.lsn)))
            pieces += [
                batch.slice(copied, index - copied),
                self._insert(truncate, has_transaction=start < stop),
            ]
            copied = index
        return pa.concat_batches([*pieces, batch.slice(copied)])

    def _insert(self, truncate: RootTruncate, *, has_transaction: bool) -> pa.RecordBatch:
        self.messages += 1
        if not has_transaction and truncate.commit_lsn not in {
            self._last_commit_lsn,
            self._counted_commit_lsn,
        }:
            self.transactions += 1
            self._counted_commit_lsn = truncate.commit_lsn
        return truncate.to_row()

    def _renumber(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        commit_lsn = batch["commit_lsn"].to_numpy()
        seq = np.arange(len(commit_lsn)) - np.searchsorted(commit_lsn, commit_lsn)
        seq[commit_lsn == self._last_commit_lsn] += self._next_seq
        self._last_commit_lsn, self._next_seq = int(commit_lsn[-1]), int(seq[-1]) + 1
        column = pa.array(seq.astype(np.int32))
        return batch.set_column(batch.schema.get_field_index("seq"), batch.schema.field("seq"), column)


def _parse_truncate(message: bytes) -> Truncate:
    parsed = decode(message)
    if not isinstance(parsed, Truncate):
        raise InvalidMessage(f"expected a TRUNCATE message, got {parsed.type.name}", rule="R1.1")
    return parsed


def _are_truncates(rows: pa.RecordBatch) -> pa.BooleanArray:
    return pc.equal(rows["kind"], MessageType.TRUNCATE.value)
