"""What is wrong according to a status, in the order in which it should be put right.

| problem                                                      | remedy                                  |
|--------------------------------------------------------------|-----------------------------------------|
| a publisher or subscriber does not answer                    | the error's, or `doctor`                |
| a slot is missing, lost or near lost; a log is not readable  | the error's; setup; capture             |
| a publisher has written WAL, and nothing captures it         | capture                                 |
| a subscription or a table of it is parked                    | the error's, or `resume`                |
| a subscription has no tables yet                             | `sync`                                  |
| the last replay failed, the last validation found a difference | the error's; `validate`               |
| changes of a subscribed table are not captured               | the error's                             |
| a table waits for a copy, and no process copies it           | the error's                             |
| rows differed when they were last compared                   | `validate --repair`                     |
| a validation could not judge a table                         | its report                              |
| the lag or the age of a proof exceeds a bound                | `sync`; `validate`                      |

The hint of an error is its remedy, if it is one of ours.
"""

from __future__ import annotations

import datetime as dt
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from cdc_replay.errors import split_parts
from cdc_replay.model.duration import duration_in_words, parse_short_duration
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import ValidationOutcome
from cdc_replay.model.size import parse_size, size_in_words
from cdc_replay.model.status import (
    Problem,
    PublisherState,
    PublisherStatus,
    StatusResult,
    SubscriptionState,
    SubscriptionStatus,
    TableStatus,
    TableSync,
)

_DOCTOR: Final = "Run `cdc-replay doctor`, which says what each server lacks."


LONGEST_PAUSE: Final = dt.timedelta(minutes=10)
"""The end of the log may stay for so long where WAL has no changes (`capture.commit_watch`)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a subscription may lag in time or in bytes, and how old its proof may be; None: any.

    Bounds of the proofs of single tables are in the configuration.
    """

    lag: dt.timedelta | None = None
    lag_bytes: int | None = None
    proof_age: dt.timedelta | None = None

    def times(self, factor: int) -> Bounds:
        """Bounds that are wider by a factor."""
        return Bounds(
            None if self.lag is None else factor * self.lag,
            None if self.lag_bytes is None else factor * self.lag_bytes,
            None if self.proof_age is None else factor * self.proof_age,
        )

    @classmethod
    def of_lag(cls, text: str) -> Bounds:
        """The bound of a lag such as `5min` or `1GB`.

        Raises:
            ValueError: if `text` has another form.
        """
        if text.strip().endswith(("kB", "MB", "GB", "TB")):
            return cls(lag_bytes=parse_size(text))
        return cls(lag=parse_short_duration(text))


def find_problems(status: StatusResult, bounds: Bounds, now: dt.datetime) -> tuple[Problem, ...]:
    """The problems of the publishers, then of the subscriptions, in the order of the status."""
    problems: list[Problem] = []
    for publisher in status.publishers:
        problems += [*_of_publisher(publisher), *_log_missing(publisher), *_uncaptured(publisher, bounds)]
    for subscription in status.subscriptions:
        tables = [table for table in status.tables if table.subscription == subscription.subscription]
        problems += _of_subscription(subscription, tables)
        if subscription.state in {SubscriptionState.READY, SubscriptionState.COPYING}:
            problems += lag_beyond(subscription, bounds)
        if subscription.state not in {SubscriptionState.DOWN, SubscriptionState.NEW}:
            problems += proof_beyond(subscription, bounds, now)
            problems += _proofs_of_tables(subscription.subscription, tables, now)
    return tuple(problems)


def log_missing_hint(publisher: str) -> str:
    """The way out where a slot has no change log; setup creates none in place of one that is lost."""
    return (
        f"Run `cdc-replay setup {publisher}`, which creates a first one. One that was there has to come back:"
        " `cdc-replay doctor` says where it is looked for."
    )


def split_hint(error: str) -> tuple[str, str]:
    """An error's text without hints, in one line, and its own hint, which may be empty.

    A server's hint is in the words of whoever owns the table or its code: nobody is advised to follow it.
    """
    message, detail, hint = split_parts(error)
    parts = [part.partition("\nHINT: ")[0].replace("\nDETAIL: ", ": ") for part in (message, detail) if part]
    return " ".join(": ".join(parts).split()), " ".join(hint.split())


