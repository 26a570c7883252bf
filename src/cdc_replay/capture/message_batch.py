"""Columns of messages: one batch of the peek, and rows of the log made of it without a loop over messages.

The loop of `transactions` looks at control messages only. What lies between two of them is a *run*:
consecutive messages I, U, D, T, M of one transaction. A run is three numbers until whole columns are made
of many runs at once.

A message of a streamed block carries the transaction id of its (sub)transaction (R1.9). It is cut out here,
so that everything behind this module, the log included, sees the same bytes whether a transaction was
streamed or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.changelog.segment import LOG_SCHEMA
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn
from cdc_replay.pgoutput.messages import IN_STREAM, MessageType
from cdc_replay.postgres.peek import RawMessages

Ints: TypeAlias = npt.NDArray[np.int64]

BODY_SCHEMA: Final = pa.schema(
    [
        ("subxid", pa.int64()),
        ("lsn", pa.int64()),
        ("kind", pa.string()),
        ("relation_id", pa.int64()),
        ("relation_version", pa.int64()),
        ("message", pa.binary()),
    ]
)
"""A message of a transaction whose end is not known yet; `subxid` is 0 outside of streamed blocks."""


def kinds_table(kinds: str | frozenset[MessageType]) -> npt.NDArray[np.bool_]:
    """Which first bytes are of these kinds."""
    known = {kind if isinstance(kind, str) else kind.value for kind in kinds}
    return np.array([chr(byte) in known for byte in range(256)])


_DATA: Final = kinds_table("IUDTM")
_ROW_CHANGES: Final = kinds_table("IUD")
_WITH_XID: Final = kinds_table(IN_STREAM)
_MESSAGE: Final = ord(MessageType.MESSAGE.value)
_STREAM_START: Final = ord(MessageType.STREAM_START.value)
_STREAM_STOP: Final = ord(MessageType.STREAM_STOP.value)
_XID_END: Final = 1 + 4
_RELATION_END: Final = 1 + 4
# The default of `stop`, the largest number there is, overflows in Arrow's arithmetic.
_NO_END: Final = 2**31 - 1


def places_in(known: Ints, wanted: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Where numbers are among sorted ones, and whether they are there; a place counts only then."""
    places = np.searchsorted(known, wanted)
    found = places < len(known)
    found[found] = known[places[found]] == wanted[found]
    return places, found


@dataclass(frozen=True, slots=True)
class RelationVersions:
    """Which version of each relation is in force at some point of the stream."""

    versions: Mapping[int, int] = field(default_factory=dict)

    def with_version(self, relation_id: int, version: int) -> RelationVersions:
        """The same with one relation's version replaced."""
        if self.versions.get(relation_id) == version:
            return self
        return RelationVersions({**self.versions, relation_id: version})

    def with_all(self, other: RelationVersions) -> RelationVersions:
        """The same with all versions of `other` replaced."""
        return RelationVersions({**self.versions, **other.versions})

    def of(self, relation_ids: Ints) -> Ints:
        """The versions of relations.

        Raises:
            InvalidMessage: if one was never described (R1.13).
        """
        known = np.fromiter(sorted(self.versions), dtype=np.int64, count=len(self.versions))
        versions = np.array([self.versions[relation_id] for relation_id in known.tolist()], dtype=np.int64)
        places, found = places_in(known, relation_ids)
        if not found.all():
            unknown = int(relation_ids[~found][0])
            raise InvalidMessage(
                f"a change names relation {unknown}, which no Relation message has described", rule="R1.13"
            )
        return versions[places]


class MessageRange(NamedTuple):
    """Messages `[start, stop)` of a chunk, all data, and the relation versions in force for them."""

    start: int
    stop: int
    relations: RelationVersions


