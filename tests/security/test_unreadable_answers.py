"""A server whose rows have another form than PostgreSQL's is named in an error; nothing is kept of them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence

import pytest
from psycopg import sql

from cdc_replay.compare.buckets import compare_buckets
from cdc_replay.compare.digest import TableSide
from cdc_replay.errors import CdcReplayError, InvalidMessage, PublisherNotReady
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import connect
from cdc_replay.postgres.copy import CopyTarget, copy_across
from cdc_replay.postgres.peek import PeekOptions, peek
from cdc_replay.subscriber.as_owner import AsOurselves
from fixtures.liar import Liar, message
from fixtures.postgres import Database

HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack(">II", 0, 0)
READY = message(b"Z", b"I")


def row(*fields: bytes) -> bytes:
    """A row of COPY BINARY."""
    return struct.pack(">h", len(fields)) + b"".join(struct.pack(">i", len(f)) + f for f in fields)


GOOD = row(struct.pack(">q", 1), struct.pack(">i", 7), b"B" + bytes(20))
TRAILER = struct.pack(">h", -1)


def copies(*data: bytes, is_binary: bool = True) -> Callable[[socket.socket], None]:
    """Settings are accepted; every later statement is a COPY with this data."""

    def answer(session: socket.socket) -> None:
        result = message(b"T", b"\0\0") + message(b"C", b"SELECT 0\0")
        session.sendall(3 * result + READY)
        out = message(b"H", struct.pack(">bh", is_binary, 3) + 3 * struct.pack(">h", is_binary))
        while session.recv(1 << 16):
            rows = b"".join(message(b"d", content) for content in data)
            session.sendall(out + rows + message(b"c", b"") + message(b"C", b"COPY 1\0") + READY)

    return answer


def no_copy(session: socket.socket) -> None:
    result = message(b"T", b"\0\0") + message(b"C", b"SELECT 0\0")
    session.sendall(3 * result + READY)
    while session.recv(1 << 16):
        session.sendall(result + READY)


UNREADABLE_PEEKS: dict[str, Sequence[bytes]] = {
    "no header": (GOOD, TRAILER),
    "nothing": (),
    "short": (HEADER + b"\0\3\0\0\0\10", TRAILER),
    "short later": (HEADER + GOOD, b"\0\3\0\0\0\10", TRAILER),
    "fewer fields": (HEADER + GOOD, row(bytes(8), bytes(14)), TRAILER),
    "more fields": (HEADER + GOOD, row(bytes(8), bytes(4), b"B", b"C"), TRAILER),
    "lengths": (HEADER + GOOD, row(bytes(4), bytes(8), b"B" + bytes(20)), TRAILER),
    "null": (HEADER + GOOD, row(bytes(8), bytes(4))[:1] + b"\3" + row(bytes(8), bytes(4))[2:] + b"\xff" * 4),
    "end": (HEADER + GOOD, b"\0\1", GOOD),
    "after the end": (HEADER + GOOD, TRAILER, GOOD),
}


@pytest.mark.parametrize("data", UNREADABLE_PEEKS.values(), ids=UNREADABLE_PEEKS)
def test_rows_of_a_slot(data: Sequence[bytes]) -> None:
    with Liar(copies(*data)) as liar, connect(liar.dsn, purpose="test") as connection:
        messages = peek(connection, PeekOptions("s", ("p",)), upto_lsn=Lsn(9), upto_nchanges=None)
        with pytest.raises(InvalidMessage, match='replication slot "s"'):
            list(messages)


def test_a_slot_that_is_no_copy() -> None:
    with Liar(no_copy) as liar, connect(liar.dsn, purpose="test") as connection:
        messages = peek(connection, PeekOptions("s", ("p",)), upto_lsn=Lsn(9), upto_nchanges=None)
        with pytest.raises(InvalidMessage, match='replication slot "s"'):
            list(messages)


UNREADABLE_DIGESTS = {
    "short": b"1\t2\n",
    "no number": b"1\tx\t0\t1\t2\n",
    "not UTF-8": b"\xff\t1\t0\t1\t2\n",
    "sums": b"1\t1\t0\t\xff\t2\n",
    "long": b"1" * 5000 + b"\t1\t0\t1\t2\n",
}


@pytest.mark.parametrize("line", UNREADABLE_DIGESTS.values(), ids=UNREADABLE_DIGESTS)
def test_digests(publisher: Database, line: bytes) -> None:
    """As other errors of one table, it does not keep the others from being compared."""
    publisher.run("create table t (id int)")
    rows = sql.SQL("select id from public.t")
    with (
        Liar(copies(line, is_binary=False)) as liar,
        connect(liar.dsn, purpose="test") as liars,
        connect(publisher.dsn, purpose="test") as honest,
    ):
        lying = TableSide(rows, (), ("id",), AsOurselves(liars), 'table "public.t" of the publisher')
        side = TableSide(rows, (), ("id",), AsOurselves(honest), 'table "public.t" of the subscriber')
        with (
            pytest.raises(InvalidMessage, match=r'cannot read table "public\.t" of the publisher'),
            compare_buckets(lying, side, 12) as buckets,
        ):
            list(buckets)


UNREADABLE_COPIES = {
    "more fields": b"1\t2\n",
    "not UTF-8": b"\xff\n",
    "no number": b"x\n",
    "null byte": b"\0\n",
    "binary": HEADER + GOOD,
}


def copy_from(liar: Liar, subscriber: Database) -> None:
    subscriber.run("create table t (id int)")
    target = CopyTarget(sql.Identifier("public", "t"), QualifiedName("public", "t"), ("id",))
    with connect(liar.dsn, purpose="test") as source, connect(subscriber.dsn, purpose="test") as destination:
        copy_across(source, [sql.SQL("select 1")], destination, target)


@pytest.mark.parametrize("line", UNREADABLE_COPIES.values(), ids=UNREADABLE_COPIES)
def test_copied_rows(subscriber: Database, line: bytes) -> None:
    with (
        Liar(copies(line, is_binary=False)) as liar,
        pytest.raises(CdcReplayError, match=r'table "public\.t"'),
    ):
        copy_from(liar, subscriber)
    assert subscriber.rows("table t") == []


def test_a_copy_that_is_none(subscriber: Database) -> None:
    with (
        Liar(no_copy) as liar,
        pytest.raises(PublisherNotReady, match=r'table "public\.t" of the publisher: copy\(\) should'),
    ):
        copy_from(liar, subscriber)
