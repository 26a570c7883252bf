"""Rows of unfinished transactions: nothing is lost on the way through files, and memory has one limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from cdc_replay.capture import spool
from cdc_replay.capture.message_batch import BODY_SCHEMA
from cdc_replay.capture.spool import Spool, limit_memory

if TYPE_CHECKING:
    import pytest


def batch(number: int, rows: int = 1) -> pa.RecordBatch:
    content = {
        "subxid": [0] * rows, "lsn": [number] * rows, "kind": ["I"] * rows, "relation_id": [5] * rows,
        "relation_version": [7] * rows, "message": [b"x" * 100] * rows,
    }  # fmt: skip
    return pa.RecordBatch.from_pydict(content, schema=BODY_SCHEMA)


def numbers(one: Spool) -> list[int]:
    return [number for drained in one.drain() for number in drained["lsn"].to_pylist()]


def test_rows_come_back_in_order_from_file_and_memory() -> None:
    one = Spool()
    for number in range(10):
        one.append(batch(number))
        if number in {3, 6}:
            one.write_out()
    assert numbers(one) == list(range(10))
    assert one.is_empty


def test_an_empty_or_closed_spool_has_no_rows() -> None:
    one = Spool()
    assert numbers(one) == []
    one.append(batch(1))
    one.write_out()
    one.close()
    assert one.is_empty
    assert numbers(one) == []


def test_the_largest_go_to_files_until_the_rest_is_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    spools = [Spool() for _ in range(3)]
    for one, rows in zip(spools, (10, 1000, 100), strict=True):
        one.append(batch(rows, rows))
    small, large, middle = (one.held_bytes for one in spools)
    for limit, expected in (
        (small + middle + large, [small, large, middle]),
        (small + middle + large - 1, [small, 0, middle]),
        (small + middle - 1, [small, 0, 0]),
        (0, [0, 0, 0]),
    ):
        monkeypatch.setattr(spool, "MEMORY_BYTES", limit)
        limit_memory(spools)
        assert [one.held_bytes for one in spools] == expected
    assert [len(numbers(one)) for one in spools] == [10, 1000, 100]
