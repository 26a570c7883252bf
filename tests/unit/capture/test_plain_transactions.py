"""The vectorised path and the loop produce the same rows, whatever is between plain transactions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_replay.capture import plain_transactions
from cdc_replay.capture.message_batch import MessageBatch
from cdc_replay.capture.plain_transactions import TransactionRun, split_runs
from cdc_replay.changelog.prepared_transactions import PreparedTransactions
from cdc_replay.changelog.storage import Location
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn
from cdc_replay.pgoutput.reader import POSTGRES_EPOCH_MICROSECONDS
from unit.capture.stream import (
    RELATION,
    STREAM_STOP,
    VERSIONS,
    WIDER,
    assemble_rows,
    begin,
    begin_prepare,
    commit,
    commit_prepared,
    in_stream,
    insert,
    logical_message,
    origin,
    prepare,
    raw,
    relation,
    rollback_prepared,
    signed_message,
    stream_abort,
    stream_commit,
    stream_start,
    type_name,
)

NEVER = 1 << 30
"""More transactions than any batch has: all go through the loop."""


@dataclass
class Rows:
    """The rows of an open transaction: subtransaction, relation, message."""

    shape: bytes
    origin: str | None = None
    content: list[tuple[int, bytes, bytes]] = field(default_factory=list)


@dataclass
class History:
    """What a slot sends, and the log rows that the rules require, derived without the code under test."""

    draw: st.DrawFn
    after: int
    messages: list[bytes] = field(default_factory=list)
    lsns: list[int] = field(default_factory=list)
    expected: list[tuple[Any, ...]] = field(default_factory=list)
    shape: bytes = RELATION
    streams: dict[int, Rows] = field(default_factory=dict)
    prepared: dict[int, tuple[int, Rows]] = field(default_factory=dict)
    end_lsn: int = 0
    last_xid: int = 100
    values: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def send(self, *messages: bytes) -> None:
        self.messages += messages
        self.lsns += [self.end_lsn] * len(messages)

    def end(self) -> int:
        self.end_lsn += 10
        return self.end_lsn

    def xid(self) -> int:
        self.last_xid += 10
        return self.last_xid

    def some(self, most: int) -> range:
        return range(self.draw(st.integers(0, most)))

    def happens(self) -> bool:
        return self.draw(st.integers(0, 3)) == 0

    def commit(self, rows: Rows, xid: int, end_lsn: int, time: int | None) -> None:
        """R9.1, R1.30: the rows are in the log at this position, unless it has them."""
        if end_lsn <= self.after:
            return
        when = None if time is None else time + POSTGRES_EPOCH_MICROSECONDS
        for seq, (_, shape, message) in enumerate(rows.content):
            version = VERSIONS[shape] if message[:1] == b"I" else None
            self.expected.append((end_lsn, when, xid, rows.origin, seq, version, message))

    def change(self, rows: Rows, subxid: int) -> bytes:
        value = str(next(self.values))
        message = signed_message(value) if self.happens() else insert(value)
        rows.content.append((subxid, rows.shape, message))
        return message

    def body(self, xid: int) -> Rows:
        """The messages of an ordinary transaction between its first and its last."""
        rows = Rows(self.shape)
        if self.happens():
            rows.origin = "far"
            self.send(origin("far"))
        for _ in self.some(3):
            if self.happens():
                self.shape = rows.shape = self.draw(st.sampled_from((RELATION, WIDER)))
                self.send(type_name(), self.shape)
            self.send(self.change(rows, xid))
        return rows

    def ordinary(self) -> None:
        plain = self.draw(st.booleans())
        for _ in self.some(5):
            xid, time = self.xid(), self.draw(st.integers(-10, 10))
            end_lsn = self.end_lsn + 10
            self.send(begin(end_lsn, xid))
            if plain:
                rows = Rows(self.shape)
                self.send(*(self.change(rows, xid) for _ in self.some(3)))
            else:
                rows = self.body(xid)
            self.end()
            self.send(commit(end_lsn, time))
            self.commit(rows, xid, end_lsn, time)

    def foreign_message(self) -> None:
        """R9.13: foreign messages are dropped, wherever they are."""
        self.end()
        self.send(logical_message(str(next(self.values)), transactional=False))

    def block(self) -> None:
        known = self.draw(st.sampled_from([None, *self.streams]))
        xid = self.xid() if known is None else known
        self.send(stream_start(xid, first=known is None))
        rows = self.streams.setdefault(xid, Rows(RELATION))
        # Described in every block, which is more often than R1.16 asks for.
        rows.shape = self.draw(st.sampled_from((RELATION, WIDER)))
        if known is None and self.happens():
            rows.origin = "far"
            self.send(origin("far"))
        self.send(in_stream(rows.shape, xid))
        for _ in self.some(3):
            subxid = xid + self.draw(st.integers(0, 2))
            if self.happens():
                self.send(in_stream(logical_message("of another program"), xid))
            message = insert(str(next(self.values)))
            rows.content.append((subxid, rows.shape, message))
            self.send(in_stream(message, subxid))
        self.send(STREAM_STOP)

    def rolled_back_savepoint(self) -> None:
        """R9.5: its rows are dropped; the next block describes the relation again."""
        if not self.streams:
            return
        xid = self.draw(st.sampled_from([*self.streams]))
        subxid = xid + self.draw(st.integers(1, 2))
        self.send(stream_abort(xid, subxid))
        rows = self.streams[xid]
        rows.content = [row for row in rows.content if row[0] != subxid]

    def end_of_stream(self) -> None:
        if not self.streams:
            return
        xid = self.draw(st.sampled_from([*self.streams]))
        rows = self.streams.pop(xid)
        what = self.draw(st.sampled_from("cAp"))
        if what == "A":
            self.send(stream_abort(xid, xid))
        elif what == "c":
            end_lsn = self.end()
            self.send(stream_commit(xid, end_lsn), relation("id"))
            self.shape = RELATION
            self.commit(rows, xid, end_lsn, 0)
        else:
            self.store_prepared(xid, rows, prepare(xid, self.end(), streamed=True))

    def prepared_transaction(self) -> None:
        xid, end_lsn = self.xid(), self.end_lsn + 10
        self.send(begin_prepare(xid, end_lsn))
        rows = self.body(xid)
        self.store_prepared(xid, rows, prepare(xid, self.end()))

    def store_prepared(self, xid: int, rows: Rows, message: bytes) -> None:
        self.send(message)
        self.prepared[xid] = (self.end_lsn, rows)

    def outcome(self) -> None:
        xid = self.draw(st.sampled_from([1, *self.prepared]))
        prepare_end_lsn, rows = self.prepared.pop(xid, (0, Rows(self.shape)))
        end_lsn = self.end()
        if self.draw(st.booleans()):
            self.send(rollback_prepared(xid, prepare_end_lsn, end_lsn))
            return
        self.send(commit_prepared(xid, end_lsn))
        self.commit(rows, xid, end_lsn, 0)

    def prepared_before_two_phase(self) -> None:
        """R9.9: prepared before the slot had two_phase, and now committed."""
        xid, prepare_end_lsn = self.xid(), self.draw(st.integers(9, self.end_lsn))
        self.send(begin_prepare(xid, prepare_end_lsn))
        rows = self.body(xid)
        end_lsn = self.end()
        self.send(prepare(xid, prepare_end_lsn), commit_prepared(xid, end_lsn))
        self.commit(rows, xid, end_lsn, 0)


STEPS = (
    History.ordinary,
    History.ordinary,
    History.foreign_message,
    History.block,
    History.rolled_back_savepoint,
    History.end_of_stream,
    History.prepared_transaction,
    History.outcome,
    History.prepared_before_two_phase,
)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Transactions of every kind; a log that ends before them, or where one of the first ends."""
    history = History(draw, after=draw(st.sampled_from((0, 30))))
    end_lsn = history.end()
    history.send(begin(end_lsn), RELATION, commit(end_lsn))
    for step in draw(st.lists(st.sampled_from(STEPS), max_size=12)):
        step(history)
    return history


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@settings(deadline=None)
@given(history=histories(), data=st.data(), min_transactions=st.sampled_from((1, 2, NEVER)))
def test_log_has_every_transaction_completely_once_and_in_commit_order(
    folder: Path, history: History, data: st.DataObject, min_transactions: int
) -> None:
    """R9.1-R9.9, R1.26-R1.30; the batches of the peek end anywhere."""
    size = data.draw(st.integers(1, len(history.messages)))
    batches = [
        raw(history.messages[start : start + size], history.lsns[start : start + size])
        for start in range(0, len(history.messages), size)
    ]
    prepared = PreparedTransactions(Location.parse(str(folder)))
    prepared.remove(prepared.list_keys())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_transactions, "MIN_TRANSACTIONS", min_transactions)
        rows = assemble_rows(prepared, *batches, after=Lsn(history.after))
    names = ("commit_lsn", "commit_time", "xid", "origin", "seq", "relation_version", "message")
    assert [tuple(row[name] for name in names) for row in rows] == history.expected