def _of_publisher(publisher: PublisherStatus) -> Iterator[Problem]:
    name = publisher.publisher
    message, hint = split_hint(publisher.error or "")
    match publisher.state:
        case PublisherState.DOWN:
            yield Problem(f"publisher {name}", f"does not answer: {message}", hint or _DOCTOR)
        case PublisherState.LOG_UNREADABLE:
            yield Problem(f"publisher {name}", message, hint or _DOCTOR)
        case PublisherState.NO_SLOT if publisher.log_end is None:
            yield Problem(f"publisher {name}", "is not set up", f"Run `cdc-replay setup {name}`.")
        case PublisherState.NO_SLOT:
            yield Problem(f"publisher {name}", message, hint)
        case PublisherState.LOST:
            remedy = f"Run `cdc-replay capture {name}`: it says what the server reports, and what to do."
            yield Problem(f"publisher {name}", f"replication slot {publisher.slot} is lost", remedy)
        case PublisherState.NEAR_LOST:
            retained = size_in_words(publisher.retained_wal_bytes or 0)
            message = f"replication slot {publisher.slot} is near lost: it retains {retained} of WAL"
            yield Problem(f"publisher {name}", message, f"Run `cdc-replay capture {name}` now.")
        case PublisherState.READY:
            pass


def _log_missing(publisher: PublisherStatus) -> Iterator[Problem]:
    has_slot = publisher.state in {PublisherState.READY, PublisherState.NEAR_LOST}
    if has_slot and publisher.log_end is None:
        message = f"replication slot {publisher.slot} exists, but its change log is missing"
        yield Problem(f"publisher {publisher.publisher}", message, log_missing_hint(publisher.publisher))


def _uncaptured(publisher: PublisherStatus, bounds: Bounds) -> Iterator[Problem]:
    seconds = publisher.uncaptured_seconds
    if bounds.lag is not None and seconds is not None and seconds > uncaptured_bound(bounds.lag):
        message = f"nothing was captured for {duration_in_words(seconds)}, and it has written WAL since"
        yield Problem(f"publisher {publisher.publisher}", message, capture_hint(publisher.publisher))


def uncaptured_bound(lag: dt.timedelta) -> float:
    """How many seconds WAL may stay beyond the log's end, if subscriptions may lag by `lag`."""
    return (lag + LONGEST_PAUSE).total_seconds()


def capture_hint(publisher: str) -> str:
    """The way out where no capture moves the end of the log."""
    return f"Run `cdc-replay capture {publisher}`. Its DAG may be paused, or its service stopped."


def _of_subscription(subscription: SubscriptionStatus, tables: Iterable[TableStatus]) -> Iterator[Problem]:
    name = subscription.subscription
    subject = f"subscription {name}"
    message, hint = split_hint(subscription.error or "")
    match subscription.state:
        case SubscriptionState.DOWN:
            was = "" if subscription.parked is None else "; it was parked when it last answered"
            yield Problem(subject, f"does not answer: {message}{was}", hint or _DOCTOR)
            return
        case SubscriptionState.NEW:
            yield Problem(subject, "waits for its first snapshot", f"Run `cdc-replay sync {name}`.")
        case SubscriptionState.FAILED:
            message, hint = split_hint(subscription.last_replay or "")
            yield Problem(subject, f"the last replay {message}", hint or f"Run `cdc-replay replay {name}`.")
        case _ if subscription.parked_transaction is not None:
            yield Problem(subject, message, way_out(name, "", subscription.parked_transaction, hint))
        case _:
            if subscription.error:
                yield Problem(subject, message, hint)
    yield from _of_tables(name, tables)
    yield from _differences(subscription, tables)


