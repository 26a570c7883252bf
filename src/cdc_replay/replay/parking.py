"""Permanent apply errors: apply everything before the failing transaction, then park subscription or table.

A native worker applies transactions in order, and stops at the first one that it cannot apply; the error
repeats forever, or disables the subscription. A window has many transactions, and is refused as a whole. So
its first half is tried alone, and so on:

    transactions     1  2  3  4  5  6  7  8        6 has a row that the subscriber refuses
    1 … 8            refused
    1 … 4            applied
    5 … 6            refused
    5                applied
    6                refused: the subscription is parked before 6
                     or, with `on_failure: table`, the table of that row, and the others continue with 6 … 8

Every part that is applied is committed with its position, so a crash loses nothing of it. A part is applied
as its net effect, like any window: a row that is inserted and deleted within it is not refused.

| parked (PostgreSQL: disabled)      | replay                  | it continues                           |
|------------------------------------|-------------------------|----------------------------------------|
| a subscription, before a           | retries that one first, | once that can be applied; or without   |
| transaction                        | and no later one        | it: `resume --skip LSN`                |
| a table, before a transaction      | leaves it out           | `resume --table`, also with `--skip`;  |
|                                    |                         | or `snapshot --table`                  |
| either, before a transaction by    | the same                | the same, or with NULL for the value:  |
| which a row enters with a lost     |                         | `resume --accept-null`                 |
| value (R4.6)                       |                         |                                        |

A missing value is looked for in the largest possible window, as a later change may supply it or remove the
row again. So no halves are tried for it: everything before the row's transaction is applied.

A transient error (a lock, a full disk, a server that is down) parks nothing.
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
    """The outcome of replaying a subscription: windows that were applied, and at most one that failed.

    `error` says why it failed; without a `plan` it was not even planned.
    """

    applied: tuple[ReplayResult, ...] = ()
    failed: ReplayResult | None = None
    error: Exception | None = None
    plan: WindowPlan | None = None
    parked: tuple[str, ...] = ()
    """Tables that were parked."""

    @property
    def windows(self) -> tuple[ReplayResult, ...]:
        """The windows that were applied, and the failed one."""
        return self.applied if self.failed is None else (*self.applied, self.failed)

    @property
    def result(self) -> ReplayResult:
        """All windows as one; there must be one."""
        whole = functools.reduce(ReplayResult.followed_by, self.windows)
        return dataclasses.replace(whole, parked=(*whole.parked, *self.parked))

    def followed_by(self, later: ReplayOutcome) -> ReplayOutcome:
        """These windows, which were applied, and later ones."""
        windows, parked = (*self.applied, *later.applied), (*self.parked, *later.parked)
        return ReplayOutcome(windows, later.failed, later.error, later.plan, parked)

    @property
    def is_refused(self) -> bool:
        """The error is permanent: the subscriber refuses a change, or PostgreSQL would not have sent it.

        Or a value is lost (R4.6). The same window would fail again, while both stay as they are.
        """
        match self.error:
            case ApplyConflict() | TargetMismatch() | PublicationRefused() | UnchangedToastLost():
                return True
            case SubscriberNotReady() | InvalidFilter():
                # With a plan, about a change: its row cannot be found, or its filter fails.
                return self.plan is not None
            case _:
                return False

    @property
    def table(self) -> QualifiedName | None:
        """The table that the error is about, if known."""
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
    """Apply what can be applied of the transactions that end at `ends`; park before what cannot.

    `refused` is the outcome of the window of all of them, if it was tried.
    """
    bisection = _Bisection(session, ends, attempt)
    if refused is not None and not bisection.narrow(refused, len(ends)):
        return bisection.park(refused)
    return bisection.run()


@dataclass(slots=True)
class _Bisection:
    session: SubscriptionSession
    ends: Sequence[Lsn]
    attempt: Attempt
    applied_count: int = 0
    """The number of transactions that are applied."""
    refused_upto: int | None = None
    """The first this many transactions cannot be applied together; None: unknown."""
    applied: list[ReplayResult] = field(default_factory=list)
    parked: list[str] = field(default_factory=list)
    lost_value: tuple[int, ReplayOutcome] | None = None
    """The number of transactions before the one that lacks a value, and its outcome."""

    def run(self) -> ReplayOutcome:
        """Continue until everything is applied or nothing is left to try."""
        while self.applied_count < len(self.ends):
            if self.lost_value is not None and self.applied_count >= self.lost_value[0]:
                (_, outcome), self.lost_value = self.lost_value, None
                if not self._park_table(outcome, self.ends[self.applied_count]):
                    return self.park(outcome)
                continue
            upto = self.applied_count + self._size()
            outcome = self.attempt(self.ends[upto - 1])
            self.applied += outcome.applied
            reached = self.ends[upto - 1] if outcome.error is None else _end(outcome)
            while (
                self.applied_count < upto and reached is not None and self.ends[self.applied_count] <= reached
            ):
                self.applied_count += 1
            if self.applied_count == self.refused_upto:
                self.refused_upto = None
            if outcome.error is not None and not self.narrow(outcome, upto):
                return self.park(outcome)
        return ReplayOutcome(tuple(self.applied), parked=tuple(self.parked))

    def _size(self) -> int:
        if self.refused_upto is None:
            end = len(self.ends) if self.lost_value is None else self.lost_value[0]
            return end - self.applied_count
        return max(1, (self.refused_upto - self.applied_count) // 2)

    def narrow(self, outcome: ReplayOutcome, refused_upto: int) -> bool:
        """The first `refused_upto` transactions were not applied; whether something is left to try."""
        if (
            isinstance(outcome.error, UnchangedToastLost)
            and (commit_lsn := outcome.error.commit_lsn) is not None
        ):
            self.refused_upto = None
            self.lost_value = sum(end.value < commit_lsn for end in self.ends), outcome
            return True
        if outcome.is_refused and refused_upto - self.applied_count > 1:
            self.refused_upto = refused_upto
            return True
        self.refused_upto = None
        return outcome.is_refused and self._park_table(outcome, self.ends[self.applied_count])

    def park(self, outcome: ReplayOutcome) -> ReplayOutcome:
        """The outcome if nothing is left to try; parks the subscription if it was refused."""
        error, failed = outcome.error, outcome.failed
        name = self.session.subscription.name
        if outcome.is_refused:
            transaction = self.ends[self.applied_count]
            error = parked_error(name, transaction, outcome.error)
            self._record_park(str(outcome.error), transaction)
        if failed is not None and error is not None:
            failed = failed.failed_with(error)
        return ReplayOutcome(tuple(self.applied), failed, error, outcome.plan, tuple(self.parked))

    def _record_park(self, reason: str, transaction: Lsn) -> None:
        at = self.session.position() or self.ends[self.applied_count]
        subscription_records.park(
            self.session.connection, self.session.subscription.name, at, reason, transaction
        )
        failpoint("parking.after_park")

    def _park_table(self, outcome: ReplayOutcome, transaction: Lsn) -> bool:
        """Park the table that the error is about, if `on_failure` says so; whether it is parked."""
        table, subscription = outcome.table, self.session.subscription
        applied = None if table is None else self.session.ready_tables().get(table)
        if subscription.on_failure is not FailurePolicy.TABLE or table is None or applied is None:
            return False
        parked = Parked(applied, str(outcome.error), transaction)
        subscription_tables.set_table_state(self.session.connection, subscription.name, table, parked)
        failpoint("parking.after_park")
        self.parked.append(str(table))
        logger.warning(
            "subscription %s: table %s is parked at %s, the others continue: %s%s",
            *(subscription.name, table, applied, outcome.error),
            "" if _names_its_transaction(outcome.error) else _remedy(subscription.name, table, transaction),
        )
        return True


def _end(outcome: ReplayOutcome) -> Lsn | None:
    return outcome.applied[-1].to_lsn if outcome.applied else None


def parked_error(subscription: str, transaction: Lsn, reason: Exception | None) -> SubscriptionParked:
    """The error of a subscription that is parked before a transaction, with the remedy."""
    parts = ["Everything before the transaction is applied, nothing of it and nothing after it."]
    detail = str(reason)
    if isinstance(reason, CdcReplayError):
        parts += filter(None, [reason.hint])
        rule = "" if reason.rule is None else f" [{reason.rule}]"
        detail = f"{reason.message}{rule}" + (f". {reason.detail}" if reason.detail else "")
    if not _names_its_transaction(reason):
        parts.append(
            f"Then run `cdc-replay replay {subscription}` again; or leave the transaction out:"
            f" `cdc-replay resume {subscription} --skip {transaction}`."
        )
    error = SubscriptionParked(
        f'subscription "{subscription}" is parked before the transaction that committed at {transaction}',
        detail=detail,
        hint=" ".join(parts),
        rule="R8.5",
    )
    error.commit_lsn = transaction.value
    return error


def _names_its_transaction(reason: Exception | None) -> bool:
    """Whether the reason has its own remedy for its transaction."""
    return isinstance(reason, UnchangedToastLost) and reason.commit_lsn is not None


def _remedy(subscription: str, table: QualifiedName, transaction: Lsn) -> str:
    command = f"cdc-replay resume {subscription} --table {table.argument}"
    return (
        f"\nThen run `{command}`; or leave out what the transaction that committed at"
        f" {transaction} does to the table: `{command} --skip {transaction}`."
    )
