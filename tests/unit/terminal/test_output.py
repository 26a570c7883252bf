"""How results reach standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from cdc_replay.terminal.output import CommandOutcome, print_outcome

if TYPE_CHECKING:
    import pytest


def test_a_view_in_a_file_has_no_blanks_at_the_end_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", "state", box=None)
    table.add_row("a long name", "x")
    table.add_row("b", "y")
    print_outcome(CommandOutcome({}, view=table))
    lines = capsys.readouterr().out.split("\n")
    assert [line.split() for line in lines] == [["name", "state"], ["a", "long", "name", "x"], ["b", "y"], []]
    assert lines == [line.rstrip() for line in lines]
