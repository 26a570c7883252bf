"""SIGTERM in a program of its own: it ends by itself, or is ended (`termination`)."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Final

import pytest

from faults.ending import LIMIT_SECONDS, LINE, TERMINATED, state
from fixtures.native import wait_for

PROGRAM: Final = """
import contextlib, threading, time
from cdc_replay.termination import cancel_on_termination, end_on_sigterm
{before}
end_on_sigterm()
try:
    {wait}
finally:
    print("left", flush=True)
"""

WAIT: Final = "print('ready', flush=True); time.sleep(600)"
THREAD: Final = "threading.Thread(target=time.sleep, args=(600,)).start()"
CANCELLED: Final = """
given_up = threading.Event()
cancel_on_termination(given_up.set)
threading.Thread(target=given_up.wait).start()
"""
STUCK: Final = """
    import ctypes
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("ready", flush=True)
    lock(mutex)  # no signal ends this
"""


@pytest.mark.parametrize(
    ("before", "wait", "lines"),
    [
        ("", WAIT, ["left"]),
        (CANCELLED, WAIT, ["left"]),
        (THREAD, WAIT, ["left"]),
        ("", STUCK, []),
    ],
    ids=[
        "main thread waits",
        "thread whose statement is cancelled",
        "thread that goes on",
        "library goes on",
    ],
)
def test_program_ends_with_its_code_and_one_line(before: str, wait: str, lines: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(before=before, wait=wait)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    wait_for(lambda: state(process.pid) == "S", "the main thread to wait", LIMIT_SECONDS)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, out.splitlines(), error.splitlines()) == (TERMINATED, lines, [LINE])


def test_second_signal_interrupts_no_clean_up() -> None:
    tidying = f"{WAIT}\nfinally:\n    time.sleep(2)\n    print('tidied', flush=True)\ntry:\n    pass"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(before="", wait=tidying)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(5):
        process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, out.splitlines(), error.splitlines()) == (TERMINATED, ["tidied"], [LINE])


FINISHING: Final = """
import threading, time
from cdc_replay.termination import end_on_sigterm, finish_on_sigterm
end_on_sigterm()
with finish_on_sigterm() as stop:
    print("ready", flush=True)
    stop.wait()
    print("finishing", flush=True)
    {work}
print("left", flush=True)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_loop_that_finishes_ends_by_itself_after_the_first_signal(signal_number: signal.Signals) -> None:
    with start(FINISHING.format(work="time.sleep(6)")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal_number)

        out, error_text = process.communicate(timeout=60)

    assert (process.returncode, out, error_text) == (0, "finishing\nleft\n", "")


def test_loop_that_finishes_is_ended_by_the_second_sigterm() -> None:
    with start(FINISHING.format(work="time.sleep(600)")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "finishing\n"
        process.terminate()

        _, error_text = process.communicate(timeout=LIMIT_SECONDS)

    assert (process.returncode, error_text) == (TERMINATED, f"{LINE}\n")


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
