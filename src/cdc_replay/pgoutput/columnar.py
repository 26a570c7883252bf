"""Arrow batch of messages → Arrow batch of changes, without a Python loop per message or value.

The new columns are built as Arrow buffers. `old` is a list of texts, `old_kinds` a text with one character
per list element, so that the two share offsets and validity (likewise `new`). Three changes, the second
without old tuple:

    row        0        1      2
    offsets    0        2      2          4
    kinds      t    n          t    t          characters of old_kinds; t: not NULL
    values     "a"  -          ""   "bc"       value offsets 0 1 1 1 3 into the bytes "abc"

TRUNCATE is rare and uses the reference reader; logical messages are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Never

import numpy as np
import pyarrow as pa

from cdc_replay.arrow.arrays import (
    Bools,
    Bytes,
    Int32s,
    Int64s,
    int_array,
    offsets_from_lengths,
    string_array,
    text_buffers,
    text_lists,
)
from cdc_replay.arrow.frame_schema import arrow_schema
from cdc_replay.arrow.version_index import CatalogVersions
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.frames import CHANGES, ChangeKind
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import Relation
from cdc_replay.pgoutput.kernels import HEADER_BYTES, Fault, copy_values, locate_tuples
from cdc_replay.pgoutput.messages import MessageType, Truncate, TupleKind
from cdc_replay.pgoutput.reader import decode

CHANGES_SCHEMA: Final = arrow_schema(CHANGES)
"""The columns of CHANGES in Arrow's types."""

PROBLEMS: Final[dict[Fault, tuple[str, str]]] = {
    Fault.ENDS_EARLY: ("message ends too early", "R1.2"),
    Fault.BYTES_LEFT: ("bytes after the end of the message", "R1.2"),
    Fault.OTHER_TYPE: ("message type differs from the log's column kind", "R1.2"),
    Fault.OTHER_RELATION: ("relation differs from the log's column relation_id", "R1.2"),
    Fault.UNKNOWN_TUPLE: ("unknown tuple", "R1.2"),
    Fault.NEGATIVE_COUNT: ("negative number of columns", "R1.4"),
    Fault.OTHER_COUNT: ("number of columns differs from the relation version's", "R1.4"),
    Fault.UNKNOWN_KIND: ("unknown kind of value", "R1.4"),
    Fault.BINARY_VALUE: ("value in binary format, which the log must not be captured with", "R1.4"),
    Fault.NEGATIVE_LENGTH: ("negative length of a value", "R1.4"),
}
"""The error text and the rule of each fault."""

