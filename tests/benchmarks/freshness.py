"""How soon a committed change is visible at a subscriber, and what it costs to wait for the next one.

A writer commits fifty rows a second, each alone, and notes when; a reader asks the subscriber again and again
which rows it has. Commit to visible is the difference, by one clock. Then nothing happens for a while, and
the CPU time of all processes is taken: the servers', and those of the side that is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benchmarks import airflow_side
from benchmarks.memory import cpu_seconds
from benchmarks.programs import Session, environment
from benchmarks.stand import Stand, stand, wait_for

TABLE: Final = "create table t (id bigint primary key, a int)"
PUBLISHED: Final = f"{TABLE}; create publication p for table t where (a >= 0)"
COMMITS_PER_SECOND: Final = 50
IDLE_SECONDS: Final = 30.0
END_SECONDS: Final = 120
NATIVE: Final = "native"
FOLLOW: Final = "follow"
IDLE: Final = "idle CPU, s/min"

_WIDTH: Final = 700
_HEIGHT: Final = 320
_MARGIN: Final = 50
_COLORS: Final[Mapping[str, str]] = {
    NATIVE: "#336791",
    FOLLOW: "#e25a1c",
    airflow_side.WARM: "#017cee",
    airflow_side.SUBMIT: "#7a7a7a",
}


def measure_sides(seconds: float) -> tuple[dict[str, dict[str, float]], tuple[str, ...]]:
    """By side the percentiles of commit to visible, in seconds, and the idle cost; the tables that differ."""
    with stand((("p",),)) as at:
        at.create_databases(PUBLISHED, TABLE, [NATIVE, FOLLOW, *airflow_side.SIDES])
        with Session(at.folder, at.servers) as session:
            at.set_up([FOLLOW], session.run)
        at.subscribe_natively()
        sides = {NATIVE: _observe(at, NATIVE, seconds, os.getpid())}
        at.pause_natives()
        with _following(at) as process:
            sides[FOLLOW] = _observe(at, FOLLOW, seconds, process.pid)
        with airflow_side.start(at, FOLLOW) as airflow:
            for side in airflow_side.SIDES:
                with airflow.running(side):
                    sides[side] = _observe(at, side, seconds, os.getpid())
        at.switch_natives("enable")
        _wait_for_row(at, NATIVE, _last_row(at))
        airflow_side.sync_all(at)
        with Session(at.folder, at.servers) as session:
            session.run(at.line("sync", *at.names(FOLLOW)))
        return sides, tuple(at.differences([FOLLOW, *airflow_side.SIDES]))


@contextlib.contextmanager
def _following(at: Stand) -> Iterator[subprocess.Popen[bytes]]:
    command = [*at.command("sync", *at.names(FOLLOW)), "--follow"]
    with (at.folder / "follow.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), cwd=at.folder)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(END_SECONDS)
    finally:
        process.kill()
        process.wait()


def _observe(at: Stand, side: str, seconds: float, root: int) -> dict[str, float]:
    _write(at, seconds=1.0)
    _wait_for_row(at, side, _last_row(at))
    stop = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(_read, at, side, stop)
        committed = _write(at, seconds)
        _wait_for_row(at, side, max(committed))
        stop.set()
        visible = reading.result()
    measured = [_visible_at(visible, row) - when for row, when in committed.items()]
    percentiles = statistics.quantiles(measured, n=100, method="inclusive")
    result = {f"p{number}": round(value, 3) for number, value in enumerate(percentiles, start=1)}
    return result | {"max": round(max(measured), 3), IDLE: round(_idle_cpu(at, root), 2)}


def _write(at: Stand, seconds: float) -> dict[int, float]:
    """Commit rows; row → when its commit had returned."""
    committed: dict[int, float] = {}
    first = _last_row(at) + 1
    with at.publisher_connection() as connection:
        began = time.monotonic()
        for number in range(int(seconds * COMMITS_PER_SECOND)):
            time.sleep(max(0.0, began + number / COMMITS_PER_SECOND - time.monotonic()))
            connection.execute("insert into t values (%s, 1)", (first + number,))
            committed[first + number] = time.monotonic()
    return committed


def _read(at: Stand, side: str, stop: threading.Event) -> list[tuple[int, float]]:
    """The last row that was visible, and when, each time that it had changed."""
    visible: list[tuple[int, float]] = []
    with at.subscriber_connection(at.names(side)[0]) as connection:
        is_last = False
        while not is_last:
            # Once more after the end: another session may have seen the last row first.
            is_last = stop.wait(0.005)
            row = connection.execute("select coalesce(max(id), 0) from t").fetchone()
            assert row is not None
            if not visible or row[0] > visible[-1][0]:
                visible.append((row[0], time.monotonic()))
    return visible


def _visible_at(visible: Sequence[tuple[int, float]], row: int) -> float:
    return next(when for last, when in visible if last >= row)


def _last_row(at: Stand) -> int:
    with at.publisher_connection() as connection:
        row = connection.execute("select coalesce(max(id), 0) from t").fetchone()
    assert row is not None
    return int(row[0])


def _wait_for_row(at: Stand, side: str, row: int) -> None:
    with at.subscriber_connection(at.names(side)[0]) as connection:

        def has_arrived() -> bool:
            [(last,)] = connection.execute("select coalesce(max(id), 0) from t").fetchall()
            return bool(last >= row)

        wait_for(has_arrived, f"row {row} at {side}")


def _idle_cpu(at: Stand, root: int) -> float:
    """CPU seconds per minute of the servers, and of the process `root` with its descendants."""
    began = cpu_seconds(root, at.servers_pids)
    time.sleep(IDLE_SECONDS)
    return (cpu_seconds(root, at.servers_pids) - began) * 60 / IDLE_SECONDS


def plot(sides: Mapping[str, Mapping[str, float]]) -> str:
    """The share of changes that are visible after so many seconds, as SVG."""
    curves = {
        side: [(percent, values[f"p{percent}"]) for percent in range(1, 100)]
        for side, values in sides.items()
        if "p50" in values
    }
    longest = max((seconds for curve in curves.values() for _, seconds in curve), default=1.0)
    across, down = (_WIDTH - 2 * _MARGIN) / longest, (_HEIGHT - 2 * _MARGIN) / 100
    parts = []
    for number, (side, curve) in enumerate(curves.items()):
        color = _COLORS.get(side, "#666666")
        points = " ".join(
            f"{_MARGIN + seconds * across:.1f},{_HEIGHT - _MARGIN - percent * down:.1f}"
            for percent, seconds in curve
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{_MARGIN + 10 + 90 * number}" y="30" fill="{color}">{side}</text>')
    for share in (0.0, 0.5, 1.0):
        x = _MARGIN + share * longest * across
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{share * longest:.2f} s</text>'
        )
    for percent in (50, 95):
        y = _HEIGHT - _MARGIN - percent * down
        parts.append(f'<text x="{_MARGIN - 8}" y="{y:.1f}" text-anchor="end">{percent} %</text>')
    size = f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, *parts, "</svg>\n"])