def _shapes(runs: Sequence[MessageRange]) -> Iterator[tuple[RelationVersions, int]]:
    for _, same in itertools.groupby(runs, key=lambda run: id(run.relations)):
        together = list(same)
        yield together[0].relations, sum(run.stop - run.start for run in together)


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """A batch of messages as columns; `data` has no transaction ids of streamed blocks any more."""

    lsn: Ints
    xid: Ints
    subxid: Ints
    kinds: npt.NDArray[np.uint8]
    data: pa.BinaryArray

    @classmethod
    def of(cls, raw: RawMessages, *, in_stream: bool) -> MessageBatch:
        """The messages of a peek; `in_stream` says that they start inside a streamed block.

        Raises:
            InvalidMessage: if one is too short for its kind.
        """
        content, offsets = buffers(raw.data)
        starts, lengths = offsets[:-1], np.diff(offsets)
        if not (lengths > 0).all():
            raise InvalidMessage("empty pgoutput message", rule="R1.1")
        kinds = content[starts]
        depth = np.cumsum(kinds == _STREAM_START) - np.cumsum(kinds == _STREAM_STOP) + int(in_stream)
        streamed = (depth > 0) & _WITH_XID[kinds]
        if not streamed.any():
            return cls(raw.lsn, raw.xid, np.zeros(len(kinds), dtype=np.int64), kinds, raw.data)
        if (lengths[streamed] < _XID_END).any():
            raise InvalidMessage("streamed message without transaction id", rule="R1.9")
        subxid = _numbers_behind_kind(content, starts, streamed)
        cut = pc.binary_join_element_wise(
            pc.binary_slice(raw.data, start=0, stop=1),
            pc.binary_slice(raw.data, start=_XID_END, stop=_NO_END),
            b"",
        )
        return cls(raw.lsn, raw.xid, subxid, kinds, pc.if_else(pa.array(streamed), cut, raw.data))

    def where(self, kept: npt.NDArray[np.bool_]) -> MessageBatch:
        """The messages that are `kept`, in order."""
        data = self.data.filter(pa.array(kept))
        return MessageBatch(self.lsn[kept], self.xid[kept], self.subxid[kept], self.kinds[kept], data)

    def controls(self) -> Ints:
        """The positions of the messages that are not data, in order."""
        return np.flatnonzero(~_DATA[self.kinds])

    def message(self, position: int) -> bytes:
        """One message."""
        return bytes(self.data[position].as_buffer())

    def has_message(self, start: int, stop: int) -> bool:
        """Whether there are logical messages in `[start, stop)`."""
        return bool((self.kinds[start:stop] == _MESSAGE).any())

    def body(self, runs: Sequence[MessageRange]) -> pa.RecordBatch:
        """The messages of `runs` as rows of `BODY_SCHEMA`.

        Raises:
            InvalidMessage: if a change is of a relation that was never described.
        """
        starts = np.array([run.start for run in runs], dtype=np.int64)
        stops = np.array([run.stop for run in runs], dtype=np.int64)
        return self.rows(positions(starts, stops), list(_shapes(runs)))

    def rows(self, places: Ints, shapes: Sequence[tuple[RelationVersions, int]]) -> pa.RecordBatch:
        """The messages at `places`; `shapes` says for how many of them which versions are in force, in order.

        Raises:
            InvalidMessage: if a change is of a relation that was never described.
        """
        kinds = self.kinds[places]
        of_row = _ROW_CHANGES[kinds]
        messages = self.data.take(pa.array(places))
        relation_ids = _relation_ids(messages, of_row)
        versions = np.zeros(len(places), dtype=np.int64)
        start = 0
        for relations, count in shapes:
            part = slice(start, start + count)
            chosen = of_row[part]
            versions[part][chosen] = relations.of(relation_ids[part][chosen])
            start += count
        columns = [
            pa.array(self.subxid[places]),
            pa.array(self.lsn[places]),
            _letters(kinds),
            pa.array(relation_ids, mask=~of_row),
            pa.array(versions, mask=~of_row),
            messages,
        ]
        return pa.RecordBatch.from_arrays(columns, schema=BODY_SCHEMA)


class TransactionStamp(NamedTuple):
    """What a transaction's end adds to each of its rows; `commit_time` is None outside of transactions."""

    commit_lsn: Lsn
    commit_time: int | None
    xid: int
    origin: str | None


class TransactionStamps(NamedTuple):
    """The stamps of transactions as columns."""

    commit_lsn: pa.Int64Array
    commit_time: pa.Int64Array
    xid: pa.Int64Array
    origin: pa.StringArray

    @classmethod
    def of(cls, stamps: Sequence[TransactionStamp]) -> TransactionStamps:
        """The same as columns."""
        return cls(
            pa.array([stamp.commit_lsn.value for stamp in stamps], pa.int64()),
            pa.array([stamp.commit_time for stamp in stamps], pa.int64()),
            pa.array([stamp.xid for stamp in stamps], pa.int64()),
            pa.array([stamp.origin for stamp in stamps], pa.string()),
        )


