"""`doctor` on a screen: one line per check, with what to do below it."""

from __future__ import annotations

from itertools import groupby
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table

from cdc_replay.model.check import DoctorResult, Verdict
from cdc_replay.terminal.layout import BAD, DOUBTFUL, GAP, GOOD, HEADING, text

_STYLES: Final = {Verdict.OK: GOOD, Verdict.WARNING: DOUBTFUL, Verdict.FAILED: BAD}


def diagnosis(result: DoctorResult) -> RenderableType:
    """The checks of each subject under its name."""
    parts: list[RenderableType] = []
    for subject, checks in groupby(result.checks, key=lambda check: check.subject):
        grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        grid.add_column(no_wrap=True, min_width=max(len(verdict.value) for verdict in Verdict))
        grid.add_column(overflow="fold")
        for check in checks:
            grid.add_row(text(check.verdict.value, _STYLES[check.verdict]), text(check.message))
            if check.remedy:
                grid.add_row(text(""), text(f"→ {check.remedy}"))
        parts += [text(subject, HEADING), grid]
    return Group(*parts)
