"""A batch of peeked messages as columns, and its conversion to log rows without a loop over messages.

`transactions` loops over control messages only. The data messages (I, U, D, T, M) between two of them are a
`MessageRange`; columns are built from many ranges at once.

A message of a streamed block carries the id of its (sub)transaction (R1.9). `MessageBatch.from_raw` removes
it, so that the log has the same bytes whether a transaction was streamed or not.
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

from cdc_replay.arrow.arrays import Bytes, big_endian, letters
from cdc_replay.arrow.byte_slices import VIEWS, ByteSlices, with_views
from cdc_replay.changelog.segment import ROWS_SCHEMA
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
        ("message", VIEWS),
    ]
)
"""A message of an open transaction; `subxid` is 0 outside of streamed blocks."""


def kind_mask(kinds: str | frozenset[MessageType]) -> npt.NDArray[np.bool_]:
    """For each possible first byte, whether it is one of these kinds."""
    known = {kind if isinstance(kind, str) else kind.value for kind in kinds}
    return np.array([chr(byte) in known for byte in range(256)])


_DATA: Final = kind_mask("IUDTM")
_ROW_CHANGES: Final = kind_mask("IUD")
_WITH_XID: Final = kind_mask(IN_STREAM)
_MESSAGE: Final = ord(MessageType.MESSAGE.value)
_STREAM_START: Final = ord(MessageType.STREAM_START.value)
_STREAM_STOP: Final = ord(MessageType.STREAM_STOP.value)
_XID_BYTES: Final = 4
_XID_END: Final = 1 + _XID_BYTES
_RELATION_END: Final = 1 + 4


def find_sorted(sorted_values: Ints, values: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The index of each value in `sorted_values`, and whether it is present (else the index is arbitrary)."""
    indexes = np.searchsorted(sorted_values, values)
    is_present = indexes < len(sorted_values)
    is_present[is_present] = sorted_values[indexes[is_present]] == values[is_present]
    return indexes, is_present


@dataclass(frozen=True, slots=True)
class RelationVersions:
    """The current version of each relation at some point of the stream."""

    versions: Mapping[int, int] = field(default_factory=dict)

    def with_version(self, relation_id: int, version: int) -> RelationVersions:
        """A copy with one relation's version replaced."""
        if self.versions.get(relation_id) == version:
            return self
        return RelationVersions({**self.versions, relation_id: version})

    def with_all(self, other: RelationVersions) -> RelationVersions:
        """A copy with the versions in `other` replaced."""
        return RelationVersions({**self.versions, **other.versions})

    def versions_of(self, relation_ids: Ints) -> Ints:
        """The current versions of these relations.

        Raises:
            InvalidMessage: if no Relation message described one of them (R1.13).
        """
        known = np.fromiter(sorted(self.versions), dtype=np.int64, count=len(self.versions))
        versions = np.array([self.versions[relation_id] for relation_id in known.tolist()], dtype=np.int64)
        indexes, is_known = find_sorted(known, relation_ids)
        if not is_known.all():
            unknown = int(relation_ids[~is_known][0])
            raise InvalidMessage(
                f"no Relation message has described relation {unknown}, which a change refers to",
                rule="R1.13",
            )
        return versions[indexes]


class MessageRange(NamedTuple):
    """Data messages `[start, stop)` of a batch, and the relation versions that apply to them."""

    start: int
    stop: int
    relations: RelationVersions


def _version_counts(runs: Sequence[MessageRange]) -> Iterator[tuple[RelationVersions, int]]:
    for _, same in itertools.groupby(runs, key=lambda run: id(run.relations)):
        consecutive = list(same)
        yield consecutive[0].relations, sum(run.stop - run.start for run in consecutive)


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """A batch of messages as columns; transaction ids of streamed blocks are removed from `data`."""

    lsn: Ints
    xid: Ints
    subxid: Ints
    kinds: Bytes
    data: ByteSlices

    @classmethod
    def from_raw(cls, raw: RawMessages, *, in_stream: bool) -> MessageBatch:
        """Build the columns; `in_stream` says that the batch starts inside a streamed block.

        Raises:
            InvalidMessage: if a message is too short for its kind.
        """
        data = raw.data
        if not (data.lengths > 0).all():
            raise InvalidMessage("empty pgoutput message", rule="R1.1")
        kinds = data.first_bytes()
        depth = np.cumsum(kinds == _STREAM_START) - np.cumsum(kinds == _STREAM_STOP) + int(in_stream)
        streamed = (depth > 0) & _WITH_XID[kinds]
        if not streamed.any():
            return cls(raw.lsn, raw.xid, np.zeros(len(kinds), dtype=np.int64), kinds, data)
        if (data.lengths[streamed] < _XID_END).any():
            raise InvalidMessage("streamed message without transaction id", rule="R1.9")
        subxid = _uint32_after_kind(data, streamed)
        return cls(raw.lsn, raw.xid, subxid, kinds, _without_xid(data, streamed))

    def filter(self, keep: npt.NDArray[np.bool_]) -> MessageBatch:
        """The messages where `keep` is true, in order."""
        return MessageBatch(
            self.lsn[keep], self.xid[keep], self.subxid[keep], self.kinds[keep], self.data[keep]
        )

    def control_positions(self) -> Ints:
        """The positions of the messages that are not data, in order."""
        return np.flatnonzero(~_DATA[self.kinds])

    def message(self, position: int) -> bytes:
        """One message."""
        return self.data[position]

    def has_logical_message(self, start: int, stop: int) -> bool:
        """Whether there are logical messages in `[start, stop)`."""
        return bool((self.kinds[start:stop] == _MESSAGE).any())

    def body(self, runs: Sequence[MessageRange]) -> pa.RecordBatch:
        """The messages of `runs` as rows of `BODY_SCHEMA`.

        Raises:
            InvalidMessage: if the relation of a change was never described.
        """
        starts = np.array([run.start for run in runs], dtype=np.int64)
        stops = np.array([run.stop for run in runs], dtype=np.int64)
        return self.rows(expand_ranges(starts, stops), list(_version_counts(runs)))

    def rows(self, positions: Ints, version_counts: Sequence[tuple[RelationVersions, int]]) -> pa.RecordBatch:
        """The messages at `positions` as rows of `BODY_SCHEMA`.

        `version_counts` are relation versions, each with the number of consecutive messages it applies to.

        Raises:
            InvalidMessage: if the relation of a change was never described.
        """
        kinds = self.kinds[positions]
        of_row = _ROW_CHANGES[kinds]
        messages = self.data[positions]
        relation_ids = _relation_ids(messages, of_row)
        versions = np.zeros(len(positions), dtype=np.int64)
        start = 0
        for relations, count in version_counts:
            rows = slice(start, start + count)
            is_chosen = of_row[rows]
            versions[rows][is_chosen] = relations.versions_of(relation_ids[rows][is_chosen])
            start += count
        columns = [
            pa.array(self.subxid[positions]),
            pa.array(self.lsn[positions]),
            letters(kinds),
            pa.array(relation_ids, mask=~of_row),
            pa.array(versions, mask=~of_row),
            messages.views(),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=BODY_SCHEMA)


