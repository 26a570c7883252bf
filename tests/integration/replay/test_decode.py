"""What a real publisher sends, as changes: the columnar decoder, and the decode stage on Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PythonException

from cdc_replay.changelog.segment import RowGroup, SegmentWriter, plan_row_groups
from cdc_replay.changelog.storage import Location
from cdc_replay.model.frames import CHANGES
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.pgoutput import messages as m
from cdc_replay.pgoutput.columnar import ChangeDecoder
from cdc_replay.replay.decode import LogReader
from fixtures.postgres import Database
from unit.pgoutput.assembly import Assembly
from unit.pgoutput.wire import encode, log_batch, log_row, reference_changes, relation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVERYTHING = Window(Lsn(0), Lsn(2**63 - 1))

TABLES = """
    create table orders (id int primary key, note text, amount numeric(10, 2), document text);
    alter table orders alter document set storage external;
    create table visits (who text, at timestamptz, path text[]);
    alter table visits replica identity full;
    create table "Tags ü" (id int primary key, order_id int references orders, tag text)
"""


class Stream:
    """A slot and a publication of all tables of a database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.slot = f"decode_{database.name}"
        database.run("create publication everything for all tables")
        with database.connect() as connection:
            connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (self.slot,))

    def assembly(self) -> Assembly:
        """All that the slot holds."""
        with self.database.connect() as connection:
            rows = connection.execute(
                "select (lsn - '0/0')::bigint, xid::text::bigint, data"
                " from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '1',"
                " 'publication_names', 'everything', 'messages', 'true')",
                (self.slot,),
            ).fetchall()
        return Assembly.of(rows)

    def decoded(self) -> list[dict[str, Any]]:
        """CHANGES rows, which are those of the reference reader."""
        assembly = self.assembly()
        log = assembly.log()
        changes = ChangeDecoder.from_relations(EVERYTHING, assembly.relations, [(0, 0)]).decode(log)
        changes.validate(full=True)
        decoded: list[dict[str, Any]] = changes.to_pylist()
        assert decoded == reference_changes(log, EVERYTHING, [(0, 0)])
        return decoded


@pytest.fixture
def stream(publisher: Database) -> Stream:
    publisher.run(TABLES)
    return Stream(publisher)


