"""The fold of one lineage, as a readable state machine; `replay.compact.fold` must give the same.

A *lineage* is the set of changes that can touch the same subscriber row: those of one key, or of several keys
that UPDATEs have linked by moving a row from one to the other. Its changes come in commit order. The
subscriber's rows are not read: of a row that the window has not touched yet it is *unknown* whether it
exists.

| row at the key | INSERT                    | UPDATE                       | DELETE                     |
|----------------|---------------------------|------------------------------|----------------------------|
| unknown        | inserted; an existing row | an existing row is changed;  | DELETE of the row          |
|                | is a conflict for apply   | `update_missing` counts      |                            |
| base row       | inserted, if the base row | changed further              | DELETE of the base row     |
|                | does not exist            |                              |                            |
| inserted row   | `insert_exists`, certain  | changed further              | TRANSIENT if absence is    |
|                |                           |                              | still to be checked        |
| absent         | inserted                  | `update_missing`, certain    | `delete_missing`, certain  |

Columns that an UPDATE does not send (`u`, `-`) keep what the window sent earlier, else what the subscriber
has. An UPDATE that changes the key moves the row, with all that was not sent: swaps and chains of keys end as
one UPDATE per row, from its first key to its last. After a TRUNCATE every key is absent.

A row that moves to an unknown key may meet a row of the subscriber there: an UPDATE of a deferrable key, or a
key that has fewer columns on the subscriber, makes such moves. If the row stays there, apply sees that. If it
leaves that key again or is deleted there, only TRANSIT has the key checked: changes meant for the
subscriber's row were applied to the moved one. A key that a row of the window has left is known to be free.

| policy    | a subscriber's row at a TRANSIT key is                                                         |
|-----------|------------------------------------------------------------------------------------------------|
| error     | refused (`update_exists`), as natively                                                         |
| overwrite | deleted, as by the move itself                                                                 |
| skip      | deleted: its changes were applied to the moved row, which change by change would have stayed   |

A lineage is *contingent* if a later change of it meets a row that has moved: if the subscriber lacks the
moved row, that change is for whatever row has the key (R8.4), and the fold is wrong. Apply checks whether the
rows that such lineages start from exist. If one does not, their changes are folded again, given which of
their keys the subscriber has (`replay.apply.contingent`).

Under the policy `skip`, an INSERT that finds a subscriber's row is skipped with all that the window does to
that row until it deletes it.

A row that the window inserts has the ordinal of its last INSERT, however it is changed and moved afterwards.
Where the policy lets an INSERT overwrite the row with its key, that row keeps its own ordinal.

Under REPLICA IDENTITY FULL without a key (R8.10) a "key" is a whole row and stands for any number of equal
rows; each change takes exactly one of them, rows of the window itself first.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from cdc_replay.model.frames import ChangeKind, ConflictKind, NetKind
from cdc_replay.model.subscription import ConflictPolicy

Key: TypeAlias = tuple[str | None, ...]
Values: TypeAlias = tuple[str | None, ...]

SENT = frozenset("nt")
"""Kinds of a value that the publisher did send (R1.4)."""


@dataclass(frozen=True, slots=True)
class RoutedChange:
    """A row of ROUTED, or `weight` UPDATEs of one row, merged into the last of them.

    `ordinal` orders INSERTs as the log does; it is ignored for other changes.
    """

    kind: ChangeKind
    commit_lsn: int
    search_key: Key | None
    new_key: Key | None
    values: Values | None
    kinds: str | None
    weight: int = 1
    ordinal: int | None = None


@dataclass(frozen=True, slots=True)
class NetChange:
    """A row of NET, without its target."""

    kind: NetKind
    base_key: Key
    values: Values | None = None
    kinds: str | None = None
    update_missing: int = 0
    delete_missing: int = 0
    insert_ordinal: int | None = None


@dataclass(slots=True)
class _Row:
    """A row as the window has changed it so far; `base_key` is None for one that the window inserted."""

    base_key: Key | None
    values: Values | None = None
    kinds: str | None = None
    update_missing: int = 0
    may_hide_subscriber_row: bool = False
    """Inserted, or moved to, where the subscriber may have had a row."""
    insert_ordinal: int | None = None
    """The ordinal of the INSERT, if the window inserted the row."""

    def net(self, key: Key) -> NetChange:
        """What is left to do for the row, which ends at `key`."""
        kind = NetKind.INSERT if self.base_key is None else NetKind.UPDATE
        base_key = key if self.base_key is None else self.base_key
        return NetChange(
            kind, base_key, self.values, self.kinds, self.update_missing, insert_ordinal=self.insert_ordinal
        )

    def overlay(self, values: Values | None, kinds: str | None) -> None:
        """Later values win; a value that was not sent stays."""
        if values is None or kinds is None:
            return
        if self.values is None or self.kinds is None:
            self.values, self.kinds = values, kinds
            return
        both = list(zip(values, kinds, self.values, self.kinds, strict=True))
        self.values = tuple(new if kind in SENT else old for new, kind, old, _ in both)
        self.kinds = "".join(kind if kind in SENT else old for _, kind, _, old in both)

    def become(self, values: Values | None, kinds: str | None) -> None:
        """Another row replaces this one: what it did not send (`u`) is not this row's value (R4.6)."""
        if values is None or kinds is None or self.values is None or self.kinds is None:
            self.overlay(values, kinds)
            return
        both = list(zip(values, kinds, self.values, self.kinds, strict=True))
        self.values = tuple(old if kind == "-" else new for new, kind, old, _ in both)
        self.kinds = "".join(old if kind == "-" else kind for _, kind, _, old in both)


