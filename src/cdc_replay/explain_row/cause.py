"""Why both sides differ in a row, or why they do not: one sentence; pure.

If the subscriber holds something else than the changes that it got have made of the row (`facts`), somebody
has changed it there, or an applied change was left out. If it holds just that, and the publisher something
else, the reason is in what the subscription did not see: a change that passed it by, another definition, a
rewrite. The rules are tried in the order of `_RULES`; the first that has an explanation wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from cdc_replay.explain_row.facts import (
    DECIDES,
    Facts,
    contradicts,
    last_change,
    last_event,
)
from cdc_replay.model.explained_row import (
    Answer,
    Cause,
    ClauseRole,
    EventKind,
    ExplainedChange,
    Fate,
    PresentRow,
    TableEvent,
)
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.subscription import ConflictPolicy
from cdc_replay.model.table_state import Copying, Parked, Pending


class Finding(NamedTuple):
    """A cause, and the sentence that explains it."""

    cause: Cause
    explanation: str


def find_cause(facts: Facts) -> Finding:
    """The cause and its sentence."""
    return next(finding for rule in _RULES if (finding := rule(facts)) is not None)


def _unread(facts: Facts) -> Finding | None:
    for side, row in (("subscriber", facts.subscriber), ("publisher", facts.publisher)):
        if row.error is not None and facts.progress.exists:
            return Finding(Cause.UNKNOWN, f"The {side}'s row could not be read: {row.error}.")
    return None


def _not_published(facts: Facts) -> Finding | None:
    if facts.is_published:
        return None
    events = [event for event in facts.events if event.kind is EventKind.DEFINITION]
    since = f" since {events[-1].lsn}" if events else ""
    return Finding(
        Cause.NOT_PUBLISHED,
        f"No publication of subscription {facts.subscription.name} publishes table {facts.table}{since}:"
        " the subscriber gets none of its changes (R2.2).",
    )


def _not_subscribed(facts: Facts) -> Finding | None:
    name, state = facts.subscription.name, facts.progress.state
    if state is None:
        return Finding(
            Cause.NOT_SUBSCRIBED,
            f"Table {facts.table} is published, and not in the subscription, so its changes are skipped:"
            f" `cdc-replay refresh {name}` adds it (R7.12).",
        )
    if not facts.progress.exists:
        return Finding(Cause.TARGET_MISSING, f"Table {facts.table} was dropped on the subscriber (R8.1).")
    if isinstance(state, Pending | Copying):
        verb = "waits for its copy" if isinstance(state, Pending) else "is being copied"
        return Finding(
            Cause.NOT_COPIED, f"Table {facts.table} {verb}: `cdc-replay snapshot {name}` copies it."
        )
    return None


def _of_others(facts: Facts) -> Finding | None:
    if not facts.is_of_others:
        return None
    name, owners = facts.subscription.name, facts.others.owners
    return Finding(
        Cause.OTHER_SUBSCRIPTION,
        f"The subscriber's row is not of subscription {name}, whose row filter does not pass it, but of"
        f" {', '.join(owners)}, whose row filter does: ask `cdc-replay why {owners[0]}` for it.",
    )


def _same(facts: Facts) -> Finding | None:
    if facts.differs is not False:
        return None
    if facts.holds:
        return Finding(Cause.SAME, "Both sides hold the same row.")
    if facts.on_publisher:
        return Finding(
            Cause.FILTERED_OUT, f"The publisher's row is not published: {_why_filtered(facts.publisher)}."
        )
    last = last_change(facts.changes)
    if last is None:
        return Finding(
            Cause.ABSENT, "Neither side has a row with this key, and the log has no change of one."
        )
    if last.kind == "UPDATE":
        return Finding(
            Cause.KEY_MOVED,
            f"Neither side has it: the UPDATE at {last.commit_lsn} gave the row another key.",
        )
    return Finding(
        Cause.ABSENT,
        f"Neither side has the row: the publisher's last change is the {last.kind} at {last.commit_lsn}.",
    )


def _why_filtered(row: PresentRow) -> str:
    counted = [clause for clause in row.clauses if clause.role is ClauseRole.FILTER]
    words = [
        f'row filter {clause.row_filter} of publication "{clause.publication}" is'
        f" {clause.new.value if clause.new else Answer.UNKNOWN.value} for it"
        for clause in counted
    ]
    return ", ".join(words) + " (R3.1)" if words else "no publication publishes it"


def _not_applied(facts: Facts) -> Finding | None:
    waiting = [change for change in facts.row_changes if change.fate in {Fate.PENDING, Fate.PARKED}]
    if not waiting:
        return None
    first, state, name = waiting[0], facts.progress.state, facts.subscription.name
    if first.fate is Fate.PARKED or isinstance(state, Parked):
        subject = f"Table {facts.table}" if isinstance(state, Parked) else f"Subscription {name}"
        reason = state.reason if isinstance(state, Parked) else facts.progress.parked_reason or "unknown"
        before = state.transaction if isinstance(state, Parked) else facts.progress.parked_transaction
        where = "" if before is None else f" before transaction {before}"
        return Finding(
            Cause.PARKED,
            f"{subject} is parked{where}, so the {first.kind} at {first.commit_lsn} is not applied:"
            f" {_first_line(reason)}.",
        )
    return Finding(
        Cause.NOT_APPLIED,
        f"The {first.kind} at {first.commit_lsn} is in the log and not applied yet: the table is at"
        f" {facts.progress.applied_lsn}. `cdc-replay replay {name}` applies it.",
    )


def _first_line(reason: str) -> str:
    return reason.strip().splitlines()[0].rstrip(".") if reason.strip() else "unknown"


def _several(facts: Facts) -> Finding | None:
    if not facts.has_several:
        return None
    sides = [
        side
        for side, row in (("the publisher", facts.publisher), ("the subscriber", facts.subscriber))
        if (row.rows or 0) > 1
    ]
    return Finding(
        Cause.UNKNOWN,
        f"Several rows of {' and '.join(sides)} have this key, and are not compared one by one:"
        f" `cdc-replay validate {facts.subscription.name}` compares the whole table.",
    )


def _never_sent(facts: Facts) -> Finding | None:
    """The publisher did to the row what is not published, and so need not be in the log."""
    if facts.publisher.rows is None:
        return None
    logged = facts.logged().is_present
    if not facts.on_publisher:
        action, is_logged, has = PublishAction.DELETE, logged is False, "has no such row any more"
    elif not facts.holds:
        action, is_logged, has = PublishAction.INSERT, logged is True, "has the row"
    else:
        action, is_logged, has = PublishAction.UPDATE, False, "has other values in the row"
    if is_logged or action in facts.actions:
        return None
    return Finding(
        Cause.ACTION_NOT_PUBLISHED,
        f"The publisher {has}, and the publications of the subscription do not publish {action.value} of the"
        " table (R2.7), so the subscriber does not get it.",
    )


def _not_captured(facts: Facts) -> Finding | None:
    """The publisher's row is not what the log says."""
    if facts.publisher.rows is None or facts.publisher.lsn is None:
        return None
    logged = facts.logged()
    is_newer = logged.is_present is None and facts.is_newer_than_log
    if not is_newer and not contradicts(logged, facts.on_publisher, facts.published_values, facts.columns):
        return None
    last = last_change(facts.changes)
    after = None if last is None else last.commit_lsn
    if (rewrite := last_event(facts, EventKind.REWRITE, after)) is not None:
        return Finding(Cause.REWRITTEN, _rewritten(facts, rewrite))
    if facts.uncaptured:
        return Finding(Cause.NOT_CAPTURED, _uncaptured(facts))
    since = "" if last is None else f" since the {last.kind} at {last.commit_lsn}"
    if facts.publisher.lsn > facts.log_end:
        publisher = facts.subscription.publisher
        return Finding(
            Cause.NOT_CAPTURED_YET,
            f"The publisher has changed the row{since}, and the log ends at {facts.log_end}, before that:"
            f" `cdc-replay capture {publisher}` or `sync` brings the change.",
        )
    return Finding(
        Cause.NOT_CAPTURED,
        f"The publisher has changed the row{since}, and the log, complete up to {facts.log_end}, lacks"
        " the change: the table was not captured then, or the change was not logged.",
    )