class TransactionStamp(NamedTuple):
    """Columns that the end of a transaction determines; `commit_time` is None outside of transactions."""

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
    def from_stamps(cls, stamps: Sequence[TransactionStamp]) -> TransactionStamps:
        """Convert stamps to columns."""
        return cls(
            pa.array([stamp.commit_lsn.value for stamp in stamps], pa.int64()),
            pa.array([stamp.commit_time for stamp in stamps], pa.int64()),
            pa.array([stamp.xid for stamp in stamps], pa.int64()),
            pa.array([stamp.origin for stamp in stamps], pa.string()),
        )


def log_rows(
    body: pa.RecordBatch, stamps: TransactionStamps, counts: Sequence[int] | Ints, first_seq: int = 0
) -> pa.RecordBatch:
    """Rows (`ROWS_SCHEMA`) of consecutive transactions, of `counts` messages each.

    `first_seq` is the `seq` of the first row, if earlier rows of its transaction were already returned.
    """
    repeats = np.asarray(counts, dtype=np.int64)
    starts = np.cumsum(repeats) - repeats
    transaction_index = pa.array(np.repeat(np.arange(len(repeats)), repeats))
    seq = np.arange(body.num_rows) - np.repeat(starts, repeats) + first_seq
    columns = [
        *(column.take(transaction_index) for column in stamps),
        pa.array(seq.astype(np.int32)),
        *(body[name] for name in ("lsn", "kind", "relation_id", "relation_version", "message")),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS_SCHEMA)


def number_rows(bodies: Iterator[pa.RecordBatch], stamp: TransactionStamp) -> Iterator[pa.RecordBatch]:
    """Rows (`ROWS_SCHEMA`) of one transaction, whose messages come in several batches."""
    seq, stamps = 0, TransactionStamps.from_stamps([stamp])
    for body in bodies:
        yield log_rows(body, stamps, [body.num_rows], seq)
        seq += body.num_rows


def restamp_prepared(batch: pa.RecordBatch, stamp: TransactionStamp) -> pa.RecordBatch:
    """Rows that were stored at PREPARE, with the commit LSN, time and origin of COMMIT PREPARED."""
    commit_lsn = pa.repeat(pa.scalar(stamp.commit_lsn.value, pa.int64()), batch.num_rows)
    commit_time = pa.repeat(pa.scalar(stamp.commit_time, pa.int64()), batch.num_rows)
    columns = {"commit_lsn": commit_lsn, "commit_time": commit_time}
    if stamp.origin is not None:
        columns["origin"] = pc.fill_null(batch["origin"], stamp.origin)
    restamped = [columns.get(name, batch[name]) for name in batch.schema.names]
    return with_views(pa.RecordBatch.from_arrays(restamped, schema=batch.schema))


def expand_ranges(starts: Ints, stops: Ints) -> Ints:
    """All positions in the ranges `[start, stop)`, concatenated."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    positions: Ints = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)
    return positions


def _without_xid(data: ByteSlices, streamed: npt.NDArray[np.bool_]) -> ByteSlices:
    """The messages, those that are `streamed` without their transaction id: the kind takes its last byte."""
    dropped = np.where(streamed, _XID_BYTES, 0)
    starts, content = data.starts + dropped, data.content.copy()
    content[starts[streamed]] = data[streamed].first_bytes()
    return ByteSlices(content, starts, data.lengths - dropped)


def _uint32_after_kind(data: ByteSlices, where: npt.NDArray[np.bool_]) -> Ints:
    """The uint32 after the first byte of the messages selected by `where`, 0 for the others."""
    values = np.zeros(len(data), dtype=np.int64)
    values[where] = big_endian(data.content, data.starts[where] + 1, 4)
    return values


def _relation_ids(messages: ByteSlices, of_row: npt.NDArray[np.bool_]) -> Ints:
    if (messages.lengths[of_row] < _RELATION_END).any():
        raise InvalidMessage("change without relation", rule="R1.2")
    return _uint32_after_kind(messages, of_row)
