"""What the subscriber refuses for good: everything before it is applied, and what has it is parked.

A native worker applies one transaction after the other, and stops at the one that it cannot apply; an error
repeats for ever, or disables the subscription. A window has many transactions, and is refused as a whole. So
its first half is tried alone, and so on:

    transactions     1  2  3  4  5  6  7  8        6 has a row that the subscriber refuses
    1 … 8            refused
    1 … 4            applied
    5 … 6            refused
    5                applied
    6                refused: the subscription is parked before 6
                     or, with `on_failure: table`, the table of that row, and the others go on with 6 … 8

Every part that is applied is committed with its position, so a crash anywhere loses nothing of it. A part is
applied as its net effect, like any window: a row that is inserted and deleted again within one is no refusal.

| parked is                          | replay                  | it goes on                             |
|------------------------------------|-------------------------|----------------------------------------|
| a subscription, before a           | tries that one first,   | by itself once that can be applied; or |
| transaction                        | and nothing behind it   | without it: `resume --skip LSN`        |
| a table, before a transaction      | leaves it out           | `resume --table`, also with `--skip`;  |
|                                    |                         | or `snapshot --table`                  |
| either, before a transaction by    | the same                | the same, or with NULL for it:         |
| which a row enters with a value    |                         | `resume --accept-null`                 |
| that nobody has (R4.6)             |                         |                                        |

Such a value is looked for in the largest window that there is, as a later change may bring it or take the row
away again. So nothing is tried in halves for it: everything before the row's transaction is applied.

What may pass by itself (a lock, a full disk, a server that is gone) parks nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cdc_replay.errors import (
    ApplyConflict,
    CdcReplayError,
    InvalidFilter,
    PublicationRefused,
    SubscriberNotReady,
    SubscriptionParked,
    TargetMismatch,
    UnchangedToastLost,
)
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ReplayResult
from cdc_replay.model.subscription import FailurePolicy
from cdc_replay.model.table_state import Parked
from cdc_replay.replay.window_plan import WindowPlan
from cdc_replay.subscriber import subscription_records, subscription_tables
from cdc_replay.subscriber.session import SubscriptionSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """What replaying a subscription has come to: windows that were applied, and one that was not, if any.

    Of that one, `error` says why; without a `plan` it was not even begun.
    """

    applied: tuple[ReplayResult, ...] = ()
    failed: ReplayResult | None = None
    error: Exception | None = None
    plan: WindowPlan | None = None
    parked: tuple[str, ...] = ()
    """Tables that were parked on the way."""

    @property
    def windows(self) -> tuple[ReplayResult, ...]:
        """Those that were applied, and the one that was not."""
        return self.applied if self.failed is None else (*self.applied, self.failed)

    @property
    def result(self) -> ReplayResult:
        """All windows as one; there is one at least."""
        whole = functools.reduce(ReplayResult.followed_by, self.windows)
        return dataclasses.replace(whole, parked=(*whole.parked, *self.parked))

    def followed_by(self, later: ReplayOutcome) -> ReplayOutcome:
        """Windows that were applied, and what came after them."""
        windows, parked = (*self.applied, *later.applied), (*self.parked, *later.parked)
        return ReplayOutcome(windows, later.failed, later.error, later.plan, parked)

    @property
    def is_refused(self) -> bool:
        """The subscriber does not take a change of the window, or PostgreSQL would not have sent it.

        Or it lacks a value that nobody has (R4.6). None of it changes while both stay as they are.
        """
        match self.error:
            case ApplyConflict() | TargetMismatch() | PublicationRefused() | UnchangedToastLost():
                return True
            case SubscriberNotReady() | InvalidFilter():
                # Of a change: its row cannot be found, or its filter fails. Before a plan, of something else.
                return self.plan is not None
            case _:
                return False

    @property
    def table(self) -> QualifiedName | None:
        """The table that the error is about, as far as that is known."""
        if isinstance(self.error, CdcReplayError) and self.error.table is not None:
            return QualifiedName(*self.error.table)
        if self.plan is None:
            return None
        routes = self.plan.routes
        names = {table.name for table in routes.tables}
        if isinstance(self.error, SubscriberNotReady):
            names = {route.target.name for route in routes.routes if route.refusal is not None}
        return names.pop() if len(names) == 1 else None


Attempt: TypeAlias = Callable[[Lsn], ReplayOutcome]
"""Applies the subscription's next window, up to the given position."""


def apply_in_halves(
    session: SubscriptionSession, ends: Sequence[Lsn], attempt: Attempt, refused: ReplayOutcome | None = None
) -> ReplayOutcome:
    """Apply what can be applied of the transactions that end at `ends`; park what refuses the rest.

    `refused` is what the window of all of them has come to, if it was tried.
    """
    settling = _Bisection(session, ends, attempt)
    if refused is not None and not settling.goes_on(refused, len(ends)):
        return settling.stopped(refused)
    return settling.run()


