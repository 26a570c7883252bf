"""How loops over bytes are compiled, and where the machine code is cached.

The cache is on disk, so that a new process starts in a fraction of a second: in `NUMBA_CACHE_DIR` if set,
else in `__pycache__` next to the module, else in the user's cache folder. If the cache cannot be written or
read, each process compiles the code in two seconds.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import numba
from numba import types

BYTES: Final = types.Array(types.uint8, 1, "C", readonly=True)
INT32S: Final = types.Array(types.int32, 1, "C", readonly=True)
INT64S: Final = types.Array(types.int64, 1, "C", readonly=True)
BOOLS: Final = types.Array(types.boolean, 1, "C", readonly=True)
MUTABLE_BYTES: Final = types.Array(types.uint8, 1, "C")
MUTABLE_INT32S: Final = types.Array(types.int32, 1, "C")
"""The arrays of signatures; those of Arrow's buffers are read-only."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(*signatures: object) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile a function for these signatures when its module is imported."""

    def compile_function(function: Callable[_P, _R]) -> Callable[_P, _R]:
        machine_code: Callable[_P, _R]
        try:
            machine_code = numba.njit(list(signatures), cache=True, nogil=True)(function)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
            # No writable folder, a full disk, or a file truncated by a crash.
            machine_code = numba.njit(list(signatures), nogil=True)(function)
        return machine_code

    return compile_function


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function that compiled functions call."""
    inline_function: Callable[_P, _R] = numba.njit(nogil=True)(function)
    return inline_function