def _uncaptured(facts: Facts) -> str:
    return (
        f"Changes are not captured: {', '.join(facts.uncaptured)}. Run `cdc-replay setup"
        f" {facts.subscription.publisher}`, then `cdc-replay refresh {facts.subscription.name} --reconcile`"
        " (R2.3)."
    )


def _rewritten(facts: Facts, rewrite: TableEvent) -> str:
    return (
        f"The publisher rewrote the table at {rewrite.lsn}, which sends no changes, and since then"
        f" {_differ(facts.differing) if facts.differing else 'the row differs'}: `cdc-replay sync"
        f" {facts.subscription.name}` compares and updates them (R11.9)."
    )


def _skipped(facts: Facts) -> Finding | None:
    for change in reversed(facts.row_changes):
        if change.fate is Fate.SKIPPED:
            return Finding(
                Cause.SKIPPED,
                f"The {change.kind} at {change.commit_lsn} was left out: its transaction was skipped with"
                " `cdc-replay resume --skip`.",
            )
        if change.fate is Fate.APPLIED and change.outcome in DECIDES:
            return None
    return None


def _conflict(facts: Facts) -> Finding | None:
    policy = facts.subscription.on_conflict
    for change in reversed(facts.row_changes):
        window = change.window
        if change.fate is not Fate.APPLIED or window is None or not window.conflict_kinds:
            continue
        kinds = ", ".join(window.conflict_kinds)
        left = {"insert_exists", "update_exists"}.intersection(window.conflict_kinds)
        if left and policy is ConflictPolicy.SKIP:
            return Finding(
                Cause.CONFLICT,
                f"The {change.outcome} at {change.commit_lsn} met a row of the subscriber ({kinds}), which"
                " stayed: `on_conflict` is `skip`.",
            )
        if (
            "update_missing" in window.conflict_kinds
            and not facts.holds
            and facts.expected().is_present is None
        ):
            return _missing_row(facts, change)
    return None


