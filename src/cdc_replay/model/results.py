"""What commands return, and its JSON form."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from cdc_replay.errors import Retry, retry_of
from cdc_replay.model.lsn import Lsn

CONFLICT_KEYS_KEPT: Final = 20
"""A result of many windows keeps so many keys of each kind of conflict."""

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


def to_json(value: object) -> Json:
    """A result as JSON values: LSNs and paths as text, enums as their values, dataclasses as objects.

    Raises:
        TypeError: for a value that has no JSON form here.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Lsn | Path):
        return str(value)
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_json(getattr(value, each.name)) for each in dataclasses.fields(value)}
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
class SetupResult(Result):
    """What `setup` did, or with `--dry-run` would do.

    `event_trigger`: the publisher has the event triggers, so definitions are exact by position (R9.11).
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
class CaptureResult(Result):
    """What one `capture` brought into the change log."""

    publisher: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    pulls: int
    transactions: int
    messages: int
    bytes: int

    def followed_by(self, later: CaptureResult) -> CaptureResult:
        """This capture and the next one as one."""
        return CaptureResult(
            publisher=self.publisher,
            from_lsn=self.from_lsn,
            to_lsn=later.to_lsn,
            seconds=self.seconds + later.seconds,
            pulls=self.pulls + later.pulls,
            transactions=self.transactions + later.transactions,
            messages=self.messages + later.messages,
            bytes=self.bytes + later.bytes,
        )


@dataclass(frozen=True, slots=True)
class TableCopied(Result):
    """One table of a snapshot, in chunks that this run has read, and those that killed runs had staged."""

    table: str
    rows: int
    bytes: int
    seconds: float
    chunks_read: int = 0
    chunks_staged_before: int = 0


@dataclass(frozen=True, slots=True)
class TableCompared(Result):
    """One table that the publisher had rewritten, of which values were compared by key (R11.9).

    `updated` rows got the publisher's values, `differing` rows have others still. `missing` rows are
    published and not here, `taken_out` rows are here and on the publisher and not published. `warning` says
    what of that stays, and why.
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
class SnapshotResult(Result):
    """Tables copied as of `to_lsn`, none if every table was ready; and those compared after a rewrite."""

    subscription: str
    from_lsn: Lsn | None
    to_lsn: Lsn | None
    seconds: float
    rows: int
    bytes: int
    tables: tuple[TableCopied, ...]
    compared: tuple[TableCompared, ...] = ()

    @classmethod
    def nothing(cls, subscription: str, seconds: float = 0.0) -> SnapshotResult:
        """No table had to be copied."""
        return cls(subscription, None, None, seconds, 0, 0, ())

    def followed_by(self, later: SnapshotResult) -> SnapshotResult:
        """This snapshot and the next one as one; either may have had nothing to copy."""
        return SnapshotResult(
            subscription=self.subscription,
            from_lsn=self.from_lsn or later.from_lsn,
            to_lsn=later.to_lsn or self.to_lsn,
            seconds=self.seconds + later.seconds,
            rows=self.rows + later.rows,
            bytes=self.bytes + later.bytes,
            tables=(*self.tables, *later.tables),
            compared=(*self.compared, *later.compared),
        )


@dataclass(frozen=True, slots=True)
class ReplayResult(Result):
    """Windows of one subscription; `error` is set if the last one failed, and was not applied.

    Then `retry` says whether running it again can help. `conflict_keys` are the keys of the first rows of
    each kind and table. `unsent_nulls` are NULLs that were stored for values which nobody has (R4.6).
    `parked` are tables that could not be applied, and that stand still from now on. `passed_over` are those
    whose changes were ignored: published and there, but not subscribed to (R7.12).
    """

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    changes_read: int = 0
    transactions: int = 0
    filtered_out: int = 0
    updates_to_insert: int = 0
    updates_to_delete: int = 0
    applied: Mapping[str, int] = field(
        default_factory=lambda: {"insert": 0, "update": 0, "delete": 0, "truncate": 0}
    )
    conflicts: Mapping[str, int] = field(default_factory=dict)
    conflict_keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unsent_nulls: int = 0
    parked: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    error: str | None = None
    retry: Retry | None = None

    def failed_with(self, error: Exception) -> ReplayResult:
        """The same, as far as it came before `error`."""
        return dataclasses.replace(self, error=str(error).strip(), retry=retry_of(error))

    def followed_by(self, later: ReplayResult) -> ReplayResult:
        """This window and the next one as one."""
        return ReplayResult(
            subscription=self.subscription,
            from_lsn=self.from_lsn,
            to_lsn=later.to_lsn,
            seconds=self.seconds + later.seconds,
            changes_read=self.changes_read + later.changes_read,
            transactions=self.transactions + later.transactions,
            filtered_out=self.filtered_out + later.filtered_out,
            updates_to_insert=self.updates_to_insert + later.updates_to_insert,
            updates_to_delete=self.updates_to_delete + later.updates_to_delete,
            applied=_sums(self.applied, later.applied),
            conflicts=_sums(self.conflicts, later.conflicts),
            conflict_keys=first_keys(self.conflict_keys, later.conflict_keys),
            unsent_nulls=self.unsent_nulls + later.unsent_nulls,
            parked=(*self.parked, *later.parked),
            passed_over=tuple(dict.fromkeys((*self.passed_over, *later.passed_over))),
            error=later.error,
            retry=later.retry,
        )


