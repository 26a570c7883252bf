"""Damaged messages through both decoders, counted; a program of its own for runs with bounds checks.

What the two must agree on, for each damaged message:

| compiled decoder says                              | the reference reader                             |
|----------------------------------------------------|--------------------------------------------------|
| accepted                                           | accepts, with the same values                    |
| early end, bytes left, tuple, kind, count, length  | refuses, with the same problem at the same offset |
| other type, relation or number of columns, binary  | knows no row of the log: it accepts and the        |
|                                                    | message has that difference, or it refuses after  |
| not UTF-8                                          | accepts bytes that Python cannot decode either   |
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numba
import numpy as np
import pyarrow as pa
import pytest

from cdc_replay.changelog.segment import LOG_SCHEMA
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import Relation
from cdc_replay.pgoutput import messages as m
from cdc_replay.pgoutput.columnar import PROBLEMS, ChangeDecoder
from cdc_replay.pgoutput.kernels import Fault, locate_tuples
from cdc_replay.pgoutput.reader import decode
from unit.pgoutput.mutation import Mutants, mutants
from unit.pgoutput.wire import encode, relation

RowChange: TypeAlias = m.Insert | m.Update | m.Delete

SEED: Final = 20130101
BATCH: Final = 20_000
EVERYTHING: Final = Window(Lsn(0), Lsn(2**63 - 1))

T, N, U = m.TupleKind.TEXT, m.TupleKind.NULL, m.TupleKind.UNCHANGED


def row(*values: str | m.TupleKind) -> m.TupleData:
    """A tuple of texts, NULLs and unchanged values."""
    return m.TupleData(
        tuple(value if isinstance(value, m.TupleKind) else T for value in values),
        tuple(None if isinstance(value, m.TupleKind) else value.encode() for value in values),
    )


ROWS: Final = (
    (row(), row()),
    (row("1"), row("")),
    (row("42", N, U, ""), row("42", "ünï", U, N)),
    (row("7", *("abcd" * 3), N, U), row("8", *("efgh" * 3), U, "2013-01-01 05:15:00+00")),
)
"""An old and a new row per relation, of 0, 1, 4 and 15 columns."""


def tables() -> dict[int, Relation]:
    """A relation per line of `ROWS`, by version."""
    known = [relation(len(old.kinds), 16384 + number, number) for number, (old, _) in enumerate(ROWS)]
    return {table.version: table for table in known}


def row_changes(table: Relation) -> list[RowChange]:
    """Every form of a row change."""
    old, new = ROWS[table.version]
    changes: list[RowChange] = [m.Insert(None, table.id, new), m.Update(None, table.id, None, None, new)]
    for kind in m.OldTuple:
        changes += [m.Update(None, table.id, kind, old, new), m.Delete(None, table.id, kind, old)]
    return changes


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the compiled decoder says of one message; the offset is that of the fault."""

    fault: Fault
    offset: int


SAME: Final = {
    Fault.ENDS_EARLY: "message ends too early at offset",
    Fault.BYTES_LEFT: "bytes after the end of the message at offset",
    Fault.UNKNOWN_TUPLE: "unknown tuple",
    Fault.UNKNOWN_KIND: "unknown kind of value",
    Fault.NEGATIVE_COUNT: "negative count",
    Fault.NEGATIVE_LENGTH: "negative length",
}
"""Faults that the reference reader finds too, in its words."""

DIFFERENCES: Final[dict[Fault, Callable[[RowChange, Relation], bool]]] = {
    Fault.OTHER_RELATION: lambda change, table: change.relation != table.id,
    Fault.OTHER_COUNT: lambda change, table: any(
        len(sent.kinds) != len(table.columns) for sent in rows_of(change)
    ),
    Fault.BINARY_VALUE: lambda change, _: any(m.TupleKind.BINARY in sent.kinds for sent in rows_of(change)),
}
"""Faults that only a reader of the log can find: how they show in what the reference reader accepts."""


