"""The change log by itself: atomic, one writer at a time, damage is detected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.metadata_tables import CatalogRow
from cdc_replay.changelog.prepared_transactions import PreparedKey
from cdc_replay.changelog.segment import LOG_SCHEMA, read_row_group
from cdc_replay.errors import ChangeLogConflict, ChangeLogDamaged, ChangeLogMissing
from cdc_replay.model.database import Database
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import (
    QualifiedName,
    Relation,
    RelationColumn,
    RelationId,
    ReplicaIdentity,
)

HEADER = LogHeader("7000000000000000001", 1, "slot", Lsn(100), Database(5, "shop"))
EVERYTHING = Window(Lsn(0), Lsn(2**62))


def transaction(commit_lsn: int, messages: int = 1) -> pa.RecordBatch:
    rows = [
        {
            "commit_lsn": commit_lsn, "commit_time": commit_lsn, "xid": 1, "origin": None, "seq": seq,
            "lsn": commit_lsn - 8, "kind": "I", "relation_id": 1, "relation_version": 2, "message": b"I" * 50,
        }
        for seq in range(messages)
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(rows, schema=LOG_SCHEMA)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture
def log(uri: str) -> ChangeLog:
    return ChangeLog.create(uri, HEADER)


def append(log: ChangeLog, end_lsn: int, *batches: pa.RecordBatch) -> None:
    log.commit(log.write(batches), Lsn(end_lsn))


def commit_lsns(log: ChangeLog, window: Window = EVERYTHING) -> list[int]:
    return [lsn for group in log.segments(window) for lsn in read_row_group(group)["commit_lsn"].to_pylist()]


@pytest.mark.usefixtures("log")
def test_a_new_log_is_empty_and_ends_where_it_starts(uri: str) -> None:
    opened = ChangeLog.open(uri)
    assert (opened.header, opened.end_lsn) == (HEADER, Lsn(100))
    assert (commit_lsns(opened), opened.relations(), opened.catalogs()) == ([], {}, ())


def test_messages_and_end_become_visible_together(log: ChangeLog, uri: str) -> None:
    segments = log.write([transaction(110), transaction(120)])
    assert (ChangeLog.open(uri).end_lsn, commit_lsns(ChangeLog.open(uri))) == (Lsn(100), [])

    log.commit(segments, Lsn(125))

    assert (ChangeLog.open(uri).end_lsn, commit_lsns(ChangeLog.open(uri))) == (Lsn(125), [110, 120])


def test_an_empty_pull_moves_the_end_only(log: ChangeLog, uri: str) -> None:
    append(log, 150)
    assert (ChangeLog.open(uri).end_lsn, commit_lsns(ChangeLog.open(uri))) == (Lsn(150), [])


def test_a_reader_keeps_the_log_that_it_opened(log: ChangeLog, uri: str) -> None:
    append(log, 110, transaction(110))
    reader = ChangeLog.open(uri)
    append(log, 120, transaction(120))
    assert (reader.end_lsn, commit_lsns(reader)) == (Lsn(110), [110])


def test_a_reader_keeps_the_log_that_it_opened_when_old_commits_are_deleted(
    log: ChangeLog, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_replay.changelog.delta.table.CHECKPOINT_EVERY", 2)
    monkeypatch.setattr("cdc_replay.changelog.delta.checkpoints.KEPT_COMMITS", 2)
    append(log, 110, transaction(110))
    reader = ChangeLog.open(uri)
    for end_lsn in range(120, 180, 10):
        append(log, end_lsn, transaction(end_lsn))
    assert not Path(uri, "changes", "_delta_log", f"{1:020}.json").exists()
    assert (reader.start_lsn, reader.end_lsn, commit_lsns(reader)) == (Lsn(100), Lsn(110), [110])


def test_a_second_writer_is_refused(log: ChangeLog, uri: str) -> None:
    other = ChangeLog.open(uri)
    append(log, 110, transaction(110))
    with pytest.raises(ChangeLogConflict, match="another writer"):
        append(other, 110, transaction(110))
    assert commit_lsns(ChangeLog.open(uri)) == [110]


@pytest.mark.usefixtures("log")
def test_a_log_is_not_created_over_another(uri: str) -> None:
    with pytest.raises(ChangeLogConflict, match="already"):
        ChangeLog.create(uri, HEADER)


def test_a_window_reads_the_segments_and_row_groups_that_it_needs(
    log: ChangeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment of three row groups (of 10 rows) and one of one; the window is in the second group."""
    monkeypatch.setattr("cdc_replay.changelog.segment.ROW_GROUP_ROWS", 10)
    append(log, 130, transaction(110, 10), transaction(120, 10), transaction(130, 10))
    append(log, 140, transaction(140))
    assert [group.rows for group in log.segments(EVERYTHING)] == [10, 10, 10, 1]
    assert commit_lsns(log, Window(Lsn(110), Lsn(120))) == [120] * 10
    assert log.segments(Window(Lsn(140), Lsn(200))) == ()


