"""Which transactions a snapshot of a database sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

_XIDS: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class PgSnapshot:
    """`pg_current_snapshot()`: transaction ids of 64 bits."""

    xmin: int
    xmax: int
    in_progress: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `xmin:xmax:xip,…`."""
        xmin, xmax, in_progress = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(map(int, filter(None, in_progress.split(",")))))

    def sees(self, xid: int) -> bool:
        """Whether it sees a committed transaction, by a 32-bit id within half the id space of `xmax`."""
        distance = (xid - self.xmax + _XIDS // 2) % _XIDS - _XIDS // 2
        full_xid = self.xmax + distance
        return full_xid < self.xmin or (full_xid < self.xmax and full_xid not in self.in_progress)
