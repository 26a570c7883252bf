"""What commands return, and its JSON form."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, TypeAlias

from cdc_replay.errors import Retry, SubscriptionParked, retry_of, text_of_error
from cdc_replay.model.lsn import Lsn

CONFLICT_KEYS_KEPT: Final = 20
"""The number of keys that a result keeps for each kind of conflict."""

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


def to_json(value: object) -> Json:
    """A result as JSON values: LSNs, paths and times as text, enums as their values, dataclasses as objects.

    Raises:
        TypeError: for a value that has no JSON form here.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Lsn | Path | dt.datetime):
        return value.isoformat() if isinstance(value, dt.datetime) else str(value)
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_json(element) for key, element in value.items()}
    if isinstance(value, Sequence):
        return [to_json(element) for element in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"no JSON form for {type(value).__name__}")


class Result:
    """A frozen dataclass that a command returns."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Json]:
        """The result as JSON values."""
        form = to_json(self)
        if not isinstance(form, dict):
            raise TypeError(form)
        return form


@dataclass(frozen=True, slots=True)
class RangeResult(Result):
    """A result for the range `(from_lsn, to_lsn]`."""

    def followed_by(self, later: Self) -> Self:
        """This result and that of the next range as one: numbers are added, tuples joined."""
        pairs = {
            field.name: (getattr(self, field.name), getattr(later, field.name))
            for field in dataclasses.fields(self)
        }
        joined = {name: _JOIN_BY_NAME.get(name, _join)(*pair) for name, pair in pairs.items()}
        return dataclasses.replace(self, **joined)


def _join(earlier: object, later: object) -> object:
    match earlier, later:
        case RangeResult(), RangeResult():
            return earlier.followed_by(later)
        case Mapping(), Mapping():
            return {name: earlier.get(name, 0) + later.get(name, 0) for name in {**earlier, **later}}
        case tuple(), tuple():
            return (*earlier, *later)
        case int() | float(), int() | float():
            return earlier + later
        case _:
            return later


def first_keys(
    earlier: Mapping[str, Sequence[str]], later: Mapping[str, Sequence[str]]
) -> Mapping[str, Sequence[str]]:
    """Keys by kind of conflict, the first `CONFLICT_KEYS_KEPT` of each."""
    kinds = dict.fromkeys((*earlier, *later))
    return {
        kind: tuple([*earlier.get(kind, ()), *later.get(kind, ())][:CONFLICT_KEYS_KEPT]) for kind in kinds
    }


_JOIN_BY_NAME: Final[Mapping[str, Callable[..., object]]] = {
    "from_lsn": lambda earlier, later: earlier or later,
    "to_lsn": lambda earlier, later: later or earlier,
    "conflict_keys": first_keys,
    "passed_over": lambda earlier, later: tuple(dict.fromkeys((*earlier, *later))),
}


@dataclass(frozen=True, slots=True)
class PublisherResult(RangeResult):
    """A result for a publisher's change log."""

    publisher: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float


@dataclass(frozen=True, slots=True)
class SubscriptionResult(RangeResult):
    """A result for a subscription; a position is None if there is none."""

    subscription: str
    from_lsn: Lsn | None
    to_lsn: Lsn | None
    seconds: float


@dataclass(frozen=True, slots=True)
class AppliedRange(SubscriptionResult):
    """What one subscription got from the transactions of `(from_lsn, to_lsn]`."""

    from_lsn: Lsn
    to_lsn: Lsn
    changes_read: int = 0
    transactions: int = 0
    filtered_out: int = 0
    updates_to_insert: int = 0
    updates_to_delete: int = 0
    applied: Mapping[str, int] = field(
        default_factory=lambda: {"insert": 0, "update": 0, "delete": 0, "truncate": 0}
    )
    conflicts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SetupResult(Result):
    """What `setup` did, or with `--dry-run` would do.

    `event_trigger`: the publisher has the event triggers, so the catalog is exact at every position (R9.11).
    """

    publisher: str
    from_lsn: Lsn | None
    to_lsn: Lsn | None
    seconds: float
    statements: tuple[str, ...]
    warnings: tuple[str, ...]
    event_trigger: bool
    dry_run: bool