def test_summary_and_commits_count_transactions_across_row_groups(
    log: ChangeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_replay.changelog.segment.ROW_GROUP_ROWS", 2)
    rows = transaction(110, 5)
    append(log, 120, *(rows.slice(start, 1) for start in range(5)), transaction(120, 2))
    summary = log.summary(EVERYTHING)
    assert (summary.messages, summary.transactions) == (7, 2)
    assert [commit.commit_lsn for commit in log.commits(EVERYTHING)] == [Lsn(110), Lsn(120)]
    assert log.summary(Window(Lsn(110), Lsn(120))).messages == 2


def test_the_first_commit_of_a_window_is_read_without_later_row_groups(log: ChangeLog, uri: str) -> None:
    append(log, 110, transaction(110))
    append(log, 130, transaction(120), transaction(130))
    append(log, 140, transaction(140))
    (*_, last) = sorted(Path(uri, "changes").glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
    last.write_bytes(b"")  # reading it would fail
    commits = [log.first_commit(Window(Lsn(after), Lsn(140))) for after in (0, 110, 120)]
    assert [commit and commit.commit_lsn for commit in commits] == [Lsn(110), Lsn(120), Lsn(130)]
    assert log.first_commit(Window(Lsn(140), Lsn(150))) is None


def test_relations_are_kept_once_per_version(log: ChangeLog, uri: str) -> None:
    columns = (RelationColumn("id", 23, -1, True), RelationColumn("ä", 25, 7, False))
    relation = Relation(RelationId(5), -9, QualifiedName("s", "t"), ReplicaIdentity.DEFAULT, columns)
    log.add_relations({relation.version: relation})
    log.add_relations({relation.version: relation})
    assert ChangeLog.open(uri).relations() == {-9: relation}
    assert DeltaTable(f"{uri}/relations").version() == 1


def test_the_later_reading_of_two_catalogs_for_one_position_counts(log: ChangeLog) -> None:
    """The first was written by a pull that died before its commit."""
    for read_lsn, text in ((90, "died"), (95, "committed")):
        log.add_catalogs([CatalogRow(Lsn(0), Lsn(read_lsn), text)])
    log.add_catalogs([CatalogRow(Lsn(120), Lsn(130), "next")])
    assert [version.text for version in log.catalogs()] == ["committed", "next"]


def test_ddl_changes_are_stored_by_position_and_transaction(log: ChangeLog, uri: str) -> None:
    """R9.10: in the order in which all transactions see them; repeated ones are stored once."""
    commands = [
        CatalogRow(Lsn(105), Lsn(120), "of a long one", Lsn(120)),
        CatalogRow(Lsn(107), Lsn(110), "of a short one", Lsn(110)),
    ]
    for _ in range(2):
        log.add_catalogs([CatalogRow(Lsn(0), Lsn(90), "whole"), *commands])

    assert [version.text for version in log.catalogs()] == ["whole", "of a short one", "of a long one"]
    assert ChangeLog.open(uri).catalogs()[1:] == (commands[1], commands[0])


def test_catalogs_after_the_end_are_dropped_as_those_of_a_dead_pull(log: ChangeLog, uri: str) -> None:
    append(log, 110, transaction(110))
    committed = [
        CatalogRow(Lsn(0), Lsn(115), "read after the end, in force before"),
        CatalogRow(Lsn(105), Lsn(110), "command", Lsn(110)),
        CatalogRow(Lsn(110), Lsn(130), "in force from the end on"),
    ]
    log.add_catalogs([*committed, CatalogRow(Lsn(108), Lsn(120), "command", Lsn(120))])
    log.add_catalogs([CatalogRow(Lsn(115), Lsn(115), "whole")])

    assert log.drop_uncommitted_catalogs() == tuple(committed)
    assert ChangeLog.open(uri).catalogs() == tuple(committed)
    version = DeltaTable(f"{uri}/catalogs").version()
    assert log.drop_uncommitted_catalogs() == tuple(committed)
    assert DeltaTable(f"{uri}/catalogs").version() == version


def test_any_delta_reader_can_read_the_log(log: ChangeLog, uri: str) -> None:
    append(log, 110, transaction(110, 3))
    table = DeltaTable(f"{uri}/changes")
    assert table.transaction_version("slot") == 110
    assert table.to_pyarrow_table()["message"].to_pylist() == [b"I" * 50] * 3


def data_file(log: ChangeLog) -> Path:
    (group,) = log.segments(EVERYTHING)
    return Path(group.uri)


def test_a_missing_segment_is_reported_before_it_is_read(log: ChangeLog) -> None:
    append(log, 110, transaction(110))
    file = data_file(log)
    file.unlink()
    with pytest.raises(ChangeLogDamaged, match=file.name):
        log.segments(EVERYTHING)


def test_a_truncated_segment_is_reported_before_it_is_read(log: ChangeLog) -> None:
    append(log, 110, transaction(110))
    file = data_file(log)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ChangeLogDamaged, match=file.name) as refused:
        log.segments(EVERYTHING)
    assert "bytes" in str(refused.value.detail)


def test_the_page_checksum_detects_a_flipped_bit(log: ChangeLog) -> None:
    """The error names the file and the row group."""
    append(log, 110, transaction(110))
    (group,) = log.segments(EVERYTHING)
    file = Path(group.uri)
    content = bytearray(file.read_bytes())
    content[60] ^= 1
    file.write_bytes(content)
    with pytest.raises(ChangeLogDamaged, match=file.name) as refused:
        read_row_group(group)
    assert "Row group 0" in str(refused.value.detail)


def test_a_damaged_commit_is_reported_when_the_log_is_opened(log: ChangeLog, uri: str) -> None:
    append(log, 110, transaction(110))
    Path(uri, "changes", "_delta_log", f"{1:020}.json").write_text("{")
    with pytest.raises(ChangeLogDamaged, match="changes"):
        ChangeLog.open(uri)


def test_a_missing_log_is_named(uri: str) -> None:
    with pytest.raises(ChangeLogMissing, match=uri):
        ChangeLog.open(uri)


def test_a_delta_table_that_is_no_change_log_is_refused(tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path / "log" / "changes"), schema=pa.schema([("a", pa.int64())]))
    with pytest.raises(ChangeLogDamaged, match="not a change log"):
        ChangeLog.open(str(tmp_path / "log"))


