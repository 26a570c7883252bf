"""`plan` on a screen: a sentence, one table with what is not zero, what to know of each table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from cdc_replay.model.count import count_in_words
from cdc_replay.model.proposed_change import (
    FailingStatement,
    PlannedTable,
    PlanResult,
    ProposalRefused,
    RowsOfTable,
    SentChanges,
)
from cdc_replay.terminal.layout import (
    BAD,
    DOUBTFUL,
    ESSENTIAL,
    FAINT,
    HEADING,
    Column,
    FittedTable,
    labelled,
    text,
)
from cdc_replay.terminal.units import duration, size

SHORTEST_FOR_A_RATE: Final = 1 / 24
"""Days; a shorter range is shown as it is, not as a rate per day."""

_DAY_SECONDS: Final = 86_400


def planned(result: PlanResult) -> RenderableType:
    """The whole screen."""
    parts: list[RenderableType] = [text(_sentence(result), HEADING)]
    if result.refused is not None:
        parts += [Text(), *_refused(result.refused)]
    rate = _Rate.of_range(result.days)
    if result.tables:
        parts += [Text(), _table(result, rate)]
        parts += [Text(), text(_legend(result, rate), FAINT)]
    parts += _blocks(result)
    for failing in result.failing:
        parts += [Text(), text(_failing(failing), BAD)]
    for warning in result.warnings:
        parts += [Text(), Text.assemble(text("warning: ", DOUBTFUL), text(warning))]
    if result.log_error is not None:
        parts += [Text(), Text.assemble(text("changes were not counted: ", DOUBTFUL), text(result.log_error))]
    parts += [Text(), text(_parsed(result), FAINT)]
    if result.tables:
        parts.append(text(_semantics(result), FAINT))
    return Group(*parts)


# ---- the sentence


def _sentence(result: PlanResult) -> str:
    name = f"subscription {result.subscription}"
    if result.refused is not None:
        return f"PostgreSQL would refuse the proposal for {name}."
    if not result.tables:
        return f"The proposal changes nothing for {name}."
    rows = [table.rows for table in result.tables if table.rows is not None]
    enter, leave = (sum(getattr(row, side) or 0 for row in rows) for side in ("enter", "leave"))
    uncounted = sum(row.error is not None for row in rows)
    unknown = f"; of {count_in_words(uncounted, 'table')} that is unknown" if uncounted else ""
    return (
        f"The proposal changes {count_in_words(len(result.tables), 'table')} of {name}:"
        f" {count_in_words(enter, 'row')} would enter, {leave:,} would leave{unknown}."
    )


def _refused(refused: ProposalRefused) -> Iterator[RenderableType]:
    rule = "" if refused.rule is None else f" [{refused.rule}]"
    line = "" if refused.line is None else f"line {refused.line}: "
    yield text(f"{line}{refused.message}{rule}", BAD)
    pairs = [("detail", refused.detail), ("hint", refused.hint)]
    yield labelled((label, text(value)) for label, value in pairs if value)


# ---- the table


@dataclass(frozen=True, slots=True)
class _Rate:
    """By what counts of the range are multiplied."""

    factor: float
    per_day: bool

    @classmethod
    def of_range(cls, days: float) -> _Rate:
        is_long = days >= SHORTEST_FOR_A_RATE
        return cls(1 / days if is_long else 1.0, is_long)

    def __call__(self, count: int) -> int:
        return round(count * self.factor)


_Cell = Callable[[PlannedTable], str]


def _table(result: PlanResult, rate: _Rate) -> RenderableType:
    cells: list[tuple[Column, _Cell]] = [
        (Column("table", ESSENTIAL), lambda table: table.table),
        (Column("", 3), lambda table: "" if table.membership == "stays" else table.membership),
        (Column("enter", 7, is_number=True), lambda table: _rows(table.rows, "enter")),
        (Column("leave", 7, is_number=True), lambda table: _rows(table.rows, "leave")),
        (Column("→INSERT", 6, is_number=True), lambda table: _becomes(table, "INSERT")),
        (Column("→DELETE", 6, is_number=True), lambda table: _becomes(table, "DELETE")),
        (Column("appear", 5, is_number=True), _appear),
        (Column("vanish", 5, is_number=True), _vanish),
        (
            Column("changes", 4, is_number=True),
            lambda table: _both(table, lambda sent: str(rate(sent.changes)) if sent.changes else "0"),
        ),
        (
            Column("bytes", 2, is_number=True),
            lambda table: _both(table, lambda sent: size(rate(sent.bytes))),
        ),
    ]
    shown = [
        (column, cell)
        for column, cell in cells
        if column.title == "table" or any(cell(table) for table in result.tables)
    ]
    rows = [[text(cell(table)) for _, cell in shown] for table in result.tables]
    return FittedTable([column for column, _ in shown], rows)


def _rows(rows: RowsOfTable | None, side: str) -> str:
    if rows is None:
        return ""
    return "?" if rows.error is not None else _unless_zero(getattr(rows, side))


def _unless_zero(count: int | None) -> str:
    return str(count) if count else ""


def _becomes(table: PlannedTable, outcome: str) -> str:
    return _unless_zero(
        sum(
            transition.changes
            for transition in table.transitions
            if transition.kind == "UPDATE" and transition.then == outcome
        )
    )


def _appear(table: PlannedTable) -> str:
    return _unless_zero(
        sum(
            transition.changes
            for transition in table.transitions
            if transition.now is None and (transition.kind, transition.then) not in _TRANSFORMED
        )
    )


def _vanish(table: PlannedTable) -> str:
    return _unless_zero(
        sum(transition.changes for transition in table.transitions if transition.then is None)
    )


_TRANSFORMED: Final = frozenset({("UPDATE", "INSERT"), ("UPDATE", "DELETE")})


def _both(table: PlannedTable, show: Callable[[SentChanges], str]) -> str:
    if table.uncaptured:
        return f"{show(table.now)} → ?"
    return "" if table.now == table.then else f"{show(table.now)} → {show(table.then)}"


def _legend(result: PlanResult, rate: _Rate) -> str:
    length = duration(result.days * _DAY_SECONDS)
    per = ", per day" if rate.per_day else ""
    return (
        f"Changes are those of ({result.from_lsn}, {result.to_lsn}] of the log, {length}, under both"
        f" definitions; changes and bytes{per}: now → then."
    )


# ---- tables


def _blocks(result: PlanResult) -> Iterator[RenderableType]:
    for table in result.tables:
        facts = [(label, text(value)) for label, value in _facts(table)]
        if facts:
            yield from (Text(), text(table.table, HEADING), labelled(facts))


def _facts(table: PlannedTable) -> Iterator[tuple[str, str]]:
    if table.rows is not None and table.rows.error is not None:
        yield "rows", f"not counted: {table.rows.error}"
    if table.filters_now != table.filters_then:
        yield from _filters("now", table.filters_now)
        yield from _filters("then", table.filters_then)
        yield from (("evaluated by", evaluated) for evaluated in table.evaluated_by)
    for label, columns in (
        ("columns added", table.added_columns),
        ("columns removed", table.removed_columns),
    ):
        if columns:
            yield label, ", ".join(columns)
    if table.uncaptured:
        yield "changes", "not captured yet: the log does not have them"
    for unknown in table.unknown_old_values:
        yield (
            "not in old rows",
            (
                f"{', '.join(unknown.columns)} of {unknown.leaf}: {unknown.changes} UPDATEs and DELETEs of"
                " the range. For an UPDATE without an old row the new row decides for both (R4.3); in the old"
                " row of any other, and of a DELETE, the filter reads NULL (R3.9, R4.4)"
            ),
        )
    yield from _membership(table)


def _filters(label: str, filters: Mapping[str, str | None] | None) -> Iterator[tuple[str, str]]:
    """One line, or one for each different filter."""
    if filters is None:
        yield label, "not published"
        return
    by_filter: dict[str, list[str]] = {}
    for action, row_filter in filters.items():
        if action != "truncate" or row_filter == "not published":
            by_filter.setdefault(str(row_filter), []).append(action)
    for row_filter, actions in by_filter.items():
        yield label, row_filter if len(by_filter) == 1 else f"{', '.join(actions)}: {row_filter}"


def _membership(table: PlannedTable) -> Iterator[tuple[str, str]]:
    if table.membership == "new":
        yield "new", "`refresh` copies it; until then its changes are not applied (R7.12)"
    elif table.membership == "removed":
        yield "removed", "`refresh` forgets it; its rows stay on the subscriber (R7.13)"


def _failing(failing: FailingStatement) -> str:
    return (
        f"Every {failing.action.upper()} of {failing.table} would fail on the publisher, because of"
        f' publication "{failing.publication}": {failing.message}. {failing.detail} [{failing.rule}]'
    )


# ---- what was done, and what is to do


def _parsed(result: PlanResult) -> str:
    because = "" if result.because is None else f", because {result.because}; privileges were not checked"
    return f"Parsed by {result.parsed_by}{because}. Nothing was changed."


def _semantics(result: PlanResult) -> str:
    return (
        "Executed, the new definition is in force for changes from its own position on. It sends no rows:"
        f" those that enter or leave stay as they are until `cdc-replay refresh {result.subscription}"
        " --reconcile` (R9.12)."
    )
