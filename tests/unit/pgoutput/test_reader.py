"""The reference reader understands every message, and refuses everything else (R1.2)."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.pgoutput import messages as m
from cdc_replay.pgoutput.reader import (
    decode,
    decode_stream,
    parse_relation,
    relation_version,
    split_stream_xid,
)
from unit.pgoutput.examples import EXAMPLES, ONE_SECOND_AFTER_EPOCH
from unit.pgoutput.wire import encode, streamable, unstreamable, xids

any_form = st.sampled_from([(False, False), (True, False), (False, True), (True, True)])


@pytest.mark.parametrize("kind", m.MessageType)
def test_reader_decodes_every_message_type(kind: m.MessageType) -> None:
    """R1.2, one message per line of the table."""
    data, message = EXAMPLES[kind]
    assert decode(bytes.fromhex(data)) == message


@given(st.data(), any_form)
def test_encoded_message_decodes_to_itself(data: st.DataObject, form: tuple[bool, bool]) -> None:
    """R1.2, R1.3, R1.9: in a streamed block and outside, with `streaming = parallel` and without."""
    in_stream, parallel = form
    message = data.draw(streamable(xids if in_stream else st.none()) | unstreamable(parallel=parallel))
    written = encode(message, in_stream=in_stream)
    assert decode(written, in_stream=in_stream, streaming_parallel=parallel) == message


@given(st.data(), any_form)
def test_message_too_short_or_too_long_is_rejected(data: st.DataObject, form: tuple[bool, bool]) -> None:
    """R1.2: every proper prefix, and one byte too many."""
    in_stream, parallel = form
    message = data.draw(streamable(xids if in_stream else st.none()) | unstreamable(parallel=parallel))
    written = encode(message, in_stream=in_stream)
    for end in range(len(written)):
        with pytest.raises(InvalidMessage):
            decode(written[:end], in_stream=in_stream, streaming_parallel=parallel)
    with pytest.raises(InvalidMessage, match=f"bytes after the end of the message at offset {len(written)}"):
        decode(written + b"\0", in_stream=in_stream, streaming_parallel=parallel)


@pytest.mark.parametrize(
    ("kind", "offset"),
    [
        (m.MessageType.COMMIT, 1),
        (m.MessageType.PREPARE, 1),
        (m.MessageType.STREAM_PREPARE, 1),
        (m.MessageType.COMMIT_PREPARED, 1),
        (m.MessageType.ROLLBACK_PREPARED, 1),
        (m.MessageType.STREAM_COMMIT, 5),
        (m.MessageType.STREAM_START, 5),
        (m.MessageType.TRUNCATE, 5),
        (m.MessageType.MESSAGE, 1),
        (m.MessageType.RELATION, 11),
    ],
)
def test_unknown_flags_are_rejected(kind: m.MessageType, offset: int) -> None:
    """R1.2: the flags bytes of C, P, p, K, r, c must be 0; the others have one known bit, T has two."""
    data = bytearray.fromhex(EXAMPLES[kind][0])
    data[offset] = 4
    with pytest.raises(InvalidMessage, match=f"unknown flags 0x04 at offset {offset}"):
        decode(bytes(data))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("", "message ends too early at offset 0"),
        ("58", 'unknown message type "X" at offset 0'),
        ("49 00004000 4b 0000", 'unknown tuple "K" at offset 5'),
        ("55 00004000 41 0000", 'unknown tuple "A" at offset 5'),
        ("55 00004000 4b 0000 4f 0000", 'unknown tuple "O" at offset 8'),
        ("44 00004000 4e 0000", 'unknown tuple "N" at offset 5'),
        ("49 00004000 4e ffff", "negative count -1 at offset 6"),
        ("49 00004000 4e 0001 78", 'unknown kind of value "x" at offset 8'),
        ("49 00004000 4e 0001 74 80000000", "negative length -2147483648 at offset 9"),
        ("49 00004000 4e 0001 74 00000002 31", "message ends too early at offset 13"),
        ("54 ffffffff 00", "negative count -1 at offset 1"),
        ("4d 00 0000000000000000 00 ffffffff", "negative length -1 at offset 11"),
        ("4f 0000000000000000 7067", "string without end at offset 9"),
        ("4f 0000000000000000 ff00", "string is not UTF-8 at offset 9"),
        ("52 00004000 00 7400 78 0000", 'unknown replica identity "x" at offset 8'),
        ("52 00004000 00 7400 64 fffe", "negative count -2 at offset 9"),
    ],
)
def test_invalid_item_is_rejected_with_its_offset(data: str, problem: str) -> None:
    with pytest.raises(InvalidMessage) as refused:
        decode(bytes.fromhex(data))
    assert problem in refused.value.message


def test_relation_version_depends_on_message_bytes_only() -> None:
    data = bytes.fromhex(EXAMPLES[m.MessageType.RELATION][0])
    relation = parse_relation(data)
    (version,) = struct.unpack(">q", hashlib.blake2b(data).digest()[:8])
    assert relation.version == relation_version(data) == version
    assert relation.id == 16384
    assert relation.name == QualifiedName("pg_catalog", "t")
    assert relation.column_names == ("id",)
    assert relation_version(data[:-1] + b"\x08") != version


def test_parse_relation_rejects_other_messages() -> None:
    with pytest.raises(InvalidMessage, match="not a Relation message"):
        parse_relation(bytes.fromhex(EXAMPLES[m.MessageType.INSERT][0]))


@given(streamable(xids))
def test_streamed_message_without_xid_equals_plain_message(message: m.StreamedMessage) -> None:
    """R1.9: the transaction id is all that differs."""
    xid, ordinary = split_stream_xid(encode(message, in_stream=True))
    assert xid == message.xid
    assert ordinary == encode(message)


def test_split_stream_xid_rejects_messages_without_xid() -> None:
    """R1.9: B, C, O, E and the others have fields of their own."""
    with pytest.raises(InvalidMessage, match="message without transaction id at offset 0"):
        split_stream_xid(bytes.fromhex(EXAMPLES[m.MessageType.COMMIT][0]))


def test_decode_stream_tracks_blocks_and_starts_outside_of_one() -> None:
    """R1.9: messages between S and E carry a transaction id; a block never spans calls."""
    inside = m.Insert(701, RelationId(1), m.TupleData((), ()))
    outside = m.Insert(None, RelationId(1), m.TupleData((), ()))
    stream: list[m.Message] = [
        m.StreamStart(700, is_first=True), inside, m.StreamStop(), outside,
        m.StreamStart(700, is_first=False), inside,
    ]  # fmt: skip
    written = [encode(message, in_stream=message is inside) for message in stream]
    assert list(decode_stream(written)) == stream
    assert list(decode_stream([encode(outside)])) == [outside]


def test_decode_stream_reads_streaming_parallel() -> None:
    """R1.3."""
    abort = m.StreamAbort(700, 701, Lsn(9), ONE_SECOND_AFTER_EPOCH)
    assert list(decode_stream([encode(abort)], streaming_parallel=True)) == [abort]
    with pytest.raises(InvalidMessage, match="bytes after the end"):
        list(decode_stream([encode(abort)]))
