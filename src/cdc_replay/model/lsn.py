"""WAL positions and the windows between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from cdc_replay.errors import InvalidLsn

_TEXT: Final = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


@dataclass(frozen=True, slots=True, order=True)
class Lsn:
    """A byte position in the write-ahead log, printed as PostgreSQL prints it (`16/B374D848`)."""

    value: int

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Read `text` in the form of PostgreSQL's type pg_lsn.

        Raises:
            InvalidLsn: if `text` has another form.
        """
        if (match := _TEXT.fullmatch(text.strip())) is None:
            raise InvalidLsn(
                f'invalid WAL position: "{text}"',
                hint="Give two hexadecimal numbers with a slash between them, such as 0/16B3748.",
            )
        high, low = (int(part, 16) for part in match.groups())
        return cls(high << 32 | low)

    def __str__(self) -> str:
        return f"{self.value >> 32:X}/{self.value & 0xFFFFFFFF:X}"

    @property
    def file_name(self) -> str:
        """The position without a slash (`16-B374D848`), for file and run names."""
        return str(self).replace("/", "-")


ZERO: Final = Lsn(0)
"""Before every transaction."""


@dataclass(frozen=True, slots=True)
class Window:
    """The transactions whose commit LSN is in `(after, upto]`.

    A transaction's commit LSN is the *end* of its commit record (R1.29, R8.17), to which a slot is advanced
    after its delivery. If `after` is a snapshot's consistent point, the window holds exactly the transactions
    that the snapshot does not see (R7.9).
    """

    after: Lsn
    upto: Lsn

    def __contains__(self, commit_lsn: Lsn) -> bool:
        return self.after < commit_lsn <= self.upto

    def __str__(self) -> str:
        return f"({self.after}, {self.upto}]"

    @property
    def is_empty(self) -> bool:
        """Whether the window contains no position."""
        return self.upto <= self.after
