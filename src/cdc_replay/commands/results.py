"""What commands return, and its JSON form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from cdc_replay.model.lsn import Lsn

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


def to_json(value: object) -> Json:
    """A result as JSON values: LSNs and paths as text, dataclasses as objects.

    Raises:
        TypeError: for a value that has no JSON form here.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Lsn | Path):
        return str(value)
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
    """One table of a snapshot."""

    table: str
    rows: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SnapshotResult(Result):
    """Tables copied as of `to_lsn`; none if every table was ready."""

    subscription: str
    from_lsn: Lsn | None
    to_lsn: Lsn | None
    seconds: float
    rows: int
    bytes: int
    tables: tuple[TableCopied, ...]

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
        )


@dataclass(frozen=True, slots=True)
class ReplayResult(Result):
    """One window of one subscription; `error` is set, and nothing was applied, if it failed."""

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
    error: str | None = None

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
            error=later.error,
        )


def _sums(one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


@dataclass(frozen=True, slots=True)
class SyncResult(Result):
    """A sync of one subscription: its snapshot, if one was needed, the capture and the replay."""

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    snapshot: SnapshotResult
    capture: CaptureResult
    replay: ReplayResult

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
class RefreshResult(Result):
    """Tables that entered and left the subscription."""

    subscription: str
    from_lsn: Lsn | None
    to_lsn: Lsn | None
    seconds: float
    added: tuple[str, ...]
    removed: tuple[str, ...]
    snapshot: SnapshotResult


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
    `segments`, `messages` and `bytes` are what was pruned, `files` how many files were deleted, `merged` how
    many small segments were merged.
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
    files: int
    merged: int
    dry_run: bool


@dataclass(frozen=True, slots=True)
class TeardownResult(Result):
    """What was removed."""

    name: str
    removed: tuple[str, ...]
    seconds: float
