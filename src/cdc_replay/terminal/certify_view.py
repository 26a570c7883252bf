"""`certify` on a screen: the verdict, what was compared, a line per table, and why tables are not equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from cdc_replay.model.certificate import CertifiedTable, CertifyResult, TableOutcome
from cdc_replay.model.count import count_in_words
from cdc_replay.terminal.layout import (
    BAD,
    DOUBTFUL,
    ESSENTIAL,
    GOOD,
    HEADING,
    Column,
    FittedTable,
    labelled,
    text,
)

_STYLES: Final[Mapping[TableOutcome, str]] = {
    TableOutcome.EQUAL: GOOD,
    TableOutcome.DEVIATES: DOUBTFUL,
    TableOutcome.DIFFERS: BAD,
    TableOutcome.NOT_COMPARED: BAD,
    TableOutcome.LEFT_OUT: DOUBTFUL,
}

_COLUMNS: Final = (
    Column("table", ESSENTIAL),
    Column("verdict", ESSENTIAL),
    Column("native rows", 3, is_number=True),
    Column("our rows", 4, is_number=True),
    Column("differing", 6, is_number=True),
    Column("by deviation", 5, is_number=True),
)


def certified(result: CertifyResult) -> RenderableType:
    """The certificate."""
    word = "certified" if result.success else "NOT certified"
    parts: list[RenderableType] = [
        text(f"{result.subscription}: {word}", GOOD if result.success else BAD),
        labelled((label, text(value)) for label, value in _facts(result)),
        Text(),
        FittedTable(_COLUMNS, [_row(table) for table in result.tables]),
    ]
    for table in result.tables:
        if reasons := list(_reasons(table)):
            parts += [Text(), text(table.table, HEADING), labelled(reasons)]
    return Group(*parts)


def _facts(result: CertifyResult) -> Iterator[tuple[str, str]]:
    yield "publisher", f"{result.publisher}, PostgreSQL {result.publisher_version}"
    yield "native", f"PostgreSQL {result.native_version}, a subscription to {', '.join(result.publications)}"
    yield "cdc-replay", result.version
    followed = f"{count_in_words(result.transactions, 'transaction')} in {result.followed_seconds:.0f} s"
    yield "followed", f"({result.from_lsn}, {result.to_lsn}], {followed}"
    yield "compared at", str(result.to_lsn)
    for name in result.removed:
        yield "removed", f"slot {name} of the publisher, which a killed run had left"
    yield "report", str(result.report)


def _row(table: CertifiedTable) -> tuple[Text, ...]:
    explained = sum(rows.rows for rows in table.deviations)
    differing = sum(table.differences.values())
    return (
        text(table.table),
        text(table.outcome.value, _STYLES[table.outcome]),
        text(_count(table.native_rows)),
        text(_count(table.our_rows)),
        text(f"{differing:,}" if differing else ""),
        text(f"{explained:,}" if explained else ""),
    )


def _reasons(table: CertifiedTable) -> Iterator[tuple[str, RenderableType]]:
    if table.reason is not None:
        yield table.outcome.value, text(table.reason)
    for kind, count in table.differences.items():
        yield kind, text(f"{count:,}", BAD)
    if table.keys:
        yield "such as", text(", ".join(table.keys))
    for explained in table.deviations:
        yield (
            explained.deviation.value,
            text(f"{explained.rows:,} ({', '.join(explained.keys)}): {explained.reason}"),
        )


def _count(rows: int | None) -> str:
    return "" if rows is None else f"{rows:,}"