def rows_of(change: RowChange) -> list[m.TupleData]:
    """The old tuple, the new one, or both."""
    both = (getattr(change, "old", None), getattr(change, "new", None))
    return [sent for sent in both if sent is not None]


def reference(
    message: bytes, *, in_stream: bool = False, parallel: bool = False
) -> m.Message | InvalidMessage:
    """The reference reader's message, or why there is none."""
    try:
        return decode(message, in_stream=in_stream, streaming_parallel=parallel)
    except InvalidMessage as error:
        return error


def check_row_changes(count: int, seed: int = SEED) -> Counter[str]:
    """Damage `count` row changes; returns how many ended how.

    Raises:
        AssertionError: if the two decoders disagree about one; it names seed, batch and message.
    """
    outcomes: Counter[str] = Counter()
    for number, start in enumerate(range(0, count, BATCH)):
        table = tables()[number % len(ROWS)]
        changes = row_changes(table)
        randomness = np.random.default_rng([seed, number])
        damaged = mutants(list(map(encode, changes)), randomness, min(BATCH, count - start))
        outcomes += _Batch.of(damaged, table, changes).check()
    return outcomes


@dataclass(frozen=True, slots=True)
class _Batch:
    """Damaged changes of one table in the columns of the log; `kinds` are those before the damage."""

    damaged: Mutants
    table: Relation
    kinds: Sequence[str]
    log: pa.RecordBatch

    @classmethod
    def of(cls, damaged: Mutants, table: Relation, changes: Sequence[RowChange]) -> _Batch:
        kinds = [changes[base].type.value for base in damaged.bases]
        constants = {
            "commit_lsn": 100, "commit_time": 1, "xid": 700, "lsn": 50,
            "relation_id": table.id, "relation_version": table.version,
        }  # fmt: skip
        columns = {name: pa.repeat(pa.scalar(value), len(damaged)) for name, value in constants.items()}
        columns |= {
            "origin": pa.nulls(len(damaged), pa.string()),
            "seq": pa.array(np.arange(len(damaged), dtype=np.int32)),
            "kind": pa.array(kinds),
            "message": damaged.array(),
        }
        log = pa.RecordBatch.from_arrays([columns[name] for name in LOG_SCHEMA.names], schema=LOG_SCHEMA)
        return cls(damaged, table, kinds, log)

    def check(self) -> Counter[str]:
        verdicts = list(self.verdicts())
        good, no_text, values = [], [], []
        outcomes: Counter[str] = Counter()
        for index, (message, verdict) in enumerate(zip(self.damaged, verdicts, strict=True)):
            change = reference(message)
            self.agree(index, message, verdict, change)
            if verdict.fault:
                outcomes[verdict.fault.name] += 1
            elif isinstance(change, RowChange) and all(map(is_text, rows_of(change))):
                good.append(index)
                values.append(changed_values(change))
            else:
                no_text.append(index)
        self.check_first_refusal(verdicts, no_text)
        self.check_values(good, values)
        return outcomes + Counter(accepted=len(good), not_utf8=len(no_text))

    def verdicts(self) -> Iterator[Verdict]:
        """The compiled decoder's, each message being all that there is: its end is the buffer's."""
        first, starts = np.zeros(1, dtype=np.int64), np.zeros((1, 2), dtype=np.int64)
        facts = (self.table.id, len(self.table.columns))
        expected = {kind: np.array([(ord(kind), *facts)]) for kind in set(self.kinds)}
        ends = self.damaged.offsets.tolist()
        spans = np.zeros((len(self.damaged), 2), dtype=np.int32)
        spans[:, 1] = np.diff(self.damaged.offsets)
        for begin, end, span, kind in zip(ends, ends[1:], spans, self.kinds, strict=False):
            data = self.damaged.data[begin:end]
            fault, _, offset, _, _ = locate_tuples(data, span, first, expected[kind], starts)
            yield Verdict(Fault(fault), offset)

    def agree(self, index: int, message: bytes, verdict: Verdict, change: m.Message | InvalidMessage) -> None:
        """Check one message's verdict against the reference reader's."""
        table, kind = self.table, self.kinds[index]
        evidence = (message.hex(), verdict, change)
        if verdict.fault is Fault.OTHER_TYPE:
            assert message[0] != ord(kind), evidence
        elif verdict.fault in SAME:
            assert isinstance(change, InvalidMessage), evidence
            assert SAME[verdict.fault] in change.message, evidence
            assert change.message.endswith(f" at offset {verdict.offset}"), evidence
        elif isinstance(change, InvalidMessage):
            assert verdict.fault in DIFFERENCES, evidence
            assert int(change.message.rpartition(" ")[2]) >= verdict.offset, evidence
        else:
            assert isinstance(change, RowChange), evidence
            assert change.type.value == kind, evidence
            differs = [fault for fault, result in DIFFERENCES.items() if result(change, table)]
            assert verdict.fault in differs if verdict.fault else not differs, evidence

    def check_first_refusal(self, verdicts: Sequence[Verdict], no_text: Sequence[int]) -> None:
        """The decoder refuses the batch for its first faulty message, by its row and offset.

        Values that are not UTF-8 come last: it looks at them when all messages are well-formed.
        """
        faulty = next((index for index, verdict in enumerate(verdicts) if verdict.fault), None)
        if faulty is not None:
            problem, rule = PROBLEMS[verdicts[faulty].fault]
            with pytest.raises(InvalidMessage) as refused:
                self.decoded(self.log)
            assert refused.value.message.endswith(
                f"{problem} at offset {verdicts[faulty].offset}, row {faulty}"
            )
            assert refused.value.rule == rule
        if no_text:
            with pytest.raises(InvalidMessage, match=r"value is not UTF-8 at offset \d+, row \d+"):
                self.decoded(self.log.take(pa.array(no_text)))

    def check_values(self, good: Sequence[int], values: Sequence[tuple[object, ...]]) -> None:
        changes = self.decoded(self.log.take(pa.array(good, pa.int64())))
        columns = [changes.column(name).to_pylist() for name in ("old_kind", *_SIDES)]
        assert list(zip(*columns, strict=True)) == list(values)

    def decoded(self, log: pa.RecordBatch) -> pa.RecordBatch:
        return ChangeDecoder.from_relations(EVERYTHING, tables(), [(0, 0)]).decode(log)