@pytest.mark.parametrize(
    ("name", "value"), [("timeline", "one"), ("start_lsn", "0"), ("database_oid", "9" * 5000)]
)
def test_a_property_that_is_no_number_or_position_is_damage(
    uri: str, log: ChangeLog, name: str, value: str
) -> None:
    properties = log.header.to_configuration() | {f"cdc_replay.{name}": value}
    with pytest.raises(ChangeLogDamaged, match="not those of a change log"):
        LogHeader.from_configuration(uri, properties)


def test_a_failed_write_leaves_nothing_that_readers_see(log: ChangeLog, uri: str) -> None:
    def breaks() -> Iterator[pa.RecordBatch]:
        yield transaction(110, 50_000)
        yield transaction(120, 50_000)
        raise RuntimeError("the connection was lost")

    with pytest.raises(RuntimeError, match="lost"):
        log.write(breaks())
    assert list(Path(uri, "changes").glob("*.parquet")) == []


def test_prepared_transactions_are_stored_until_they_are_deleted(log: ChangeLog, uri: str) -> None:
    """R9.8: keyed by xid and the end of the prepare record; storing one again changes nothing."""
    key = PreparedKey(7, Lsn(110))
    assert not log.prepared.store(PreparedKey(8, Lsn(105)), [])
    for _ in range(2):
        assert log.prepared.store(key, [transaction(110, 3)])
    assert ChangeLog.open(uri).prepared.list_keys() == (key,)
    (content,) = ChangeLog.open(uri).prepared.content(key)
    assert content.equals(transaction(110, 3))
    log.prepared.remove([key, PreparedKey(9, Lsn(1))])
    assert log.prepared.list_keys() == ()


def test_a_long_window_is_split_at_segment_ends_that_do_not_depend_on_its_start(log: ChangeLog) -> None:
    """Segments of 3 rows, split after every 6 rows of the log, wherever the window begins."""
    for end in (110, 120, 130, 140, 150):
        append(log, end, transaction(end - 2), transaction(end, messages=2))

    def cuts(after: int, upto: int) -> list[int]:
        ends = [after]
        while ends[-1] < upto:
            ends.append(log.split_lsn(Window(Lsn(ends[-1]), Lsn(upto)), 6).value)
        return ends[1:]

    assert cuts(100, 150) == [120, 140, 150]
    assert cuts(108, 150) == [120, 140, 150]
    assert cuts(110, 119) == [119]
    assert cuts(140, 150) == [150]
    assert log.split_lsn(Window(Lsn(100), Lsn(150)), 1_000) == Lsn(150)
    assert log.split_lsn(Window(Lsn(100), Lsn(150)), 1) == Lsn(110)


def test_a_window_that_ends_after_the_last_transaction_is_not_split_there(log: ChangeLog) -> None:
    """A pull may end between two transactions, such as after so much WAL."""
    append(log, 120, transaction(110), transaction(115))
    append(log, 140, transaction(130), transaction(135))
    assert log.split_lsn(Window(Lsn(100), Lsn(140)), 2) == Lsn(115)
    assert log.split_lsn(Window(Lsn(115), Lsn(140)), 2) == Lsn(140)
    assert log.split_lsn(Window(Lsn(100), Lsn(129)), 2) == Lsn(129)


def test_an_empty_log_is_not_split(log: ChangeLog) -> None:
    assert log.split_lsn(Window(Lsn(100), Lsn(200)), 1) == Lsn(200)
