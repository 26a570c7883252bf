"""The messages of event triggers: those of committed transactions count, by position (R9.10, R9.13)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cdc_replay.capture.plain_transactions import MIN_TRANSACTIONS
from cdc_replay.catalog.ddl_change import CATALOG_PREFIX, REWRITE_PREFIX
from cdc_replay.changelog.prepared_transactions import PreparedTransactions
from cdc_replay.errors import DecodingFailed
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.pg_snapshot import PgSnapshot
from unit.capture.stream import (
    RELATION,
    STREAM_STOP,
    TABLE,
    begin,
    begin_prepare,
    commit,
    commit_prepared,
    in_stream,
    insert,
    logical_message,
    open_assembler,
    prepare,
    raw,
    rollback_prepared,
    signed_message,
    stream_abort,
    stream_commit,
    stream_start,
)


def ddl(content: str, *, transactional: bool = True, prefix: str = CATALOG_PREFIX) -> bytes:
    return signed_message(content, transactional=transactional, prefix=prefix)


def read_messages(
    prepared: PreparedTransactions, *calls: Sequence[bytes], after: Lsn = ZERO
) -> list[tuple[int, int, str]]:
    """Commit LSN, LSN and content of a peek's messages; a message's LSN is its index in its batch."""
    with open_assembler(prepared, after) as assembler:
        for call in calls:
            for _ in assembler.feed(raw(call)):
                pass
        return [
            (message.commit_lsn.value, message.lsn.value, message.content.decode())
            for message in assembler.catalog_messages
        ]


def test_messages_have_position_of_command_and_of_commit(
    prepared: PreparedTransactions,
) -> None:
    messages = [begin(100), ddl("a"), RELATION, insert("1"), ddl("b"), commit(100), begin(200), ddl("c")]

    assert read_messages(prepared, [*messages, commit(200)]) == [(100, 1, "a"), (100, 4, "b"), (200, 7, "c")]
    assert read_messages(prepared, [*messages, commit(200)], after=Lsn(100)) == [(200, 7, "c")]
    assert read_messages(prepared, messages) == [(100, 1, "a"), (100, 4, "b")]


def test_messages_in_transaction_runs_are_found(prepared: PreparedTransactions) -> None:
    """They are handled without a loop."""
    lsns = range(100, 100 + 10 * MIN_TRANSACTIONS, 10)
    messages = [begin(5), RELATION, insert("x"), commit(5)]
    for lsn in lsns:
        messages += [begin(lsn), insert("a"), ddl(str(lsn)), commit(lsn)]

    messages_read = read_messages(prepared, messages)

    assert [(commit_lsn, content) for commit_lsn, _, content in messages_read] == [
        (lsn, str(lsn)) for lsn in lsns
    ]


def test_foreign_messages_are_ignored(prepared: PreparedTransactions) -> None:
    """R9.13: a non-transactional message is sent even if its command was rolled back."""
    other = [ddl("x", prefix="p"), ddl("x", prefix=REWRITE_PREFIX), ddl("x", prefix=CATALOG_PREFIX + "s")]
    unsigned = logical_message("x", prefix=CATALOG_PREFIX)
    outside = ddl("x", transactional=False)

    assert read_messages(prepared, [begin(5), *other, unsigned, outside, commit(5), outside]) == []


def test_messages_of_streamed_transaction_count_at_its_commit(prepared: PreparedTransactions) -> None:
    block = [stream_start(7, first=True), in_stream(ddl("a"), 7), STREAM_STOP]
    more = [stream_start(7, first=False), in_stream(ddl("b"), 7), STREAM_STOP]

    assert read_messages(prepared, block, more) == []
    assert read_messages(prepared, [*block, stream_abort(7, 7)]) == []
    assert read_messages(prepared, [*block, *more, stream_commit(7, 100)]) == [(100, 1, "a"), (100, 4, "b")]


@pytest.mark.parametrize("prefix", [CATALOG_PREFIX, REWRITE_PREFIX])
def test_rolled_back_savepoint_in_stream_with_ddl_requires_reading_without_streaming(
    prefix: str, prepared: PreparedTransactions
) -> None:
    """R1.9: a message has the id of the top transaction; only event trigger messages matter."""
    first, stop = stream_start(7, first=True), STREAM_STOP
    others = in_stream(logical_message("a"), 7)
    harmless = [first, others, stop, stream_abort(7, 8), stream_commit(7, 100)]
    assert read_messages(prepared, harmless) == []
    with pytest.raises(
        DecodingFailed, match="streamed transaction 7 contains DDL and a rolled-back savepoint"
    ):
        read_messages(prepared, [first, in_stream(ddl("a", prefix=prefix), 7), stop, stream_abort(7, 8)])


def test_messages_of_prepared_transaction_count_at_commit_prepared(prepared: PreparedTransactions) -> None:
    """R9.8: also in another peek."""
    content = [begin_prepare(7, 100), ddl("a"), RELATION, insert("1"), prepare(7, 100)]
    assert read_messages(prepared, content) == []
    assert read_messages(prepared, [commit_prepared(7, 200)], after=Lsn(100)) == [(200, 1, "a")]
    assert read_messages(prepared, content) == []
    assert read_messages(prepared, [rollback_prepared(7, 100, 200)], after=Lsn(100)) == []


def test_described_relations_are_those_of_committed_transactions(prepared: PreparedTransactions) -> None:
    """A prepared transaction's new tables are invisible to others."""
    with open_assembler(prepared) as assembler:
        open_stream = [stream_start(7, first=True), in_stream(RELATION, 7), STREAM_STOP]
        waiting = [begin_prepare(8, 100), RELATION, insert("1"), prepare(8, 100)]
        for call in (open_stream, waiting):
            for _ in assembler.feed(raw(call)):
                pass
        assert assembler.described_relations == set()
        for _ in assembler.feed(raw([stream_commit(7, 200)])):
            pass
        assert assembler.described_relations == {TABLE}


@pytest.mark.parametrize(
    ("xid", "is_seen"),
    [(99, True), (100, False), (101, True), (102, False), (103, True), (105, False), (106, False)],
)
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_snapshot_sees_transactions_that_had_ended(xid: int, is_seen: bool, epoch: int) -> None:
    base = epoch << 32
    snapshot = PgSnapshot.parse(f"{base + 100}:{base + 105}:{base + 100},{base + 102}")

    assert snapshot.sees(xid) is is_seen


def test_snapshot_compares_32_bit_xids_across_wraparound() -> None:
    """A snapshot taken just after a wraparound sees earlier transactions."""
    base = 3 << 32
    snapshot = PgSnapshot.parse(f"{base + 5}:{base + 5}:")

    assert snapshot.sees(2**32 - 10)
    assert snapshot.sees(4)
    assert not snapshot.sees(6)
