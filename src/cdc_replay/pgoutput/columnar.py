"""Arrow batch of messages → Arrow batch of changes, without a Python loop per message or value.

The new columns are built as Arrow's own buffers. Of `old` and `old_kinds` (and likewise of `new`), one is a
list of texts, the other a text with one character per element of the list, so that the two share offsets and
validity. Three changes, the second of which has no old tuple:

    row        0        1      2
    offsets    0        2      2          4
    kinds      t    n          t    t          the characters of old_kinds, and which values are not NULL
    values     "a"  -          ""   "bc"       value offsets 0 1 1 1 3 into the bytes "abc"

TRUNCATE is rare and goes through the reference reader; logical messages are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Never

import numpy as np
import pyarrow as pa

from cdc_replay.arrow.arrays import Bools, Bytes, Int32s, Int64s, bitmap, int_array, text_buffers
from cdc_replay.arrow.version_index import CatalogVersions
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.frames import CHANGES, ChangeKind
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import Relation
from cdc_replay.pgoutput.kernels import HEADER_BYTES, Fault, copy_values, locate_tuples
from cdc_replay.pgoutput.messages import MessageType, Truncate, TupleKind
from cdc_replay.pgoutput.reader import decode

_VALUES: Final = pa.list_(pa.string())
_ARROW_TYPES: Final = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "string": pa.string(),
    "array<string>": _VALUES,
}
CHANGES_SCHEMA: Final = pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in CHANGES.columns])
"""The columns of CHANGES in Arrow's types."""

PROBLEMS: Final[dict[Fault, tuple[str, str]]] = {
    Fault.ENDS_EARLY: ("message ends too early", "R1.2"),
    Fault.BYTES_LEFT: ("bytes behind the end of the message", "R1.2"),
    Fault.OTHER_TYPE: ("message type differs from the log's column kind", "R1.2"),
    Fault.OTHER_RELATION: ("relation differs from the log's column relation_id", "R1.2"),
    Fault.UNKNOWN_TUPLE: ("unknown tuple", "R1.2"),
    Fault.NEGATIVE_COUNT: ("negative number of columns", "R1.4"),
    Fault.OTHER_COUNT: ("number of columns differs from the relation version's", "R1.4"),
    Fault.UNKNOWN_KIND: ("unknown kind of value", "R1.4"),
    Fault.BINARY_VALUE: ("value in binary format, which the log must not be captured with", "R1.4"),
    Fault.NEGATIVE_LENGTH: ("negative length of a value", "R1.4"),
}
"""What is said of a fault, and the rule."""

