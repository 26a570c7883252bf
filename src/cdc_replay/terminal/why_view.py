"""`why` on a screen: the changes of a row in order, what both sides hold, and the sentence at the end."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from cdc_replay.model.explained_row import (
    Answer,
    Clause,
    ClauseRole,
    ExplainedChange,
    Fate,
    PresentRow,
    TableEvent,
    WhyResult,
)
from cdc_replay.terminal.layout import BAD, DOUBTFUL, FAINT, GOOD, HEADING, labelled, text

LONGEST_VALUE: Final = 200
"""Characters of a value on the screen; `--json` has all of it."""

_STYLES: Final[Mapping[Fate, str]] = {
    Fate.APPLIED: GOOD,
    Fate.SKIPPED: DOUBTFUL,
    Fate.PENDING: DOUBTFUL,
    Fate.PARKED: BAD,
    Fate.COPIED: FAINT,
    Fate.NOT_SEEN: FAINT,
}


def row_explained(result: WhyResult) -> RenderableType:
    """Header, changes and events by position, both sides, the sentence."""
    key = f"({', '.join(result.key)})=({', '.join(result.key.values())})"
    parts: list[RenderableType] = [
        text(f"{result.table} {key}", HEADING),
        labelled(
            (
                ("subscription", text(result.subscription)),
                ("log", text(f"({result.from_lsn}, {result.to_lsn}]")),
                ("changes", text(_count(result))),
            )
        ),
    ]
    steps: list[tuple[int, int, RenderableType]] = [
        (event.lsn.value, 1, _event(event)) for event in result.events
    ]
    steps += [(change.commit_lsn.value, 0, _change(change)) for change in result.changes]
    for _, _, step in sorted(steps, key=lambda step: step[:2]):
        parts += [Text(), step]
    parts += [Text(), text("now", HEADING), labelled(_sides(result)), Text()]
    style = GOOD if result.differs is False else BAD if result.differs else DOUBTFUL
    parts.append(text(result.explanation, style))
    return Group(*parts)


def explained_text(result: WhyResult, width: int) -> str:
    """The same as plain text in lines of at most `width` characters."""
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(row_explained(result))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _count(result: WhyResult) -> str:
    shown = len(result.changes)
    return (
        str(result.changes_found)
        if shown == result.changes_found
        else f"{result.changes_found}, the last {shown} are shown"
    )


def _event(event: TableEvent) -> RenderableType:
    return Text.assemble(text(f"{event.lsn}  {event.kind.value}  ", DOUBTFUL), text(event.text))


def _change(change: ExplainedChange) -> RenderableType:
    outcome = change.outcome if change.outcome == change.kind else f"{change.kind} → {change.outcome}"
    head = Text.assemble(
        text(f"{change.commit_lsn}  "),
        text(outcome, HEADING),
        text(f"  {change.fate.value}", _STYLES[change.fate]),
        text(f"  {change.committed}, transaction {change.xid}", FAINT),
    )
    return Group(head, labelled((label, text(value)) for label, value in _facts(change)))


def _facts(change: ExplainedChange) -> Iterator[tuple[str, str]]:
    if change.origin is not None:
        yield "origin", change.origin or "without a name"
    published = change.published_as or "not published"
    yield "published as", f"{published}: {change.why_published_as}" if change.why_published_as else published
    for clause in change.clauses:
        yield f'"{clause.publication}"', _clause(clause)
    if change.case is not None:
        yield "UPDATE", change.case
    yield "because", change.reason if change.rule is None else f"{change.reason} ({change.rule})"
    yield from _row(change)
    if (window := change.window) is not None:
        conflicts = f", {window.conflicts} conflicts" if window.conflicts else ""
        own = f"; this row: {', '.join(window.conflict_kinds)}" if window.conflict_kinds else ""
        yield "window", f"({window.from_lsn}, {window.to_lsn}], applied {window.finished}{conflicts}{own}"


def _row(change: ExplainedChange) -> Iterator[tuple[str, str]]:
    if change.old_key is not None:
        yield "key", f"{_values(change.old_key)} → {_values(change.key or {})}"
    if change.unsent:
        yield "not sent", ", ".join(change.unsent)
    if change.old_values:
        yield "old row", _values(change.old_values)
    if change.values:
        yield "new row", _values(change.values)


def _clause(clause: Clause, *, is_present_row: bool = False) -> str:
    if clause.role is not ClauseRole.FILTER:
        return str(clause.role.value)
    answers = [
        answer.value if is_present_row else f"{name}: {answer.value}"
        for name, answer in (("old row", clause.old), ("new row", clause.new))
        if answer is not None and answer is not Answer.NO_ROW
    ]
    error = f"; {clause.error}" if clause.error else ""
    return f"{clause.row_filter}  {', '.join(answers)}{error}"


def _sides(result: WhyResult) -> Iterator[tuple[str, RenderableType]]:
    for side, row in (("publisher", result.publisher), ("subscriber", result.subscriber)):
        yield side, text(_side(row))
        for clause in row.clauses:
            yield f'"{clause.publication}"', text(_clause(clause, is_present_row=True))
        if row.values is not None:
            yield "values", text(_values(row.values))
    if result.differing:
        yield "differing", text(", ".join(result.differing), BAD)


def _side(row: PresentRow) -> str:
    where = row.table or "no table"
    if row.error is not None:
        return f"{where}: {row.error}"
    count = {0: "no row", 1: "one row"}.get(row.rows or 0, "several rows")
    position = "" if row.lsn is None else f", as of {row.lsn}"
    return f"{where}: {count}{position}"


def _values(values: Mapping[str, str | None]) -> str:
    return " ".join(f"{name}={_shorten(value)}" for name, value in values.items())


def _shorten(value: str | None) -> str:
    if value is None:
        return "NULL"
    return value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}…"
