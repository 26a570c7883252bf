"""What a run of the benchmark leaves: lines for a reader, one JSON file, one picture."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Final

from benchmarks.bounds import Verdict
from benchmarks.freshness import IDLE, plot
from benchmarks.measures import Measured
from benchmarks.programs import ROOT
from embedded.postgres import binaries

COLORS: Final[Mapping[str, str]] = {
    "pg_recvlogical": "#9aa5b1",
    "native": "#336791",
    "cold": "#f0a35e",
    "warm": "#e25a1c",
}
_WIDTH: Final = 900
_LEFT: Final = 190
_BAR: Final = 11
_GAP: Final = 14
_TOP: Final = 40
_HEADINGS: Final = (
    "workload", "changes", "recvlogical", "native", "cold", "warm", "cold/native", "warm/native",
    "warm/recv", "capture s", "replay s", "cold MiB", "warm MiB", "equal",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Report:
    """All measurements of a run, the bounds that were judged, and why workloads were not measured."""

    machine: Mapping[str, object]
    measured: Sequence[Measured] = ()
    verdicts: Sequence[Verdict] = ()
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether everything was measured, no bound is broken and all subscribers are equal."""
        is_within = all(each.holds for each in self.verdicts)
        return is_within and not self.failures and not any(each.differences for each in self.measured)

    def write(self, folder: Path) -> None:
        """`bench.json` and `bench.svg`."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "machine": self.machine,
            "workloads": [dataclasses.asdict(each) for each in self.measured],
            "bounds": [dataclasses.asdict(each) | {"holds": each.holds} for each in self.verdicts],
            "failures": dict(self.failures),
        }
        (folder / "bench.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (folder / "bench.svg").write_text(picture(self.measured), encoding="utf-8")
        for measured in self.measured:
            if measured.workload == "freshness":
                (folder / "freshness.svg").write_text(plot(measured.details), encoding="utf-8")
        (folder / "bench.md").write_text(f"{table(self.measured)}\n", encoding="utf-8")


def machine_facts() -> dict[str, object]:
    """Where and with what a run was made."""
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"))
    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": model[1] if model else platform.machine(),
        "memory_mib": int(memory[1]) // 1024 if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "postgresql": _said([str(binaries() / "postgres"), "--version"]),
        "revision": _said(["git", "describe", "--always", "--dirty", "--abbrev=12"]),
        "packages": {
            name: importlib.metadata.version(name) for name in ("pyspark", "pyarrow", "numba", "psycopg")
        },
    }


def _said(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def row(measured: Measured) -> list[str]:
    """A measurement under the headings of `table`."""
    runs = measured.runs
    warm = measured.details.get("warm", {})
    return [
        measured.workload,
        f"{measured.changes:,}",
        *(_seconds(runs.get(name)) for name in ("pg_recvlogical", "native", "cold", "warm")),
        _ratio(runs, "cold", "native"),
        _ratio(runs, "warm", "native"),
        _ratio(runs, "warm", "pg_recvlogical"),
        _seconds(warm.get("capture")),
        _seconds(warm.get("replay")),
        *(f"{peaks.ours:.0f}" if (peaks := measured.peaks.get(name)) else "" for name in ("cold", "warm")),
        "no" if measured.differences else "yes",
    ]


def table(measured: Sequence[Measured]) -> str:
    """All measurements as a table of Markdown, columns aligned."""
    rows = [list(_HEADINGS), *(row(each) for each in measured)]
    widths = [max(len(cells[at]) for cells in rows) for at in range(len(_HEADINGS))]
    lines = [
        f"| {cells[0].ljust(widths[0])} | {' | '.join(map(str.rjust, cells[1:], widths[1:]))} |"
        for cells in rows
    ]
    rule = "|" + "|".join("-" * (width + 1) + (":" if at else "-") for at, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def details(measured: Measured) -> str:
    """Peaks of every role, and the runs that have no column in the table."""
    lines = [
        f"  {name}: {measured.runs[name]:.2f} s"
        for name in measured.runs
        if name not in {"pg_recvlogical", "native", "cold", "warm"}
    ]
    for name, values in measured.details.items():
        if "p95" in values:
            shown = ", ".join(f"{key} {values[key]:.2f}" for key in ("p50", "p95", "max", IDLE))
            lines.append(f"  {name}, seconds from commit to visible: {shown}")
    for name, peaks in measured.peaks.items():
        roles = ", ".join(f"{role} {mib:.0f}" for role, mib in peaks.by_role.items() if mib >= 1)
        lines.append(f"  MiB at most, {name}: {roles or 'too short to see'}")
    lines += [f"  NOT EQUAL: {name}" for name in measured.differences]
    return "\n".join(lines)


def verdict_line(verdict: Verdict) -> str:
    """A bound in a line."""
    word = "holds" if verdict.holds else "BROKEN"
    floor = "" if verdict.floor is None else f"; {verdict.floor:.2f} without us"
    figures = f"{verdict.figure:.2f}, at most {verdict.limit:.2f}{floor}"
    return f"{word:6} {verdict.workload}: {verdict.what} {figures}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ratio(runs: Mapping[str, float], one: str, other: str) -> str:
    return f"{runs[one] / runs[other]:.2f}" if one in runs and other in runs else ""


def picture(measured: Sequence[Measured]) -> str:
    """Bars of seconds per workload, as SVG."""
    longest = max((max(each.runs.values()) for each in measured), default=1.0)
    scale = (_WIDTH - _LEFT - 70) / longest
    parts, y = [_legend()], _TOP
    for each in measured:
        bars = [(name, seconds) for name, seconds in each.runs.items() if name in COLORS]
        middle = y + len(bars) * _BAR / 2 + 4
        parts.append(_text(_LEFT - 8, middle, f"{each.workload} ({each.changes:,})", anchor="end"))
        for name, seconds in bars:
            width = max(1.0, seconds * scale)
            parts.append(
                f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 1}" fill="{COLORS[name]}"/>'
            )
            parts.append(_text(_LEFT + width + 4, y + _BAR - 2, f"{seconds:.1f} s"))
            y += _BAR
        y += _GAP
    size = f'width="{_WIDTH}" height="{y}" font-family="sans-serif" font-size="10"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _legend() -> str:
    parts = []
    for number, (name, color) in enumerate(COLORS.items()):
        x = _LEFT + 150 * number
        parts.append(f'<rect x="{x}" y="12" width="10" height="10" fill="{color}"/>{_text(x + 15, 21, name)}')
    return "\n".join(parts)


def _text(x: float, y: float, content: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