_TRUNCATE: Final = ord(MessageType.TRUNCATE.value)
_MESSAGE: Final = ord(MessageType.MESSAGE.value)
_KINDS: Final = np.array([*(ord(kind.value) for kind in ChangeKind), _MESSAGE], dtype=np.uint8)
_TEXT: Final = ord(TupleKind.TEXT.value)
_LENGTH_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class ChangeDecoder:
    """Decodes the changes of one window; made once, used for every batch.

    The arrays `versions`, `relation_ids` and `column_counts` go together and are in the order of `versions`.
    """

    window: Window
    versions: Int64s
    relation_ids: Int64s
    column_counts: Int64s
    catalogs: CatalogVersions

    @classmethod
    def of(
        cls, window: Window, relations: Mapping[int, Relation], catalogs: Sequence[tuple[int, int]]
    ) -> ChangeDecoder:
        """For `relations` by version, and `catalogs` as `CatalogVersions.from_positions` takes them."""
        known = sorted(relations.items())
        return cls(
            window=window,
            versions=np.array([version for version, _ in known], dtype=np.int64),
            relation_ids=np.array([relation.id for _, relation in known], dtype=np.int64),
            column_counts=np.array([len(relation.columns) for _, relation in known], dtype=np.int64),
            catalogs=CatalogVersions.from_positions(catalogs),
        )

    def changes(self, log: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of `log` (in LOG columns) whose commit LSN is in the window, in CHANGES columns.

        They stay in order; a TRUNCATE is one row per relation, logical messages are left out.

        Raises:
            InvalidMessage: if a message is not well-formed, or does not agree with the other columns of its
                row or with its relation version. The text names the row of `log` and the offset.
        """
        batch = _LogBatch.of(log)
        wanted = self._in_window(batch)
        is_truncate = batch.kinds == _TRUNCATE
        changes = self._row_changes(batch, np.flatnonzero(wanted & ~is_truncate & (batch.kinds != _MESSAGE)))
        truncated = np.flatnonzero(wanted & is_truncate)
        if not len(truncated):
            return changes
        both = pa.concat_batches([changes, self._truncates(batch, truncated)])
        return both.sort_by([("commit_lsn", "ascending"), ("seq", "ascending")])

    def _in_window(self, batch: _LogBatch) -> Bools:
        commit_lsns = batch.numbers("commit_lsn")
        return (commit_lsns > self.window.after.value) & (commit_lsns <= self.window.upto.value)

    def _row_changes(self, batch: _LogBatch, rows: Int64s) -> pa.RecordBatch:
        offsets, data = text_buffers(batch.log.column("message"))
        starts = np.zeros((len(rows), 2), dtype=np.int64)
        expected = self._expected(batch, rows)
        fault, index, offset, old_bytes, new_bytes = locate_tuples(data, offsets, rows, expected, starts)
        if fault:
            batch.refuse(rows[index], offset, *PROBLEMS[Fault(fault)])
        old, new = (
            _Tuples.copied(data, np.ascontiguousarray(starts[:, side]), expected[:, 2], text_bytes)
            for side, text_bytes in enumerate((old_bytes, new_bytes))
        )
        for tuples in (old, new):
            if (bad := tuples.not_utf8()) is not None:
                index, position = bad
                batch.refuse(rows[index], position - offsets[rows[index]], "value is not UTF-8", "R1.11")
        columns = batch.taken(rows) | {
            "catalog_version": self._catalog_versions(batch, rows),
            "old_kind": old.letters(),
            "old": old.value_lists(),
            "old_kinds": old.kind_texts(),
            "new": new.value_lists(),
            "new_kinds": new.kind_texts(),
        }
        return _batch(columns, len(rows))

    def _expected(self, batch: _LogBatch, rows: Int64s) -> Int64s:
        """Per row: message type, relation, number of columns (R1.4)."""
        relation_ids = batch.numbers("relation_id")[rows]
        versions = batch.numbers("relation_version")[rows]
        places = np.searchsorted(self.versions, versions)
        known = places < len(self.versions)
        places[~known] = 0
        if len(self.versions):
            known &= (self.versions[places] == versions) & (self.relation_ids[places] == relation_ids)
        if not known.all():
            row = np.flatnonzero(~known)[0]
            problem = f"relation {relation_ids[row]} has no known version {versions[row]}"
            batch.refuse(rows[row], 0, problem, "R1.4")
        counts = self.column_counts[places]
        return np.stack([batch.kinds[rows].astype(np.int64), relation_ids, counts], axis=1)

    def _catalog_versions(self, batch: _LogBatch, rows: Int64s) -> pa.Array:
        return pa.array(self.catalogs.indexes(batch.numbers("commit_lsn")[rows], batch.numbers("lsn")[rows]))

    def _truncates(self, batch: _LogBatch, rows: Int64s) -> pa.RecordBatch:
        messages = [batch.truncate(row) for row in rows]
        repeated = np.repeat(rows, [len(message.relations) for message in messages])
        columns = batch.taken(repeated) | {
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
    def of(cls, log: pa.RecordBatch) -> _LogBatch:
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

    def numbers(self, name: str) -> Int64s:
        """A column of integers, 0 for NULL."""
        return int_array(self.log.column(name))

    def taken(self, rows: Int64s) -> dict[str, pa.Array]:
        """What LOG and CHANGES have in common, of `rows`."""
        common = self.log.select([name for name in CHANGES.names if name in self.log.schema.names])
        if not np.array_equal(rows, np.arange(common.num_rows)):
            common = common.take(pa.array(rows, pa.int64()))
        return dict(zip(common.schema.names, common.columns, strict=True))

    def truncate(self, row: int) -> Truncate:
        """The message of a row of kind T."""
        try:
            message = decode(self._message(row))
        except InvalidMessage as error:
            raise InvalidMessage(
                f"{error.message}, row {row}", detail=self._where(row), rule=error.rule
            ) from error
        if not isinstance(message, Truncate):
            self.refuse(row, 0, *PROBLEMS[Fault.OTHER_TYPE])
        return message

    def refuse(self, row: int, offset: int, problem: str, rule: str) -> Never:
        raise InvalidMessage(
            f"invalid pgoutput message: {problem} at offset {offset}, row {row}",
            detail=self._where(row),
            rule=rule,
        )

    def _where(self, row: int) -> str:
        commit_lsn, seq = (self.log.column(name)[row].as_py() for name in ("commit_lsn", "seq"))
        return (
            f"Row {row} is message {seq} of the transaction that commits at {Lsn(commit_lsn or 0)}"
            f" and has {len(self._message(row))} bytes."
        )

    def _message(self, row: int) -> bytes:
        """The bytes of a row, none if it is NULL."""
        message: bytes | None = self.log.column("message")[row].as_py()
        return message or b""


@dataclass(frozen=True, slots=True)
class _Tuples:
    """The old tuples, or the new ones, of a batch of row changes: what Arrow's arrays are made of.

    `starts` are the positions of their letters in `data`, 0 where a row has none. The columns of a row are
    `offsets[row]` to `offsets[row + 1]` in `kinds` and `values`.
    """

    data: Bytes
    starts: Int64s
    offsets: Int32s
    kinds: Bytes
    values: pa.StringArray

    @classmethod
    def copied(cls, data: Bytes, starts: Int64s, counts: Int64s, text_bytes: int) -> _Tuples:
        """The located tuples, with `counts` columns and `text_bytes` bytes of text in all.

        Nothing exceeds 32 bits: each column takes at least a byte of a message, and the messages of a batch
        are an Arrow array with 32-bit offsets.
        """
        offsets = np.zeros(len(starts) + 1, dtype=np.int32)
        np.cumsum(np.where(starts > 0, counts, 0), out=offsets[1:])
        kinds = np.empty(offsets[-1], dtype=np.uint8)
        value_offsets = np.zeros(len(kinds) + 1, dtype=np.int32)
        values = np.empty(text_bytes, dtype=np.uint8)
        copy_values(data, starts, offsets, kinds, value_offsets, values)
        array = pa.StringArray.from_buffers(
            len(kinds), pa.py_buffer(value_offsets), pa.py_buffer(values), bitmap(kinds == _TEXT)
        )
        return cls(data, starts, offsets, kinds, array)

    def letters(self) -> pa.StringArray:
        """K, O or N per row, NULL where there is no tuple."""
        sent = self.starts > 0
        offsets = np.zeros(len(sent) + 1, dtype=np.int32)
        np.cumsum(sent, out=offsets[1:])
        letters = self.data[self.starts[sent]]
        return pa.StringArray.from_buffers(
            len(sent), pa.py_buffer(offsets), pa.py_buffer(letters), bitmap(sent)
        )

    def value_lists(self) -> pa.ListArray:
        """The values per row, NULL where there is no tuple."""
        buffers = [bitmap(self.starts > 0), pa.py_buffer(self.offsets)]
        return pa.Array.from_buffers(_VALUES, len(self.starts), buffers, children=[self.values])

    def kind_texts(self) -> pa.StringArray:
        """One character per value and row, NULL where there is no tuple."""
        return pa.StringArray.from_buffers(
            len(self.starts), pa.py_buffer(self.offsets), pa.py_buffer(self.kinds), bitmap(self.starts > 0)
        )

    def not_utf8(self) -> tuple[int, int] | None:
        """Row and position in `data` of the first value that is not UTF-8."""
        try:
            self.values.validate(full=True)
        except pa.ArrowInvalid:
            bad = next(index for index, value in enumerate(self.values) if not _is_utf8(value))
            row = int(np.searchsorted(self.offsets, bad, side="right")) - 1
            position = self.starts[row] + HEADER_BYTES
            for index in range(self.offsets[row], bad):
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
    """The columns in the order of CHANGES, those that are not given being NULL."""
    return pa.RecordBatch.from_arrays(
        [columns.get(field.name, pa.nulls(rows, field.type)) for field in CHANGES_SCHEMA],
        schema=CHANGES_SCHEMA,
    )
