"""Rows of TRUNCATE, and how the partitioned tables of the second peeks get into them (R2.13, R2.14).

The WAL has one record per TRUNCATE statement, which names partitioned tables and leaves alike. A peek shows
of it, as one message, the relations that its publications publish: the capture publications the leaves, a
root publication the partitioned tables of one depth. All of them have the position of that record.

    leaf identity   T(leaf1, leaf2) at 0/15F8   ┐
    depth 0         T(root)         at 0/15F8   ├   one row of the log: T(leaf1, leaf2, root, middle)
    depth 1         T(middle)       at 0/15F8   ┘
    depth 0         T(empty_root)   at 0/1A20   ─   a row of its own, between the changes around it

So one statement stays one row, in one place, and the rows of a transaction are numbered without gaps as ever.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.changelog.segment import LOG_SCHEMA
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.relation import RelationId
from cdc_replay.pgoutput.messages import MessageType, Truncate, TruncateFlag
from cdc_replay.pgoutput.reader import decode


@dataclass(frozen=True, slots=True)
class RootTruncate:
    """What second peeks say of one TRUNCATE; `lsn` is the position of its record."""

    commit_lsn: int
    commit_time: int | None
    xid: int
    origin: str | None
    lsn: int
    flags: TruncateFlag
    relations: tuple[RelationId, ...]

    @property
    def position(self) -> tuple[int, int]:
        """Its place in the log."""
        return self.commit_lsn, self.lsn

    def row(self) -> pa.RecordBatch:
        """The statement as a row of the log, if that has none of it yet; its `seq` is to be set."""
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
        """The row that the log has of the statement, with these relations behind its own."""
        found = _truncate(row["message"][0].as_py())
        message = truncate_message(found.flags, tuple(dict.fromkeys((*found.relations, *self.relations))))
        field = row.schema.field("message")
        return row.set_column(row.schema.get_field_index("message"), field, pa.array([message], pa.binary()))


def truncates_in(rows: pa.RecordBatch) -> Iterator[RootTruncate]:
    """The TRUNCATEs among rows of the log."""
    for row in rows.filter(_are_truncates(rows)).to_pylist():
        message = _truncate(row["message"])
        yield RootTruncate(
            row["commit_lsn"], row["commit_time"], row["xid"], row["origin"], row["lsn"],
            message.flags, message.relations,
        )  # fmt: skip


def truncated_in(rows: pa.RecordBatch) -> frozenset[RelationId]:
    """The relations that TRUNCATEs among rows of the log name."""
    return frozenset(relation for one in truncates_in(rows) for relation in one.relations)


def truncate_message(flags: TruncateFlag, relations: Sequence[RelationId]) -> bytes:
    """A Truncate message as pgoutput writes it (R1.1)."""
    return struct.pack(f">cIB{len(relations)}I", b"T", len(relations), flags, *relations)


def union_truncates(truncates: Iterable[RootTruncate]) -> tuple[RootTruncate, ...]:
    """One per statement, in the order of the log, with the relations of all peeks."""
    found: dict[tuple[int, int], RootTruncate] = {}
    for one in truncates:
        held = found.get(one.position)
        relations = one.relations if held is None else (*held.relations, *one.relations)
        found[one.position] = replace(one, relations=tuple(dict.fromkeys(relations)))
    return tuple(found[position] for position in sorted(found))


class RootsAdded:
    """Rows of the log in order, with those of second peeks among them; iterated once.

    `messages` and `transactions` count, afterwards, what the log has more by that.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], truncates: Sequence[RootTruncate]) -> None:
        self.messages = 0
        self.transactions = 0
        self._batches = batches
        self._waiting = deque(truncates)
        self._last_commit = 0
        self._next_seq = 0
        self._counted_commit = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            due = list(self._due((batch["commit_lsn"][-1].as_py(), batch["lsn"][-1].as_py())))
            yield self._numbered(self._merged(batch, due) if due else batch)
        while self._waiting:
            yield self._numbered(self._inserted(self._waiting.popleft(), is_known=False))

    def _due(self, last: tuple[int, int]) -> Iterator[RootTruncate]:
        while self._waiting and self._waiting[0].position <= last:
            yield self._waiting.popleft()

    def _merged(self, batch: pa.RecordBatch, due: Sequence[RootTruncate]) -> pa.RecordBatch:
        commit_lsn, lsn = batch["commit_lsn"].to_numpy(), batch["lsn"].to_numpy()
        truncates = _are_truncates(batch).to_numpy(zero_copy_only=False)
        pieces: list[pa.RecordBatch] = []
        done = 0
        for one in due:
            start, stop = np.searchsorted(commit_lsn, (one.commit_lsn, one.commit_lsn + 1)).tolist()
            of_statement = np.flatnonzero(truncates[start:stop] & (lsn[start:stop] == one.lsn))
            if len(of_statement):
                place = start + int(of_statement[0])
                pieces += [batch.slice(done, place - done), one.add_to(batch.slice(place, 1))]
                done = place + 1
                continue
            place = max(done, start + int(np.count_nonzero(lsn[start:stop] < one.lsn)))
            pieces += [batch.slice(done, place - done), self._inserted(one, is_known=start < stop)]
            done = place
        return pa.concat_batches([*pieces, batch.slice(done)])

    def _inserted(self, one: RootTruncate, *, is_known: bool) -> pa.RecordBatch:
        self.messages += 1
        if not is_known and one.commit_lsn not in {self._last_commit, self._counted_commit}:
            self.transactions += 1
            self._counted_commit = one.commit_lsn
        return one.row()

    def _numbered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same with the ordinals of its rows in their transactions, counted anew."""
        commit_lsn = batch["commit_lsn"].to_numpy()
        seq = np.arange(len(commit_lsn)) - np.searchsorted(commit_lsn, commit_lsn)
        seq[commit_lsn == self._last_commit] += self._next_seq
        self._last_commit, self._next_seq = int(commit_lsn[-1]), int(seq[-1]) + 1
        column = pa.array(seq.astype(np.int32))
        return batch.set_column(batch.schema.get_field_index("seq"), batch.schema.field("seq"), column)


def _truncate(message: bytes) -> Truncate:
    found = decode(message)
    if not isinstance(found, Truncate):
        raise InvalidMessage(f"a {found.type.name} message is where a TRUNCATE should be", rule="R1.1")
    return found


def _are_truncates(rows: pa.RecordBatch) -> pa.BooleanArray:
    return pc.equal(rows["kind"], MessageType.TRUNCATE.value)
