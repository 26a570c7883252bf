"""Capture takes a damaged stream as the stream that it is, or refuses it: it never guesses and never crashes.

A stream is damaged in one or two messages: bytes of a message that is not a row, or the order of messages.
Then the assembler of capture and the readable one of `assembly` must agree: the same rows of the log, or both
refuse. (Rows themselves are looked at when they are decoded, so damaged rows are no business of capture.)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from cdc_replay.arrow.byte_slices import ByteSlices
from cdc_replay.capture.plain_transactions import MIN_TRANSACTIONS
from cdc_replay.capture.transactions import TransactionAssembler
from cdc_replay.changelog.prepared_transactions import PreparedTransactions
from cdc_replay.changelog.storage import Location
from cdc_replay.errors import CdcReplayError, InvalidMessage
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.relation import QualifiedName, RelationColumn, RelationId, ReplicaIdentity
from cdc_replay.pgoutput import messages as m
from cdc_replay.postgres.peek import RawMessages
from unit.pgoutput.assembly import Assembly, Row
from unit.pgoutput.examples import EXAMPLES
from unit.pgoutput.mutation import mutants
from unit.pgoutput.wire import encode

SEED: Final = 20130101
TABLE: Final = RelationId(5)
TIME: Final = 1_700_000_000_000_000
LAST_TIME: Final = 2**63 - 1
ROWS: Final = frozenset(b"IUDM")
"""Messages that capture does not read."""


def relation(xid: int | None = None, *names: str) -> m.RelationMessage:
    columns = tuple(RelationColumn(name, 25, -1, is_key=False) for name in names or ("a",))
    return m.RelationMessage(xid, TABLE, QualifiedName("s", "t"), ReplicaIdentity.DEFAULT, columns)


def insert(text: str, xid: int | None = None) -> m.Insert:
    return m.Insert(xid, TABLE, m.TupleData((m.TupleKind.TEXT,), (text.encode(),)))


class Writer:
    """Numbers transactions and positions while a stream is written down."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def ordinary(self, *messages: m.Message) -> Iterator[m.Message]:
        at, xid = self._next()
        yield m.Begin(Lsn(at), TIME, xid)
        yield from messages
        yield m.Commit(Lsn(at), Lsn(at + 8), TIME)

    def streamed(self, *, is_prepared: bool) -> Iterator[m.Message]:
        """Two large transactions in blocks between each other, parts of the first rolled back."""
        (_, first), (_, second) = self._next(), self._next()
        subxid = first + 50
        yield from block(
            first, relation(first), insert("a", first), insert("rolled back", subxid), first=True
        )
        yield from block(second, relation(second, "wide"), insert("b", second), first=True)
        yield from self.ordinary(insert("between"))
        yield m.StreamAbort(first, subxid, None, None)
        yield from block(first, relation(first), m.Truncate(first, m.TruncateFlag(0), (TABLE,)), first=False)
        at, _ = self._next()
        if is_prepared:
            yield m.StreamPrepare(Lsn(at), Lsn(at + 8), TIME, first, "g")
            at, _ = self._next()
            yield m.CommitPrepared(Lsn(at), Lsn(at + 8), TIME, first, "g")
        else:
            yield m.StreamCommit(first, Lsn(at), Lsn(at + 8), TIME)
        yield m.StreamAbort(second, second, None, None)

    def prepared(self, *, is_committed: bool) -> Iterator[m.Message]:
        at, xid = self._next()
        facts = (Lsn(at), Lsn(at + 8), TIME, xid, "gid")
        yield m.BeginPrepare(*facts)
        yield m.Origin(Lsn(9), "elsewhere")
        yield insert("prepared")
        yield m.Prepare(*facts)
        yield from self.ordinary(insert("in between"))
        at, _ = self._next()
        if is_committed:
            yield m.CommitPrepared(Lsn(at), Lsn(at + 8), TIME, xid, "gid")
        else:
            yield m.RollbackPrepared(facts[1], Lsn(at + 8), TIME, TIME, xid, "gid")

    def _next(self) -> tuple[int, int]:
        number = next(self._numbers)
        return 100 * number, 700 + number


def block(xid: int, *messages: m.Message, first: bool) -> Iterator[m.Message]:
    yield m.StreamStart(xid, is_first=first)
    yield from messages
    yield m.StreamStop()