@dataclass(slots=True)
class KeyedFold:
    """The fold of one lineage of a table with a key; memory grows with its keys, not with its changes."""

    policy: ConflictPolicy
    is_truncated: bool
    conflicts: collections.Counter[ConflictKind] = field(default_factory=collections.Counter)
    conflict_keys: dict[ConflictKind, Key] = field(default_factory=dict)
    """The key of the first conflict of each kind."""
    last_lsn: int = 0
    is_contingent: bool = False
    """The result depends on whether the subscriber has the rows that have moved."""
    _rows: dict[Key, _Row | None] = field(default_factory=dict)
    _removed: list[NetChange] = field(default_factory=list)

    def assume_rows(self, rows: Mapping[Key, int]) -> None:
        """Assume, before the first change, this number of rows per key on the subscriber."""
        self._rows.update((key, None) for key, count in rows.items() if not count)

    def apply(self, change: RoutedChange) -> None:
        """Apply the next change of the lineage."""
        self.last_lsn = change.commit_lsn
        match change:
            case RoutedChange(kind=ChangeKind.INSERT, new_key=tuple() as new_key):
                self._insert(new_key, change)
            case RoutedChange(
                kind=ChangeKind.UPDATE, search_key=tuple() as search_key, new_key=tuple() as new_key
            ):
                self._update(search_key, new_key, change)
            case RoutedChange(kind=ChangeKind.DELETE, search_key=tuple() as search_key):
                self._delete(search_key)
            case _:
                raise ValueError(f"a {change.kind.name} lacks a key or does not belong to a lineage")

    def net(self) -> Iterator[NetChange]:
        """What is left to do: first the rows to delete, then those that exist in the end."""
        yield from self._removed
        for key, row in self._rows.items():
            if row is None:
                continue
            yield row.net(key)
        if self.is_truncated and self.conflict_keys and not any(self._rows.values()):
            # Only a net change carries conflicts; in the empty table the check finds nothing.
            yield NetChange(NetKind.TRANSIENT, next(iter(self.conflict_keys.values())))

    def _meet(self, row: _Row, key: Key) -> None:
        """A change is for the row at `key`: a moved row need not exist on the subscriber."""
        self.is_contingent |= row.base_key is not None and row.base_key != key

    def _conflict(self, kind: ConflictKind, key: Key, weight: int = 1) -> None:
        self.conflicts[kind] += weight
        self.conflict_keys.setdefault(kind, key)

    def _insert(self, key: Key, change: RoutedChange) -> None:
        row = self._rows.get(key)
        if row is None:
            may_hide = key not in self._rows and not self.is_truncated
            row = _Row(
                None,
                change.values,
                change.kinds,
                may_hide_subscriber_row=may_hide,
                insert_ordinal=change.ordinal,
            )
            self._rows[key] = row
            return
        self._meet(row, key)
        if row.base_key == key:
            # It depends on whether the base row exists; apply checks that, as for every INSERT.
            row.base_key, row.may_hide_subscriber_row, row.insert_ordinal = None, True, change.ordinal
        else:
            self._conflict(ConflictKind.INSERT_EXISTS, key)
            if self.policy is ConflictPolicy.SKIP:
                return
        row.become(change.values, change.kinds)

    def _update(self, search_key: Key, new_key: Key, change: RoutedChange) -> None:
        row = self._rows.get(search_key)
        if row is None:
            if self.is_truncated or search_key in self._rows:
                self._rows.setdefault(search_key, None)
                self._conflict(ConflictKind.UPDATE_MISSING, search_key, change.weight)
                return
            row = self._rows[search_key] = _Row(search_key)
        self._meet(row, search_key)
        if row.base_key is not None:
            row.update_missing += change.weight
        if search_key != new_key and not self._move(row, search_key, new_key):
            return
        row.overlay(change.values, change.kinds)

    def _move(self, row: _Row, search_key: Key, new_key: Key) -> bool:
        """Move the row to its new key; False if another row is there and stays."""
        if (occupant := self._rows.get(new_key)) is not None:
            self.is_contingent |= row.base_key is not None or occupant.base_key is not None
            self._conflict(ConflictKind.UPDATE_EXISTS, new_key)
            if self.policy is ConflictPolicy.SKIP:
                return False
            self._remove(occupant, new_key, delete_missing=0)
        self._check_hidden_row(row, search_key)
        row.may_hide_subscriber_row = new_key not in self._rows and not self.is_truncated
        self._rows[search_key] = None
        self._rows[new_key] = row
        return True

    def _delete(self, key: Key) -> None:
        row = self._rows.get(key)
        if row is not None:
            self._meet(row, key)
            self._remove(row, key, delete_missing=1)
        elif self.is_truncated or key in self._rows:
            self._conflict(ConflictKind.DELETE_MISSING, key)
        else:
            self._removed.append(NetChange(NetKind.DELETE, key, delete_missing=1))
        self._rows[key] = None

    def _remove(self, row: _Row, key: Key, *, delete_missing: int) -> None:
        if row.base_key is not None:
            removed = NetChange(
                NetKind.DELETE, row.base_key, update_missing=row.update_missing, delete_missing=delete_missing
            )
            self._removed.append(removed)
        self._check_hidden_row(row, key)

    def _check_hidden_row(self, row: _Row, key: Key) -> None:
        """`row` leaves `key`: have apply check whether it has hidden a row of the subscriber there."""
        if not row.may_hide_subscriber_row:
            return
        if row.base_key is not None:
            self._removed.append(NetChange(NetKind.TRANSIT, key))
            return
        self._removed.append(NetChange(NetKind.TRANSIENT, key, update_missing=row.update_missing))
        row.update_missing = 0