def _missing_row(facts: Facts, change: ExplainedChange) -> Finding | None:
    """An UPDATE found no row: why it was not there is another rule's, if one has an explanation."""
    for rule in (_filter_changed, _never_copied):
        if (finding := rule(facts)) is not None:
            cause, sentence = finding
            return Finding(
                cause, f"{sentence} The UPDATE at {change.commit_lsn} found no row (update_missing, R8.4)."
            )
    return None


def _changed_locally(facts: Facts) -> Finding | None:
    """The subscriber holds something else than the changes that it got have made of the row."""
    expected = facts.expected()
    if expected.is_present is None or facts.holds is None:
        return None
    got = [
        change for change in facts.row_changes if change.fate is Fate.APPLIED and change.outcome != "nothing"
    ]
    last = got[-1]
    which = f"the {last.outcome} at {last.commit_lsn}"
    if expected.is_present and not facts.holds:
        return Finding(
            Cause.CHANGED_LOCALLY,
            f"The row was deleted on the subscriber, after {which} had been applied.",
        )
    if not expected.is_present and facts.holds:
        return Finding(
            Cause.CHANGED_LOCALLY,
            f"The row was inserted on the subscriber, after {which} had removed the publisher's."
            f"{_or_by_others(facts)}",
        )
    changed = [
        name
        for name, value in expected.values.items()
        if name in facts.comparable and name in facts.held_values and facts.held_values[name] != value
    ]
    if not expected.is_present or not changed:
        return None
    return Finding(
        Cause.CHANGED_LOCALLY,
        f"The row was updated on the subscriber: {_differ(sorted(changed))} from what {which} has left.",
    )


def _unsent(facts: Facts) -> Finding | None:
    """A row entered without a value that was not sent, and NULL was stored (R4.6)."""
    entries = [
        change
        for change in facts.row_changes
        if change.fate is Fate.APPLIED
        and change.kind == "UPDATE"
        and change.outcome == "INSERT"
        and change.unsent
    ]
    if not entries:
        return None
    lacking = [
        name for name in facts.differing if name in entries[-1].unsent and facts.held_values.get(name) is None
    ]
    if not lacking:
        return None
    return Finding(
        Cause.UNSENT_VALUE,
        f"The UPDATE at {entries[-1].commit_lsn} moved the row into the row filter without a value of"
        f" {', '.join(lacking)}, which had not changed: NULL was stored, as natively (R4.6).",
    )


_PASSED_BY: Final[Mapping[str, tuple[Cause, str]]] = {
    "R8.19": (Cause.ORIGIN, "is not applied"),
    "R2.7": (Cause.ACTION_NOT_PUBLISHED, "was not sent"),
    "R2.13": (Cause.ACTION_NOT_PUBLISHED, "was not sent"),
    "R3.10": (Cause.ACTION_NOT_PUBLISHED, "was not sent"),
    "R7.12": (Cause.NOT_SUBSCRIBED, "was skipped, as natively"),
    "R2.1": (Cause.NOT_PUBLISHED, "was not published"),
    "R2.2": (Cause.NOT_PUBLISHED, "was not published"),
}
"""By the rule for which a change was not seen: row filters are not among them."""


def _passed_by(facts: Facts) -> Finding | None:
    """The last change that would have decided, and was not seen for another reason than a row filter."""
    for change in reversed(facts.row_changes):
        if change.outcome in DECIDES:
            return None
        passed_by = _PASSED_BY.get(change.rule or "")
        if change.outcome == "nothing" and passed_by is not None:
            cause, verb = passed_by
            sentence = f"The {change.kind} at {change.commit_lsn} {verb}: {change.reason} ({change.rule})."
            return Finding(cause, sentence)
    return None


def _columns_changed(facts: Facts) -> Finding | None:
    """A column was not published when its value was sent last."""
    for event in reversed(facts.events if facts.differing else ()):
        if set(facts.differing) <= set(event.gained):
            return Finding(
                Cause.COLUMNS_CHANGED,
                f"{', '.join(facts.differing)} is published since {event.lsn} only, and was not sent since:"
                f" `cdc-replay refresh {facts.subscription.name} --reconcile` brings the values (R9.12).",
            )
    return None