def stream() -> list[m.Message]:
    """Transactions of every kind, and enough small ones in a row to be taken many at once."""
    writer = Writer()
    first = writer.ordinary(relation(), m.TypeMessage(None, 20000, QualifiedName("s", "y")), insert("a"))
    message = m.LogicalMessage(None, is_transactional=False, lsn=Lsn(1), prefix="p", content=b"c")
    small = [writer.ordinary(insert(str(number)), insert("")) for number in range(MIN_TRANSACTIONS + 2)]
    both = [
        first, *small, writer.ordinary(m.Origin(Lsn(0), "elsewhere"), insert("o")),
        writer.streamed(is_prepared=False), writer.prepared(is_committed=True), [message],
        writer.prepared(is_committed=False), writer.streamed(is_prepared=True),
        writer.ordinary(relation(None, "a", "b"), insert("wider")),
    ]  # fmt: skip
    return list(itertools.chain.from_iterable(both))


def written(messages: Sequence[m.Message]) -> list[Row]:
    """What the slot function returns for them: the LSN of an end is that of the end (R1.22)."""
    rows: list[Row] = []
    at = 0
    for message in messages:
        at = min(getattr(message, "end_lsn", Lsn(at + 1)).value, 2**63 - 1)
        in_stream = isinstance(message, m.StreamedMessage) and message.xid is not None
        rows.append((at, 0, encode(message, in_stream=in_stream)))
    return rows


STREAM: Final = stream()
WHOLE: Final = written(STREAM)


