"""What `plan` returns: the effects of a proposed change of publications on one subscription."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import Result


@dataclass(frozen=True, slots=True)
class ProposalRefused:
    """What PostgreSQL would refuse, in its words; `line` of the script, None if it concerns all of it."""

    message: str
    line: int | None = None
    detail: str | None = None
    hint: str | None = None
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class FailingStatement:
    """UPDATE or DELETE of a table of the publisher that would fail there (R5.6, R6.6, R2.17)."""

    table: str
    action: str
    publication: str
    message: str
    detail: str
    rule: str


@dataclass(frozen=True, slots=True)
class RowsOfTable:
    """Rows of the publisher in the initial copy, all in one snapshot (R7.4).

    `enter` are not in it now, `leave` only now. None where they could not be counted: `error` says why.
    """

    now: int | None = None
    then: int | None = None
    enter: int | None = None
    leave: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SentChanges:
    """What the subscription gets of the range for a table: changes by kind, and bytes of their messages."""

    changes: int = 0
    bytes: int = 0
    insert: int = 0
    update: int = 0
    delete: int = 0
    truncate: int = 0
    updates_to_insert: int = 0
    updates_to_delete: int = 0


@dataclass(frozen=True, slots=True)
class Transition:
    """Changes of the range of one kind that would be sent in another way; None: not sent."""

    kind: str
    now: str | None
    then: str | None
    changes: int


@dataclass(frozen=True, slots=True)
class UnknownOldValues:
    """Columns that a proposed filter reads, and that old rows in the log do not have.

    `changes` are UPDATEs and DELETEs of the range without these values: the filter reads NULL for the old row
    of a DELETE, and the new row alone where an UPDATE has no old one (R3.9, R4.3).
    """

    leaf: str
    columns: tuple[str, ...]
    changes: int


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """A table of the subscription now, or as proposed.

    `membership`: `stays`, `new`, `removed`; what becomes of it is up to `refresh`.
    `rows` are None if they are the same rows. `added_columns`, `removed_columns` of its changes.
    `uncaptured`: the log does not have the changes that it would get, so `then` is too small.
    """

    table: str
    membership: str
    rows: RowsOfTable | None
    now: SentChanges
    then: SentChanges
    transitions: tuple[Transition, ...] = ()
    added_columns: tuple[str, ...] = ()
    removed_columns: tuple[str, ...] = ()
    filters_now: Mapping[str, str | None] | None = None
    filters_then: Mapping[str, str | None] | None = None
    evaluated_by: tuple[str, ...] = ()
    unknown_old_values: tuple[UnknownOldValues, ...] = ()
    uncaptured: bool = False

    @property
    def differs(self) -> bool:
        """Whether the proposal changes anything of it."""
        return bool(
            self.membership != "stays"
            or self.rows is not None
            or self.transitions
            or self.added_columns
            or self.removed_columns
            or self.filters_now != self.filters_then
            or self.now != self.then
        )


@dataclass(frozen=True, slots=True)
class PlanResult(Result):
    """The effects of a proposal.

    `from_lsn` to `to_lsn` is the range of the log whose changes were routed under both definitions, `days`
    its length by commit times. `refused`: by PostgreSQL, when it is executed, or for good at the first change
    (R1.36). `log_error`: why changes could not be counted. `error`: why the proposal should not be executed.
    """

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    publications: tuple[str, ...]
    parsed_by: str
    because: str | None
    days: float
    tables: tuple[PlannedTable, ...] = ()
    failing: tuple[FailingStatement, ...] = ()
    warnings: tuple[str, ...] = ()
    refused: ProposalRefused | None = None
    log_error: str | None = None
    error: str | None = None
