"""What a report shows beside the verdict of its run, and its first sentence, which is for everybody."""

from __future__ import annotations

import datetime as dt
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import TableReconciled, ValidationOutcome
from cdc_replay.subscriber.history import ValidationRecord
from cdc_replay.subscriber.proofs import TableRecord
from cdc_replay.validate.verdict import TableVerdict, Verdict

NAMED_TABLES = 3
"""How many tables that do not hold the first sentence names."""


@dataclass(frozen=True, slots=True)
class ReportLinks:
    """Addresses in Airflow: the page of all subscriptions, the run, and the form of the repairing DAG."""

    page: str | None = None
    run: str | None = None
    repair: str | None = None


@dataclass(frozen=True, slots=True)
class Repair:
    """What was written between two validations of a run: `before` is the first one, `report` its page."""

    before: Verdict
    tables: tuple[TableReconciled, ...]
    not_repaired: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportContext:
    """Where the rows come from, earlier validations (the newest first), links, and a repair before this.

    `table_history` has the earlier validations of each table, the newest first; `unknown` are tables that the
    configuration plans, and the subscription does not have.
    """

    publisher: str
    publications: tuple[str, ...] = ()
    earlier: tuple[ValidationRecord, ...] = ()
    links: ReportLinks = ReportLinks()
    repair: Repair | None = None
    table_history: Mapping[QualifiedName, tuple[TableRecord, ...]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def file_name(subscription: str) -> str:
    """The subscription's name as a unique file name."""
    return urllib.parse.quote(subscription, safe="")


def reports_folder(context_root: Path, subscription: str) -> Path:
    """The folder of the pages of a subscription; `context_root` is the parent of `gx`."""
    return context_root.resolve() / "gx" / "uncommitted" / "reports" / file_name(subscription)


def first_sentence(verdict: Verdict, context: ReportContext, now: dt.datetime) -> str:
    """What holds and what does not, without a technical term."""
    when = f"On {now:%d %B %Y} at {time_of_day(now)}"
    if not verdict.tables:
        reason = verdict.error or "no table was due or chosen"
        return f"{when} there was nothing to compare: {reason}." + _too_old(verdict)
    subject = f"“{verdict.subscription}”"
    source = f"what “{context.publisher}” publishes to it"
    count = len(verdict.tables)
    match verdict.outcome:
        case ValidationOutcome.CONSISTENT | ValidationOutcome.TOO_OLD if verdict.is_partial:
            return (
                f"{when}, no row differed between {subject} and {source} in the part that was compared:"
                f" {_compared(verdict)}. Nothing is claimed of the rest.{_too_old(verdict)}"
            )
        case ValidationOutcome.CONSISTENT | ValidationOutcome.TOO_OLD:
            tables = "its one table is" if count == 1 else f"all {count} tables are"
            return f"{when}, {subject} held exactly {source}: {tables} as published.{_too_old(verdict)}"
        case ValidationOutcome.ERROR:
            broken = [table for table in verdict.tables if table.has_error]
            named = ", ".join(str(table.name) for table in broken[:NAMED_TABLES])
            more = f" and {len(broken) - NAMED_TABLES} more" if len(broken) > NAMED_TABLES else ""
            return (
                f"{when} it could not be judged whether {subject} held exactly {source}: {named}{more} could"
                " not be compared. No difference was seen in the rest."
            )
        case ValidationOutcome.NOT_CONSISTENT:
            return f"{when}, {subject} did not hold exactly {source}: {_shortcomings(verdict)}"


def _shortcomings(verdict: Verdict) -> str:
    count = len(verdict.tables)
    failing = [table for table in verdict.tables if table.fails or table.has_error]
    named = "; ".join(_shortcoming(table) for table in failing[:NAMED_TABLES])
    more = f"; and {len(failing) - NAMED_TABLES} more" if len(failing) > NAMED_TABLES else ""
    holding = count - len(failing)
    rest = {0: "", 1: " The other one does."}.get(holding, f" The other {holding} do.")
    rest = " Only a part was compared." if verdict.is_partial else rest
    verb = "does" if len(failing) == 1 else "do"
    return f"{len(failing)} of {count} tables {verb} not ({named}{more}).{rest}"


def _compared(verdict: Verdict) -> str:
    whole = sum(not table.is_partial for table in verdict.tables)
    parts = len(verdict.tables) - whole
    total = len(verdict.tables) + len(verdict.left_out)
    texts = [f"{whole} of {total} tables"] if whole or not parts else []
    texts += [f"a sample of {'one table' if parts == 1 else f'{parts} tables'}"] if parts else []
    return " and ".join(texts)


def _too_old(verdict: Verdict) -> str:
    if verdict.outcome is not ValidationOutcome.TOO_OLD:
        return ""
    return " But the last proof of some tables is older than it may be."


def time_of_day(now: dt.datetime) -> str:
    """The time with its zone, as a person there writes it."""
    offset = "" if now.tzname() == "UTC" else f" (UTC{now:%z})"
    return f"{now:%H:%M:%S} {now.tzname()}{offset}"


def _shortcoming(table: TableVerdict) -> str:
    if table.error is not None or (table.has_error and not table.fails):
        return f"{table.name} could not be compared"
    if not table.counts:
        return f"{table.name} fails a check"
    at_least = "" if table.counts_exact else "at least "
    return f"{table.name}: {at_least}{_join(f'{count:,} {kind.value}' for kind, count in table.counts)}"


def _join(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