def captured(rows: Sequence[Row], cuts: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """The rows of the log that capture makes of a stream that arrives in pieces."""
    result: list[dict[str, Any]] = []
    with TransactionAssembler(ZERO, PreparedTransactions(Location.parse(str(folder)))) as assembler:
        for begin, end in itertools.pairwise([0, *cuts, len(rows)]):
            for batch in assembler.feed(raw(rows[begin:end])):
                batch.validate(full=True)
                result += batch.to_pylist()
    return result


def raw(rows: Sequence[Row]) -> RawMessages:
    return RawMessages(
        np.array([lsn for lsn, _, _ in rows], dtype=np.int64),
        np.array([xid for _, xid, _ in rows], dtype=np.int64),
        ByteSlices.from_values([data for *_, data in rows]),
    )


def damaged(randomness: np.random.Generator) -> list[Row]:
    """The stream with one or two messages damaged, dropped, doubled or exchanged."""
    rows = list(WHOLE)
    for _ in range(randomness.integers(1, 3)):
        place, other = randomness.integers(len(rows), size=2).tolist()
        lsn, xid, data = rows[place]
        match randomness.integers(6):
            case 0:
                del rows[place]
            case 1:
                rows.insert(other, rows[place])
            case 2:
                rows[place], rows[other] = rows[other], rows[place]
            case _ if data[0] in ROWS:
                del rows[place]
            case _:
                [mutant] = mutants([data], randomness, 1)
                rows[place] = (lsn, xid, mutant)
    return rows


def check_streams(count: int, folder: Path, seed: int = SEED) -> Counter[str]:
    """Damage `count` streams; returns how many ended how."""
    outcomes: Counter[str] = Counter()
    for number in range(count):
        randomness = np.random.default_rng([seed, number])
        rows = damaged(randomness)
        cuts = sorted(randomness.integers(len(rows) + 1, size=randomness.integers(4)).tolist())
        outcomes[check_stream(rows, cuts, folder / str(number), number)] += 1
    return outcomes


def check_stream(rows: Sequence[Row], cuts: Sequence[int], folder: Path, number: int) -> str:
    """Both assemblers accept the stream with the same rows, or both refuse it."""
    assembly = Assembly(keeps_messages=False)
    refused: InvalidMessage | None = None
    try:
        assembly.feed(rows)
    except InvalidMessage as error:
        refused = error
    try:
        result = captured(rows, cuts, folder)
    except CdcReplayError as error:
        if refused is None and "no Relation message has described" in error.message:
            return "undescribed"  # in what is rolled back: capture need not see that it is
        if refused is None:
            pytest.fail(f"stream {number}: capture refuses what is right: {error}")
        return "refused"
    if refused is None:
        assert result == assembly.log().to_pylist(), f"stream {number}"
        return "accepted"
    # A block that does not start or end makes rows of bytes that are none.
    last = rows[len(assembly.messages)][2] if len(assembly.messages) < len(rows) else b"\0"
    if last[:1] == b"M":
        return "message"  # one that is not of the event triggers is dropped, whatever it says
    if last[:1] and last[0] in ROWS and "invalid pgoutput message" in refused.message:
        return "rows"
    pytest.fail(f"stream {number}: capture accepts what is wrong: {refused}")


def test_undamaged_stream_is_accepted_in_any_batches(tmp_path: Path) -> None:
    for size in (1, 2, 3, 4, 5, 7, 11, 16, 32, len(WHOLE)):
        cuts = range(size, len(WHOLE), size)
        assert check_stream(WHOLE, cuts, tmp_path / str(size), size) == "accepted"


@pytest.mark.parametrize("kind", m.MessageType)
def test_message_of_another_type_is_rejected_or_gives_another_stream(
    kind: m.MessageType, tmp_path: Path
) -> None:
    """R9.1, R9.5: at each index, with position and transaction of the message that it replaces."""
    _, example = EXAMPLES[kind]
    for index in indexes_by_type():
        message = STREAM[index]
        facts = {
            field.name: getattr(message, field.name)
            for field in dataclasses.fields(example)
            if field.name in POSITION and getattr(message, field.name, None) is not None
        }
        other = dataclasses.replace(example, **facts)
        rows = written([*STREAM[:index], other, *STREAM[index + 1 :]])
        check_stream(rows, [], tmp_path / str(index), index)


def indexes_by_type() -> list[int]:
    """The index of one message for each sequence of three message types."""
    types = [None, *(message.type for message in STREAM), None]
    indexes = {
        neighbours: index for index, neighbours in enumerate(zip(types, types[1:], types[2:], strict=False))
    }
    return list(indexes.values())


POSITION: Final = {"commit_lsn", "prepare_lsn", "end_lsn", "prepare_end_lsn", "xid", "gid"}


@pytest.mark.parametrize("count", [1, MIN_TRANSACTIONS])
@pytest.mark.parametrize(
    ("end_lsn", "time", "problem"),
    [
        (Lsn(2**63), TIME, "a transaction ends at 80000000/0, beyond the largest WAL position"),
        (Lsn(2**64 - 1), TIME, "a transaction ends at FFFFFFFF/FFFFFFFF, beyond the largest WAL position"),
        (Lsn(10**6), LAST_TIME + 1, "time out of range at offset 18"),
    ],
)
def test_position_or_time_out_of_range_is_rejected(
    end_lsn: Lsn, time: int, problem: str, count: int, tmp_path: Path
) -> None:
    """R1.1: the log keeps both as signed numbers of 64 bits; of the last transaction of a run, or of one."""
    writer = Writer()
    good = [writer.ordinary(relation()), *(writer.ordinary(insert("a")) for _ in range(count - 1))]
    bad: list[m.Message] = [m.Begin(Lsn(1), TIME, 9), insert("b"), m.Commit(Lsn(1), end_lsn, time)]
    rows = written([*itertools.chain.from_iterable(good), *bad])
    with pytest.raises(InvalidMessage, match=problem):
        captured(rows, [], tmp_path)


def test_largest_time_is_accepted(tmp_path: Path) -> None:
    writer = Writer()
    small = [writer.ordinary(insert("a")) for _ in range(MIN_TRANSACTIONS)]
    last: list[m.Message] = [
        m.Begin(Lsn(1), LAST_TIME, 9),
        insert("b"),
        m.Commit(Lsn(1), Lsn(2**63 - 1), LAST_TIME),
    ]
    messages = [*writer.ordinary(relation()), *itertools.chain.from_iterable(small), *last]
    [*_, row] = captured(written(messages), [], tmp_path)
    assert (row["commit_lsn"], row["commit_time"]) == (2**63 - 1, LAST_TIME)


def test_damaged_stream_is_rejected_or_gives_another_stream(tmp_path: Path) -> None:
    outcomes = check_streams(300, tmp_path)
    assert outcomes.total() == 300
    assert {"accepted", "refused"} <= set(outcomes)


@pytest.mark.slow
def test_many_damaged_streams_are_rejected_or_give_another_stream(tmp_path: Path) -> None:
    assert check_streams(10_000, tmp_path, SEED + 1).total() == 10_000
