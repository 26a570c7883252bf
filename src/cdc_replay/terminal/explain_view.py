"""`explain` on a screen: one block per published table, with its filters in full."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from cdc_replay.commands.explain import ExplainResult
from cdc_replay.publication.explain import ExplainedTable
from cdc_replay.terminal.layout import DOUBTFUL, FAINT, HEADING, labelled, text

ALL_ROWS = "all rows"
NOT_PUBLISHED = "not published"


def explained(result: ExplainResult) -> RenderableType:
    """The publications, the tables, then the warnings."""
    parts: list[RenderableType] = [
        text(result.subscription, HEADING),
        labelled(
            (
                ("publications", text(", ".join(result.publications))),
                ("as of", text(str(result.to_lsn))),
                ("definitions", text(result.definitions)),
            )
        ),
    ]
    for table in result.tables:
        leaves = text(f"  {table.leaves} tables", FAINT) if table.leaves > 1 else Text()
        parts += [Text(), Text.assemble(text(table.table, HEADING), leaves)]
        parts.append(labelled((label, text(value)) for label, value in _facts(table)))
    for warning in result.warnings:
        parts += [Text(), Text.assemble(text("warning: ", DOUBTFUL), text(warning))]
    return Group(*parts)


def _facts(table: ExplainedTable) -> Iterator[tuple[str, str]]:
    yield "published", ", ".join(table.actions) or "nothing"
    yield from _filters(table)
    filters = {table.insert, table.update, table.delete} - {None, "-"}
    for evaluation in table.evaluated_by:
        # The only filter is shown already.
        known = f"{next(iter(filters))}: " if len(filters) == 1 else ""
        yield "evaluated by", evaluation.removeprefix(known)
    yield "identity", table.identity
    yield "columns", ", ".join(table.columns)


def _filters(table: ExplainedTable) -> Iterator[tuple[str, str]]:
    """The row filter, or that of each action if they differ."""
    filters = {"insert": table.insert, "update": table.update, "delete": table.delete}
    words = {action: _in_words(row_filter) for action, row_filter in filters.items()}
    published = {word for word in words.values() if word != NOT_PUBLISHED}
    if len(published) <= 1:
        yield "rows", next(iter(published), NOT_PUBLISHED)
        return
    for action, word in words.items():
        yield f"rows, {action}", word


def _in_words(row_filter: str | None) -> str:
    if row_filter is None:
        return NOT_PUBLISHED
    return ALL_ROWS if row_filter == "-" else row_filter