_SIDES: Final = ("old_kinds", "old", "new_kinds", "new")


def changed_values(change: RowChange) -> tuple[object, ...]:
    """The columns `old_kind` and those of `_SIDES` for a change that the reference reader has read."""
    kind = getattr(change, "old_kind", None)
    values: list[object] = [kind and kind.value]
    for sent in (getattr(change, "old", None), getattr(change, "new", None)):
        values.append(sent and "".join(kind.value for kind in sent.kinds))
        values.append(sent and [None if value is None else value.decode() for value in sent.values])
    return tuple(values)


def is_text(values: m.TupleData) -> bool:
    """Python can decode all values as UTF-8."""
    try:
        for value in values.values:
            (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def bounds_are_checked() -> bool:
    """Compiled code checks array bounds in this process."""
    offsets, rows = np.array([0, 99], dtype=np.int32), np.zeros(1, dtype=np.int64)
    expected = np.array([[ord("I"), 16384, 1]])
    try:
        locate_tuples(np.zeros(0, dtype=np.uint8), offsets, rows, expected, np.zeros((1, 2), dtype=np.int64))
    except IndexError:
        return bool(numba.config.BOUNDSCHECK)
    return False


if __name__ == "__main__":
    if os.environ.get("NUMBA_BOUNDSCHECK") and not bounds_are_checked():
        sys.exit("array bounds are not checked")
    for outcome, times in check_row_changes(int(sys.argv[1])).most_common():
        sys.stdout.write(f"{outcome} {times}\n")
