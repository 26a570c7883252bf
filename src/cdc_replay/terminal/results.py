"""Results for a person: a sentence, below it what is not zero, and what comes next.

`--json` has the whole result. An error is not repeated here: it is said once, on standard error.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cdc_replay.model import results
from cdc_replay.model.count import count_in_words
from cdc_replay.model.duration import duration_in_words
from cdc_replay.model.printable import printable
from cdc_replay.model.results import AppliedRange, Result, SnapshotResult, TableCompared
from cdc_replay.model.size import size_in_words

LONGEST_LABEL: Final = 28
"""A longer label has its value on the next line."""
_PRECISE_SECONDS: Final = 100

_VERBS: Final = {"insert": "inserted", "update": "updated", "delete": "deleted", "truncate": "truncated"}

Row = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Summary:
    """A result in words; `rows` have a label and a value."""

    sentence: str
    rows: tuple[Row, ...] = ()
    next_step: str | None = None

    def to_text(self, width: int) -> str:
        """Lines of at most `width`, except for words that are longer, such as paths."""
        lines = [*wrap(self.sentence, width)]
        column = max((len(label) for label, _ in self.rows if len(label) <= LONGEST_LABEL), default=0)
        for label, value in self.rows:
            head = f"  {label:<{column}}  "
            if len(label) > column:
                lines.append(f"  {label}")
                head = " " * len(f"  {'':<{column}}  ")
            lines += wrap(value, width, head)
        if self.next_step is not None:
            lines += wrap(self.next_step, width)
        return printable("\n".join(lines)) + "\n"


def wrap(text: str, width: int, head: str = "") -> list[str]:
    """Lines of at most `width`, the first after `head`; a longer word, such as a path, is not broken."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head) or "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


@functools.singledispatch
def summarize(_result: Result) -> Summary | None:
    """The result in words; None for a result that has a view of its own."""
    return None


@summarize.register
def _(result: results.CaptureResult) -> Summary:
    content = "no new changes"
    if result.messages:
        content = f"{_changes(result.messages, result.transactions)}, {_size(result.bytes)}"
    return Summary(f"captured {result.publisher} up to {result.to_lsn}: {content} in {_time(result.seconds)}")


@summarize.register
def _(result: SnapshotResult) -> Summary:
    name = result.subscription
    if result.to_lsn is None:
        sentence = f"{name}: no table needs a copy"
    elif not result.tables:
        sentence = f"{name} starts at {result.to_lsn}: no rows are copied (copy_data: false)"
    else:
        tables = f"{count_in_words(len(result.tables), 'table')} of {name} as of {result.to_lsn}"
        sentence = f"copied {tables}: {_rows(result.rows)}, {_size(result.bytes)} in {_time(result.seconds)}"
    return Summary(sentence, (*_copied(result), *_compared(result.compared)))


@summarize.register
def _(result: results.ReplayResult) -> Summary:
    if result.error and not result.changes_read:
        done = f"{result.subscription} was not replayed"
    elif result.error:
        done = f"stopped replaying {result.subscription}{_before(result)}: {_read(result)}"
    else:
        content = _read(result) if result.changes_read else "no changes"
        done = f"replayed {result.subscription} up to {result.to_lsn}: {content}"
    return Summary(done, (*_applied(result), *_unusual(result)))


@summarize.register
def _(result: results.SyncResult) -> Summary:
    parts = []
    if tables := result.snapshot.tables:
        parts.append(f"{count_in_words(len(tables), 'table')} with {_rows(result.snapshot.rows)} copied")
    if result.replay.changes_read:
        parts.append(f"{_changes(result.replay.changes_read, result.replay.transactions)} replayed")
    done = f"synced {result.subscription} up to {result.to_lsn}"
    if result.replay.error:
        done = f"stopped syncing {result.subscription}{_before(result.replay)}"
    return Summary(
        f"{done}: {', '.join(parts) or 'no changes'} in {_time(result.seconds)}",
        (
            *_copied(result.snapshot),
            *_compared(result.compared),
            *_applied(result.replay),
            *_unusual(result.replay),
        ),
    )


@summarize.register
def _(result: results.BackfillResult) -> Summary:
    verb = "would apply" if result.dry_run else "applied"
    window = f"({result.from_lsn}, {result.to_lsn}]"
    chosen = [("table", table) for table in result.tables]
    sentence = f"{verb} {window} again for {result.subscription}: {_read(result)}"
    left_out = [("not ready, left out", table) for table in result.left_out]
    return Summary(sentence, (*chosen, *_applied(result), *left_out))


