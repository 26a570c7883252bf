"""A change log on an S3 server."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
import pytest
from deltalake import DeltaTable
from obstore.exceptions import GenericError
from pyarrow import fs

from cdc_replay.changelog.compaction import CompactionLimits
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.prepared_transactions import PreparedKey
from cdc_replay.changelog.segment import read_row_group
from cdc_replay.changelog.storage import Location, put_if_absent
from cdc_replay.changelog.verify import verify_log
from cdc_replay.errors import (
    ChangeLogConflict,
    ChangeLogDamaged,
    ChangeLogMissing,
    ChangeLogNotWritable,
    ChangeLogUnavailable,
)
from cdc_replay.model.lsn import Lsn
from integration.changelog.conftest import SECRET
from integration.changelog.pulls import (
    EVERYTHING,
    HEADER,
    PULLS,
    Publisher,
    expected_rows,
    messages,
    read_log_rows,
)

READ_IN_ANOTHER_PROCESS = """
import pickle, sys
from cdc_replay.changelog.segment import read_row_group
group = pickle.loads(sys.stdin.buffer.read())
sys.stdout.buffer.write(pickle.dumps(read_row_group(group).to_pylist()))
"""

LAST = PULLS[-1].end


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdc_replay.changelog.delta.table.CHECKPOINT_EVERY", 2)
    monkeypatch.setattr("cdc_replay.changelog.delta.checkpoints.KEPT_COMMITS", 2)


def objects(uri: str) -> dict[str, bytes]:
    """All objects below that location."""
    location = Location.parse(uri)
    selector = fs.FileSelector(location.path, recursive=True, allow_not_found=True)
    infos = location.filesystem.get_file_info(selector)
    paths = [info.path.removeprefix(location.path + "/") for info in infos if info.is_file]
    return {path: (location / path).read() for path in paths}


def filled(uri: str, upto: int = LAST) -> ChangeLog:
    publisher = Publisher()
    publisher.set_up(uri)
    publisher.capture(uri, upto)
    return ChangeLog.open(uri)


def test_pulls_and_readers_work_as_on_a_folder(s3_uri: str) -> None:
    """Six pulls with a prepared transaction, new shapes and checkpoints; no unnamed object remains."""
    log = filled(s3_uri)
    assert (log.header, log.end_lsn.value, read_log_rows(log)) == (HEADER, LAST, expected_rows(LAST))
    assert log.prepared.list_keys() == ()
    assert log.remove_dead_pulls() == 0
    names = {path.rpartition("/")[2] for path in objects(f"{s3_uri}/changes/_delta_log")}
    assert any(name.endswith(".checkpoint.parquet") for name in names)
    assert f"{0:020}.json" not in names


def test_another_process_reads_a_pickled_row_group(s3_uri: str) -> None:
    (group,) = filled(s3_uri, PULLS[0].end).segments(EVERYTHING)
    process = subprocess.run(
        [sys.executable, "-c", READ_IN_ANOTHER_PROCESS],
        input=pickle.dumps(group), capture_output=True, check=True,
    )  # fmt: skip
    rows = [(row["commit_lsn"], row["seq"], row["message"]) for row in pickle.loads(process.stdout)]
    assert rows == expected_rows(PULLS[0].end)


def test_any_delta_reader_reads_the_same_rows(s3_uri: str) -> None:
    filled(s3_uri)
    table = DeltaTable(f"{s3_uri}/changes", storage_options={"allow_http": "true"})
    assert table.transaction_version(HEADER.slot) == LAST
    rows = table.to_pyarrow_table(columns=["commit_lsn", "seq", "message"]).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == expected_rows(LAST)


def test_one_of_many_writers_of_the_same_position_succeeds(s3_uri: str) -> None:
    filled(s3_uri, PULLS[0].end)
    writers = [ChangeLog.open(s3_uri) for _ in range(6)]
    written = [log.write([messages(115, 1, count)]) for count, log in enumerate(writers, start=1)]

    def commit(writer: int) -> bool:
        try:
            writers[writer].commit(written[writer], Lsn(120))
        except ChangeLogConflict:
            return False
        return True

    with ThreadPoolExecutor(len(writers)) as pool:
        winners = [
            writer for writer, succeeded in enumerate(pool.map(commit, range(len(writers)))) if succeeded
        ]
    assert len(winners) == 1
    assert len(read_log_rows(ChangeLog.open(s3_uri))) == len(expected_rows(PULLS[0].end)) + winners[0] + 1
    assert ChangeLog.open(s3_uri).end_lsn == Lsn(120)


def test_a_lost_response_to_a_conditional_write_is_no_refusal(s3_uri: str) -> None:
    """A client that repeats a request finds its own file."""
    file = Location.parse(s3_uri) / "00000000000000000007.json"
    assert put_if_absent(file, b"mine")
    assert not put_if_absent(file, b"theirs")
    assert put_if_absent(file, b"mine")
    assert file.read() == b"mine"


def test_prepared_transactions_are_stored_and_deleted_in_a_store(s3_uri: str) -> None:
    log, key = filled(s3_uri, PULLS[0].end), PreparedKey(9, Lsn(115))
    for count in (1, 3):
        assert log.prepared.store(key, [messages(115, 1, count)])
    assert ChangeLog.open(s3_uri).prepared.list_keys() == (key,)
    assert sum(batch.num_rows for batch in log.prepared.content(key)) == 3
    log.prepared.remove([key])
    assert ChangeLog.open(s3_uri).prepared.list_keys() == ()


def test_files_of_a_dead_pull_are_removed_by_the_next(s3_uri: str) -> None:
    log = filled(s3_uri, PULLS[0].end)
    log.write([messages(115, 1)])
    before = objects(s3_uri)
    assert ChangeLog.open(s3_uri).remove_dead_pulls() == 1
    assert len(objects(s3_uri)) == len(before) - 1
    assert read_log_rows(ChangeLog.open(s3_uri)) == expected_rows(PULLS[0].end)


@pytest.mark.parametrize("listed_at_once", [1, 2, 1_000])
def test_names_with_a_prefix_are_those_of_the_folder(
    s3_uri: str, listed_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the store divides its answers; what precedes and follows the prefix is left out."""
    monkeypatch.setattr("cdc_replay.changelog.storage._LISTED_AT_ONCE", listed_at_once)
    folder = Location.parse(s3_uri)
    names = ["B-0.parquet", "B-1.parquet", "B-2.parquet"]
    for name in ("A-9.parquet", *names, "B-3/a.parquet", "C-0.parquet", "_delta_log/B-3.json"):
        assert put_if_absent(folder / name, b"content")
    assert sorted(folder.names_with("B-")) == names
    assert folder.names_with("D-") == ()
    assert (folder / "elsewhere").names_with("B-") == ()