def _sums(one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def first_keys(
    one: Mapping[str, Sequence[str]], other: Mapping[str, Sequence[str]]
) -> Mapping[str, Sequence[str]]:
    """Keys by kind of conflict, the first `CONFLICT_KEYS_KEPT` of each."""
    kinds = dict.fromkeys((*one, *other))
    return {kind: tuple([*one.get(kind, ()), *other.get(kind, ())][:CONFLICT_KEYS_KEPT]) for kind in kinds}


@dataclass(frozen=True, slots=True)
class SyncResult(Result):
    """A sync of one subscription: its snapshot, if one was needed, the capture and the replay.

    `compared` are tables that the publisher had rewritten.
    """

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    snapshot: SnapshotResult
    capture: CaptureResult
    replay: ReplayResult
    compared: tuple[TableCompared, ...] = ()

    def followed_by(self, later: SyncResult) -> SyncResult:
        """This sync and the next one as one."""
        return SyncResult(
            subscription=self.subscription,
            from_lsn=self.from_lsn,
            to_lsn=later.to_lsn,
            seconds=self.seconds + later.seconds,
            snapshot=self.snapshot.followed_by(later.snapshot),
            capture=self.capture.followed_by(later.capture),
            replay=self.replay.followed_by(later.replay),
            compared=(*self.compared, *later.compared),
        )


@dataclass(frozen=True, slots=True)
class BackfillResult(Result):
    """A past range applied again."""

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    changes_read: int
    transactions: int
    filtered_out: int
    updates_to_insert: int
    updates_to_delete: int
    applied: Mapping[str, int]
    conflicts: Mapping[str, int]
    dry_run: bool


@dataclass(frozen=True, slots=True)
class TableReconciled(Result):
    """One table of a reconciliation: what was changed, and what was read to find it.

    With `--dry-run`, what would be changed, and the keys of the first rows of each kind.
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


@dataclass(frozen=True, slots=True)
class RefreshResult(Result):
    """Tables that entered and left the subscription.

    If it was reconciled: what that changed, the bytes that it moved from server to server, and all tables
    hold exactly what is published as of `to_lsn`. `warnings` names tables that reconciling would change.
    `dry_run`: all of it would be done, and nothing was.
    """

    subscription: str
    from_lsn: Lsn | None
    to_lsn: Lsn | None
    seconds: float
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
        """The result with these reconciled tables, and their sums."""
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
class ResumeResult(Result):
    """A subscription, or tables of it, with which replay goes on.

    `tables` are those that were named, or that go on behind `to_lsn`, the end of a skipped transaction.
    """

    subscription: str
    from_lsn: Lsn | None
    to_lsn: Lsn | None
    seconds: float
    tables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VerifyLogResult(Result):
    """A change log without fault: it holds what committed in `(from_lsn, to_lsn]`."""

    publisher: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    segments: int
    messages: int
    transactions: int
    bytes: int
    prepared: int


@dataclass(frozen=True, slots=True)
class PruneResult(Result):
    """What left the change log, which starts at `to_lsn` now; in a dry run, what would leave.

    `needed_lsn` is what the subscriptions still need the log from, `needed_by` the one that needs most;
    `segments`, `messages` and `bytes` are what was pruned, `from_time` and `to_time` when the first and the
    last of it were committed, `files` how many files were deleted, `merged` how many small segments were
    merged.
    """

    publisher: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
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
    """What was removed, and of whom; the positions are where its tables stood, or where its log ends."""

    publisher: str | None
    subscription: str | None
    from_lsn: Lsn | None
    to_lsn: Lsn | None
    seconds: float
    removed: tuple[str, ...]
