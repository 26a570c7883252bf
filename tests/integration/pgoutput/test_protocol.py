"""Streams of a real server, in every form, compared with SQL (R1.1 to R1.20).

One publisher has run transactions of every kind; each test reads the same slot with other options. A peek
moves nothing, so all forms are of the same transactions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import psycopg
import pytest

from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import QualifiedName, Relation, ReplicaIdentity
from cdc_replay.pgoutput import messages as m
from cdc_replay.pgoutput.columnar import ChangeDecoder
from cdc_replay.pgoutput.reader import decode, decode_stream
from embedded.postgres import Cluster
from fixtures.postgres import Database, create_database, drop_database
from integration.pgoutput.traffic import BIG, TABLES, WIDEST, Traffic, contents, peek
from unit.pgoutput.assembly import Assembly, Row, RowChange
from unit.pgoutput.wire import reference_changes

EVERYTHING = Window(Lsn(0), Lsn(2**63 - 1))
PARALLEL_SINCE: Final = 160000


@dataclass(frozen=True)
class Form:
    """What pgoutput is asked for (R1.18)."""

    protocol: int
    streaming: str = "off"
    binary: bool = False
    messages: bool = True
    two_phase: bool = False
    """Read from the slot that was created with the property; it sends b, P, K, r for any options (R1.25)."""

    def __str__(self) -> str:
        words = [f"v{self.protocol}", f"streaming-{self.streaming}"]
        words += [word for word in ("binary", "messages", "two_phase") if getattr(self, word)]
        return "-".join(words)

    @property
    def options(self) -> list[str]:
        streaming = [] if self.streaming == "off" else ["streaming", self.streaming]
        return [
            "proto_version", str(self.protocol), "publication_names", "everything",
            "binary", str(self.binary), "messages", str(self.messages), *streaming,
        ]  # fmt: skip


PROTOCOLS = [
    (1, "off"),
    *itertools.product((2, 3), ("off", "on")),
    *((4, streaming) for streaming in ("off", "on", "parallel")),
]
FORMS = [
    Form(protocol, streaming, binary, messages, two_phase)
    for (protocol, streaming), binary, messages, two_phase in itertools.product(
        PROTOCOLS, (False, True), (False, True), (False, True)
    )
]
PLAIN = Form(1)
STREAMED = Form(2, "on")


@dataclass(frozen=True)
class Wire:
    """A publisher after its traffic, and the assemblies read so far."""

    traffic: Traffic
    slots: dict[bool, str]
    version: int
    read: dict[Form, list[Row]]

    @property
    def database(self) -> Database:
        return self.traffic.database

    def rows(self, form: Form) -> list[Row]:
        """What the server sends in this form; skips the test if it cannot."""
        if form.protocol == 4 and self.version < PARALLEL_SINCE:
            pytest.skip("protocol version 4 exists since PostgreSQL 16")
        if form not in self.read:
            self.read[form] = peek(self.database, self.slots[form.two_phase], form.options)
        return self.read[form]

    def assembly(self, form: Form) -> Assembly:
        """Its transactions."""
        return Assembly.of(self.rows(form), parallel=form.streaming == "parallel")

    def messages(self, form: Form) -> list[m.Message]:
        parallel = form.streaming == "parallel"
        return list(decode_stream((data for *_, data in self.rows(form)), streaming_parallel=parallel))

    def oid(self, table: str) -> int:
        [(oid,)] = self.database.rows(f"select '{table}'::regclass::oid::bigint")
        return int(oid)


@pytest.fixture(scope="module")
def wire(make_cluster: Callable[..., Cluster]) -> Iterator[Wire]:
    cluster = make_cluster("wire", logical_decoding_work_mem="64kB", track_commit_timestamp="on")
    database = create_database(cluster, "wire")
    database.run(TABLES)
    slots = {two_phase: f"{database.name}_{two_phase}".lower() for two_phase in (False, True)}
    with database.connect() as session:
        for two_phase, slot in slots.items():
            session.execute(
                "select pg_create_logical_replication_slot(%s, 'pgoutput', false, %s)", (slot, two_phase)
            )
        version = session.info.server_version
    traffic = Traffic(database)
    traffic.run()
    yield Wire(traffic, slots, version, {})
    drop_database(database)


def test_server_sends_every_message_type(wire: Wire) -> None:
    """R1.2: nothing below passes for want of an example."""
    sent = {
        message.type
        for form in (PLAIN, STREAMED, Form(3, "on", two_phase=True))
        for message in wire.messages(form)
    }
    assert set(m.MessageType) - sent == set()


@dataclass(frozen=True)
class Read:
    """The traffic as it was read in one form."""

    form: Form
    assembly: Assembly


@pytest.fixture(scope="module", params=FORMS, ids=str)
def read(request: pytest.FixtureRequest, wire: Wire) -> Read:
    return Read(request.param, wire.assembly(request.param))


def test_transactions_are_the_committed_ones_in_commit_order(wire: Wire, read: Read) -> None:
    """R9.1, R9.2: by transaction id and commit time (R1.1); rolled-back transactions are in no form."""
    expected = [
        (transaction.xid, transaction.commit_time, transaction.origin)
        for transaction in wire.traffic.facts.committed
        if read.form.messages or transaction.name != "message alone"  # it then has nothing to send (R9.4)
    ]
    actual = [
        (committed_transaction.xid, committed_transaction.commit_time, committed_transaction.origin)
        for committed_transaction in read.assembly.committed
        if committed_transaction.commit_time is not None
    ]
    assert actual == expected


def test_rows_equal_those_of_sql(wire: Wire, read: Read) -> None:
    """R1.4 to R1.6: replayed into empty tables; texts, or binary values with `binary`."""
    assembly = read.assembly
    replica = Replica(assembly.relations)
    for transaction in assembly.committed:
        for change in transaction.changes:
            replica.apply(decode(change.data), change.version)
    tables = {relation.name.name: relation.id for relation in assembly.relations.values()}
    assert set(tables) == {
        "things", "logged", "keyed", "append_only", "bare", "emptied", "emptied_too", "many", "wide"
    }  # fmt: skip
    for table, oid in tables.items():
        expected = contents(wire.database, table, binary=read.form.binary)
        width = len(expected[0]) if expected else 0
        rows = [row + (None,) * (width - len(row)) for row in replica.rows[oid]]
        assert sorted(rows, key=repr) == sorted(expected, key=repr), table


class Replica:
    """The rows of each relation, looked up by replica identity."""

    def __init__(self, relations: dict[int, Relation]) -> None:
        self.rows: dict[int, list[tuple[bytes | None, ...]]] = {}
        self._relations = relations

    def apply(self, message: m.Message, version: int | None) -> None:
        match message:
            case m.Insert(relation=oid, new=new):
                assert m.TupleKind.UNCHANGED not in new.kinds
                self.rows.setdefault(oid, []).append(new.values)
            case m.Update(relation=oid, old_kind=kind, old=old, new=new):
                row = self.rows[oid].pop(self._place(version, kind or m.OldTuple.KEY, old or new))
                self.rows[oid].append(filled(new, row))
            case m.Delete(relation=oid, old_kind=kind, old=old):
                self.rows[oid].pop(self._place(version, kind, old))
            case m.Truncate(relations=oids):
                self.rows.update({oid: [] for oid in oids})
            case other:
                assert isinstance(other, m.LogicalMessage)

    def _place(self, version: int | None, kind: m.OldTuple, sent: m.TupleData) -> int:
        assert version is not None
        shape = self._relations[version]
        places = [
            place for place, column in enumerate(shape.columns) if column.is_key or kind is m.OldTuple.FULL
        ]
        searched = [sent.values[place] for place in places]
        [match] = [
            number
            for number, row in enumerate(self.rows[shape.id])
            if [row[place] for place in places] == searched
        ]
        return match


def filled(new: m.TupleData, old: tuple[bytes | None, ...]) -> tuple[bytes | None, ...]:
    return tuple(
        before if kind is m.TupleKind.UNCHANGED else value
        for kind, value, before in zip(new.kinds, new.values, old, strict=True)
    )


def test_all_stream_forms_have_same_transactions(wire: Wire, read: Read) -> None:
    """Message by message, once transaction ids of blocks are cut out and rolled back parts left out."""
    plain = wire.assembly(Form(1, binary=read.form.binary, messages=read.form.messages))
    assert sent(read.assembly) == sent(plain)


def sent(assembly: Assembly) -> list[tuple[int, list[bytes]]]:
    return [
        (transaction.xid, [change.data for change in transaction.changes])
        for transaction in assembly.committed
    ]


def test_columnar_decoder_equals_reference_reader(read: Read) -> None:
    """The log is captured without the option `binary`: with it, values are refused (R1.4)."""
    log = read.assembly.log()
    catalogs = [(0, 0), (0, log.column("lsn")[log.num_rows // 2].as_py())]
    decoder = ChangeDecoder.from_relations(EVERYTHING, read.assembly.relations, catalogs)
    if read.form.binary:
        with pytest.raises(InvalidMessage, match=r"value in binary format, .* at offset 8, row 0"):
            decoder.decode(log)
        return
    changes = decoder.decode(log)
    changes.validate(full=True)
    assert changes.num_rows > 6 * BIG
    assert changes.to_pylist() == reference_changes(log, EVERYTHING, catalogs)


def changes_of(wire: Wire, name: str, form: Form) -> list[m.Message]:
    """The row changes, TRUNCATEs and logical messages of a transaction."""
    xid = wire.traffic.facts.xid(name)
    [match] = [transaction for transaction in wire.assembly(form).committed if transaction.xid == xid]
    return [decode(change.data) for change in match.changes]


def kinds(row: m.TupleData | None) -> str | None:
    return None if row is None else "".join(kind.value for kind in row.kinds)


Sides: TypeAlias = tuple[str, str | None, str | None, str | None]
"""Type, letter of the old tuple, kinds of its values, kinds of the new tuple's."""


