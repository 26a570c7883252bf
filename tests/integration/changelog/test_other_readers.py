"""The log is readable without this software: by Delta readers, and as plain Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.storage import PARTIAL
from cdc_replay.model.frames import LOG
from integration.changelog.pulls import HEADER, PULLS, Publisher, expected_rows, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = ["commit_lsn", "seq", "message"]
LAST = PULLS[-1].end


@pytest.fixture
def changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table of changes of a log with six pulls, checkpoints, and the files of two dead pulls."""
    monkeypatch.setattr("cdc_replay.changelog.delta.table.CHECKPOINT_EVERY", 2)
    monkeypatch.setattr("cdc_replay.changelog.delta.checkpoints.KEPT_COMMITS", 2)
    uri, publisher = str(tmp_path / "log"), Publisher()
    publisher.set_up(uri)
    publisher.capture(uri)
    ChangeLog.open(uri).write([messages(165, 1)])
    folder = tmp_path / "log" / "changes"
    (folder / f"{PARTIAL}0-A0-1.parquet").write_bytes(b"PAR1")
    return folder


def test_a_delta_reader_sees_rows_position_and_header(changes: Path) -> None:
    table = DeltaTable(str(changes))
    rows = table.to_pyarrow_table(columns=COLUMNS).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == expected_rows(LAST)
    assert table.transaction_version(HEADER.slot) == LAST
    memory = {"delta.deletedFileRetentionDuration": "interval 24 hours"}
    assert table.metadata().configuration == HEADER.to_configuration() | memory
    assert [entry["operation"] for entry in table.history(2)] == ["WRITE", "WRITE"]
    assert table.schema().to_arrow().names == list(LOG.names)


def test_a_delta_reader_reads_an_earlier_version(changes: Path) -> None:
    table = DeltaTable(str(changes))
    last = table.version()
    table.load_as_version(last - 1)
    assert table.transaction_version(HEADER.slot) == PULLS[-2].end


def test_a_delta_reader_prunes_by_commit_lsn(changes: Path) -> None:
    """The commits have statistics of every file."""
    dataset = DeltaTable(str(changes)).to_pyarrow_dataset()
    later = list(dataset.get_fragments(filter=ds.field("commit_lsn") > 150))
    assert (len(list(dataset.get_fragments())), len(later)) == (5, 1)


def test_any_parquet_reader_reads_a_file_and_its_order(changes: Path) -> None:
    (first,) = changes.glob("0-64-*.parquet")
    rows = pq.read_table(first, columns=COLUMNS, page_checksum_verification=True).to_pylist()
    assert [tuple(row.values()) for row in rows] == expected_rows(PULLS[0].end)


def test_the_folder_as_plain_parquet_includes_files_of_dead_pulls(changes: Path) -> None:
    """Whole files only; the log's own order is that of the columns."""
    table = ds.dataset(changes, format="parquet").to_table(columns=COLUMNS).sort_by(
        [("commit_lsn", "ascending"), ("seq", "ascending")]
    )  # fmt: skip
    rows = [tuple(row.values()) for row in table.to_pylist()]
    assert rows[: len(expected_rows(LAST))] == expected_rows(LAST)
    assert {lsn for lsn, _, _ in rows[len(expected_rows(LAST)) :]} == {165}


def test_pyarrow_alone_finds_the_files_of_the_log(changes: Path) -> None:
    """As docs/change-log.md describes: the last checkpoint, then the commits after it."""
    folder = changes / "_delta_log"
    last = json.loads((folder / "_last_checkpoint").read_text())["version"]
    actions = pq.read_table(folder / f"{last:020}.checkpoint.parquet").to_pylist()
    for file in sorted(folder.glob("*.json")):
        if int(file.stem) > last:
            actions += [json.loads(line) for line in file.read_text().splitlines()]
    files: set[str] = set()
    for action in actions:
        files |= {action["add"]["path"]} if action.get("add") else set()
        files -= {action["remove"]["path"]} if action.get("remove") else set()
    rows = ds.dataset([str(changes / name) for name in files]).to_table(columns=COLUMNS).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == expected_rows(LAST)


@pytest.mark.spark
def test_spark_reads_the_files_of_the_log_as_parquet(changes: Path, spark: SparkSession) -> None:
    """Without the Delta package Spark cannot read the table, but its files."""
    files = DeltaTable(str(changes)).file_uris()
    rows = spark.read.parquet(*files).select(*COLUMNS).orderBy("commit_lsn", "seq").collect()
    assert [(row[0], row[1], bytes(row[2])) for row in rows] == expected_rows(LAST)
    everything = spark.read.parquet(str(changes)).count()
    assert everything == len(rows) + 2
