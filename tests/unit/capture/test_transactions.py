"""Messages → transactions: what is new is kept once, what pgoutput never sends is refused."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cdc_replay.capture.transactions import Assembler
from cdc_replay.changelog.prepared import PreparedTransactions
from cdc_replay.changelog.storage import Location
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.postgres.replication import RawMessages

RELATION = (
    b"R" + struct.pack(">I", 5) + b"s\0t\0d" + struct.pack(">hB", 1, 1) + b"id\0" + struct.pack(">Ii", 23, -1)
)


def begin(end_lsn: int) -> bytes:
    return b"B" + struct.pack(">qqI", end_lsn - 8, 0, 7)


def commit(end_lsn: int) -> bytes:
    return b"C" + struct.pack(">Bqqq", 0, end_lsn - 8, end_lsn, 0)


def insert(value: str, relation: int = 5) -> bytes:
    return b"I" + struct.pack(">IchcI", relation, b"N", 1, b"t", len(value)) + value.encode()


def in_stream(message: bytes, xid: int) -> bytes:
    """R1.9: the transaction id comes first."""
    return message[:1] + struct.pack(">I", xid) + message[1:]


def stream_start(xid: int, *, first: bool) -> bytes:
    return b"S" + struct.pack(">IB", xid, first)


def stream_commit(xid: int, end_lsn: int) -> bytes:
    return b"c" + struct.pack(">IBqqq", xid, 0, end_lsn - 8, end_lsn, 0)


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedTransactions:
    return PreparedTransactions(Location.of(str(tmp_path)))


def assembled(
    prepared: PreparedTransactions, *calls: Sequence[bytes], after: Lsn = ZERO
) -> list[tuple[int, int, bytes]]:
    """Commit LSN, ordinal and bytes of the rows that come out, each argument being a batch of the peek."""
    rows = []
    with Assembler(after, prepared) as assembler:
        for messages in calls:
            numbers = np.arange(len(messages), dtype=np.int64)
            raw = RawMessages(numbers, numbers, pa.array(messages, pa.binary()))
            for batch in assembler.feed(raw):
                rows += [(row["commit_lsn"], row["seq"], row["message"]) for row in batch.to_pylist()]
    return rows


def test_transactions_that_the_log_holds_already_are_left_out(prepared: PreparedTransactions) -> None:
    """R1.30: the end LSN decides, and the shapes that came with them still count (R1.13)."""
    messages = [begin(20), RELATION, insert("a"), commit(20), begin(40), insert("b"), commit(40)]
    assert assembled(prepared, messages, after=Lsn(20)) == [(40, 0, insert("b"))]


@pytest.mark.parametrize("size", range(1, 9))
def test_batches_may_end_anywhere(size: int, prepared: PreparedTransactions) -> None:
    """A streamed transaction around an ordinary one; subtransaction 9 of it is rolled back (R9.5)."""
    messages = [
        stream_start(8, first=True), in_stream(RELATION, 8), in_stream(insert("a"), 8),
        in_stream(insert("x"), 9),
        b"E", begin(20), RELATION, insert("b"), insert("c"), commit(20), stream_start(8, first=False),
        in_stream(insert("d"), 8), b"E", b"A" + struct.pack(">II", 8, 9), stream_commit(8, 40),
    ]  # fmt: skip
    batches = [messages[start : start + size] for start in range(0, len(messages), size)]
    assert assembled(prepared, *batches) == [
        (20, 0, insert("b")), (20, 1, insert("c")), (40, 0, insert("a")), (40, 1, insert("d"))
    ]  # fmt: skip


def test_a_streamed_transaction_without_its_end_is_dropped(prepared: PreparedTransactions) -> None:
    """R1.26: the next call sends it again."""
    messages = [stream_start(8, first=True), in_stream(RELATION, 8), in_stream(insert("a"), 8), b"E"]
    assert assembled(prepared, messages) == []


def test_commit_prepared_of_an_unknown_transaction_is_nothing(prepared: PreparedTransactions) -> None:
    """R9.9."""
    message = b"K" + struct.pack(">BqqqI", 0, 10, 20, 0, 7) + b"gid\0"
    assert assembled(prepared, [message]) == []


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([insert("a")], "outside of any transaction"),
        ([begin(20), insert("a", relation=6), commit(20)], "relation 6"),
        ([begin(20), begin(40)], "inside another"),
        ([commit(20)], "did not start"),
        ([begin(40), commit(40), begin(20), commit(20)], "after one that ends at"),
        ([stream_start(8, first=False)], "did not start"),
        ([b"E"], "did not start"),
        ([begin(20), b"I\0"], "without relation"),
        ([stream_start(8, first=True), b"I\0"], "without transaction id"),
        ([b""], "empty"),
        ([b"?"], "unknown message type"),
    ],
)
def test_what_pgoutput_never_sends_is_refused(
    messages: list[bytes], complaint: str, prepared: PreparedTransactions
) -> None:
    with pytest.raises(InvalidMessage, match=complaint):
        assembled(prepared, messages)