def sides(message: m.Message) -> Sides:
    assert isinstance(message, RowChange)
    letter: m.OldTuple | None = getattr(message, "old_kind", None)
    old, new = getattr(message, "old", None), getattr(message, "new", None)
    return message.type.value, letter and letter.value, kinds(old), kinds(new)


@pytest.mark.parametrize("binary", [False, True])
def test_changes_have_tuples_of_replica_identity(wire: Wire, binary: bool) -> None:
    """R1.4 to R1.6. A type without send function stays text: `acl`, the fourteenth column of `things`."""
    expected: dict[str, list[Sides]] = {
        # All columns; NULL is n, the empty text is t.
        "values": [
            ("I", None, None, "tttttttttttttttt"),
            ("I", None, None, "tntntttntttnnnnt"),
            ("I", None, None, "ttttttntnntttttt"),
            ("I", None, None, "tntttnnnnnnnnnnn"),
        ],
        # The key stays: no old tuple. The document is out of line and was not touched.
        "label": [("U", None, None, "tttttttttttttttu")],
        "key": [("U", "K", "tnnnnnnnnnnnnnnn", "tntttnnnnnnnnnnn")],
        "delete": [("I", None, None, "tnnnnnnnnnnnnnnn"), ("D", "K", "tnnnnnnnnnnnnnnn", None)],
        # The whole old row even where nothing changes, with the value that is out of line.
        "full": [
            ("I", None, None, "tnt"), ("I", None, None, "ttt"), ("I", None, None, "tnn"),
            ("U", "O", "tnt", "tnt"), ("D", "O", "ttt", None),
        ],
        # The index is on c and a: b is never sent, and NULL means that it is not part of the key.
        "index": [
            ("I", None, None, "ttt"), ("I", None, None, "tnt"), ("I", None, None, "ttt"),
            ("U", None, None, "ttt"), ("U", "K", "tnt", "tnt"), ("D", "K", "tnt", None),
        ],
        "nothing": [("I", None, None, "t"), ("I", None, None, "n")],
        "bare": [("I", None, None, ""), ("I", None, None, "")],
        "wide": [("I", None, None, "".join("n" if number % 7 == 0 else "t" for number in range(WIDEST)))],
    }  # fmt: skip
    for name, changes in expected.items():
        actual = [sides(message) for message in changes_of(wire, name, Form(1, binary=binary))]
        acl = "t" if name in OF_THINGS else "b"
        assert actual == [in_binary(change, acl) if binary else change for change in changes], name