@dataclass(slots=True)
class KeylessFold:
    """The fold of one lineage of a table without a key: rows that are equal are exchangeable (R8.10)."""

    is_truncated: bool
    conflicts: collections.Counter[ConflictKind] = field(default_factory=collections.Counter)
    conflict_keys: dict[ConflictKind, Key] = field(default_factory=dict)
    last_lsn: int = 0
    is_contingent: bool = False
    _rows: dict[Key, list[_Row]] = field(default_factory=dict)
    _removed: list[NetChange] = field(default_factory=list)
    _remaining: dict[Key, int] | None = None
    """Number of unused rows that the subscriber has of each key; None: unknown."""
    _same_as: Mapping[Key, Key] = field(default_factory=dict)

    def assume_rows(self, rows: Mapping[Key, int], same: Mapping[Key, Key] | None = None) -> None:
        """Assume, before the first change, this number of rows per key on the subscriber.

        `same` maps keys to others that are the same row, where only the subscriber can tell.
        """
        self._remaining = {**rows}
        self._same_as = same or {}

    def apply(self, change: RoutedChange) -> None:
        """Apply the next change of the lineage."""
        self.last_lsn = change.commit_lsn
        if change.kind is ChangeKind.INSERT:
            self._put(change.new_key, _Row(None, change.values, change.kinds, insert_ordinal=change.ordinal))
            return
        missing = (
            ConflictKind.UPDATE_MISSING if change.kind is ChangeKind.UPDATE else ConflictKind.DELETE_MISSING
        )
        if (row := self._take(change.search_key)) is None:
            self.conflicts[missing] += change.weight
        elif change.kind is ChangeKind.UPDATE:
            row.update_missing += 0 if row.base_key is None else change.weight
            row.overlay(change.values, change.kinds)
            self._put(change.new_key, row)
        elif row.base_key is not None:
            self._removed.append(
                NetChange(NetKind.DELETE, row.base_key, update_missing=row.update_missing, delete_missing=1)
            )

    def net(self) -> Iterator[NetChange]:
        """What is left to do, one net change per row."""
        yield from self._removed
        for key, rows in self._rows.items():
            for row in rows:
                yield row.net(key)
        if self.is_truncated and self.conflicts and not any(self._rows.values()):
            yield NetChange(NetKind.TRANSIENT, next(iter(self._rows), ()))

    def _put(self, key: Key | None, row: _Row) -> None:
        if key is None:
            raise ValueError("a change of a table without a key lacks its new row")
        self._rows.setdefault(self._same_as.get(key, key), []).append(row)

    def _take(self, key: Key | None) -> _Row | None:
        if key is None:
            raise ValueError("a change of a table without a key lacks its old row")
        same_key = self._same_as.get(key, key)
        rows = self._rows.setdefault(same_key, [])
        if rows:
            row = rows.pop()
            self.is_contingent |= row.base_key is not None and row.base_key != key
            return row
        if self.is_truncated or not self._use_subscriber_row(same_key):
            return None
        return _Row(key)

    def _use_subscriber_row(self, key: Key) -> bool:
        """Use one of the subscriber's equal rows; False if none is left."""
        if self._remaining is None:
            return True
        remaining = self._remaining.get(key, 0)
        self._remaining[key] = remaining - 1
        return remaining > 0


def fold(
    changes: Iterable[RoutedChange],
    *,
    policy: ConflictPolicy,
    is_keyed: bool,
    is_truncated: bool,
    known: Mapping[Key, int] | None = None,
    same: Mapping[Key, Key] | None = None,
) -> KeyedFold | KeylessFold:
    """The fold of a lineage after all its changes.

    `known` is the subscriber's number of rows per key, if it was looked up, and `same` maps keys to others
    that are the same row, in a table without a key (`KeylessFold.assume_rows`).
    """
    folded = KeyedFold(policy, is_truncated) if is_keyed else KeylessFold(is_truncated)
    if known is not None and isinstance(folded, KeylessFold):
        folded.assume_rows(known, same)
    elif known is not None:
        folded.assume_rows(known)
    for change in changes:
        folded.apply(change)
    return folded
