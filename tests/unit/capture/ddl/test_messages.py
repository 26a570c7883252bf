"""The messages of event triggers: those of committed transactions count, by position (R9.10, R9.13)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cdc_replay.capture.plain_transactions import SHORTEST
from cdc_replay.catalog.ddl_change import CATALOG_PREFIX, REWRITE_PREFIX
from cdc_replay.changelog.prepared_transactions import PreparedTransactions
from cdc_replay.errors import DecodingFailed
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.pg_snapshot import PgSnapshot
from unit.capture.stream import (
    RELATION,
    STREAM_STOP,
    TABLE,
    assembler,
    begin,
    begin_prepare,
    commit,
    commit_prepared,
    in_stream,
    insert,
    logical_message,
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


def told(
    prepared: PreparedTransactions, *calls: Sequence[bytes], after: Lsn = ZERO
) -> list[tuple[int, int, str]]:
    """Commit LSN, LSN and content of what a peek tells; a message's LSN is its place in its batch."""
    with assembler(prepared, after) as made:
        for call in calls:
            for _ in made.feed(raw(call)):
                pass
        return [(one.commit_lsn.value, one.lsn.value, one.content.decode()) for one in made.catalog_messages]


def test_messages_have_the_position_of_their_command_and_of_their_commit(
    prepared: PreparedTransactions,
) -> None:
    messages = [begin(100), ddl("a"), RELATION, insert("1"), ddl("b"), commit(100), begin(200), ddl("c")]

    assert told(prepared, [*messages, commit(200)]) == [(100, 1, "a"), (100, 4, "b"), (200, 7, "c")]
    assert told(prepared, [*messages, commit(200)], after=Lsn(100)) == [(200, 7, "c")]
    assert told(prepared, messages) == [(100, 1, "a"), (100, 4, "b")]


def test_those_of_many_small_transactions_are_noticed(prepared: PreparedTransactions) -> None:
    """Which are taken all at once, without a loop."""
    lsns = range(100, 100 + 10 * SHORTEST, 10)
    messages = [begin(5), RELATION, insert("x"), commit(5)]
    for lsn in lsns:
        messages += [begin(lsn), insert("a"), ddl(str(lsn)), commit(lsn)]

    found = told(prepared, messages)

    assert [(commit_lsn, content) for commit_lsn, _, content in found] == [(lsn, str(lsn)) for lsn in lsns]


def test_others_are_none_of_them(prepared: PreparedTransactions) -> None:
    """R9.13: one that is not transactional is there even if its command was rolled back."""
    other = [ddl("x", prefix="p"), ddl("x", prefix=REWRITE_PREFIX), ddl("x", prefix=CATALOG_PREFIX + "s")]
    unsigned = logical_message("x", prefix=CATALOG_PREFIX)
    outside = ddl("x", transactional=False)

    assert told(prepared, [begin(5), *other, unsigned, outside, commit(5), outside]) == []


def test_a_streamed_transaction_tells_at_its_commit(prepared: PreparedTransactions) -> None:
    block = [stream_start(7, first=True), in_stream(ddl("a"), 7), STREAM_STOP]
    more = [stream_start(7, first=False), in_stream(ddl("b"), 7), STREAM_STOP]

    assert told(prepared, block, more) == []
    assert told(prepared, [*block, stream_abort(7, 7)]) == []
    assert told(prepared, [*block, *more, stream_commit(7, 100)]) == [(100, 1, "a"), (100, 4, "b")]


@pytest.mark.parametrize("prefix", [CATALOG_PREFIX, REWRITE_PREFIX])
def test_a_rolled_back_savepoint_of_a_stream_that_tells_of_ddl_has_to_be_read_otherwise(
    prefix: str, prepared: PreparedTransactions
) -> None:
    """R1.9: a message has the id of the top transaction; with other messages that does no harm."""
    first, stop = stream_start(7, first=True), STREAM_STOP
    others = in_stream(logical_message("a"), 7)
    harmless = [first, others, stop, stream_abort(7, 8), stream_commit(7, 100)]
    assert told(prepared, harmless) == []
    with pytest.raises(DecodingFailed, match="streamed transaction 7 has DDL and a savepoint"):
        told(prepared, [first, in_stream(ddl("a", prefix=prefix), 7), stop, stream_abort(7, 8)])


def test_a_prepared_transaction_tells_at_commit_prepared(prepared: PreparedTransactions) -> None:
    """R9.8: perhaps in another peek."""
    content = [begin_prepare(7, 100), ddl("a"), RELATION, insert("1"), prepare(7, 100)]
    assert told(prepared, content) == []
    assert told(prepared, [commit_prepared(7, 200)], after=Lsn(100)) == [(200, 1, "a")]
    assert told(prepared, content) == []
    assert told(prepared, [rollback_prepared(7, 100, 200)], after=Lsn(100)) == []


def test_tables_are_described_to_committed_transactions_only(prepared: PreparedTransactions) -> None:
    """What a prepared transaction has made is known to nobody else."""
    with assembler(prepared) as made:
        open_stream = [stream_start(7, first=True), in_stream(RELATION, 7), STREAM_STOP]
        waiting = [begin_prepare(8, 100), RELATION, insert("1"), prepare(8, 100)]
        for call in (open_stream, waiting):
            for _ in made.feed(raw(call)):
                pass
        assert made.described == set()
        for _ in made.feed(raw([stream_commit(7, 200)])):
            pass
        assert made.described == {TABLE}


@pytest.mark.parametrize(
    ("xid", "is_seen"),
    [(99, True), (100, False), (101, True), (102, False), (103, True), (105, False), (106, False)],
)
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_a_snapshot_sees_what_had_ended_when_it_was_taken(xid: int, is_seen: bool, epoch: int) -> None:
    base = epoch << 32
    snapshot = PgSnapshot.parse(f"{base + 100}:{base + 105}:{base + 100},{base + 102}")

    assert snapshot.sees(xid) is is_seen


def test_transaction_ids_have_32_bits_in_the_stream() -> None:
    """A snapshot just behind a wrap-around sees what came before it."""
    base = 3 << 32
    snapshot = PgSnapshot.parse(f"{base + 5}:{base + 5}:")

    assert snapshot.sees(2**32 - 10)
    assert snapshot.sees(4)
    assert not snapshot.sees(6)