OF_THINGS: Final = {"values", "label", "key", "delete"}
ACL: Final = 13


def in_binary(change: Sides, acl: str) -> Sides:
    """The kinds as they are with the option `binary`, where the column `acl` stays as it is."""
    kind, letter, old, new = change
    return kind, letter, binary_kinds(old, acl), binary_kinds(new, acl)


def binary_kinds(kinds: str | None, acl: str) -> str | None:
    if kinds is None:
        return None
    return "".join(
        acl if kind == "t" and place == ACL else kind.replace("t", "b") for place, kind in enumerate(kinds)
    )


def test_relation_messages_equal_catalog(wire: Wire) -> None:
    """R1.2, R1.8, R1.13: names, oids, modifiers, key columns; in the order of the tuples' values."""
    identities = {
        "logged": ReplicaIdentity.FULL,
        "keyed": ReplicaIdentity.INDEX,
        "append_only": ReplicaIdentity.NOTHING,
    }
    keys = {
        "things": {"id"},
        "many": {"id"},
        "keyed": {"a", "c"},
        "emptied": {"a"},
        "logged": {"a", "b", "c"},
    }
    last = {
        message.name: message for message in wire.messages(PLAIN) if isinstance(message, m.RelationMessage)
    }
    for name, message in last.items():
        columns = wire.database.rows(
            "select attname::text, atttypid::bigint, atttypmod from pg_attribute"
            f" where attrelid = '{name}'::regclass and attnum > 0 and not attisdropped order by attnum"
        )
        actual = [(column.name, column.type_oid, column.typmod) for column in message.columns]
        assert actual == columns
        assert message.relation == wire.oid(str(name))
        assert message.replica_identity is identities.get(name.name, ReplicaIdentity.DEFAULT)
        assert {column.name for column in message.columns if column.is_key} == keys.get(name.name, set())
    assert len(last) == 9


