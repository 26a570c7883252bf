"""`status` on a screen: one line per publisher and subscription, the tables of one, what is wrong."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from cdc_replay.model.count import count_in_words
from cdc_replay.model.results import ValidationOutcome
from cdc_replay.model.status import (
    CopyStatus,
    Problem,
    PublisherState,
    PublisherStatus,
    StatusResult,
    SubscriptionState,
    SubscriptionStatus,
    TableStatus,
    TableSync,
)
from cdc_replay.terminal.layout import (
    BAD,
    DOUBTFUL,
    FAINT,
    GOOD,
    HEADING,
    Column,
    FittedTable,
    labelled,
    text,
)
from cdc_replay.terminal.output import CommandOutcome, outcome_of
from cdc_replay.terminal.units import duration, size, time_and_age, zone

PUBLISHERS: Final = (
    Column("PUBLISHER", 9),
    Column("STATE", 8),
    Column("NOT CAPTURED", 6, is_number=True),
    Column("RETAINED WAL", 5, is_number=True),
    Column("LOG END", 4),
    Column("ANSWERED", 7),
)
SUBSCRIPTIONS: Final = (
    Column("SUBSCRIPTION", 9),
    Column("STATE", 8),
    Column("LAG", 7, is_number=True),
    Column("BEHIND", 3, is_number=True),
    Column("REPLAYED", 5),
    Column("VALIDATED", 6),
)
TABLES: Final = (Column("TABLE", 9), Column("STATE", 8), Column("APPLIED", 7), Column("PROVEN", 6))

_STYLES: Final[dict[PublisherState | SubscriptionState | TableSync, str]] = {
    PublisherState.READY: GOOD,
    SubscriptionState.READY: GOOD,
    SubscriptionState.NEW: DOUBTFUL,
    SubscriptionState.COPYING: DOUBTFUL,
    TableSync.READY: GOOD,
    TableSync.WAITING: DOUBTFUL,
    TableSync.COPYING: DOUBTFUL,
}


def status_view(status: StatusResult, *, of_one: bool) -> RenderableType:
    """The overview, or one subscription, with this machine's time."""
    now = dt.datetime.now().astimezone()
    return subscription(status, now) if of_one else overview(status, now)


def status_outcome(status: StatusResult, *, of_one: bool, check: bool, as_json: bool) -> CommandOutcome:
    """For `main`; a `check` shows problems only, and fails if there is one."""
    outcome = outcome_of(status, as_json=as_json)
    if not check:
        return replace(outcome, view=status_view(status, of_one=of_one))
    subjects = ", ".join(dict.fromkeys(problem.subject for problem in status.problems))
    error = f"something is wrong with {subjects}" if subjects else None
    return replace(outcome, view=Group(*problems(status.problems)), error=error)


def overview(status: StatusResult, now: dt.datetime) -> RenderableType:
    """All publishers and subscriptions, then what is wrong; times are in the zone of `now`."""
    parts: list[RenderableType] = []
    if status.publishers:
        parts += [_publishers(status.publishers), Text()]
    if status.subscriptions:
        parts += [_subscriptions(status.subscriptions, now), Text()]
    noticed = dict.fromkeys(table.subscription for table in status.tables if table.notice)
    parts += [
        text(f"subscription {name}: notices, see `cdc-replay status {name}`", DOUBTFUL) for name in noticed
    ]
    return Group(*parts, *_with_footer(status, now))


def subscription(status: StatusResult, now: dt.datetime) -> RenderableType:
    """One subscription with its tables and their notices, then what is wrong."""
    parts: list[RenderableType] = []
    for shown in status.subscriptions:
        facts = dict(_facts(shown, now))
        parts += [
            Text.assemble(text(shown.subscription, HEADING), "  ", _state(shown.state)),
            labelled((label, text(value)) for label, value in facts.items()),
            Text(),
        ]
    rows = [
        (text(table.table), _state(table.sync), text(str(table.applied_lsn or "-")), _proven(table, now))
        for table in status.tables
    ]
    if rows:
        parts += [FittedTable(TABLES, rows), Text()]
    parts += [text(f"{copy.table}: {_progress(copy)}") for copy in status.copies]
    parts += [text(f"{table.table}: {table.notice}", DOUBTFUL) for table in status.tables if table.notice]
    return Group(*parts, *_with_footer(status, now))


def problems(shown: Sequence[Problem]) -> Iterator[RenderableType]:
    """Each problem with what to do about it."""
    for problem in shown:
        yield Text.assemble(text(problem.subject, BAD), ": ", text(problem.message))
        if problem.remedy:
            yield labelled([("→", text(problem.remedy))])


