"""Commands that a test ends by a signal, at a failpoint or wherever they are.

ended(twin, signal.SIGTERM, "replay.mid_merge", "replay", "s")   # it stands still; the signal; it goes on
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.memory import descendants
from cdc_replay.failpoints import VARIABLE
from embedded.java import spark_environment
from fixtures.native import wait_for
from fixtures.twin import Twin

LIMIT_SECONDS: Final = 60
"""Only a process that hangs needs longer, on whatever machine."""
TERMINATED: Final = 128 + signal.SIGTERM

LINE: Final = "cdc-replay: terminated by SIGTERM; what is not committed is rolled back"

SESSIONS: Final = """
    select application_name from pg_stat_activity
    where datname = current_database() and application_name like 'cdc_replay %'
        and application_name <> 'cdc_replay test'
"""


def state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    return ""


def send(pids: tuple[int, ...], signal_number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def start(twin: Twin, failpoint: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("cdc-replay")), *arguments, "--config", str(twin.file)],
        env=os.environ | spark_environment() | {VARIABLE: failpoint},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run_and_end(twin: Twin, signal_number: signal.Signals, failpoint: str, *arguments: str) -> None:
    """Let a command stand still at the failpoint, in whatever process; end it by a signal to itself."""
    process = start(twin, f"{failpoint}=stop", *arguments)

    def stands_still() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return any(state(pid) == "T" for pid in descendants(process.pid))

    wait_for(stands_still, f"{arguments} to reach {failpoint}")
    end(twin, process, signal_number)


def end(twin: Twin, process: subprocess.Popen[str], signal_number: signal.Signals) -> None:
    """Send the signal; check how it ends, and that nothing is left of it."""
    family = descendants(process.pid)
    os.kill(process.pid, signal_number)
    # A worker that stands still would not see either that its parent is gone.
    send(family, signal.SIGCONT)
    _, error_text = process.communicate(timeout=LIMIT_SECONDS)
    if signal_number == signal.SIGTERM:
        assert process.returncode == TERMINATED, error_text
        assert error_text.splitlines().count(LINE) == 1
        assert "Traceback" not in error_text
    else:
        assert process.returncode == -signal_number, error_text
    check_nothing_is_left(twin, family)


def check_nothing_is_left(twin: Twin, family: tuple[int, ...]) -> None:
    """Neither these processes, nor a session of ours on a server."""
    wait_for(
        lambda: not any(state(pid) not in {"", "Z"} for pid in family),
        "JVM and workers to end",
        LIMIT_SECONDS,
    )
    databases = [twin.publisher, *(pair.ours for pair in twin.pairs.values())]
    wait_for(
        lambda: not any(database.rows(SESSIONS) for database in databases), "sessions to end", LIMIT_SECONDS
    )