@pytest.mark.parametrize("form", [PLAIN, STREAMED], ids=str)
def test_type_messages_precede_their_relation(wire: Wire, form: Form) -> None:
    """R1.10: a domain under the name of its base type."""
    [(mood, score)] = wire.database.rows("select 'mood'::regtype::oid::bigint, 'score'::regtype::oid::bigint")
    messages = wire.messages(form)
    things = next(
        number
        for number, message in enumerate(messages)
        if isinstance(message, m.RelationMessage) and message.name.name == "things"
    )
    assert messages[things - 2 : things] == [
        m.TypeMessage(None, mood, QualifiedName("public", "mood")),
        m.TypeMessage(None, score, QualifiedName("pg_catalog", "int4")),
    ]


def test_truncate_message_has_all_relations_and_flags(wire: Wire) -> None:
    """R1.2: one message per statement, CASCADE is 1, RESTART IDENTITY is 2."""
    cascade, restart = m.TruncateFlag.CASCADE, m.TruncateFlag.RESTART_IDENTITY
    expected = {
        "cascade": (cascade | restart, {"emptied", "emptied_too"}),
        "restart": (restart, {"emptied_too"}),
        "both": (m.TruncateFlag(0), {"many", "logged"}),
    }
    for name, (flags, tables) in expected.items():
        [message] = changes_of(wire, name, PLAIN)
        assert isinstance(message, m.Truncate)
        assert (message.flags, set(message.relations)) == (flags, {wire.oid(table) for table in tables})