@dataclass(frozen=True, slots=True)
class CaptureResult(PublisherResult):
    """What one `capture` added to the change log."""

    pulls: int
    transactions: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TableCopied(Result):
    """One table of a snapshot: chunks read by this run, and chunks staged by killed runs."""

    table: str
    rows: int
    bytes: int
    seconds: float
    chunks_read: int = 0
    chunks_staged_before: int = 0


@dataclass(frozen=True, slots=True)
class TableCompared(Result):
    """One table that the publisher rewrote, with its values compared by key (R11.9).

    `updated` rows got the publisher's values, `differing` rows still have other values. `missing` rows are
    published, but not on the subscriber. `taken_out` rows are on both sides, but not published. `warning`
    names the differences that remain, and the reason.
    """

    table: str
    rewritten_at: Lsn
    updated: int
    differing: int
    missing: int
    taken_out: int
    rows_read: int
    bytes: int
    seconds: float
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotResult(SubscriptionResult):
    """Tables copied as of `to_lsn` (none if every table was ready), and tables compared after a rewrite."""

    rows: int
    bytes: int
    tables: tuple[TableCopied, ...]
    compared: tuple[TableCompared, ...] = ()

    @classmethod
    def nothing(cls, subscription: str, seconds: float = 0.0) -> SnapshotResult:
        """No table had to be copied."""
        return cls(subscription, None, None, seconds, 0, 0, ())


@dataclass(frozen=True, slots=True)
class ReplayResult(AppliedRange):
    """Windows of one subscription; `error` is set if the last one failed and was not applied.

    Then `retry` says whether a retry can help. `conflict_keys` are the keys of the first rows of each kind
    and table. `unsent_nulls` counts NULLs stored for unchanged TOAST values that are lost (R4.6). `parked`
    are tables that this replay parked, `parked_before` is the transaction before which the subscription is
    parked. `passed_over` are existing tables whose changes were skipped: published, but not in the
    subscription (R7.12).
    """

    conflict_keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unsent_nulls: int = 0
    parked: tuple[str, ...] = ()
    parked_before: Lsn | None = None
    passed_over: tuple[str, ...] = ()
    error: str | None = None
    retry: Retry | None = None

    def failed_with(self, error: Exception) -> ReplayResult:
        """The result up to `error`."""
        parked_before = None
        if isinstance(error, SubscriptionParked) and error.commit_lsn is not None:
            parked_before = Lsn(error.commit_lsn)
        return dataclasses.replace(
            self, error=text_of_error(error), retry=retry_of(error), parked_before=parked_before
        )


@dataclass(frozen=True, slots=True)
class SyncResult(SubscriptionResult):
    """A sync of one subscription: its snapshot, if one was needed, the capture and the replay.

    `compared` are tables that the publisher rewrote.
    """

    from_lsn: Lsn
    to_lsn: Lsn
    snapshot: SnapshotResult
    capture: CaptureResult
    replay: ReplayResult
    compared: tuple[TableCompared, ...] = ()


@dataclass(frozen=True, slots=True)
class BackfillResult(AppliedRange):
    """A past range applied again; `tables` are the chosen ones, empty if none were.

    `left_out` are those that were not ready, if none were chosen.
    """

    dry_run: bool = False
    tables: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackfillPlan(SubscriptionResult):
    """The range that a backfill would apply, and what the log holds of it, before any filter.

    `log_range` says what the whole log holds. `tables` are the chosen ones, empty if none were; the counts
    are of all tables.
    """

    transactions: int
    changes: int
    log_range: str
    tables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TableReconciled(Result):
    """One table of a reconciliation: rows changed, rows and bytes read.

    With `--dry-run`, rows that would be changed, and the first keys of each kind.
    """

    table: str
    inserted: int
    updated: int
    deleted: int
    rows_read: int
    bytes: int
    seconds: float
    deleted_keys: tuple[str, ...] = ()
    updated_keys: tuple[str, ...] = ()
    inserted_keys: tuple[str, ...] = ()

    def by_kind(self) -> Mapping[str, tuple[int, tuple[str, ...]]]:
        """The number of rows and the first keys, by what was done with them."""
        return {
            "inserted": (self.inserted, self.inserted_keys),
            "updated": (self.updated, self.updated_keys),
            "deleted": (self.deleted, self.deleted_keys),
        }


