"""TransactionAssembler: each new transaction is captured once, protocol violations are rejected."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cdc_replay.capture.plain_transactions import MIN_TRANSACTIONS
from cdc_replay.capture.transactions import TransactionAssembler
from cdc_replay.changelog.prepared_transactions import PreparedKey, PreparedTransactions
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import ZERO, Lsn
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
    open_assembler,
    origin,
    prepare,
    raw,
    rollback_prepared,
    stream_abort,
    stream_commit,
    stream_start,
)


def rows_of(
    prepared: PreparedTransactions, *calls: Sequence[bytes], after: Lsn = ZERO
) -> list[tuple[int, int, bytes]]:
    """Commit LSN, seq and bytes of the resulting rows; each argument is a batch of the peek."""
    rows = assemble_rows(prepared, *map(raw, calls), after=after)
    return [(row["commit_lsn"], row["seq"], row["message"]) for row in rows]


def streamed(xid: int, *messages: bytes, first: bool = True) -> list[bytes]:
    """A block."""
    return [stream_start(xid, first=first), *(in_stream(message, xid) for message in messages), STREAM_STOP]


def transaction_run(end_lsn: int) -> list[bytes]:
    """The smallest number of plain transactions that form a run."""
    lsns = range(end_lsn, end_lsn + 10 * MIN_TRANSACTIONS, 10)
    return [message for lsn in lsns for message in (begin(lsn), insert("a"), commit(lsn))]


def test_transactions_already_in_log_are_skipped(prepared: PreparedTransactions) -> None:
    """R1.30: the end LSN decides; their Relation messages still apply (R1.13)."""
    messages = [begin(20), RELATION, insert("a"), commit(20), begin(40), insert("b"), commit(40)]
    assert rows_of(prepared, messages, after=Lsn(20)) == [(40, 0, insert("b"))]


@pytest.mark.parametrize("size", range(1, 9))
def test_rows_do_not_depend_on_where_batches_end(size: int, prepared: PreparedTransactions) -> None:
    """A streamed transaction around an ordinary one; subtransaction 9 of it is rolled back (R9.5)."""
    messages = [
        stream_start(8, first=True), in_stream(RELATION, 8), in_stream(insert("a"), 8),
        in_stream(insert("x"), 9),
        STREAM_STOP, begin(20), RELATION, insert("b"), insert("c"), commit(20),
        stream_start(8, first=False), in_stream(insert("d"), 8), STREAM_STOP,
        stream_abort(8, 9), stream_commit(8, 40),
    ]  # fmt: skip
    batches = [messages[start : start + size] for start in range(0, len(messages), size)]
    assert rows_of(prepared, *batches) == [
        (20, 0, insert("b")), (20, 1, insert("c")), (40, 0, insert("a")), (40, 1, insert("d"))
    ]  # fmt: skip


def test_streamed_transaction_without_end_is_dropped(prepared: PreparedTransactions) -> None:
    """R1.26: the next call sends it again."""
    assert rows_of(prepared, streamed(8, RELATION, insert("a"))) == []


def test_streamed_transaction_that_is_sent_again_replaces_earlier_rows(
    prepared: PreparedTransactions,
) -> None:
    """R1.26: the rows of its first start are not duplicated."""
    messages = streamed(8, RELATION, insert("a")) + streamed(8, RELATION, insert("a"), insert("b"))
    assert rows_of(prepared, [*messages, stream_commit(8, 20)]) == [
        (20, 0, insert("a")), (20, 1, insert("b"))
    ]  # fmt: skip


def test_abort_of_unknown_transaction_is_ignored(prepared: PreparedTransactions) -> None:
    """R9.5: of an unknown subtransaction or transaction; empty blocks are ignored too (R1.27)."""
    messages = [
        stream_abort(5, 5), stream_abort(5, 6), *streamed(8), stream_abort(8, 9),
        *streamed(8, RELATION, insert("a"), first=False), stream_commit(8, 20),
    ]  # fmt: skip
    assert rows_of(prepared, messages) == [(20, 0, insert("a"))]


def test_streamed_transaction_without_rows_is_not_counted(prepared: PreparedTransactions) -> None:
    """R9.4: S, E, c are sent for it all the same."""
    with TransactionAssembler(ZERO, prepared) as assembler:
        assert list(assembler.feed(raw([*streamed(8), stream_commit(8, 20)]))) == []
        assert assembler.end_lsn == Lsn(20)
        assert assembler.counts.transactions == 0


def test_stream_abort_of_parallel_streaming_is_accepted(prepared: PreparedTransactions) -> None:
    """R1.3: streaming = parallel sends a longer form; capture does not use it."""
    messages = [
        stream_start(8, first=True), in_stream(RELATION, 8), in_stream(insert("a"), 9),
        in_stream(insert("b"), 8), STREAM_STOP,
        *streamed(10, RELATION, insert("c")), stream_abort(10, 10, parallel=True),
        stream_abort(8, 9, parallel=True), stream_commit(8, 20),
    ]  # fmt: skip
    assert rows_of(prepared, messages) == [(20, 0, insert("b"))]


def test_relation_of_stream_becomes_global_at_its_commit_only(prepared: PreparedTransactions) -> None:
    """R1.16."""
    stream = streamed(8, WIDER, insert("a"))
    with pytest.raises(InvalidMessage, match="no Relation message has described"):
        rows_of(prepared, [*stream, begin(20), insert("b"), commit(20)])
    rows = assemble_rows(prepared, raw([*stream, stream_commit(8, 20), begin(40), insert("b"), commit(40)]))
    assert [row["relation_version"] for row in rows] == [VERSIONS[WIDER]] * 2


def test_relation_from_rolled_back_subtransaction_is_discarded(prepared: PreparedTransactions) -> None:
    """R1.16: after StreamAbort the server describes the relation again; other transactions keep theirs."""
    before = [begin(20), RELATION, insert("a"), commit(20)]
    stream = [
        stream_start(8, first=True), in_stream(WIDER, 9), in_stream(insert("b"), 9), STREAM_STOP,
        stream_abort(8, 9), *streamed(8, RELATION, insert("c"), first=False), stream_commit(8, 40),
    ]  # fmt: skip
    rows = assemble_rows(prepared, raw([*before, *stream, begin(60), insert("d"), commit(60)]))
    assert [row["message"] for row in rows] == [insert("a"), insert("c"), insert("d")]
    assert [row["relation_version"] for row in rows] == [VERSIONS[RELATION]] * 3
    undescribed = [*before, *stream[:5], *streamed(8, insert("c"), first=False), stream_commit(8, 40)]
    with pytest.raises(InvalidMessage, match="no Relation message has described"):
        rows_of(prepared, undescribed)


def test_rows_have_origin_of_their_transaction(prepared: PreparedTransactions) -> None:
    """R1.12: streamed, prepared or plain; interleaved transactions are local."""
    messages = [
        stream_start(8, first=True), origin("far"), in_stream(RELATION, 8), in_stream(insert("a"), 8),
        STREAM_STOP,
        begin_prepare(9, 20), origin("near"), RELATION, insert("b"), prepare(9, 20),
        begin(40), insert("c"), commit(40),
        *streamed(8, insert("d"), first=False), stream_commit(8, 60), commit_prepared(9, 80),
    ]  # fmt: skip
    rows = assemble_rows(prepared, raw(messages))
    assert [(row["message"], row["origin"]) for row in rows] == [
        (insert("c"), None), (insert("a"), "far"), (insert("d"), "far"), (insert("b"), "near"),
    ]  # fmt: skip


def test_foreign_logical_messages_are_dropped(prepared: PreparedTransactions) -> None:
    """R9.13: inside and outside of transactions; a transaction with no other messages has no row."""
    outside, inside = logical_message("now", transactional=False), logical_message("a")
    messages = [outside, *streamed(8, inside), outside, begin(20), inside, commit(20), stream_commit(8, 40)]
    with open_assembler(prepared) as assembler:
        assert [row for rows in assembler.feed(raw(messages)) for row in rows.to_pylist()] == []
        assert (assembler.counts.transactions, assembler.end_lsn) == (0, Lsn(40))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_prepared_transaction_has_position_of_commit_prepared(
    is_streamed: bool, prepared: PreparedTransactions
) -> None:
    """R9.8: in another peek, at position and time of K; the same gid may name several transactions."""
    for xid, end_lsn in ((8, 20), (9, 40)):
        ordinary = [begin_prepare(xid, end_lsn), RELATION, insert(str(xid)), prepare(xid, end_lsn)]
        stream = [*streamed(xid, RELATION, insert(str(xid))), prepare(xid, end_lsn, streamed=True)]
        assert rows_of(prepared, stream if is_streamed else ordinary, after=Lsn(end_lsn - 20)) == []
    assert prepared.list_keys() == (PreparedKey(8, Lsn(20)), PreparedKey(9, Lsn(40)))

    with TransactionAssembler(Lsn(40), prepared) as assembler:
        batch = raw([commit_prepared(9, 60, time=5), rollback_prepared(8, 20, 80)])
        [rows] = assembler.feed(batch)
        assert assembler.resolved == [PreparedKey(9, Lsn(40)), PreparedKey(8, Lsn(20))]
        assert assembler.end_lsn == Lsn(80)
    [row] = rows.to_pylist()
    assert (row["commit_lsn"], row["xid"], row["seq"], row["message"]) == (60, 9, 0, insert("9"))
    assert row["relation_version"] == VERSIONS[RELATION]


def test_outcome_of_unknown_prepared_transaction_is_ignored(prepared: PreparedTransactions) -> None:
    """R9.9: PostgreSQL 15 sends K and r without b and P for a transaction without changes."""
    assert rows_of(prepared, [commit_prepared(7, 20), rollback_prepared(8, 10, 40)]) == []


def test_prepared_transaction_without_changes_is_not_stored(prepared: PreparedTransactions) -> None:
    """R9.4: b, P are sent for it all the same."""
    empty = [begin_prepare(8, 20), prepare(8, 20), *streamed(9), prepare(9, 40, streamed=True)]
    assert rows_of(prepared, [*empty, commit_prepared(8, 60), rollback_prepared(9, 40, 80)]) == []
    assert prepared.list_keys() == ()


def test_prepared_transaction_that_is_sent_again_is_stored_once(prepared: PreparedTransactions) -> None:
    """R1.30: the log ends after P, so its rows are stored already; K was not read yet."""
    messages = [begin_prepare(8, 20), RELATION, insert("a"), prepare(8, 20)]
    assert rows_of(prepared, messages) == []
    assert rows_of(prepared, [*messages, commit_prepared(8, 40)], after=Lsn(20)) == [(40, 0, insert("a"))]


def test_transaction_prepared_before_two_phase_is_captured_at_its_commit(
    prepared: PreparedTransactions,
) -> None:
    """R9.9: P has its original position, which is before the log's end."""
    messages = [begin(60), commit(60), begin_prepare(8, 20), RELATION, insert("a"), prepare(8, 20)]
    assert rows_of(prepared, [*messages, commit_prepared(8, 80)], after=Lsn(40)) == [(80, 0, insert("a"))]


