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
from cdc_replay.termination import cancel_on_termination, end_on_sigterm, finish_on_sigterm
{before}
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
    with start(FINISHING.format(before="", work="time.sleep(6)")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal_number)

        out, error_text = process.communicate(timeout=300)

    assert (process.returncode, out, error_text) == (0, "finishing\nleft\n", "")


def test_loop_hears_a_signal_that_comes_while_it_looks() -> None:
    """The handler runs within a method of the event, wherever that is."""
    looking = "    while not stop.wait(0):\n        pass\n"
    for _ in range(10):
        with start(FINISHING.format(before="", work="pass").replace("    stop.wait()\n", looking)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.terminate()
            try:
                out, error_text = process.communicate(timeout=LIMIT_SECONDS)
            finally:
                process.kill()
        assert (process.returncode, out, error_text) == (0, "finishing\nleft\n", "")


def test_next_loop_finishes_too() -> None:
    loop = "with finish_on_sigterm() as stop:\n    print('again', flush=True)\n    stop.wait()\n"
    with start(f"{FINISHING.format(before='', work='pass')}{loop}time.sleep(6)") as process:
        assert process.stdout is not None
        for line in ("ready\n", "finishing\n", "left\n", "again\n"):
            assert process.stdout.readline() == line
            if line in {"ready\n", "again\n"}:
                process.terminate()
        try:
            process.communicate(timeout=300)
        finally:
            process.kill()

    assert process.returncode == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_loop_that_finishes_is_ended_by_the_second_signal(
    first: signal.Signals, second: signal.Signals
) -> None:
    """Of either kind, also while a thread of it waits for a server."""
    with start(FINISHING.format(before=CANCELLED, work="time.sleep(600)")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(first)
        assert process.stdout.readline() == "finishing\n"
        process.send_signal(second)
        try:
            _, error_text = process.communicate(timeout=LIMIT_SECONDS)
        finally:
            process.kill()

    line = LINE if second == signal.SIGTERM else LINE.replace("terminated by SIGTERM", "interrupted")
    assert (process.returncode, error_text) == (TERMINATED, f"{line}\n")


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