@summarize.register
def _(result: results.RefreshResult) -> Summary:
    would = "would be " if result.dry_run else ""
    counts = {
        f"{would}inserted": result.inserted,
        f"{would}updated": result.updated,
        f"{would}deleted": result.deleted,
    }
    rows: list[Row] = [(f"table {would}added", table) for table in result.added]
    rows += [(f"table {would}removed", table) for table in result.removed]
    rows += _copied(result.snapshot)
    rows += [("rows " + label, f"{count:,}") for label, count in counts.items() if count]
    rows += [("warning", warning) for warning in result.warnings]
    checked = "checked" if result.dry_run else "refreshed"
    compared = f", {count_in_words(len(result.reconciled), 'table')} compared" if result.reconciled else ""
    same = "" if rows else "; nothing differs" if result.reconciled else "; its tables are as published"
    return Summary(f"{checked} {result.subscription}{compared}{same} in {_time(result.seconds)}", tuple(rows))


@summarize.register
def _(result: results.ResumeResult) -> Summary:
    name, tables = result.subscription, ", ".join(result.tables)
    if result.to_lsn is not None:
        left_out = f"; its changes of {tables} are left out" if tables else ""
        sentence = f"{name} continues after the transaction that committed at {result.to_lsn}{left_out}"
    elif tables:
        sentence = f"{tables} of {name}: no longer parked"
    else:
        sentence = f"{name} is no longer parked"
    return Summary(
        sentence,
        next_step=f"Nothing is applied yet: run `cdc-replay replay {name}`."
        + ("" if result.to_lsn else " A transaction that is refused again parks it again."),
    )


@summarize.register
def _(result: results.ValidateResult) -> Summary:
    notes = [
        (str(table["table"]), str(note))
        for table in result.tables
        if table["success"] and isinstance(table["notes"], list)
        for note in table["notes"]
    ]
    rows = (*repair_rows(result), *notes, *_not_compared(result), ("report", str(result.report)))
    if result.first_report is not None:
        rows = (*rows, ("report before the repair", str(result.first_report)))
    sentence = f"{result.subscription} {_verdict(result)}, {_time(result.seconds)}"
    return Summary(
        sentence,
        rows,
        _repair_step(result) if result.outcome is results.ValidationOutcome.NOT_CONSISTENT else None,
    )


def _repair_step(result: results.ValidateResult) -> str | None:
    """What makes the sides equal, if a repair has not been tried yet; the rows say what it had to leave."""
    command = f"cdc-replay validate {result.subscription} --repair"
    if result.dry_run:
        return f"`{command}` makes them equal." if result.repaired else None
    return None if result.first_report is not None else f"`{command} --dry-run` counts what makes them equal."


def _verdict(result: results.ValidateResult) -> str:
    tables = count_in_words(len(result.tables), "table")
    total = sum(count for table in result.tables if isinstance(count := table["publisher_rows"], int))
    compared = f"{tables}, {_rows(total)}"
    match result.outcome:
        case results.ValidationOutcome.NOT_CONSISTENT:
            failed = [table for table in result.tables if not table["success"]]
            differ = "differs" if len(failed) == 1 else "differ"
            return f"is NOT consistent at {result.to_lsn}: {len(failed)} of {tables} {differ}"
        case results.ValidationOutcome.ERROR:
            broken = sum(bool(table.get("has_error")) for table in result.tables)
            return f"could not be judged at {result.to_lsn}: {broken} of {tables} could not be compared"
        case _ if result.is_partial and not result.tables:
            return f"has nothing to compare at {result.to_lsn}"
        case _ if result.is_partial:
            return f"has no difference at {result.to_lsn} in what was compared: {compared}"
        case _:
            return f"is consistent at {result.to_lsn}: {compared}"


def _not_compared(result: results.ValidateResult) -> Iterator[Row]:
    """Tables of which nothing was compared, with the last proof, and what a budget was not enough for."""
    yield from (("not reached", text) for text in result.not_reached)
    for left in result.left_out:
        if left["reason"] != "not reached":
            at = left["proven_at"]
            yield str(left["reason"]), f"{left['table']}: {left['proof']}{f', at {at}' if at else ''}"


def repair_rows(result: results.ValidateResult) -> Iterator[Row]:
    """What a repair wrote, or would write, by table, with the first keys; then what it left."""
    would = "would be " if result.dry_run else ""
    for table in result.repaired:
        for kind, (count, keys) in table.by_kind().items():
            if count:
                shown = f", such as {', '.join(keys)}" if keys else ""
                yield table.table, f"{count:,} {would}{kind}{shown}"
    yield from (("not repaired", reason) for reason in result.not_repaired)


@summarize.register
def _(result: results.VerifyLogResult) -> Summary:
    segments = count_in_words(result.segments, "segment")
    content = f"{segments}, {_changes(result.messages, result.transactions)}"
    return Summary(
        f"the change log of {result.publisher} is sound: ({result.from_lsn}, {result.to_lsn}], {content},"
        f" {_size(result.bytes)} in {_time(result.seconds)}",
        _nonzero({"prepared transactions": result.prepared}),
    )