@pytest.mark.parametrize("form", [Form(1), Form(2, "on"), Form(3, two_phase=True)], ids=str)
def test_logical_messages_are_unchanged(wire: Wire, form: Form) -> None:
    """R1.2, R9.4, R9.13: in a transaction, alone in one, and outside of any, although it was rolled back."""
    actual = [
        (transaction.xid, message.is_transactional, message.prefix, message.content)
        for transaction in wire.assembly(form).committed
        for message in (decode(change.data) for change in transaction.changes)
        if isinstance(message, m.LogicalMessage)
    ]
    facts = wire.traffic.facts
    assert actual == [
        (facts.xid("message"), True, "inside ü", b"\x00\xff"),
        (facts.xid("message alone"), True, "", b""),
        (0, False, "outside", b"lost"),
    ]


def test_origin_follows_begin_of_its_transaction(wire: Wire) -> None:
    """R1.12: with the LSN and the time that it had there."""
    messages = wire.messages(PLAIN)
    origins = [number for number, message in enumerate(messages) if isinstance(message, m.Origin)]
    assert [messages[number] for number in origins] == [m.Origin(Lsn(0xABCD), wire.traffic.origin)]
    [(then,)] = wire.database.rows(
        "select (extract(epoch from '2001-02-03 04:05:06.000007+00'::timestamptz) * 1000000)::bigint"
    )
    begin = messages[origins[0] - 1]
    assert isinstance(begin, m.Begin)
    assert (begin.xid, begin.commit_time) == (wire.traffic.facts.xid("origin"), then)


@pytest.mark.parametrize("form", [form for form in FORMS if form.streaming == "off"], ids=str)
def test_commit_has_lsn_announced_by_begin(wire: Wire, form: Form) -> None:
    """R1.22: and the slot function says where it ends."""
    begins: list[m.Begin] = []
    for lsn, _, data in wire.rows(form):
        message = decode(data)
        if isinstance(message, m.Begin):
            begins.append(message)
        elif isinstance(message, m.Commit):
            begin = begins[-1]
            assert (message.commit_lsn, message.commit_time) == (begin.commit_lsn, begin.commit_time)
            assert message.commit_lsn < message.end_lsn == Lsn(lsn)
    assert begins


STREAMING = [form for form in FORMS if form.streaming != "off" and form.messages and not form.binary]


@pytest.mark.parametrize("form", STREAMING, ids=str)
def test_large_transactions_are_streamed_in_interleaved_blocks(wire: Wire, form: Form) -> None:
    """R1.9, R1.16: messages of a block name the (sub)transaction that made them; R comes in each stream."""
    facts = wire.traffic.facts
    blocks: list[int] = []
    writers: dict[int, set[int]] = {}
    described: Counter[tuple[int, int]] = Counter()
    for message in wire.messages(form):
        if isinstance(message, m.StreamStart):
            assert message.is_first == (message.xid not in blocks)
            blocks.append(message.xid)
        elif isinstance(message, m.RelationMessage) and message.xid is not None:
            described[blocks[-1], message.relation] += 1
        elif isinstance(message, RowChange) and message.xid is not None:
            writers.setdefault(blocks[-1], set()).add(message.xid)
    first, second = facts.xid("first"), facts.xid("second")
    assert {first, second} <= set(blocks)
    assert [xid for xid, _ in itertools.groupby(blocks) if xid in {first, second}] != [first, second]
    for top, xids in writers.items():
        assert {facts.rolled_back_parts.get(xid, top) for xid in xids} == {top}
    assert described[first, wire.oid("many")] >= 1