def values(change: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(change[name] for name in ("kind", "old_kind", "old", "old_kinds", "new", "new_kinds"))


def test_rows_arrive_as_the_publisher_wrote_them(stream: Stream) -> None:
    """R1.4 to R1.6, default replica identity: no old tuple unless the key changes, then the key."""
    stream.database.run("insert into orders values (1, null, 1.5, repeat('x', 3000)), (2, 'ünï', null, '')")
    stream.database.run("update orders set note = 'seen' where id = 1")
    stream.database.run("update orders set id = 3 where id = 2")
    stream.database.run("delete from orders where id = 1")
    document = "x" * 3000
    assert [values(change) for change in stream.decoded()] == [
        ("I", None, None, None, ["1", None, "1.50", document], "tntt"),
        ("I", None, None, None, ["2", "ünï", None, ""], "ttnt"),
        # The document is stored out of line and did not change.
        ("U", None, None, None, ["1", "seen", "1.50", None], "tttu"),
        ("U", "K", ["2", None, None, None], "tnnn", ["3", "ünï", None, ""], "ttnt"),
        ("D", "K", ["1", None, None, None], "tnnn", None, None),
    ]


def test_replica_identity_full_sends_the_whole_old_row(stream: Stream) -> None:
    """R1.6: always, even where nothing changes."""
    stream.database.run("insert into visits values ('ann', '2013-01-01 05:15:00+00', '{a,\"b c\",null}')")
    stream.database.run("update visits set who = who")
    stream.database.run("delete from visits")
    row = ["ann", "2013-01-01 05:15:00+00", '{a,"b c",NULL}']
    assert [values(change) for change in stream.decoded()] == [
        ("I", None, None, None, row, "ttt"),
        ("U", "O", row, "ttt", row, "ttt"),
        ("D", "O", row, "ttt", None, None),
    ]


def test_truncate_of_several_tables_is_one_row_per_table(stream: Stream) -> None:
    stream.database.run("truncate orders, visits restart identity cascade")
    changes = stream.decoded()
    (oids,) = zip(
        *stream.database.rows(
            "select oid from pg_class where relname in ('orders', 'visits', 'Tags ü') order by oid"
        ),
        strict=True,
    )
    assert sorted(change["relation_id"] for change in changes) == list(oids)
    assert {(change["kind"], change["truncate_flags"]) for change in changes} == {("T", 3)}
    assert len({(change["commit_lsn"], change["seq"]) for change in changes}) == 1


def test_table_altered_between_two_rows_has_two_shapes(stream: Stream) -> None:
    """R1.13: the tuples of each shape are read with their own number of columns (R1.4)."""
    stream.database.run(
        "begin; insert into visits values ('ann'); alter table visits add page int;"
        " insert into visits values ('bob'); commit"
    )
    first, second = stream.decoded()
    assert first["new"] == ["ann", None, None]
    assert second["new"] == ["bob", None, None, None]
    assert first["relation_id"] == second["relation_id"]
    assert first["relation_version"] != second["relation_version"]


def test_logical_message_is_not_a_change(stream: Stream) -> None:
    stream.database.run(
        "begin; select pg_logical_emit_message(true, 'p', 'x'); insert into visits values ('ann'); commit"
    )
    assert [change["kind"] for change in stream.decoded()] == ["I"]


def write_segment(folder: Path, name: str, batches: list[Any]) -> tuple[RowGroup, ...]:
    """A segment with one row group per batch."""
    location = Location.parse(str(folder))
    with SegmentWriter(location, name) as writer:
        for batch in batches:
            writer.write(batch)
    assert writer.segment is not None
    return plan_row_groups(location / writer.segment.name, EVERYTHING)


@pytest.mark.spark
def test_reader_yields_the_changes_of_the_window(stream: Stream, spark: SparkSession, tmp_path: Path) -> None:
    """Through Parquet row groups and Spark tasks: the reference reader's changes, each once."""
    for index in range(1, 8):
        stream.database.run(f"insert into orders values ({index}, null, {index})")
        stream.database.run("update visits set who = who; insert into visits values ('ä', now(), '{}')")
    stream.database.run("truncate visits, orders cascade")
    assembly = stream.assembly()
    log = assembly.log()
    groups = write_segment(tmp_path, "test", [log.slice(start, 5) for start in range(0, log.num_rows, 5)])
    assert len(groups) > 2
    commits = log.column("commit_lsn").to_pylist()
    window = Window(Lsn(commits[2]), Lsn(commits[-1]))
    catalogs = [(0, 0), (0, log.column("lsn").to_pylist()[10])]

    reader = LogReader.for_cores(groups, window, assembly.relations, catalogs, cores=2)
    frame = reader.frame(spark)

    inside = [row for row in log.to_pylist() if window.after.value < row["commit_lsn"] <= window.upto.value]
    assert reader.relations_seen() == Counter(row["relation_id"] or 0 for row in inside)
    assert frame.columns == list(CHANGES.names)
    assert frame.schema == spark.createDataFrame([], CHANGES.ddl).schema
    expected = reference_changes(log, window, catalogs)
    assert {change["catalog_version"] for change in expected} == {0, 1}
    assert in_order([row.asDict() for row in frame.collect()]) == in_order(expected)


def in_order(changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(changes, key=lambda change: (change["commit_lsn"], change["seq"], change["relation_id"]))


@pytest.mark.spark
def test_no_row_groups_are_no_changes(spark: SparkSession) -> None:
    frame = LogReader.for_cores((), EVERYTHING, {}, [(0, 0)], cores=2).frame(spark)
    assert frame.columns == list(CHANGES.names)
    assert frame.count() == 0


TABLE = relation(2)
GOOD = encode(m.Insert(None, TABLE.id, m.TupleData((m.TupleKind.TEXT, m.TupleKind.NULL), (b"1", None))))
TRUNCATE = encode(m.Truncate(None, m.TruncateFlag(0), (TABLE.id,)))

# GOOD is: I, oid (offset 1), N (5), 2 columns (6), t (8), length 1 (9), "1" (13), n (14).
# TRUNCATE is: T, 1 relation (1), flags (5), oid (6).
DAMAGES: dict[str, tuple[str, bytes | None, str]] = {
    "nothing": ("I", b"", "message ends too early at offset 0"),
    "cut": ("I", GOOD[:-1], "message ends too early at offset 14"),
    "longer": ("I", GOOD + b"n", "bytes after the end of the message at offset 15"),
    "value": ("I", GOOD[:14] + b"x", "unknown kind of value at offset 14"),
    "binary": ("I", GOOD[:8] + b"b" + GOOD[9:], "which the log must not be captured with at offset 8"),
    "negative": ("I", GOOD[:9] + b"\xff" + GOOD[10:], "negative length of a value at offset 9"),
    "long": ("I", GOOD[:9] + b"\x7f" + GOOD[10:], "message ends too early at offset 13"),
    "columns": ("I", GOOD[:7] + b"\3" + GOOD[8:], "differs from the relation version's at offset 6"),
    "latin1": ("I", GOOD[:13] + b"\xe9" + GOOD[14:], "value is not UTF-8 at offset 13"),
    "type": ("U", GOOD, "message type differs from the log's column kind at offset 0"),
    "kind": ("R", GOOD, 'unknown kind "R" in the log at offset 0'),
    "truncate": ("T", TRUNCATE[:-1], "message ends too early at offset 6"),
    "flags": ("T", TRUNCATE[:5] + b"\4" + TRUNCATE[6:], "unknown flags 0x04 at offset 5"),
    "null": ("T", None, "message ends too early at offset 0"),
}


@pytest.mark.spark
def test_task_error_names_segment_row_group_row_and_offset(spark: SparkSession, tmp_path: Path) -> None:
    """The driver gets the text alone; the segment around the damage is valid."""
    good = log_row(GOOD)
    for damage, (kind, message, problem) in DAMAGES.items():
        bad = good | {"seq": 3, "kind": kind, "message": message}
        batches = [log_batch([good, good | {"seq": 1}]), log_batch([good | {"seq": 2}, bad])]
        groups = write_segment(tmp_path, damage, batches)
        with pytest.raises(PythonException) as failed:
            LogReader.for_cores(groups, EVERYTHING, {TABLE.version: TABLE}, [(0, 0)], cores=2).frame(
                spark
            ).collect()
        message_text = str(failed.value)
        assert f'{problem}, row 1 of row group 1 of segment "{groups[1].uri}" [R1.' in message_text
        assert message_text.count("cdc_replay.errors.InvalidMessage: ") == 1
        assert (
            "DETAIL: Row 1 is message 3 of the transaction that commits at 0/64"
            f" and has {len(message or b'')} bytes." in message_text
        )


@pytest.mark.spark
def test_damaged_message_outside_of_the_window_is_ignored(spark: SparkSession, tmp_path: Path) -> None:
    """Only what is replayed is decoded."""
    batch = log_batch([log_row(GOOD, commit_lsn=100), log_row(GOOD[:-1], commit_lsn=101)])
    groups = write_segment(tmp_path, "test", [batch])
    window = Window(Lsn(0), Lsn(100))
    assert (
        LogReader.for_cores(groups, window, {TABLE.version: TABLE}, [(0, 0)], cores=2).frame(spark).count()
        == 1
    )


def test_position_belongs_to_the_task_that_reads_it(tmp_path: Path) -> None:
    """A transaction may span several tasks, and a row group before it may hold none of the window."""
    placed = [[(100, 0), (101, 0)], [(101, 1), (101, 2)], [(101, 3), (105, 0)], [(105, 2)]]
    batches = [
        log_batch([log_row(GOOD, commit_lsn=lsn) | {"seq": seq} for lsn, seq in rows]) for rows in placed
    ]
    groups = write_segment(tmp_path, "test", batches)
    reader = LogReader.for_cores(
        groups, Window(Lsn(100), Lsn(105)), {TABLE.version: TABLE}, [(0, 0)], cores=2
    )
    found = {
        (row["commit_lsn"], row["seq"]): task
        for task in range(len(reader.tasks))
        for _, batch in reader.chunks(task)
        for row in batch.to_pylist()
    }
    assert len(set(found.values())) > 2
    assert reader.tasks_of(found) == list(found.values())
