"""Segments: a file is complete or does not exist, and any message fits."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa
import pytest

from cdc_replay.changelog.segment import LOG_SCHEMA, SegmentWriter, plan_row_groups, read_row_group
from cdc_replay.changelog.storage import Location
from cdc_replay.model.lsn import ZERO, Lsn, Window

EVERYTHING = Window(ZERO, Lsn(2**62))


def batch(commit_lsn: int, *messages: bytes) -> pa.RecordBatch:
    count = len(messages)
    columns = {
        "commit_lsn": [commit_lsn] * count, "commit_time": [1] * count, "xid": [1] * count,
        "origin": [None] * count, "seq": range(count), "lsn": [commit_lsn] * count, "kind": ["I"] * count,
        "relation_id": [1] * count, "relation_version": [2] * count, "message": messages,
    }  # fmt: skip
    arrays = [pa.array(columns[field.name], field.type) for field in LOG_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=LOG_SCHEMA)


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path))


def test_a_segment_gets_its_name_when_it_is_complete(folder: Location) -> None:
    with SegmentWriter(folder, "a.parquet") as writer:
        writer.write(batch(110, b"x"))
        assert "a.parquet" not in folder.names()
    assert folder.names() == ("a.parquet",)
    assert writer.segment is not None
    assert (writer.segment.rows, writer.segment.min_commit_lsn) == (1, 110)


def test_a_rewritten_segment_replaces_the_first_only_when_it_is_complete(folder: Location) -> None:
    with SegmentWriter(folder, "a.parquet") as writer:
        writer.write(batch(110, b"first"))
    with contextlib.suppress(RuntimeError), SegmentWriter(folder, "a.parquet") as writer:
        writer.write(batch(110, b"second"))
        raise RuntimeError("the connection was lost")
    assert folder.names() == ("a.parquet",)
    (group,) = plan_row_groups(folder / "a.parquet", EVERYTHING)
    assert read_row_group(group)["message"].to_pylist() == [b"first"]


def test_a_row_group_holds_a_message_of_hundreds_of_megabytes(folder: Location) -> None:
    """A message has at most 1 GB (R1.32), and comes with at most 16 MiB of others."""
    small, giant = b"small" * 1_000_000, bytes(300 << 20)
    with SegmentWriter(folder, "a.parquet") as writer:
        writer.write(batch(110, small, giant, small))
    (group,) = plan_row_groups(folder / "a.parquet", EVERYTHING)
    row_group = read_row_group(group)
    assert row_group.num_rows == 3
    assert [len(value.as_buffer()) for value in row_group["message"]] == [len(small), len(giant), len(small)]
    assert row_group["message"][0].as_py() == small