@pytest.mark.parametrize("form", STREAMING, ids=str)
def test_stream_abort_has_position_and_time_with_streaming_parallel_only(wire: Wire, form: Form) -> None:
    """R1.3: protocol version 4 alone does not lengthen it."""
    parts = wire.traffic.facts.rolled_back_parts
    aborts = [message for message in wire.messages(form) if isinstance(message, m.StreamAbort)]
    assert aborts
    for abort in aborts:
        assert abort.xid == abort.subxid or parts[abort.subxid] == abort.xid
        assert (abort.abort_lsn is not None) == (form.streaming == "parallel")
        assert (abort.abort_time is not None) == (form.streaming == "parallel")


@pytest.mark.parametrize("form", [form for form in FORMS if form.two_phase and form.messages], ids=str)
def test_prepared_transactions_are_sent_at_prepare_and_their_outcome_separately(
    wire: Wire, form: Form
) -> None:
    """R9.8: an outcome names the transaction, its gid, and where and when it was prepared."""
    messages = wire.messages(form)
    prepares = {
        message.gid: message for message in messages if isinstance(message, m.Prepare | m.StreamPrepare)
    }
    facts = wire.traffic.facts
    assert {gid: message.xid for gid, message in prepares.items()} == facts.prepared
    streamed = {gid for gid, message in prepares.items() if isinstance(message, m.StreamPrepare)}
    assert streamed <= {gid for gid in facts.prepared if gid.startswith("large")}
    assert bool(streamed) == (form.streaming != "off")
    for begin in (message for message in messages if isinstance(message, m.BeginPrepare)):
        prepare = prepares[begin.gid]
        assert (begin.prepare_lsn, begin.end_lsn, begin.prepare_time, begin.xid) == (
            prepare.prepare_lsn, prepare.end_lsn, prepare.prepare_time, prepare.xid
        )  # fmt: skip
    committed = [message for message in messages if isinstance(message, m.CommitPrepared)]
    rolled_back = [message for message in messages if isinstance(message, m.RollbackPrepared)]
    assert [message.gid for message in committed] == ["small commit ü", "large commit ü"]
    assert [message.gid for message in rolled_back] == ["small rollback ü", "large rollback ü"]
    for outcome in rolled_back:
        prepare = prepares[outcome.gid]
        assert (outcome.xid, outcome.prepare_end_lsn, outcome.prepare_time) == (
            prepare.xid, prepare.end_lsn, prepare.prepare_time
        )  # fmt: skip
        assert outcome.rollback_time >= outcome.prepare_time
        assert outcome.end_lsn > prepare.end_lsn


@pytest.mark.parametrize("form", [PLAIN, STREAMED], ids=str)
def test_each_call_sends_relations_again(wire: Wire, form: Form) -> None:
    """R1.14: two calls return the same bytes; one that begins later describes its relations itself."""
    rows = wire.rows(form)
    assert peek(wire.database, wire.slots[form.two_phase], form.options) == rows


def test_pgoutput_has_no_text_form(wire: Wire) -> None:
    """R1.20."""
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="binary"):
        peek(wire.database, wire.slots[False], PLAIN.options, function="peek")


@pytest.mark.parametrize(
    "options",
    [
        ["proto_version", "1"],
        ["publication_names", "everything"],
        ["proto_version", "5", "publication_names", "everything"],
        ["proto_version", "1", "publication_names", "everything", "streaming", "on"],
        ["proto_version", "1", "publication_names", "everything", "unknown", "on"],
        ["proto_version", "1", "proto_version", "1", "publication_names", "everything"],
    ],
    ids=" ".join,
)
def test_unknown_options_are_a_server_error(wire: Wire, options: list[str]) -> None:
    """R1.18: nothing is left out in silence."""
    with pytest.raises(psycopg.Error):
        peek(wire.database, wire.slots[False], options)