def _filter_changed(facts: Facts) -> Finding | None:
    """Another definition began after what decided whether the subscriber has the row: change or copy."""
    if facts.should_hold == facts.holds:
        return None
    decided = [
        change.commit_lsn
        for change in facts.row_changes
        if change.outcome in DECIDES and change.fate is Fate.APPLIED
    ]
    after = decided[-1] if decided else facts.progress.copied_at
    event = _deciding_event(facts, after)
    if event is None:
        return None
    does = "lets the row in" if facts.should_hold else "shuts the row out"
    return Finding(
        Cause.FILTER_CHANGED,
        f"What is published changed at {event.lsn}, which {does} ({event.text}). A changed definition sends"
        f" no rows: `cdc-replay refresh {facts.subscription.name} --reconcile` makes up for it (R9.12).",
    )


def _deciding_event(facts: Facts, after: Lsn | None) -> TableEvent | None:
    """The last definition after a position that passes the publisher's row if the one before did not."""
    events = [
        event
        for event in facts.events
        if event.kind is EventKind.DEFINITION and (after is None or event.lsn > after)
    ]
    if not facts.on_publisher:
        # The old row of its DELETE did not pass; whether it passed before is not known.
        last = last_change(facts.row_changes)
        passed_by = last is not None and last.outcome == "nothing" and last.rule == "R3.5"
        earlier = [event for event in events if last is not None and event.lsn < last.commit_lsn]
        return earlier[-1] if passed_by and earlier else None
    passes = facts.publisher.is_published
    for event in reversed(events):
        before = facts.passed_before.get(event.lsn)
        if before is not None and before != passes:
            return event
    return None


def _rewrite(facts: Facts) -> Finding | None:
    last = last_change(facts.row_changes)
    rewrite = last_event(facts, EventKind.REWRITE, None if last is None else last.commit_lsn)
    if rewrite is None or not facts.differing:
        return None
    return Finding(Cause.REWRITTEN, _rewritten(facts, rewrite))


def _never_copied(facts: Facts) -> Finding | None:
    progress = facts.progress
    if progress.is_copied or facts.holds or any(change.outcome == "INSERT" for change in facts.row_changes):
        return None
    return Finding(
        Cause.NEVER_COPIED,
        f"The row is older than the subscription, which began at {progress.copied_at} without a copy"
        " (copy_data: false).",
    )


def _older_than_log(facts: Facts) -> Finding | None:
    copied_at = facts.progress.copied_at
    if (copied_at is not None and copied_at >= facts.log_start) or facts.row_changes:
        return None
    return Finding(
        Cause.OLDER_THAN_LOG,
        f"The log, which starts at {facts.log_start}, has no change of the row: what made the difference is"
        " older, or happened on the subscriber.",
    )


def _differ(columns: Iterable[str]) -> str:
    names = tuple(columns)
    return f"{', '.join(names)} {'differs' if len(names) == 1 else 'differ'}"


def _local_since_copy(facts: Facts) -> Finding | None:
    """The copy, or an UPDATE of the copied row, is the last that the subscriber got."""
    if facts.differs is None:
        return None
    subject = "deleted" if not facts.holds else "inserted" if not facts.should_hold else "updated"
    last = last_change([change for change in facts.row_changes if change.fate is Fate.APPLIED])
    since = (
        f"the copy at {facts.progress.copied_at}" if last is None else f"the {last.kind} at {last.commit_lsn}"
    )
    columns = f": {_differ(facts.differing)}" if subject == "updated" else ""
    return Finding(
        Cause.CHANGED_LOCALLY,
        f"The row was {subject} on the subscriber{columns}. Nothing that the publisher has sent since {since}"
        f" explains the difference.{_or_by_others(facts) if subject == 'inserted' else ''}",
    )


def _or_by_others(facts: Facts) -> str:
    unknown = facts.others.unknown
    if not unknown:
        return ""
    return f" It may be of {', '.join(unknown)}, which also feeds the table: its rows cannot be told apart."


def _unknown(facts: Facts) -> Finding:
    del facts
    return Finding(Cause.UNKNOWN, "A side could not be read, so that it is unknown whether they differ.")


_RULES: Final[tuple[Callable[[Facts], Finding | None], ...]] = (
    _not_published,
    _not_subscribed,
    _unread,
    _of_others,
    _same,
    _not_applied,
    _several,
    _never_sent,
    _not_captured,
    _skipped,
    _conflict,
    _unsent,
    _changed_locally,
    _passed_by,
    _columns_changed,
    _filter_changed,
    _rewrite,
    _never_copied,
    _older_than_log,
    _local_since_copy,
    _unknown,
)
"""In this order: the first that returns a finding explains the difference."""
