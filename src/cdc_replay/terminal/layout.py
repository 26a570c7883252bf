"""Tables and blocks that say everything at any width: columns are left out by importance, texts wrap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cdc_replay.model.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

GAP: Final = 2

ESSENTIAL: Final = 8
"""A column of this importance always stays."""

GOOD: Final = "green"
BAD: Final = "bold red"
DOUBTFUL: Final = "yellow"
HEADING: Final = "bold"
FAINT: Final = "dim"


def text(content: str, style: str = "") -> Text:
    """A text of ours or of a server, without markup or control characters."""
    return Text(printable(content), style, overflow="fold")


@dataclass(frozen=True, slots=True)
class Column:
    """A column; the one of the lowest `importance` goes first where the width does not suffice."""

    title: str
    importance: int
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class FittedTable:
    """Rows of cells under their columns; the first one wraps if it must."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Rich's protocol: draw the columns that fit."""
        kept = self._fitting(options.max_width)
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style=HEADING)
        for index in kept:
            column = self.columns[index]
            table.add_column(
                text(column.title),
                justify="right" if column.is_number else "left",
                no_wrap=index != kept[0],
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*(row[index] for index in kept))
        yield table

    def _fitting(self, width: int) -> list[int]:
        kept = list(range(len(self.columns)))
        while len(kept) > 1 and sum(self._width(index) + GAP for index in kept) - GAP > width:
            least = min(kept[1:], key=lambda index: self.columns[index].importance)
            if self.columns[least].importance >= ESSENTIAL:
                break
            kept.remove(least)
        return kept

    def _width(self, index: int) -> int:
        cells = [text(self.columns[index].title), *(row[index] for row in self.rows)]
        return max(cell.cell_len for cell in cells)


def labelled(pairs: Iterable[tuple[str, RenderableType]]) -> RenderableType:
    """Labels and their texts, which wrap beside the labels."""
    grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True, style=FAINT)
    grid.add_column(overflow="fold")
    for label, value in pairs:
        grid.add_row(text(label), value)
    return Padding(grid, (0, 0, 0, GAP), expand=False)
