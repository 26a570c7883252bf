"""`verify_log` detects every kind of damage, and names the file and the position in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc_replay.changelog.delta.checkpoints import CHECKPOINT_EVERY
from cdc_replay.changelog.delta.commits import without_seal
from cdc_replay.changelog.metadata_tables import CatalogRow
from cdc_replay.changelog.prepared_transactions import PreparedKey
from cdc_replay.changelog.verify import verify_log
from cdc_replay.errors import ChangeLogDamaged, ChangeLogMissing
from cdc_replay.model.lsn import Lsn
from unit.changelog.small_log import LOGICAL, TRUNCATE, SmallLog, insert, message_rows, transaction


@pytest.fixture
def small(tmp_path: Path) -> SmallLog:
    """Three pulls, one of them empty."""
    small = SmallLog.create(tmp_path)
    small.pull(120, transaction(110), transaction(120))
    small.pull(125)
    small.pull(150, transaction(130), transaction(140))
    return small


def fault(small: SmallLog, *words: str) -> None:
    """The log is damaged, and the error has these words."""
    with pytest.raises(ChangeLogDamaged) as error:
        small.verify()
    text = str(error.value)
    for word in words:
        assert word in text, text


def test_a_sound_log_is_counted(small: SmallLog) -> None:
    """A non-transactional message is no transaction (R9.13); a prepared one is counted separately."""
    small.pull(160, message_rows(155, [(0, LOGICAL)], commit_time=None), message_rows(160, [(0, LOGICAL)]))
    small.prepare(158)
    verified = small.verify()
    assert (verified.from_lsn, verified.to_lsn) == (Lsn(100), Lsn(160))
    assert (verified.segments, verified.messages, verified.transactions, verified.prepared) == (3, 10, 5, 1)
    assert verified.bytes == sum(len(row["message"]) for row in small.rows())


def test_an_empty_log_is_sound(tmp_path: Path) -> None:
    small = SmallLog.create(tmp_path)
    assert small.verify().to_lsn == Lsn(100)


def test_a_missing_log_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(ChangeLogMissing):
        verify_log(str(tmp_path / "none"))


def test_progress_ends_when_all_bytes_are_read(small: SmallLog) -> None:
    seen: list[tuple[int, int]] = []
    verify_log(small.uri, progress=lambda done, total: seen.append((done, total)))
    total = sum(file.stat().st_size for file in small.data_files())
    assert seen[-1] == (total, total)
    assert len(seen) == 2


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def flippable(small: SmallLog, kind: str) -> Path:
    """A file of that kind; for the last ones the log gets a checkpoint first."""
    if kind.startswith("checkpoint"):
        small.pulls(CHECKPOINT_EVERY)
        folder = Path(small.uri, "changes", "_delta_log")
        return folder / "_last_checkpoint" if "pointer" in kind else next(folder.glob("*.checkpoint.parquet"))
    if kind == "prepared":
        return small.prepare(140)
    if kind == "segment":
        return small.data_files()[1]
    return next(Path(small.uri, kind).glob("*.parquet"))


def verification_error(small: SmallLog) -> ChangeLogDamaged | None:
    try:
        small.verify()
    except ChangeLogDamaged as error:
        return error
    return None


def everything(small: SmallLog, file: Path) -> object:
    return small.rows(), small.log.relations(), small.log.catalogs(), pq.read_table(file).to_pylist()


@pytest.mark.parametrize("kind", ["segment", "relations", "catalogs", "prepared"])
def test_a_flipped_bit_of_a_data_file_is_reported_if_it_matters(small: SmallLog, kind: str) -> None:
    """In values, by their page checksums; elsewhere, unless readers get the original rows."""
    file = flippable(small, kind)
    content = file.read_bytes()
    written = everything(small, file)
    reported = 0
    for position in range(0, len(content), 23):
        flip(file, position)
        if (error := verification_error(small)) is None:
            assert everything(small, file) == written, position
        else:
            assert file.name in str(error), position
            reported += 1
        file.write_bytes(content)
    assert reported > len(content) / 23 / 2
    small.verify()


def test_every_flipped_bit_of_a_commit_is_reported(small: SmallLog) -> None:
    """The commit is invalid, does not match its seal, or has lost it."""
    file = small.commit_file(3)
    content = file.read_bytes()
    for position in range(0, len(content), 5):
        flip(file, position)
        fault(small, file.name)
        flip(file, position)
    file.write_bytes(content)
    small.verify()


@pytest.mark.parametrize("value", ["1e999", "[" * 100_000 + "]" * 100_000])
def test_numbers_without_bound_and_nesting_without_end_are_reported(small: SmallLog, value: str) -> None:
    """Python reads an infinite number, and raises no ValueError for such a nesting."""
    file = small.commit_file(3)
    content = file.read_bytes()
    file.write_text(f'{{"txn":{{"appId":"slot","version":{value}}}}}', encoding="ascii")
    fault(small, file.name)
    file.write_bytes(content)
    pointer = flippable(small, "checkpoint pointer")
    pointer.write_text(f'{{"version":{value}}}', encoding="ascii")
    fault(small, pointer.name)


@pytest.mark.parametrize("kind", ["checkpoint pointer", "checkpoint"])
def test_a_damaged_checkpoint_is_reported(small: SmallLog, kind: str) -> None:
    file = flippable(small, kind)
    small.verify()
    content = file.read_bytes()
    for damage in (content[: len(content) // 2], b"", content[:-1] + b"x"):
        file.write_bytes(damage)
        fault(small, file.name)
    file.write_bytes(content)
    small.verify()


def test_a_checkpoint_that_differs_from_the_commits_is_reported(small: SmallLog) -> None:
    """Readers start from it: they would miss a segment."""
    file = flippable(small, "checkpoint")
    rows = pq.read_table(file)
    lost = small.data_files()[0].name
    paths = [None if add is None else add["path"] for add in rows["add"].to_pylist()]
    pq.write_table(rows.filter(pa.array([path != lost for path in paths])), file)
    fault(small, lost, "does not match its commits")


def test_a_changed_position_is_reported(small: SmallLog) -> None:
    """Otherwise the log would seem to end at 150, and the next capture would skip changes."""
    file = small.commit_file(3)
    text = file.read_text()
    assert '"version":150' in text
    file.write_text(text.replace('"version":150', '"version":159'))
    assert small.reopened().end_lsn == Lsn(159)
    fault(small, file.name, "seal")


def test_a_commit_without_seal_after_a_sealed_one_is_reported(small: SmallLog) -> None:
    file = small.commit_file(2)
    file.write_bytes(without_seal(file.read_bytes())[0])
    fault(small, file.name, "no seal")


@pytest.mark.parametrize("table", ["changes", "relations", "catalogs"])
def test_a_missing_commit_is_reported(small: SmallLog, table: str) -> None:
    small.log.add_catalogs([CatalogRow(Lsn(120), Lsn(121), "{}")])
    other = dataclasses.replace(small.log.relations()[-9], version=7)
    small.log.add_relations({7: other})
    file = small.commit_file(1, table)
    file.unlink()
    fault(small, file.name, "missing")


def test_only_commits_before_a_checkpoint_may_be_missing(small: SmallLog) -> None:
    """As after a cleanup of old commits: the rest is verified from the checkpoint on."""
    small.pulls(CHECKPOINT_EVERY + 5)
    whole = small.verify()
    (checkpoint,) = Path(small.uri, "changes", "_delta_log").glob("*.checkpoint.parquet")
    covered = int(checkpoint.name.partition(".")[0])
    for version in range(covered + 1):
        small.commit_file(version).unlink()
    assert small.verify() == whole
    file = small.commit_file(covered + 1)
    content = file.read_bytes()
    flip(file, content.index(b'"path":"') + 10)
    fault(small, file.name)
    file.unlink()
    fault(small, file.name, "missing")


def test_a_removed_segment_is_reported(small: SmallLog) -> None:
    file = small.data_files()[0]
    file.unlink()
    fault(small, file.name)


def test_a_truncated_segment_is_reported(small: SmallLog) -> None:
    file = small.data_files()[0]
    file.write_bytes(file.read_bytes()[:-1])
    fault(small, file.name, "bytes")


def shuffled(batch: pa.RecordBatch, *rows: int) -> pa.RecordBatch:
    return batch.take(pa.array(rows))


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([shuffled(transaction(160, 3), 0, 2, 1)], ["row 1", "message 2"]),
        ([transaction(160), transaction(155)], ["0/9B"]),
        ([shuffled(transaction(160, 3), 0, 2)], ["row 1", "message 2"]),
        ([shuffled(transaction(160, 3), 0, 1, 1)], ["row 2", "message 1"]),
        ([shuffled(transaction(160, 3), 1, 2)], ["row 0", "message 1"]),
        ([transaction(160), transaction(160)], ["row 2", "message 0"]),
    ],
    ids=["swapped", "transactions swapped", "lost", "doubled", "lost at the start", "transaction doubled"],
)
def test_misplaced_rows_with_valid_checksums_are_reported(
    small: SmallLog, batches: list[pa.RecordBatch], words: list[str]
) -> None:
    small.pull(200, *batches)
    fault(small, small.data_files()[-1].name, *words)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            message_rows(160, [(0, insert(1)), (1, insert(2)[:-1])]),
            ["Row group 0", "row 1", "ends too early"],
        ),
        (message_rows(160, [(0, insert(1))], relation_version=4), ["row 0", "no known version 4"]),
        (message_rows(160, [(0, insert(1)), (1, LOGICAL + b"x")]), ["Row group 0", "row 1"]),
        (message_rows(160, [(0, TRUNCATE[:-1])]), ["row 0"]),
        (message_rows(160, [(0, insert(1))], kind="M"), ["row 0", "kind"]),
        (message_rows(160, [(0, insert(1))], xid=None), ["row 0", "no xid"]),
    ],
    ids=["short", "relation version", "logical message", "truncate", "other kind", "null"],
)
def test_a_malformed_message_is_reported_with_its_row(
    small: SmallLog, rows: pa.RecordBatch, words: list[str]
) -> None:
    small.pull(200, rows)
    fault(small, small.data_files()[-1].name, *words)


def test_a_duplicate_segment_is_reported(small: SmallLog) -> None:
    """Under two names, in one pull."""
    segments = small.log.write([transaction(160)]) + small.log.write([transaction(160)])
    small.log.commit(segments, Lsn(160))
    fault(small, max(segment.name for segment in segments), "row 0", "message 1")


def test_a_segment_outside_of_its_pull_is_reported(small: SmallLog) -> None:
    small.pull(160, transaction(145))
    fault(small, f"{4:020}.json", "0/91")


def test_an_end_that_moves_back_is_reported(small: SmallLog) -> None:
    small.pull(149)
    fault(small, f"{4:020}.json", "back")


@pytest.mark.parametrize(("rows", "first", "last"), [(4, 151, 170), (4, 160, 190), (3, 160, 170)])
def test_statistics_that_differ_from_the_content_are_reported(
    small: SmallLog, rows: int, first: int, last: int
) -> None:
    (segment,) = small.log.write([transaction(160), transaction(170)])
    wrong = dataclasses.replace(segment, rows=rows, min_commit_lsn=first, max_commit_lsn=last)
    small.log.commit([wrong], Lsn(200))
    fault(small, segment.name, "expected")


def test_a_log_without_the_catalog_of_its_start_is_reported(tmp_path: Path) -> None:
    small = SmallLog.create(tmp_path)
    small.pull(110, transaction(110))
    for file in Path(small.uri, "catalogs", "_delta_log").iterdir():
        if not file.name.startswith(f"{0:020}"):
            file.unlink()
    fault(small, "is missing the catalog")
    small.reopened().add_catalogs([CatalogRow(Lsn(105), Lsn(106), "{}")])
    fault(small, "0/69")


def test_prepared_truncates_of_partitioned_tables_are_verified(small: SmallLog) -> None:
    """R2.14: the TRUNCATEs of partitioned tables in prepared transactions."""
    waiting = small.log.prepared_roots("some_publication")
    waiting.store(PreparedKey(1, Lsn(140)), [message_rows(140, [(0, TRUNCATE)])])
    assert small.verify().prepared == 0
    waiting.store(PreparedKey(1, Lsn(140)), [message_rows(140, [(0, TRUNCATE + b"x")])])
    fault(small, "some_publication", "row 0")


def test_files_of_a_dead_pull_are_no_damage(small: SmallLog) -> None:
    """A part of a segment that no commit names, and of a prepared transaction after the log's end."""
    small.log.write([transaction(160)])
    small.prepare(170).write_bytes(b"PAR1")
    assert small.verify().prepared == 0


def test_an_unknown_file_among_prepared_transactions_is_reported(small: SmallLog) -> None:
    small.prepare(130)
    Path(small.uri, "prepared", "notes.txt").write_text("mine")
    fault(small, "prepared", "notes")


def test_segments_pruned_during_verification_are_skipped(small: SmallLog) -> None:
    small.pulls(40)
    pruned: list[int] = []

    def prune(_done: int, _total: int) -> None:
        if not pruned:
            log = small.reopened()
            pruned.append(log.prune(log.prunable_segments(log.end_lsn)))

    verified = verify_log(small.uri, progress=prune)
    assert pruned == [42]
    assert 1 <= verified.segments < 42