def runs_in(*messages: bytes) -> list[range]:
    """The runs of a batch, as positions."""
    parts = split_runs(MessageBatch.from_raw(raw(messages), in_stream=False))
    return [range(part.start, part.stop) for part in parts if isinstance(part, TransactionRun)]


def transactions(*end_lsns: int) -> list[bytes]:
    return [message for lsn in end_lsns for message in (begin(lsn), insert("a"), commit(lsn))]


MANY = tuple(range(20, 20 + 10 * plain_transactions.MIN_TRANSACTIONS, 10))


def test_run_ends_at_any_other_message() -> None:
    """A run has nothing between its transactions, and only data messages in them."""
    length = 3 * len(MANY)
    preamble = [begin(10), RELATION, insert("a"), commit(10)]
    assert runs_in(*transactions(*MANY)) == [range(length)]
    assert runs_in(*preamble, *transactions(*MANY), *preamble) == [range(4, 4 + length)]
    foreign_message = logical_message("now", transactional=False)
    assert runs_in(*transactions(*MANY), foreign_message, *transactions(*MANY)) == [
        range(length), range(length + 1, 2 * length + 1)
    ]  # fmt: skip
    assert runs_in(*transactions(*MANY[1:])) == []
    assert runs_in(*transactions(*MANY)[1:]) == []
    assert runs_in() == []


@pytest.mark.parametrize(
    ("index", "message", "complaint"),
    [
        pytest.param(2, commit(20)[:-1], "ends too early", id="short C"),
        pytest.param(0, begin(20) + b"\0", "bytes after the end", id="long B"),
        pytest.param(2, b"C\1" + commit(20)[2:], "unknown flags", id="flags"),
        pytest.param(5, commit(20), "after one that ends at", id="falling"),
        pytest.param(0, stream_start(8, first=True), "did not start", id="in a block"),
        pytest.param(4, b"I\0", "without relation", id="short I"),
    ],
)
def test_invalid_message_in_run_is_rejected(folder: Path, index: int, message: bytes, complaint: str) -> None:
    """R1.2, R1.28: with the same error as outside of a run."""
    messages = transactions(*MANY)
    messages[index] = message
    prepared = PreparedTransactions(Location.parse(str(folder)))
    preamble = [begin(10), RELATION, commit(10)]
    with pytest.raises(InvalidMessage, match=complaint):
        assemble_rows(prepared, raw([*preamble, *messages]))