@summarize.register
def _(result: results.PruneResult) -> Summary:
    name = result.publisher
    rows: list[Row] = []
    if result.segments:
        dropped = f"{count_in_words(result.segments, 'segment')}, {_size(result.bytes)}"
        verb = "would drop" if result.dry_run else "dropped"
        starts = "would then start" if result.dry_run else "now starts"
        sentence = f"{verb} {dropped} of the change log of {name}, which {starts} at {result.to_lsn}"
        rows.append(("committed", f"{result.from_time} to {result.to_time}"))
    else:
        sentence = f"nothing to prune: the change log of {name} starts at {result.to_lsn} as before"
    needed = f"from {result.needed_lsn} on"
    rows.append(("needed", needed if result.needed_by is None else f"{needed}, by {result.needed_by}"))
    rows += _nonzero({"segments merged": result.merged, "files deleted": result.files})
    later = "A job is reading the log: a later run deletes the files of the dropped segments."
    is_later = not result.dry_run and result.files < result.segments
    return Summary(sentence, tuple(rows), later if is_later else None)


@summarize.register
def _(result: results.TeardownResult) -> Summary:
    if result.subscription is not None:
        name = f"subscription {result.subscription}"
        stays = "The rows of its tables stay. Remove it from the configuration; to use it again, empty its"
        stays += f" tables and run `cdc-replay sync {result.subscription}`."
    else:
        name = f"publisher {result.publisher}"
        stays = "The change log and the subscribers' rows stay. To capture again, move the change log away,"
        stays += f" then run `cdc-replay setup {result.publisher}`, and `cdc-replay snapshot` for each"
        stays += " subscription."
    if not result.removed:
        return Summary(f"{name}: there was nothing to remove")
    by_kind: dict[str, list[str]] = {}
    for removed in result.removed:
        kind, _, removed_name = removed.rpartition(" ")
        by_kind.setdefault(kind, []).append(removed_name)
    rows = tuple((kind, ", ".join(names)) for kind, names in by_kind.items())
    return Summary(f"removed from {name}", rows, stays)


def _read(result: AppliedRange) -> str:
    return f"{_changes(result.changes_read, result.transactions)} in {_time(result.seconds)}"


def _before(result: results.ReplayResult) -> str:
    """Where a failed replay stopped, if that is known: its `to_lsn` was not reached."""
    return "" if result.parked_before is None else f" before {result.parked_before}"


def _applied(result: AppliedRange) -> tuple[Row, ...]:
    applied = ", ".join(
        f"{count:,} {_VERBS.get(kind, kind)}" for kind, count in result.applied.items() if count
    )
    counts = {
        "filtered out": result.filtered_out,
        "UPDATE to INSERT": result.updates_to_insert,
        "UPDATE to DELETE": result.updates_to_delete,
    }
    return (*((("rows", applied),) if applied else ()), *_nonzero(counts))


def _unusual(result: results.ReplayResult) -> Iterator[Row]:
    for kind, count in result.conflicts.items():
        keys = ", ".join(result.conflict_keys.get(kind, ()))
        yield kind, f"{count:,}" + (f", such as {keys}" if keys else "")
    yield from _nonzero({"stored as NULL (R4.6)": result.unsent_nulls})
    if result.parked_before is not None:
        yield "parked", f"before the transaction that committed at {result.parked_before}"
    for table in result.parked:
        yield "parked table", table
    for table in result.passed_over:
        yield "not subscribed", f"{table}; `cdc-replay refresh {result.subscription}` adds it"


def _copied(result: SnapshotResult) -> Iterator[Row]:
    for table in result.tables:
        staged = f", {count_in_words(table.chunks_staged_before, 'chunk')} staged before"
        yield (
            table.table,
            f"{_rows(table.rows)}, {_size(table.bytes)}{staged if table.chunks_staged_before else ''}",
        )


def _compared(tables: Iterable[TableCompared]) -> Iterator[Row]:
    for table in tables:
        counts = {"updated": table.updated, "differing": table.differing, "missing": table.missing}
        texts = [f"{count:,} {label}" for label, count in counts.items() if count]
        yield table.table, f"rewritten by the publisher: {', '.join(texts) or 'no row differs'}"


def _nonzero(counts: Mapping[str, int]) -> tuple[Row, ...]:
    return tuple((label, f"{count:,}") for label, count in counts.items() if count)


def _changes(changes: int, transactions: int) -> str:
    return f"{count_in_words(changes, 'change')} of {count_in_words(transactions, 'transaction')}"


def _rows(count: int) -> str:
    return count_in_words(count, "row")


def _size(size_bytes: int) -> str:
    return size_in_words(size_bytes)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < _PRECISE_SECONDS else duration_in_words(seconds)
