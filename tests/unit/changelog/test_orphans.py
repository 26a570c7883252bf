"""Files of dead processes are deleted, files that others are writing are not."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pytest

from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.prepared_transactions import PreparedKey
from cdc_replay.changelog.segment import LOG_SCHEMA
from cdc_replay.changelog.storage import PARTIAL
from cdc_replay.errors import ChangeLogConflict, ChangeLogDamaged
from cdc_replay.model.database import Database
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName, Relation, RelationId, ReplicaIdentity

HEADER = LogHeader("7000000000000000001", 1, "slot", Lsn(0x100), Database(5, "shop"))
SHAPE = Relation(RelationId(1), 1, QualifiedName("s", "t"), ReplicaIdentity.DEFAULT, ())


def transaction(commit_lsn: int) -> pa.RecordBatch:
    row = dict.fromkeys(LOG_SCHEMA.names) | {"commit_lsn": commit_lsn, "seq": 0, "message": b"I"}
    return pa.RecordBatch.from_pylist([row], schema=LOG_SCHEMA)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A log that ends at 0/110, with one segment."""
    uri = str(tmp_path / "log")
    log = ChangeLog.create(uri, HEADER)
    log.add_relations({1: SHAPE})
    log.commit(log.write([transaction(0x110)]), Lsn(0x110))
    return uri


def files(uri: str) -> set[str]:
    return {str(path.relative_to(uri)) for path in Path(uri).rglob("*") if path.is_file()}


def leave(uri: str, name: str, *, hours: float = 0) -> str:
    """Create a file that was last written that long ago."""
    path = Path(uri, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"PAR1")
    then = time.time() - hours * 3600
    os.utime(path, (then, then))
    return name


def test_files_of_a_dead_pull_are_deleted_at_once(uri: str) -> None:
    before = files(uri)
    ChangeLog.open(uri).write([transaction(0x120)])
    leave(uri, f"changes/{PARTIAL}0-110-1.parquet")
    leave(uri, f"prepared/{PARTIAL}7_0-118.parquet")
    leave(uri, "prepared/7_0-118.parquet")
    leave(uri, "prepared_roots/some_publication/7_0-118.parquet")
    assert ChangeLog.open(uri).remove_dead_pulls() == 5
    assert files(uri) == before
    assert ChangeLog.open(uri).remove_dead_pulls() == 0


def test_prepared_transactions_up_to_the_end_are_not_those_of_a_dead_pull(uri: str) -> None:
    leave(uri, "prepared/7_0-110.parquet")
    before = files(uri)
    assert ChangeLog.open(uri).remove_dead_pulls() == 0
    assert files(uri) == before


def test_a_file_that_is_no_prepared_transaction_is_named(uri: str) -> None:
    """It may be one that somebody has renamed."""
    leave(uri, "prepared/7_0-110.parquet.bak")
    before = files(uri)
    with pytest.raises(ChangeLogDamaged, match="not a prepared transaction") as refused:
        ChangeLog.open(uri).remove_dead_pulls()
    assert "7_0-110.parquet.bak" in str(refused.value)
    assert files(uri) == before


def test_files_that_may_be_in_use_stay_for_a_day(uri: str) -> None:
    """A compaction writes at the same time as a capture, under the name of an earlier pull."""
    names = (
        "changes/0-100-1.parquet",
        f"changes/{PARTIAL}0-100-2.parquet",
        f"changes/_delta_log/{PARTIAL}3.json",
        "relations/rows-4.parquet",
        f"catalogs/{PARTIAL}5.rows.parquet",
    )
    before = files(uri)
    for hours, remaining in ((23, len(names)), (25, 0)):
        for name in names:
            leave(uri, name, hours=hours)
        assert ChangeLog.open(uri).remove_dead_pulls() == 0
        assert ChangeLog.open(uri).delete_removed() == len(names) - remaining
        assert len(files(uri) - before) == remaining
    assert files(uri) == before


def test_files_of_the_log_are_never_orphans(uri: str) -> None:
    """However old they are; so are the files that a compaction removed, which readers may still need."""
    log = ChangeLog.open(uri)
    assert log.prepared.store(PreparedKey(7, Lsn(0x118)), [transaction(0x118)])
    for segment in (log.write([transaction(0x120)]), log.write([transaction(0x130)])):
        log.commit(segment, Lsn(log.end_lsn.value + 0x10))
    log.prune(log.prunable_segments(Lsn(0x110)))
    before = files(uri)
    for name in before:
        then = time.time() - 48 * 3600
        os.utime(Path(uri, name), (then, then))
    assert ChangeLog.open(uri).remove_dead_pulls() == 0
    assert ChangeLog.open(uri).delete_removed() == 0
    assert files(uri) == before


def test_what_was_committed_meanwhile_is_no_orphan(uri: str) -> None:
    """Also if the log was opened more than a day ago."""
    opened = ChangeLog.open(uri)
    log = ChangeLog.open(uri)
    log.commit(log.write([transaction(0x120)]), Lsn(0x120))
    before = files(uri)
    for name in before:
        then = time.time() - 48 * 3600
        os.utime(Path(uri, name), (then, then))
    assert opened.delete_removed() == 0
    assert files(uri) == before


def test_metadata_tables_without_a_log_are_not_used_for_another_log(uri: str) -> None:
    """It is unknown which log they belonged to."""
    shutil.rmtree(Path(uri, "changes"))
    with pytest.raises(ChangeLogConflict, match="remains of a removed change log") as refused:
        ChangeLog.create(uri, HEADER)
    assert "relations" in str(refused.value.detail)
    shutil.rmtree(uri)
    ChangeLog.create(uri, HEADER)


def test_a_creation_that_died_after_the_metadata_tables_can_be_repeated(tmp_path: Path) -> None:
    uri = str(tmp_path / "log")
    ChangeLog.create(uri, HEADER)
    shutil.rmtree(Path(uri, "changes"))
    assert ChangeLog.create(uri, HEADER).end_lsn == HEADER.start_lsn