def log_rows(
    body: pa.RecordBatch, stamps: TransactionStamps, counts: Sequence[int] | Ints, first_seq: int = 0
) -> pa.RecordBatch:
    """Rows of the log: whole transactions, one after another, of `counts` messages each.

    `first_seq` is the ordinal of the first row, for the rest of a transaction whose beginning was written.
    """
    repeats = np.asarray(counts, dtype=np.int64)
    starts = np.cumsum(repeats) - repeats
    which = pa.array(np.repeat(np.arange(len(repeats)), repeats))
    seq = np.arange(body.num_rows) - np.repeat(starts, repeats) + first_seq
    columns = [
        *(column.take(which) for column in stamps),
        pa.array(seq.astype(np.int32)),
        *(body[name] for name in ("lsn", "kind", "relation_id", "relation_version", "message")),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=LOG_SCHEMA)


def number_rows(bodies: Iterator[pa.RecordBatch], stamp: TransactionStamp) -> Iterator[pa.RecordBatch]:
    """Rows of the log: one transaction, given in parts."""
    seq, stamps = 0, TransactionStamps.of([stamp])
    for body in bodies:
        yield log_rows(body, stamps, [body.num_rows], seq)
        seq += body.num_rows


def restamp_prepared(batch: pa.RecordBatch, stamp: TransactionStamp) -> pa.RecordBatch:
    """Rows that were kept at PREPARE, as of COMMIT PREPARED: only when they count changes."""
    commit_lsn = pa.repeat(pa.scalar(stamp.commit_lsn.value, pa.int64()), batch.num_rows)
    commit_time = pa.repeat(pa.scalar(stamp.commit_time, pa.int64()), batch.num_rows)
    columns = {"commit_lsn": commit_lsn, "commit_time": commit_time}
    if stamp.origin is not None:
        columns["origin"] = pc.fill_null(batch["origin"], stamp.origin)
    return pa.RecordBatch.from_arrays(
        [columns.get(name, batch[name]) for name in batch.schema.names], schema=batch.schema
    )


def positions(starts: Ints, stops: Ints) -> Ints:
    """All positions of the ranges, one after another."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    places: Ints = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)
    return places


def buffers(data: pa.BinaryArray) -> tuple[npt.NDArray[np.uint8], Ints]:
    """The bytes of a binary array and where each value starts in them; the last offset is the end."""
    _, offsets, content = data.buffers()
    places = np.frombuffer(offsets, dtype=np.int32, count=len(data) + 1, offset=data.offset * 4)
    return np.frombuffer(content or b"", dtype=np.uint8), places.astype(np.int64)


def big_endian(content: npt.NDArray[np.uint8], places: Ints, width: int) -> Ints:
    """The numbers of `width` bytes that start at `places`; of 8 bytes they are signed (R1.1)."""
    numbers = np.zeros(len(places), dtype=np.int64)
    for byte in range(width):
        numbers = numbers << 8 | content[places + byte]
    return numbers


def _numbers_behind_kind(content: npt.NDArray[np.uint8], starts: Ints, where: npt.NDArray[np.bool_]) -> Ints:
    """The unsigned number behind the first byte of the messages that are chosen, 0 for the others."""
    numbers = np.zeros(len(starts), dtype=np.int64)
    numbers[where] = big_endian(content, starts[where] + 1, 4)
    return numbers


def _relation_ids(messages: pa.BinaryArray, of_row: npt.NDArray[np.bool_]) -> Ints:
    content, offsets = buffers(messages)
    if (np.diff(offsets)[of_row] < _RELATION_END).any():
        raise InvalidMessage("change without relation", rule="R1.2")
    return _numbers_behind_kind(content, offsets[:-1], of_row)


def _letters(kinds: npt.NDArray[np.uint8]) -> pa.StringArray:
    offsets = np.arange(len(kinds) + 1, dtype=np.int32)
    return pa.StringArray.from_buffers(
        len(kinds), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(kinds))
    )
