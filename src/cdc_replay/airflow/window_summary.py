"""What a replay did for one subscription, as its report task pushes it and the run's page reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from cdc_replay.errors import CdcReplayError
from cdc_replay.model.lsn import Lsn

COUNTS: Final = {
    "Changes read": "changes_read",
    "Filtered out": "filtered_out",
    "UPDATE to INSERT": "updates_to_insert",
    "UPDATE to DELETE": "updates_to_delete",
    "Rows applied": "applied",
    "Conflicts": "conflicts",
}
"""By what people read, the field of a `ReplayResult`; of a mapping of counts their sum counts."""

_GREATEST: Final = 2**63


@dataclass(frozen=True, slots=True)
class WindowSummary:
    """All windows of one replay; `counts` has the keys of `COUNTS`."""

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    counts: Mapping[str, int]
    seconds: float

    @classmethod
    def of_result(cls, result: Mapping[str, object]) -> Self:
        """Take them from a `ReplayResult` as JSON.

        Raises:
            InvalidLsn: if it has no LSN where one belongs.
        """
        return cls(
            str(result["subscription"]),
            Lsn.parse(str(result["from_lsn"])),
            Lsn.parse(str(result["to_lsn"])),
            {name: _sum(result.get(field)) for name, field in COUNTS.items()},
            _seconds(result.get("seconds")),
        )

    def to_json(self) -> dict[str, object]:
        """The same in the form that `parse` reads."""
        return {
            "subscription": self.subscription,
            "from_lsn": str(self.from_lsn),
            "to_lsn": str(self.to_lsn),
            "seconds": self.seconds,
            **{field: self.counts[name] for name, field in COUNTS.items()},
        }

    @classmethod
    def parse(cls, value: Mapping[object, object]) -> Self | None:
        """Read what anybody may have written; None if it is not a summary."""
        try:
            return cls.of_result({str(key): entry for key, entry in value.items()})
        except (KeyError, CdcReplayError):
            return None


def _sum(value: object) -> int:
    if isinstance(value, Mapping):
        return sum(map(_sum, value.values()))
    return value if isinstance(value, int) and 0 <= value < _GREATEST else 0


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < _GREATEST else 0.0
