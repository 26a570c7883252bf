"""Damaged copies of messages by the million: whole columns of bytes, no loop over messages.

A copy suffers one to three damages, each at a random place. All randomness comes from one generator, so a
seed and a count name the same copies everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

if TYPE_CHECKING:
    from numpy.random import Generator

Bytes: TypeAlias = NDArray[np.uint8]
Ints: TypeAlias = NDArray[np.int64]

ROOM: Final = 16
"""How much longer than the longest message a damaged copy can be."""

HEADER: Final = 5
IN_HEADER: Final = 0.2
"""A damaged message type or oid is found at once, so most damages spare them."""

MOST_DAMAGES: Final = 3
LONGEST_PIECE: Final = 4

LETTERS: Final = np.frombuffer(b"BCORYIUDTMSEcAbPKrpNKOntub\0\1\2\3\4", dtype=np.uint8)
"""Bytes that mean something somewhere in a message."""

NUMBERS: Final = (
    b"\xff", b"\x7f", b"\x80", b"\0", b"\xff\xff", b"\x7f\xff", b"\x80\0", b"\0\0", b"\0\1", b"\0\xff",
    b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\0", b"\0\0\0\1", b"\0\0\1\0",
    b"\x7f\xff\xff\xf0", b"\xff\xff\xff\xf0", b"\x3f\xff\xff\xff",
)  # fmt: skip
"""Counts and lengths that a careless reader trusts."""


@dataclass(frozen=True, slots=True)
class Mutants:
    """Damaged messages, concatenated in `data`; `bases` are the indexes of their originals."""

    data: Bytes
    offsets: NDArray[np.int32]
    bases: Ints

    def __len__(self) -> int:
        return len(self.bases)

    def __iter__(self) -> Iterator[bytes]:
        data, ends = self.data.tobytes(), self.offsets.tolist()
        return (data[begin:end] for begin, end in itertools.pairwise(ends))

    def array(self) -> pa.BinaryArray:
        """The messages as an Arrow array."""
        buffers = [None, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
        return pa.BinaryArray.from_buffers(pa.binary(), len(self), buffers)


@dataclass(slots=True)
class _Lines:
    """Messages as lines of one width: `bytes[line, :ends[line]]` is the message."""

    bytes: Bytes
    ends: Ints

    @property
    def columns(self) -> Ints:
        return np.arange(self.bytes.shape[1])

    def positions(self, randomness: Generator) -> Ints:
        """A random offset in each message, or at its end; rarely in the header."""
        first = np.where(randomness.random(len(self.ends)) < IN_HEADER, 0, np.minimum(HEADER, self.ends))
        return randomness.integers(first, self.ends + 1)

    def shifted(self, sources: Ints) -> Bytes:
        """The bytes with columns taken from other columns; columns past the end are the last one."""
        return np.take_along_axis(self.bytes, np.clip(sources, 0, self.bytes.shape[1] - 1), axis=1)


def mutants(corpus: Sequence[bytes], randomness: Generator, count: int) -> Mutants:
    """`count` damaged copies of messages of `corpus`."""
    bases = randomness.integers(len(corpus), size=count)
    lines = _lines(corpus)
    copies = _Lines(lines.bytes[bases], lines.ends[bases])
    damages = randomness.integers(1, MOST_DAMAGES + 1, size=count)
    for already in range(MOST_DAMAGES):
        which = np.where(damages > already, randomness.integers(len(_DAMAGES), size=count), -1)
        for number, damage in enumerate(_DAMAGES):
            these = np.flatnonzero(which == number)
            damaged = damage(_Lines(copies.bytes[these], copies.ends[these]), randomness)
            copies.bytes[these], copies.ends[these] = damaged.bytes, damaged.ends
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(copies.ends, out=offsets[1:])
    return Mutants(copies.bytes[copies.columns < copies.ends[:, None]], offsets, bases)


def _lines(corpus: Sequence[bytes]) -> _Lines:
    width = max(map(len, corpus)) + ROOM
    joined = b"".join(message.ljust(width, b"\0") for message in corpus)
    table = np.frombuffer(joined, dtype=np.uint8).reshape(len(corpus), width)
    return _Lines(table, np.array([len(message) for message in corpus]))


def _cut(lines: _Lines, randomness: Generator) -> _Lines:
    return _Lines(lines.bytes, lines.positions(randomness))


def _insert(lines: _Lines, randomness: Generator) -> _Lines:
    positions, pieces = lines.positions(randomness)[:, None], _pieces(lines, randomness)
    moved = lines.shifted(lines.columns - np.where(lines.columns >= positions + pieces, pieces, 0))
    is_new = (lines.columns >= positions) & (lines.columns < positions + pieces)
    noise = randomness.integers(256, size=lines.bytes.shape, dtype=np.uint8)
    ends = np.minimum(lines.ends + pieces[:, 0], lines.bytes.shape[1])
    return _Lines(np.where(is_new, noise, moved), ends)


def _remove(lines: _Lines, randomness: Generator) -> _Lines:
    positions, pieces = lines.positions(randomness)[:, None], _pieces(lines, randomness)
    moved = lines.shifted(lines.columns + np.where(lines.columns >= positions, pieces, 0))
    return _Lines(moved, np.maximum(lines.ends - pieces[:, 0], np.minimum(positions[:, 0], lines.ends)))


def _flip(lines: _Lines, randomness: Generator) -> _Lines:
    positions = lines.positions(randomness)[:, None]
    bits = np.left_shift(np.uint8(1), randomness.integers(8, size=positions.shape, dtype=np.uint8))
    return _Lines(np.where(lines.columns == positions, lines.bytes ^ bits, lines.bytes), lines.ends)


def _letter(lines: _Lines, randomness: Generator) -> _Lines:
    positions = lines.positions(randomness)[:, None]
    letters = randomness.choice(LETTERS, size=positions.shape)
    return _Lines(np.where(lines.columns == positions, letters, lines.bytes), lines.ends)


def _number(lines: _Lines, randomness: Generator) -> _Lines:
    numbers = _lines(NUMBERS)
    chosen = randomness.integers(len(NUMBERS), size=len(lines.ends))
    starts = lines.positions(randomness)
    ends = np.minimum(starts + numbers.ends[chosen], lines.bytes.shape[1])
    at = lines.columns - starts[:, None]
    digits = _Lines(numbers.bytes[chosen], numbers.ends[chosen]).shifted(at)
    is_new = (at >= 0) & (lines.columns < ends[:, None])
    return _Lines(np.where(is_new, digits, lines.bytes), np.maximum(lines.ends, ends))


def _splice(lines: _Lines, randomness: Generator) -> _Lines:
    """The beginning of one message and the end of another."""
    other = randomness.permutation(len(lines.ends))
    positions = lines.positions(randomness)
    mixed = np.where(lines.columns < positions[:, None], lines.bytes, lines.bytes[other])
    return _Lines(mixed, np.maximum(lines.ends[other], positions))


def _pieces(lines: _Lines, randomness: Generator) -> Ints:
    return randomness.integers(1, LONGEST_PIECE + 1, size=(len(lines.ends), 1))


_DAMAGES: Final[Sequence[Callable[[_Lines, Generator], _Lines]]] = (
    _cut, _insert, _remove, _flip, _flip, _letter, _letter, _number, _number, _splice,
)  # fmt: skip
