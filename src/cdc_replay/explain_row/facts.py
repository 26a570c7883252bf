"""What is known of a row, and what both sides should hold by it; pure.

What the subscriber should hold by its own history is folded from the changes that it got:

| it got               | then the row is                                                     |
|----------------------|---------------------------------------------------------------------|
| INSERT               | there, with the values that were sent                               |
| UPDATE               | as before, with the values that were sent                           |
| DELETE, TRUNCATE     | absent                                                              |
| nothing since a copy | unknown: the copy decides                                           |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.explain_row.other_owners import OtherOwners
from cdc_replay.explain_row.progress import Progress
from cdc_replay.model.explained_row import EventKind, ExplainedChange, Fate, PresentRow, TableEvent
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.subscription import Subscription

REMOVES: Final = frozenset({"DELETE", "TRUNCATE"})
DECIDES: Final = frozenset({"INSERT", *REMOVES})
"""The outcomes that decide whether the subscriber has the row."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the sentence depends on.

    `changes` have their values. `passed_before` says whether the publisher's present row passes the
    definition before each event. `uncaptured` are published actions of the table that the log does not get.
    `published_values` and `held_values` are those of present rows; `converted_values` are the publisher's as
    the subscriber's types print them. `comparable` are columns of equal type, whose texts in the log compare
    with the subscriber's. `is_cut`: older changes are left out. `columns` and `actions` are published.
    `others` are other subscriptions that feed the table: those that the subscriber's row is of, and others.
    `is_newer_than_log`: the transaction that wrote the publisher's row began after the log's last one.
    """

    subscription: Subscription
    table: str
    key: Mapping[str, str]
    log_start: Lsn
    log_end: Lsn
    changes: tuple[ExplainedChange, ...]
    events: tuple[TableEvent, ...]
    progress: Progress
    publisher: PresentRow
    subscriber: PresentRow
    published_values: Mapping[str, str | None]
    converted_values: Mapping[str, str | None]
    held_values: Mapping[str, str | None]
    columns: frozenset[str]
    comparable: frozenset[str]
    passed_before: Mapping[Lsn, bool | None] = field(default_factory=dict)
    actions: frozenset[PublishAction] = frozenset(PublishAction)
    others: OtherOwners = field(default_factory=OtherOwners)
    uncaptured: tuple[str, ...] = ()
    is_newer_than_log: bool = False
    is_published: bool = True
    is_cut: bool = False

    @property
    def on_publisher(self) -> bool:
        """The publisher holds a row under the key."""
        return bool(self.publisher.rows)

    @property
    def should_hold(self) -> bool | None:
        """Whether the subscriber should hold the row by the present definitions; None if unknown."""
        if self.publisher.rows is None:
            return None
        return False if not self.on_publisher else self.publisher.is_published

    @property
    def holds(self) -> bool | None:
        """Whether the subscriber holds it."""
        return None if self.subscriber.rows is None else bool(self.subscriber.rows)

    @property
    def is_of_others(self) -> bool:
        """Whether the subscriber's row is another subscription's, and the publisher has none for this one."""
        return self.should_hold is False and bool(self.holds and self.others.owners)

    @property
    def has_several(self) -> bool:
        """Whether a side holds several rows under the key, of which only one was read."""
        return max(self.publisher.rows or 0, self.subscriber.rows or 0) > 1

    @property
    def differing(self) -> tuple[str, ...]:
        """The columns whose values differ, if both sides hold the row, and one each."""
        if not (self.on_publisher and self.holds) or self.has_several:
            return ()
        shared = self.converted_values.keys() & self.held_values.keys() & self.columns
        return tuple(name for name in sorted(shared) if self.converted_values[name] != self.held_values[name])

    @property
    def differs(self) -> bool | None:
        """Whether the subscriber holds something else than it should."""
        if self.should_hold is None or self.holds is None:
            return None
        if self.is_of_others:
            return False
        if self.has_several:
            return None
        return self.should_hold != self.holds or bool(self.holds and self.differing)

    @property
    def row_changes(self) -> tuple[ExplainedChange, ...]:
        """The changes after the copy, or all without one."""
        return tuple(change for change in self.changes if change.fate is not Fate.COPIED)

    def expected(self) -> Expected:
        """What the subscriber should hold under the key by the changes that it got."""
        got = [(change, change.outcome) for change in self.row_changes if change.fate is Fate.APPLIED]
        return _fold(got, self.key, starts_present=True if self.is_cut else None)

    def logged(self) -> Expected:
        """What the publisher holds under the key by the log."""
        return _fold([(change, change.kind) for change in self.changes], self.key, starts_present=True)


@dataclass(frozen=True, slots=True)
class Expected:
    """A row as far as it is known: `is_present` is None if it is not; values that were sent."""

    is_present: bool | None = None
    values: Mapping[str, str | None] = field(default_factory=dict)


def _fold(
    changes: Iterable[tuple[ExplainedChange, str]],
    key: Mapping[str, str],
    *,
    starts_present: bool | None,
) -> Expected:
    """The row under the key after changes, each with what it does; an UPDATE finds it `starts_present`.

    Changes of another key are those of the row before it got this one, or after it lost it.
    """
    is_present, values, has_left = None, dict[str, str | None](), False
    for change, does in changes:
        if does == "INSERT":
            is_present, values = True, {}
        elif does == "UPDATE" and is_present is not True:
            is_present = starts_present
        elif does in REMOVES:
            is_present, values = False, {}
        if does in {"INSERT", "UPDATE"}:
            values |= change.values or {}
            has_left = change.key != key and (has_left or change.old_key == key)
    return Expected(False) if has_left else Expected(is_present, values)


def contradicts(
    row: Expected, is_present: bool, values: Mapping[str, str | None], columns: frozenset[str]
) -> bool:
    """Whether what is known of a row differs from what is there."""
    if row.is_present is None:
        return False
    if row.is_present != is_present:
        return True
    known = row.values.items() if is_present else ()
    return any(name in values and values[name] != value for name, value in known if name in columns)


def last_event(facts: Facts, kind: EventKind, after: Lsn | None) -> TableEvent | None:
    """The last event of this kind after a position."""
    events = [event for event in facts.events if event.kind is kind and (after is None or event.lsn > after)]
    return events[-1] if events else None


def last_change(changes: Sequence[ExplainedChange]) -> ExplainedChange | None:
    """The last one, if there is one."""
    return changes[-1] if changes else None