@dataclass(slots=True)
class _Bisection:
    session: SubscriptionSession
    ends: Sequence[Lsn]
    attempt: Attempt
    done: int = 0
    """How many transactions are applied."""
    bad: int | None = None
    """The first so many of all are not applied together, if that is known."""
    applied: list[ReplayResult] = field(default_factory=list)
    parked: list[str] = field(default_factory=list)
    unknown: tuple[int, ReplayOutcome] | None = None
    """How many transactions come before the one that lacks a value, and what it has come to."""

    def run(self) -> ReplayOutcome:
        """Go on until everything is applied or something stands in the way."""
        while self.done < len(self.ends):
            if self.unknown is not None and self.done >= self.unknown[0]:
                (_, outcome), self.unknown = self.unknown, None
                if not self._park_table(outcome, self.ends[self.done]):
                    return self.stopped(outcome)
                continue
            upto = self.done + self._size()
            outcome = self.attempt(self.ends[upto - 1])
            self.applied += outcome.applied
            reached = self.ends[upto - 1] if outcome.error is None else _end(outcome)
            while self.done < upto and reached is not None and self.ends[self.done] <= reached:
                self.done += 1
            if self.done == self.bad:
                self.bad = None
            if outcome.error is not None and not self.goes_on(outcome, upto):
                return self.stopped(outcome)
        return ReplayOutcome(tuple(self.applied), parked=tuple(self.parked))

    def _size(self) -> int:
        """How many transactions to try next."""
        if self.bad is None:
            end = len(self.ends) if self.unknown is None else self.unknown[0]
            return end - self.done
        return max(1, (self.bad - self.done) // 2)

    def goes_on(self, outcome: ReplayOutcome, bad: int) -> bool:
        """Take up that the first `bad` transactions were not applied; whether something is left to try."""
        if (
            isinstance(outcome.error, UnchangedToastLost)
            and (lacking := outcome.error.commit_lsn) is not None
        ):
            self.bad = None
            self.unknown = sum(end.value < lacking for end in self.ends), outcome
            return True
        if outcome.is_refused and bad - self.done > 1:
            self.bad = bad
            return True
        self.bad = None
        return outcome.is_refused and self._park_table(outcome, self.ends[self.done])

    def stopped(self, outcome: ReplayOutcome) -> ReplayOutcome:
        """What it comes to where nothing is left to try; the subscription is parked if it was refused."""
        error, failed = outcome.error, outcome.failed
        name = self.session.subscription.name
        if outcome.is_refused:
            transaction = self.ends[self.done]
            error = parked_error(name, transaction, outcome.error)
            self._park(str(outcome.error), transaction)
        if failed is not None and error is not None:
            failed = failed.failed_with(error)
        return ReplayOutcome(tuple(self.applied), failed, error, outcome.plan, tuple(self.parked))

    def _park(self, reason: str, transaction: Lsn) -> None:
        at = self.session.position() or self.ends[self.done]
        subscription_records.park(
            self.session.connection, self.session.subscription.name, at, reason, transaction
        )
        failpoint("parking.after_park")

    def _park_table(self, outcome: ReplayOutcome, transaction: Lsn) -> bool:
        """Park the table that the error is about, where the configuration says so; whether it is done."""
        table, subscription = outcome.table, self.session.subscription
        applied = None if table is None else self.session.ready_tables().get(table)
        if subscription.on_failure is not FailurePolicy.TABLE or table is None or applied is None:
            return False
        found = Parked(applied, str(outcome.error), transaction)
        subscription_tables.set_table_state(self.session.connection, subscription.name, table, found)
        failpoint("parking.after_park")
        self.parked.append(str(table))
        logger.warning(
            "subscription %s: table %s is parked at %s, the others go on: %s%s",
            *(subscription.name, table, applied, outcome.error),
            "" if _names_its_transaction(outcome.error) else _remedy(subscription.name, table, transaction),
        )
        return True


def _end(outcome: ReplayOutcome) -> Lsn | None:
    return outcome.applied[-1].to_lsn if outcome.applied else None


def parked_error(subscription: str, transaction: Lsn, reason: Exception | None) -> SubscriptionParked:
    """The error of a subscription that is parked before a transaction, with what to do about it."""
    hint = "Everything before it is applied."
    if not _names_its_transaction(reason):
        hint += (
            f" Correct the cause and run `cdc-replay replay {subscription}` again, or leave the transaction"
            f" out: `cdc-replay resume {subscription} --skip {transaction}`."
        )
    return SubscriptionParked(
        f'subscription "{subscription}" is parked before the transaction that committed at {transaction}',
        detail=str(reason),
        hint=hint,
        rule="R8.5",
    )


def _names_its_transaction(reason: Exception | None) -> bool:
    """Whether the reason itself says what to do about its transaction."""
    return isinstance(reason, UnchangedToastLost) and reason.commit_lsn is not None


def _remedy(subscription: str, table: QualifiedName, transaction: Lsn) -> str:
    command = f"cdc-replay resume {subscription} --table {table}"
    return (
        f"\nHINT: Correct the cause and run `{command}`; or leave out what the transaction that committed at"
        f" {transaction} does to the table: `{command} --skip {transaction}`."
    )
