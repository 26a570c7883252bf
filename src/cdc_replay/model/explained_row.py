"""What `why` says of one row: its changes, what a subscription made of each, and what both sides hold now."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import Result


class Answer(enum.Enum):
    """The value of a row filter for one row (R3.1)."""

    TRUE = "true"
    FALSE = "false"
    NULL = "null"
    ERROR = "error"
    """Evaluating it fails (R1.36)."""
    NO_ROW = "no row"
    """The change has no such row, or it was not sent."""
    UNKNOWN = "unknown"
    """It was not evaluated, because PostgreSQL could not be asked."""


class ClauseRole(enum.Enum):
    """What a publication of the subscription contributes to the fate of a change."""

    FILTER = "row filter"
    """Its row filter counts."""
    EVERY_ROW = "every row"
    """It publishes the action, without a row filter (R3.4)."""
    OTHER_ACTIONS = "does not publish the action"
    """It publishes the table, but not this action: its row filter does not count."""
    LOWER_LEVEL = "actions only"
    """Another publication publishes the change under an ancestor: only its actions count (R2.6, R2.7)."""
    NOT_LISTED = "does not publish the table"
    MISSING = "does not exist"


@dataclass(frozen=True, slots=True)
class Clause(Result):
    """A publication's part in the fate of one change, or of the present row; `error` if the filter fails.

    `old` and `new` are the values of its row filter; without a filter that counts they are None.
    """

    publication: str
    role: ClauseRole
    row_filter: str | None = None
    old: Answer | None = None
    new: Answer | None = None
    error: str | None = None


class Fate(enum.Enum):
    """How far a change has come on the subscriber."""

    COPIED = "copied"
    """It was committed before the table's last copy, which has its effect."""
    APPLIED = "applied"
    SKIPPED = "skipped"
    """Its transaction was left out (`resume --skip`)."""
    PARKED = "parked"
    """The subscription or the table is parked before it."""
    PENDING = "pending"
    """It is in the log, and not applied yet."""
    NOT_SEEN = "not seen"
    """The subscription does not see it."""


@dataclass(frozen=True, slots=True)
class WindowOfChange(Result):
    """The window that applied a change, if the subscriber's history still has it; `finished` is ISO time.

    `conflicts` are those of the whole window; `conflict_kinds` those recorded with the row's key.
    """

    from_lsn: Lsn
    to_lsn: Lsn
    finished: str
    conflicts: int
    conflict_kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExplainedChange(Result):
    """One change of the row, and what the subscription made of it.

    `key` and `old_key` are the row's key after and before it, by column; `old_key` only if it differs.
    `unsent` are columns whose values were not sent (R1.4). `values` and `old_values` are sent values, and
    only there on request. `outcome` is what the subscription sees, in capitals as `kind`, or `nothing`;
    `case` is the row of the table of UPDATEs (R4.4); `reason` follows from `rule`.
    """

    commit_lsn: Lsn
    lsn: Lsn
    seq: int
    xid: int
    committed: str
    origin: str | None
    kind: str
    leaf: str
    published_as: str | None
    why_published_as: str
    clauses: tuple[Clause, ...]
    outcome: str
    case: str | None
    reason: str
    rule: str | None
    fate: Fate
    target: str | None = None
    key: Mapping[str, str | None] | None = None
    old_key: Mapping[str, str | None] | None = None
    unsent: tuple[str, ...] = ()
    values: Mapping[str, str | None] | None = None
    old_values: Mapping[str, str | None] | None = None
    window: WindowOfChange | None = None


class EventKind(enum.Enum):
    """What happened to the table, beside changes of the row."""

    DEFINITION = "definition"
    """The publications publish it in another way from here on."""
    REWRITE = "rewrite"
    """The publisher rewrote its rows, and sent no changes (R11.9)."""
    COPY = "copy"
    """The subscriber's rows were copied, or reconciled, as of here."""


@dataclass(frozen=True, slots=True)
class TableEvent(Result):
    """Something that happened to the table at `lsn`; `gained` are columns that are published since."""

    lsn: Lsn
    kind: EventKind
    text: str
    gained: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PresentRow(Result):
    """What one side holds under the key now: the number of rows, and on request the first row's values.

    `lsn` is the publisher's position, or the applied LSN of the subscriber's table. `is_published` says
    whether the row passes the present row filters; None if unknown, and always on the subscriber. `error`
    says why the side could not be read.
    """

    table: str | None
    lsn: Lsn | None
    rows: int | None
    is_published: bool | None = None
    clauses: tuple[Clause, ...] = ()
    values: Mapping[str, str | None] | None = None
    error: str | None = None


class Cause(enum.Enum):
    """Why both sides differ, or why they do not."""

    SAME = "same"
    """Both hold the same row."""
    ABSENT = "absent"
    """Neither has the row."""
    FILTERED_OUT = "filtered out"
    """The publisher's row is not published: its row filters do not pass it."""
    NOT_PUBLISHED = "not published"
    NOT_SUBSCRIBED = "not subscribed"
    NOT_COPIED = "not copied yet"
    TARGET_MISSING = "table missing on the subscriber"
    PARKED = "parked"
    NOT_APPLIED = "not applied yet"
    NOT_CAPTURED_YET = "not captured yet"
    NOT_CAPTURED = "not captured"
    SKIPPED = "skipped"
    CONFLICT = "conflict"
    ORIGIN = "origin"
    ACTION_NOT_PUBLISHED = "action not published"
    FILTER_CHANGED = "filter changed"
    COLUMNS_CHANGED = "columns changed"
    REWRITTEN = "table rewritten"
    UNSENT_VALUE = "value not sent"
    KEY_MOVED = "moved to another key"
    OLDER_THAN_LOG = "older than the log"
    NEVER_COPIED = "never copied"
    OTHER_SUBSCRIPTION = "of another subscription"
    """The subscriber's row is one that another subscription of the same table has brought."""
    CHANGED_LOCALLY = "changed locally"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class WhyResult(Result):
    """The history of one row; `from_lsn` and `to_lsn` are the log's start and end.

    `changes_found` is the number of its changes in the log, `changes` the newest of them, in order. `differs`
    is None if a side could not be read, or has several rows. `differing` are the columns whose values differ.
    `explanation` is the sentence of `cause`.
    """

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    table: str
    key: Mapping[str, str]
    changes_found: int
    changes: tuple[ExplainedChange, ...]
    events: tuple[TableEvent, ...]
    publisher: PresentRow
    subscriber: PresentRow
    differs: bool | None
    differing: tuple[str, ...]
    cause: Cause
    explanation: str