_TRUNCATE: Final = ord(MessageType.TRUNCATE.value)
_MESSAGE: Final = ord(MessageType.MESSAGE.value)
_KINDS: Final = np.array([*(ord(kind.value) for kind in ChangeKind), _MESSAGE], dtype=np.uint8)
_TEXT: Final = ord(TupleKind.TEXT.value)
_LENGTH_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class ChangeDecoder:
    """Decodes the changes of one window, batch by batch.

    `versions` is sorted; `relation_ids` and `column_counts` are in the same order.
    """

    window: Window
    versions: Int64s
    relation_ids: Int64s
    column_counts: Int64s
    catalogs: CatalogVersions

    @classmethod
    def from_relations(
        cls, window: Window, relations: Mapping[int, Relation], catalogs: Sequence[tuple[int, int]]
    ) -> ChangeDecoder:
        """Build from `relations` by version, and catalog versions as for `CatalogVersions.of`."""
        ordered = sorted(relations.items())
        return cls(
            window=window,
            versions=np.array([version for version, _ in ordered], dtype=np.int64),
            relation_ids=np.array([relation.id for _, relation in ordered], dtype=np.int64),
            column_counts=np.array([len(relation.columns) for _, relation in ordered], dtype=np.int64),
            catalogs=CatalogVersions.from_positions(catalogs),
        )

    def decode(self, log: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of `log` (in LOG columns) whose commit LSN is in the window, in CHANGES columns.

        The order is kept; a TRUNCATE becomes one row per relation, logical messages are skipped.

        Raises:
            InvalidMessage: if a message is not well-formed, or contradicts its row or relation version; the
                text names row and offset.
        """
        batch = _LogBatch.from_rows(log)
        is_in_window = self._in_window(batch)
        is_truncate = batch.kinds == _TRUNCATE
        changes = self._row_changes(
            batch, np.flatnonzero(is_in_window & ~is_truncate & (batch.kinds != _MESSAGE))
        )
        truncate_rows = np.flatnonzero(is_in_window & is_truncate)
        if not len(truncate_rows):
            return changes
        combined = pa.concat_batches([changes, self._truncate_changes(batch, truncate_rows)])
        return combined.sort_by([("commit_lsn", "ascending"), ("seq", "ascending")])

    def _in_window(self, batch: _LogBatch) -> Bools:
        commit_lsns = batch.int_column("commit_lsn")
        return (commit_lsns > self.window.after.value) & (commit_lsns <= self.window.upto.value)

    def _row_changes(self, batch: _LogBatch, rows: Int64s) -> pa.RecordBatch:
        offsets, data = text_buffers(batch.log.column("message"))
        starts = np.zeros((len(rows), 2), dtype=np.int64)
        expected = self._expected(batch, rows)
        fault, index, offset, old_bytes, new_bytes = locate_tuples(data, offsets, rows, expected, starts)
        if fault:
            batch.refuse(rows[index], offset, *PROBLEMS[Fault(fault)])
        old, new = (
            _Tuples.copy_from(data, np.ascontiguousarray(starts[:, side]), expected[:, 2], text_bytes)
            for side, text_bytes in enumerate((old_bytes, new_bytes))
        )
        for tuples in (old, new):
            if (bad_value := tuples.first_invalid_utf8()) is not None:
                index, position = bad_value
                batch.refuse(rows[index], position - offsets[rows[index]], "value is not UTF-8", "R1.11")
        columns = batch.shared_columns(rows) | {
            "catalog_version": self._catalog_versions(batch, rows),
            "old_kind": old.tuple_kinds(),
            "old": old.value_lists(),
            "old_kinds": old.kind_texts(),
            "new": new.value_lists(),
            "new_kinds": new.kind_texts(),
        }
        return _batch(columns, len(rows))

    def _expected(self, batch: _LogBatch, rows: Int64s) -> Int64s:
        relation_ids = batch.int_column("relation_id")[rows]
        versions = batch.int_column("relation_version")[rows]
        indexes = np.searchsorted(self.versions, versions)
        is_known = indexes < len(self.versions)
        indexes[~is_known] = 0
        if len(self.versions):
            is_known &= (self.versions[indexes] == versions) & (self.relation_ids[indexes] == relation_ids)
        if not is_known.all():
            row = np.flatnonzero(~is_known)[0]
            problem = f"relation {relation_ids[row]} has no known version {versions[row]}"
            batch.refuse(rows[row], 0, problem, "R1.4")
        counts = self.column_counts[indexes]
        return np.stack([batch.kinds[rows].astype(np.int64), relation_ids, counts], axis=1)

    def _catalog_versions(self, batch: _LogBatch, rows: Int64s) -> pa.Array:
        return pa.array(
            self.catalogs.indexes(batch.int_column("commit_lsn")[rows], batch.int_column("lsn")[rows])
        )

    def _truncate_changes(self, batch: _LogBatch, rows: Int64s) -> pa.RecordBatch:
        messages = [batch.truncate(row) for row in rows]
        repeated = np.repeat(rows, [len(message.relations) for message in messages])
        columns = batch.shared_columns(repeated) | {
            "relation_id": pa.array(
                [relation for message in messages for relation in message.relations], pa.int64()
            ),
            "relation_version": pa.nulls(len(repeated), pa.int64()),
            "catalog_version": self._catalog_versions(batch, repeated),
            "truncate_flags": pa.array(
                [int(message.flags) for message in messages for _ in message.relations], pa.int32()
            ),
        }
        return _batch(columns, len(repeated))


@dataclass(frozen=True, slots=True)
class _LogBatch:
    """A batch of LOG rows; `kinds` holds the message byte of each."""

    log: pa.RecordBatch
    kinds: Bytes

    @classmethod
    def from_rows(cls, log: pa.RecordBatch) -> _LogBatch:
        kind = log.column("kind")
        offsets, data = text_buffers(kind)
        batch = cls(log, data[offsets[0] : offsets[-1]])
        is_known = np.diff(offsets) == 1
        if is_known.all():
            is_known = np.isin(batch.kinds, _KINDS)
        if not is_known.all():
            row = int(np.flatnonzero(~is_known)[0])
            batch.refuse(row, 0, f'unknown kind "{kind[row]}" in the log', "R1.2")
        return batch

    def int_column(self, name: str) -> Int64s:
        """A column of integers, 0 for NULL."""
        return int_array(self.log.column(name))

    def shared_columns(self, rows: Int64s) -> dict[str, pa.Array]:
        """The columns that LOG and CHANGES share, of `rows`."""
        common = self.log.select([name for name in CHANGES.names if name in self.log.schema.names])
        if not np.array_equal(rows, np.arange(common.num_rows)):
            common = common.take(pa.array(rows, pa.int64()))
        return dict(zip(common.schema.names, common.columns, strict=True))

    def truncate(self, row: int) -> Truncate:
        """Decode a row of kind T."""
        try:
            message = decode(self._message(row))
        except InvalidMessage as error:
            raise InvalidMessage(
                f"{error.message}, row {row}", detail=self._describe_row(row), rule=error.rule
            ) from error
        if not isinstance(message, Truncate):
            self.refuse(row, 0, *PROBLEMS[Fault.OTHER_TYPE])
        return message

    def refuse(self, row: int, offset: int, problem: str, rule: str) -> Never:
        raise InvalidMessage(
            f"invalid pgoutput message: {problem} at offset {offset}, row {row}",
            detail=self._describe_row(row),
            rule=rule,
        )

    def _describe_row(self, row: int) -> str:
        commit_lsn, seq = (self.log.column(name)[row].as_py() for name in ("commit_lsn", "seq"))
        return (
            f"Row {row} is message {seq} of the transaction that commits at {Lsn(commit_lsn or 0)}"
            f" and has {len(self._message(row))} bytes."
        )

    def _message(self, row: int) -> bytes:
        message: bytes | None = self.log.column("message")[row].as_py()
        return message or b""


@dataclass(frozen=True, slots=True)
class _Tuples:
    """The old or the new tuples of a batch of row changes, as buffers.

    `starts` are the positions of their kinds (K, O, N) in `data`, 0 for none. The columns of a row are
    `offsets[row]` to `offsets[row + 1]` in `kinds` and `values`.
    """

    data: Bytes
    starts: Int64s
    offsets: Int32s
    kinds: Bytes
    values: pa.StringArray

    @classmethod
    def copy_from(cls, data: Bytes, starts: Int64s, counts: Int64s, text_bytes: int) -> _Tuples:
        """Copy the located tuples, with `counts` columns and `text_bytes` bytes of text in total.

        Nothing exceeds 32 bits: each column takes at least a byte of a message, and the messages of a batch
        are an Arrow array with 32-bit offsets.
        """
        offsets = offsets_from_lengths(np.where(starts > 0, counts, 0))
        kinds = np.empty(offsets[-1], dtype=np.uint8)
        value_offsets = np.zeros(len(kinds) + 1, dtype=np.int32)
        values = np.empty(text_bytes, dtype=np.uint8)
        copy_values(data, starts, offsets, kinds, value_offsets, values)
        return cls(data, starts, offsets, kinds, string_array(value_offsets, values, kinds == _TEXT))

    def tuple_kinds(self) -> pa.StringArray:
        """K, O or N per row, NULL where there is no tuple."""
        sent = self.starts > 0
        return string_array(offsets_from_lengths(sent.astype(np.int32)), self.data[self.starts[sent]], sent)

    def value_lists(self) -> pa.ListArray:
        """The values per row, NULL where there is no tuple."""
        return text_lists(self.offsets, self.values, self.starts > 0)

    def kind_texts(self) -> pa.StringArray:
        """One character per value and row, NULL where there is no tuple."""
        return string_array(self.offsets, self.kinds, self.starts > 0)

    def first_invalid_utf8(self) -> tuple[int, int] | None:
        """Row and position in `data` of the first value that is not UTF-8."""
        try:
            self.values.validate(full=True)
        except pa.ArrowInvalid:
            bad_index = next(index for index, value in enumerate(self.values) if not _is_utf8(value))
            row = int(np.searchsorted(self.offsets, bad_index, side="right")) - 1
            position = self.starts[row] + HEADER_BYTES
            for index in range(self.offsets[row], bad_index):
                sent = self.kinds[index] == _TEXT
                position += 1 + (_LENGTH_BYTES + len(self.values[index].as_buffer()) if sent else 0)
            return row, int(position) + 1 + _LENGTH_BYTES
        return None


def _is_utf8(value: pa.StringScalar) -> bool:
    if not value.is_valid:
        return True
    try:
        value.as_buffer().to_pybytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _batch(columns: Mapping[str, pa.Array], rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [columns.get(field.name, pa.nulls(rows, field.type)) for field in CHANGES_SCHEMA],
        schema=CHANGES_SCHEMA,
    )