def _publishers(publishers: Sequence[PublisherStatus]) -> FittedTable:
    rows = [
        (
            text(publisher.publisher),
            _state(publisher.state),
            text(size(publisher.behind_bytes)),
            text(size(publisher.retained_wal_bytes)),
            text(str(publisher.log_end or "-")),
            _answered(publisher.seconds_old, is_down=publisher.state is PublisherState.DOWN),
        )
        for publisher in publishers
    ]
    return _without_idle(PUBLISHERS, rows)


def _subscriptions(subscriptions: Sequence[SubscriptionStatus], now: dt.datetime) -> FittedTable:
    rows = [
        (
            text(shown.subscription),
            _state(shown.state),
            text(duration(shown.lag_seconds)),
            text(size(shown.lag_bytes)),
            text(time_and_age(shown.last_replay_at, now)),
            _validated(shown, now),
            _answered(shown.seconds_old, is_down=shown.state is SubscriptionState.DOWN),
        )
        for shown in subscriptions
    ]
    return _without_idle((*SUBSCRIPTIONS, PUBLISHERS[-1]), rows)


def _without_idle(columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> FittedTable:
    """Without the last column, unless a server does not answer."""
    if any(row[-1].plain for row in rows):
        return FittedTable(columns, rows)
    return FittedTable(columns[:-1], rows)


def _answered(seconds_old: float | None, *, is_down: bool) -> Text:
    if not is_down:
        return Text()
    return text("never" if seconds_old is None else f"{duration(seconds_old)} ago", FAINT)


def _validated(shown: SubscriptionStatus, now: dt.datetime) -> Text:
    is_wrong = shown.last_validation_outcome is ValidationOutcome.NOT_CONSISTENT
    return text(time_and_age(shown.last_validation_at, now), BAD if is_wrong else "")


def _proven(table: TableStatus, now: dt.datetime) -> Text:
    """The age of the table's proof, or why it has none."""
    if table.proven_at is not None:
        return text(time_and_age(table.proven_at, now))
    return text(table.proof or "never validated", BAD if table.differing_buckets else DOUBTFUL)


def _facts(shown: SubscriptionStatus, now: dt.datetime) -> Iterator[tuple[str, str]]:
    yield "publisher", shown.publisher
    yield "applied", str(shown.applied_lsn or "-")
    yield "lag", f"{duration(shown.lag_seconds)}, {size(shown.lag_bytes)}"
    if shown.behind_reason:
        since = "" if shown.behind_since is None else f"since {time_and_age(shown.behind_since, now)}: "
        yield "behind", f"{since}{_first_line(shown.behind_reason)}"
    yield "replayed", _run(shown.last_replay_at, shown.last_replay, now)
    yield "validated", _run(shown.last_validation_at, shown.last_validation, now)
    if shown.last_validation_at is not None:
        through = "" if shown.proven_through is None else f": through {shown.proven_through}"
        yield "proven", (time_and_age(shown.proven_at, now) + through) if through else "not all of its rows"
    if shown.state is SubscriptionState.DOWN:
        yield "answered", _answered(shown.seconds_old, is_down=True).plain


def _run(at: str | None, outcome: str | None, now: dt.datetime) -> str:
    return time_and_age(at, now) + ("" if outcome is None else f": {_first_line(outcome)}")


def _first_line(error: str) -> str:
    """Without detail and hint: `problems` has them."""
    return error.partition("\n")[0]


def _progress(copy: CopyStatus) -> str:
    share = f"about {min(99, 100 * copy.bytes // copy.expected_bytes)} %, " if copy.expected_bytes else ""
    left = "" if copy.seconds_left is None else f", about {duration(copy.seconds_left)} left"
    rate = f"{size(int(copy.bytes_per_second))}/s"
    reported = f", reported {duration(copy.reported_seconds_ago)} ago"
    return f"copying, {share}{count_in_words(copy.rows, 'row')}, {size(copy.bytes)}, {rate}{left}{reported}"


def _state(state: PublisherState | SubscriptionState | TableSync) -> Text:
    return text(state.value, _STYLES.get(state, BAD))


def _with_footer(status: StatusResult, now: dt.datetime) -> Iterator[RenderableType]:
    yield from problems(status.problems)
    if status.problems:
        yield Text()
    yield text(f"{now:%Y-%m-%d %H:%M:%S} {zone(now)}", FAINT)
