"""How loops over bytes are compiled, and where the machine code is kept.

It is kept on disk, so that a new process starts in a fraction of a second: in `NUMBA_CACHE_DIR` if that is
set, else in `__pycache__` beside the module, else in the user's cache folder. Where none of them can be
written, or what is there cannot be read, each process compiles the code for itself, in two seconds.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(*signatures: object) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile a function for these signatures when its module is imported."""

    def compile_function(function: Callable[_P, _R]) -> Callable[_P, _R]:
        found: Callable[_P, _R]
        try:
            found = numba.njit(list(signatures), cache=True, nogil=True)(function)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
            # No folder for the machine code, a full disk, or a file cut short by a crash.
            found = numba.njit(list(signatures), nogil=True)(function)
        return found

    return compile_function


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function as a part of those that call it."""
    found: Callable[_P, _R] = numba.njit(nogil=True)(function)
    return found
