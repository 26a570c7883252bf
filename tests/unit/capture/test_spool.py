"""Rows of open transactions: no row is lost in files, and one memory limit applies to all."""

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


def lsns_in(spooled: Spool) -> list[int]:
    return [number for body in spooled.drain() for number in body["lsn"].to_pylist()]


def test_drain_returns_rows_in_order_from_file_and_memory() -> None:
    spooled = Spool()
    for number in range(10):
        spooled.append(batch(number))
        if number in {3, 6}:
            spooled.write_out()
    assert lsns_in(spooled) == list(range(10))
    assert spooled.is_empty


def test_empty_or_closed_spool_has_no_rows() -> None:
    spooled = Spool()
    assert lsns_in(spooled) == []
    spooled.append(batch(1))
    spooled.write_out()
    spooled.close()
    assert spooled.is_empty
    assert lsns_in(spooled) == []


def test_limit_memory_writes_largest_spools_first(monkeypatch: pytest.MonkeyPatch) -> None:
    spools = [Spool() for _ in range(3)]
    for spooled, rows in zip(spools, (10, 1000, 100), strict=True):
        spooled.append(batch(rows, rows))
    small, large, middle = (spooled.memory_bytes for spooled in spools)
    for limit, expected in (
        (small + middle + large, [small, large, middle]),
        (small + middle + large - 1, [small, 0, middle]),
        (small + middle - 1, [small, 0, 0]),
        (0, [0, 0, 0]),
    ):
        monkeypatch.setattr(spool, "MEMORY_BYTES", limit)
        limit_memory(spools)
        assert [spooled.memory_bytes for spooled in spools] == expected
    assert [len(lsns_in(spooled)) for spooled in spools] == [10, 1000, 100]