def test_small_segments_are_merged_and_the_log_is_verified(s3_uri: str) -> None:
    log = filled(s3_uri)
    result = log.compact(CompactionLimits(worthwhile=2))
    assert (result.removed, result.added) > (2, 0)
    compacted = ChangeLog.open(s3_uri)
    assert read_log_rows(compacted) == expected_rows(LAST)
    assert len(compacted.segments(EVERYTHING)) == 1
    assert verify_log(s3_uri).to_lsn.value == LAST
    before = len(objects(s3_uri))
    assert compacted.delete_removed(older_than_hours=0) > 2
    assert len(objects(s3_uri)) < before
    assert read_log_rows(ChangeLog.open(s3_uri)) == expected_rows(LAST)


def test_a_compaction_whose_commit_was_not_answered_loses_nothing(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has written the commit; all that the client hears of it is an error."""
    log = filled(s3_uri)
    put = obstore.put

    def write_without_answer(*arguments: Any, **options: Any) -> None:
        put(*arguments, **options)
        raise GenericError("operation timed out")

    with monkeypatch.context() as silent:
        silent.setattr(obstore, "put", write_without_answer)
        with pytest.raises(ChangeLogNotWritable, match="timed out"):
            log.compact(CompactionLimits(worthwhile=2))
    assert len(ChangeLog.open(s3_uri).segments(EVERYTHING)) == 1
    assert read_log_rows(ChangeLog.open(s3_uri)) == expected_rows(LAST)


def test_a_missing_object_is_reported_as_damage(s3_uri: str) -> None:
    log = filled(s3_uri, PULLS[0].end)
    (group,) = log.segments(EVERYTHING)
    file = Location.parse(group.uri)
    file.filesystem.delete_file(file.path)
    with pytest.raises(ChangeLogDamaged, match=file.name):
        log.segments(EVERYTHING)


@pytest.mark.parametrize("deleted_count", [1, 3, 8, 13, 18])
def test_a_removal_that_stops_halfway_never_leaves_an_older_log(s3_uri: str, deleted_count: int) -> None:
    """After that many deletions the log is refused."""
    location = Location.parse(s3_uri)
    filled(s3_uri)
    paths = sorted(objects(f"{s3_uri}/changes"), key=lambda path: ("_delta_log/" in path, path))
    for path in paths[:deleted_count]:
        location.filesystem.delete_file(f"{location.path}/changes/{path}")
    with pytest.raises((ChangeLogDamaged, ChangeLogMissing)):
        read_log_rows(ChangeLog.open(s3_uri))


def test_credentials_are_in_no_object_and_in_no_text(s3_uri: str) -> None:
    log = filled(s3_uri)
    group = log.segments(EVERYTHING)[0]
    texts = [repr(log), repr(Location.parse(s3_uri)), repr(group), repr(log.header), pickle.dumps(group)]
    assert SECRET not in str(texts)
    assert all(SECRET.encode() not in content for content in objects(s3_uri).values())


def test_an_unreachable_store_is_not_reported_as_damage(
    s3_uri: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(s3_uri, PULLS[0].end)
    groups = log.segments(EVERYTHING)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for attempt in (lambda: ChangeLog.open(s3_uri), lambda: read_row_group(groups[0]), log.relations):
        with pytest.raises(ChangeLogUnavailable) as refused:
            attempt()
        assert SECRET not in str(refused.value)
    with pytest.raises(ChangeLogNotWritable) as not_writable:
        log.remove_dead_pulls()
    assert SECRET not in str(not_writable.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    assert read_log_rows(log) == expected_rows(PULLS[0].end)


def test_a_refused_write_is_reported(s3_uri: str) -> None:
    """The bucket does not exist."""
    missing = s3_uri.replace("change-logs", "not-there")
    with pytest.raises(ChangeLogNotWritable) as refused:
        ChangeLog.create(missing, HEADER)
    assert missing in str(refused.value)


def test_a_store_without_conditional_writes_is_refused(unconditional_s3_uri: str) -> None:
    with pytest.raises(ChangeLogNotWritable, match="does not support conditional writes") as refused:
        ChangeLog.create(unconditional_s3_uri, HEADER)
    assert "If-None-Match" in str(refused.value.detail)
    assert objects(unconditional_s3_uri) == {}