def test_commit_prepared_already_in_log_only_removes_stored_rows(prepared: PreparedTransactions) -> None:
    """R1.30."""
    messages = [begin_prepare(8, 20), RELATION, insert("a"), prepare(8, 20)]
    assert rows_of(prepared, messages) == []
    with TransactionAssembler(Lsn(40), prepared) as assembler:
        assert list(assembler.feed(raw([*messages, commit_prepared(8, 40)]))) == []
        assert assembler.resolved == [PreparedKey(8, Lsn(20))]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([insert("a")], "outside of any transaction"),
        ([begin(20), insert("a", table=6), commit(20)], "relation 6"),
        ([begin(20), begin(40)], "inside another"),
        ([begin(20), stream_start(8, first=True)], "inside another"),
        ([stream_start(8, first=True), begin(20)], "inside another"),
        ([stream_start(8, first=True), *transaction_run(20)], "inside another"),
        ([begin(20), stream_commit(8, 40)], "inside another"),
        ([begin(20), commit_prepared(8, 40)], "inside another"),
        ([begin(20), STREAM_STOP], "did not start"),
        ([stream_start(8, first=True), commit(20)], "did not start"),
        ([commit(20)], "did not start"),
        ([origin("far")], "outside of any transaction"),
        ([begin(40), commit(40), begin(20), commit(20)], "after one that ends at"),
        ([stream_start(8, first=False)], "did not start"),
        ([stream_commit(8, 20)], "did not start"),
        ([prepare(8, 20, streamed=True)], "did not start"),
        ([STREAM_STOP], "did not start"),
        ([begin(20), b"I\0"], "without relation"),
        ([stream_start(8, first=True), b"I\0"], "without transaction id"),
        ([b""], "empty"),
        ([b"?"], "unknown message type"),
    ],
)
def test_protocol_violation_is_rejected(
    messages: list[bytes], complaint: str, prepared: PreparedTransactions
) -> None:
    with pytest.raises(InvalidMessage, match=complaint):
        rows_of(prepared, messages)
