"""What `certify` answers: our subscription beside a native one, table by table, at one WAL position."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import Result


class TableOutcome(enum.Enum):
    """How a table of ours compares with the native one."""

    EQUAL = "equal"
    """The same rows, to the byte of their texts."""
    DEVIATES = "deviates as documented"
    """Every row that differs does so by a documented deviation."""
    DIFFERS = "differs"
    """At least one row differs for no documented reason."""
    NOT_COMPARED = "not compared"
    """Our table could not be brought to the position, or could not be read."""
    LEFT_OUT = "left out"
    """A native subscription on another server cannot hold it as ours does, or ours does not have it yet."""

    @property
    def fails(self) -> bool:
        """Whether the certificate is refused."""
        return self in {TableOutcome.DIFFERS, TableOutcome.NOT_COMPARED}


class Deviation(enum.Enum):
    """A documented deviation from a native subscription that shows in rows; the value is its rule.

    See `docs/compatibility.md`; sentences are in `DEVIATION_TEXTS`.
    """

    UNSENT_VALUE = "R4.6"
    TABLE_REWRITTEN = "R11.9"
    TEXT_OF_SESSION = "R1.11"
    FILTER_CHANGED = "R9.12"
    ACTIONS_NOT_PUBLISHED = "R7.5"
    NOT_COPIED = "R7.11"
    DEFINITION_CHANGED = "R9.10"
    NOT_SUBSCRIBED = "R7.12"


DEVIATION_TEXTS: Mapping[Deviation, str] = {
    Deviation.UNSENT_VALUE: "an UPDATE moved the row into the filter without sending a value: natively it is"
    " NULL, ours is the publisher's",
    Deviation.TABLE_REWRITTEN: "the publisher rewrote the table, which sends no rows: natively they keep the"
    " old values, ours have the publisher's",
    Deviation.TEXT_OF_SESSION: "the column has another type here, and the text of its values depends on the"
    " session that reads them",
    Deviation.FILTER_CHANGED: "the row differed from the start, because its table was copied here with"
    " another row filter or other columns; `cdc-replay refresh --reconcile` makes up for it",
    Deviation.ACTIONS_NOT_PUBLISHED: "the row differed from the start, because not all of its changes are"
    " published: natively it was copied now",
    Deviation.NOT_COPIED: "the row differed from the start, because the subscription has copy_data: false",
    Deviation.DEFINITION_CHANGED: "what is published of the table changed during the run; natively a later"
    " definition may apply to open transactions",
    Deviation.NOT_SUBSCRIBED: "the subscription does not have the table yet; `cdc-replay refresh` adds it",
}
"""Why rows, or a table, differ."""


@dataclass(frozen=True, slots=True)
class ExplainedRows(Result):
    """Rows that differ by one deviation: their number and the first keys."""

    deviation: Deviation
    reason: str
    rows: int
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CertifiedTable(Result):
    """One table; rows are None if it was not compared, with the `reason`.

    `differences` are the unexplained ones by kind: `missing` is a row that only the native subscription has,
    `unexpected` one that only ours has. `keys` are the first of them.
    """

    table: str
    outcome: TableOutcome
    native_rows: int | None = None
    our_rows: int | None = None
    differences: Mapping[str, int] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    deviations: tuple[ExplainedRows, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class CertifyResult(Result):
    """A certificate; `error` is set if it is refused.

    Both subscriptions followed the publisher through `(from_lsn, to_lsn]`, for `followed_seconds`. `removed`
    are leftovers of killed runs on the publisher. Versions are PostgreSQL's.
    """

    subscription: str
    publisher: str
    publications: tuple[str, ...]
    version: str
    publisher_version: str
    native_version: str
    from_lsn: Lsn
    to_lsn: Lsn
    transactions: int
    followed_seconds: float
    seconds: float
    success: bool
    tables: tuple[CertifiedTable, ...]
    report: Path
    removed: tuple[str, ...] = ()
    error: str | None = None