@dataclass(frozen=True, slots=True)
class RefreshResult(SubscriptionResult):
    """Tables that a refresh added to and removed from the subscription.

    After a reconciliation, all tables hold exactly what is published as of `to_lsn`; the counts are changed
    rows, and bytes moved between the servers. `warnings` names tables that a reconciliation would change.
    `dry_run`: nothing was changed.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    snapshot: SnapshotResult
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    bytes: int = 0
    reconciled: tuple[TableReconciled, ...] = ()
    warnings: tuple[str, ...] = ()
    dry_run: bool = False

    def with_tables(self, reconciled: Iterable[TableReconciled]) -> RefreshResult:
        """The result with these reconciled tables and their totals."""
        tables = tuple(reconciled)
        return dataclasses.replace(
            self,
            inserted=sum(table.inserted for table in tables),
            updated=sum(table.updated for table in tables),
            deleted=sum(table.deleted for table in tables),
            bytes=sum(table.bytes for table in tables),
            reconciled=tables,
        )


@dataclass(frozen=True, slots=True)
class ResumeResult(SubscriptionResult):
    """A subscription, or tables of it, that is no longer parked.

    `tables` are those that were named, or that continue after `to_lsn`, the commit LSN of a skipped
    transaction.
    """

    tables: tuple[str, ...]


class ValidationOutcome(enum.Enum):
    """The result of a validation in one word."""

    CONSISTENT = "consistent"
    NOT_CONSISTENT = "not consistent"
    ERROR = "error"
    """Something could not be judged."""
    TOO_OLD = "proof too old"

    def in_words(self, *, is_partial: bool) -> str:
        """The outcome in a few words, which claim no more than was compared."""
        if self is ValidationOutcome.CONSISTENT and is_partial:
            return "no difference in what was compared"
        return self.value


@dataclass(frozen=True, slots=True)
class ValidateResult(Result):
    """The verdict of one validation; `error` is set unless all that was compared holds, in time.

    `is_partial`: some tables, or some rows of them, were not compared; `left_out` has those tables, and
    `not_reached` what a budget was not enough for.

    With `--repair`: the rows that were written, or with `dry_run` would be; `not_repaired` says which
    differing tables were left and why. `first_report` is of the validation before, the rest of that after.
    """

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    success: bool
    tables: tuple[Mapping[str, Json], ...]
    report: Path
    data_docs: Path
    error: str | None
    repaired: tuple[TableReconciled, ...] = ()
    not_repaired: tuple[str, ...] = ()
    dry_run: bool = False
    first_report: Path | None = None
    outcome: ValidationOutcome = ValidationOutcome.CONSISTENT
    is_partial: bool = False
    left_out: tuple[Mapping[str, Json], ...] = ()
    not_reached: tuple[str, ...] = ()
    proven_through: Lsn | None = None
    """The proof of the subscription: all rows of all its tables were equal at this position or later."""
    proven_at: str | None = None

    @property
    def is_undecided(self) -> bool:
        """Whether the validation failed by an error, not by a difference."""
        return self.outcome is ValidationOutcome.ERROR


@dataclass(frozen=True, slots=True)
class VerifyLogResult(PublisherResult):
    """A valid change log: it holds the transactions of `(from_lsn, to_lsn]`."""

    segments: int
    messages: int
    transactions: int
    bytes: int
    prepared: int


@dataclass(frozen=True, slots=True)
class PruneResult(PublisherResult):
    """What was pruned from the change log, which now starts at `to_lsn`; in a dry run, what would be.

    Subscriptions need the log from `needed_lsn` on, `needed_by` is the one that needs most. `segments`,
    `messages` and `bytes` were pruned, with commit times from `from_time` to `to_time`; `files` counts
    deleted files, `merged` small segments that were merged.
    """

    needed_lsn: Lsn
    needed_by: str | None
    segments: int
    messages: int
    bytes: int
    from_time: str | None
    to_time: str | None
    files: int
    merged: int
    dry_run: bool


@dataclass(frozen=True, slots=True)
class TeardownResult(Result):
    """What was removed; the positions are those of its tables, or the end of its log."""

    publisher: str | None
    subscription: str | None
    from_lsn: Lsn | None
    to_lsn: Lsn | None
    seconds: float
    removed: tuple[str, ...]
