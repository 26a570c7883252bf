"""What threads have allocated and freed goes back to the system."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from cdc_replay.arrow.freed_memory import release_freed_memory

MIB = 1 << 20
SIZE_MIB = 48


def resident_mib() -> float:
    found = re.search(r"Rss:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) / 1024


def fill_and_free_by_malloc() -> None:
    """In pieces that come from the thread's arena; the last one keeps the arena from shrinking."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    pieces = [libc.malloc(ctypes.c_size_t(100_000)) for _ in range(SIZE_MIB * MIB // 100_000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 100_000)
    for piece in pieces[:-1]:
        libc.free(ctypes.c_void_p(piece))


def fill_and_free_by_arrow() -> None:
    pieces = [pa.allocate_buffer(100_000) for _ in range(SIZE_MIB * MIB // 100_000)]
    for piece in pieces:
        ctypes.memset(piece.address, 1, piece.size)


@pytest.mark.parametrize("work", [fill_and_free_by_malloc, fill_and_free_by_arrow])
def test_memory_freed_by_an_ended_thread_is_released(work: Callable[[], None]) -> None:
    release_freed_memory()
    before = resident_mib()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    kept = resident_mib() - before
    release_freed_memory()
    assert kept > SIZE_MIB / 2, "the allocator keeps nothing: the release is not needed"
    assert resident_mib() - before < SIZE_MIB / 8


def test_memory_in_use_stays() -> None:
    buffer = pa.array(range(100_000))
    release_freed_memory()
    assert buffer.to_pylist() == list(range(100_000))