def _differences(subscription: SubscriptionStatus, tables: Iterable[TableStatus]) -> Iterator[Problem]:
    """What the last validation has found, and what an earlier one has that the last did not look at."""
    name, last = subscription.subscription, subscription.last_validation
    subject = f"subscription {name}"
    remedy = (
        f"`cdc-replay validate {name}` names the rows; `cdc-replay refresh {name} --reconcile` repairs them."
    )
    if subscription.last_validation_outcome is ValidationOutcome.NOT_CONSISTENT:
        yield Problem(subject, f"the last validation: {last}", remedy)
        return
    if subscription.last_validation_outcome is ValidationOutcome.ERROR:
        yield Problem(
            subject, f"the last validation: {last}", f"Run `cdc-replay validate {name}`, which says why."
        )
    for table in tables:
        if table.differing_buckets:
            repair = (
                f"`cdc-replay validate {name} --tables {shlex.quote(table.table)} --repair` repairs them."
            )
            yield Problem(subject, f"table {table.table}: {table.proof}", repair)


def _of_tables(name: str, tables: Iterable[TableStatus]) -> Iterator[Problem]:
    for table in tables:
        message, hint = split_hint(table.state)
        if table.parked_transaction is not None:
            remedy = way_out(name, f" --table {shlex.quote(table.table)}", table.parked_transaction, hint)
        elif table.sync is TableSync.DROPPED:
            remedy = f"Create it again, or run `cdc-replay refresh {name}`."
        else:
            continue
        yield Problem(f"subscription {name}", f"table {table.table}: {message}", remedy)


def way_out(name: str, table: str, transaction: Lsn, hint: str) -> str:
    """How a parked subscription, or a `table` of it, goes on."""
    if "cdc-replay resume" in hint:
        return hint
    resume = f"cdc-replay resume {name}{table}"
    retry = resume if table else f"cdc-replay replay {name}"
    return f"{hint} Then `{retry}`; or without that transaction: `{resume} --skip {transaction}`.".strip()


def lag_beyond(subscription: SubscriptionStatus, bounds: Bounds) -> Iterator[Problem]:
    """That the subscription lags by more than the bounds allow, in time or in bytes."""
    subject = f"subscription {subscription.subscription}"
    remedy = f"Run `cdc-replay sync {subscription.subscription}`."
    seconds, size = subscription.lag_seconds, subscription.lag_bytes
    if bounds.lag is not None and (seconds is None or seconds > bounds.lag.total_seconds()):
        lag = "the lag is unknown" if seconds is None else f"it lags by {duration_in_words(seconds)}"
        bound = duration_in_words(bounds.lag.total_seconds())
        yield Problem(subject, f"{lag}, at most {bound} are allowed", remedy)
    if bounds.lag_bytes is not None and (size is None or size > bounds.lag_bytes):
        lag = "the lag is unknown" if size is None else f"it lags by {size_in_words(size)}"
        yield Problem(subject, f"{lag}, at most {size_in_words(bounds.lag_bytes)} are allowed", remedy)


def proof_beyond(subscription: SubscriptionStatus, bounds: Bounds, now: dt.datetime) -> Iterator[Problem]:
    """The proof of a subscription is the oldest of its tables' (`model.proof`)."""
    if bounds.proof_age is None:
        return
    age = _age(subscription.proven_at, now)
    if age is None or age > bounds.proof_age.total_seconds():
        if age is not None:
            proof = f"its proof is {duration_in_words(age)} old"
        elif subscription.last_validation_at is None:
            proof = "it was never validated"
        else:
            proof = "not all of its rows are proven"
        allowed = duration_in_words(bounds.proof_age.total_seconds())
        name = subscription.subscription
        message = f"{proof}, at most {allowed} are allowed"
        yield Problem(f"subscription {name}", message, f"Run `cdc-replay validate {name}`.")


def _proofs_of_tables(name: str, tables: Iterable[TableStatus], now: dt.datetime) -> Iterator[Problem]:
    for table in tables:
        bound, age = table.max_proof_age_seconds, _age(table.proven_at, now)
        if bound is None or (age is not None and age <= bound):
            continue
        proof = table.proof or "never validated"
        proof = proof if age is None else f"its proof is {duration_in_words(age)} old"
        message = f"table {table.table}: {proof}, at most {duration_in_words(bound)} are allowed"
        remedy = f"Run `cdc-replay validate {name} --tables {shlex.quote(table.table)}`."
        yield Problem(f"subscription {name}", message, remedy)


def _age(time: str | None, now: dt.datetime) -> float | None:
    return None if time is None else (now - dt.datetime.fromisoformat(time)).total_seconds()
