"""How far changes have come on the subscriber: copied, applied, skipped, parked, pending."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cdc_replay.errors import InvalidLsn
from cdc_replay.explain_row.row_key import RowKey
from cdc_replay.model.explained_row import Fate, WindowOfChange
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Copying, Parked, Ready, TableState
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber import recorded_results, subscription_records, subscription_tables
from cdc_replay.subscriber.copy_definitions import Definition, read_copy_definitions
from cdc_replay.subscriber.history import WindowRecord, windows_of_commits
from cdc_replay.subscriber.recorded_results import RecordedResult


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of one table of a subscription.

    `state` is None if the table is not in the subscription, `exists` whether the subscriber has it.
    `copied_at` is the position of its last copy or reconciliation; with `is_copied` false the table was only
    taken into the subscription there (`copy_data: false`). `parked_transaction` and `parked_reason` are those
    of the subscription. `skipped` are transactions that were left out for the table.
    """

    state: TableState | None = None
    exists: bool = True
    copied_at: Lsn | None = None
    copied_by: Definition | None = None
    is_copied: bool = True
    parked_transaction: Lsn | None = None
    parked_reason: str | None = None
    skipped: frozenset[Lsn] = frozenset()
    conflicts: tuple[tuple[Lsn, Lsn, str], ...] = field(default=())
    """Recorded conflicts of the row: the window's positions and the kind."""

    @property
    def applied_lsn(self) -> Lsn | None:
        """The table holds everything up to this position."""
        match self.state:
            case Ready(applied_lsn) | Parked(applied_lsn, _, _):
                return applied_lsn
            case _:
                return None

    def fate(self, commit_lsn: Lsn, *, is_seen: bool) -> Fate:
        """How far a change of this transaction has come."""
        copied_at = self.state.consistent_point if isinstance(self.state, Copying) else self.copied_at
        is_before = copied_at is not None and commit_lsn <= copied_at
        if is_before and self.is_copied:
            return Fate.COPIED
        if is_before or not is_seen:
            return Fate.NOT_SEEN
        if commit_lsn in self.skipped:
            return Fate.SKIPPED
        if self.applied_lsn is not None and commit_lsn <= self.applied_lsn:
            return Fate.APPLIED
        return Fate.PARKED if self._is_parked_before(commit_lsn) else Fate.PENDING

    def _is_parked_before(self, commit_lsn: Lsn) -> bool:
        if isinstance(self.state, Parked):
            return commit_lsn >= self.state.transaction
        return self.parked_transaction is not None and commit_lsn >= self.parked_transaction

    def conflict_kinds(self, commit_lsn: Lsn) -> tuple[str, ...]:
        """The conflicts recorded with the row's key in the window of this transaction."""
        return tuple(kind for after, upto, kind in self.conflicts if after < commit_lsn <= upto)


def read_progress(
    connection: Connection, subscription: Subscription, table: QualifiedName, keys: Iterable[RowKey]
) -> Progress:
    """The state of the table that changes of this name reach; `keys` are the row's."""
    name = subscription.name
    known = {
        known.name or known.recorded_name: known
        for known in subscription_tables.known_tables(connection, name)
    }
    known_table = known.get(table)
    record = subscription_records.subscription_record(connection, name)
    copied = read_copy_definitions(connection, name).get(table)
    reconciled = recorded_results.recorded_results(connection, name, "reconcile")
    return Progress(
        state=None if known_table is None else known_table.state,
        exists=known_table is not None and known_table.name is not None,
        copied_at=None if copied is None else copied.lsn,
        copied_by=None if copied is None else copied.definition,
        is_copied=subscription.copy_data or bool(reconciled),
        parked_transaction=None if record is None else record.parked_transaction,
        parked_reason=None if record is None else record.parked_reason,
        skipped=frozenset(_skipped(recorded_results.recorded_results(connection, name, "resume"), table)),
        conflicts=tuple(
            _conflicts(recorded_results.recorded_results(connection, name, "replay"), table, keys)
        ),
    )


def read_windows(
    connection: Connection, subscription: str, commit_lsns: Iterable[Lsn], progress: Progress
) -> dict[Lsn, WindowOfChange]:
    """The windows that applied these transactions, as far as the history has them."""
    windows = windows_of_commits(connection, subscription, commit_lsns)
    return {lsn: _window(window, progress.conflict_kinds(lsn)) for lsn, window in windows.items()}


def _window(window: WindowRecord, kinds: tuple[str, ...]) -> WindowOfChange:
    return WindowOfChange(
        Lsn.parse(window.from_lsn),
        Lsn.parse(window.end_lsn),
        window.finished.isoformat(timespec="seconds"),
        window.conflicts,
        kinds,
    )


def _skipped(resumed: Iterable[RecordedResult], table: QualifiedName) -> Iterable[Lsn]:
    for recorded in resumed:
        tables = recorded.result.get("tables")
        if isinstance(tables, list) and str(table) in tables and (lsn := _lsn(recorded.result, "to_lsn")):
            yield lsn


def _conflicts(
    replayed: Iterable[RecordedResult], table: QualifiedName, keys: Iterable[RowKey]
) -> Iterable[tuple[Lsn, Lsn, str]]:
    wanted = {f"{table} {key}" for key in keys}
    for recorded in replayed:
        after, upto = (_lsn(recorded.result, name) for name in ("from_lsn", "to_lsn"))
        by_kind = recorded.result.get("conflict_keys")
        if after is None or upto is None or not isinstance(by_kind, Mapping):
            continue
        for kind, texts in by_kind.items():
            if isinstance(texts, list) and wanted.intersection(map(str, texts)):
                yield after, upto, str(kind)


def _lsn(result: Mapping[str, Any], name: str) -> Lsn | None:
    text = result.get(name)
    try:
        return Lsn.parse(text) if isinstance(text, str) else None
    except InvalidLsn:
        return None
