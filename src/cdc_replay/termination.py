"""Ending on SIGTERM from Airflow, systemd, a container engine or a person.

Uncommitted work is rolled back, as after any kill. In addition no statement is left running on a server, and
the process announces its end. There is little time: Airflow kills after five seconds.

| when            | happens                                                                                |
|-----------------|----------------------------------------------------------------------------------------|
| at once         | `Terminated` is raised in the main thread; statements of all threads are cancelled     |
| then            | contexts exit, sessions close, the JVM ends with its parent, and Spark's workers end   |
| after 4 seconds | the process exits, also if something still blocks it                                   |

`Terminated` is a `SystemExit`, so that nothing reports or retries it as a failure. An error raised while
contexts exit can replace it; `is_asked_to_end` is true then too.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Final, NoReturn

EXIT_CODE: Final = 128 + signal.SIGTERM
GRACE_SECONDS: Final = 4.0

_CANCEL_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 1.0

_MESSAGES: Final[dict[int, bytes]] = {
    signal.SIGTERM: b"cdc-replay: terminated by SIGTERM; what is not committed is rolled back\n",
    signal.SIGINT: b"cdc-replay: interrupted; what is not committed is rolled back\n",
}


@dataclass(slots=True)
class _Finishing:
    """A loop that finishes after the first signal: what it looks at, and who has seen that signal."""

    stop: threading.Event
    is_heard: bool = False
    """By the handler."""
    is_received: bool = False
    """By the thread that reads the pipe."""


_finishing: _Finishing | None = None
"""Of `finish_on_sigterm`."""

_cancellations: list[Callable[[], None]] = []
_was_announced = threading.Event()


class Terminated(SystemExit):
    """The process was asked to end."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


def cancel_on_termination(cancel: Callable[[], None]) -> None:
    """Register a function that another thread calls, more than once, when the process is asked to end."""
    _cancellations.append(cancel)


def end_on_sigterm() -> None:
    """Install the handler of SIGTERM; for programs that own their process."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # Another thread reads this pipe: a handler runs only when the main thread returns from a library call.
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_end_after_grace, args=(read_end,), name="termination", daemon=True).start()
    signal.signal(signal.SIGTERM, _terminate)


def end_without_collecting() -> None:
    """Have the interpreter end without collecting garbage, which takes 0.3 s of what a program of ours loads.

    Contexts have exited by then, and functions of `atexit` have run.
    """
    atexit.register(gc.freeze)


@contextlib.contextmanager
def finish_on_sigterm() -> Iterator[threading.Event]:
    """Within the context, the first SIGTERM or Ctrl-C sets the event; the next one, of either, is as SIGTERM.

    For loops that finish what they have begun: they look at the event between two steps.
    """
    global _finishing  # noqa: PLW0603 - a signal belongs to the process
    _finishing = _Finishing(threading.Event())
    interrupt = signal.signal(signal.SIGINT, _terminate)
    try:
        yield _finishing.stop
    finally:
        signal.signal(signal.SIGINT, interrupt)
        _finishing = None


def finish_on_interrupt_again() -> None:
    """Let Ctrl-C set the event of `finish_on_sigterm` again, after a library has taken the signal.

    Spark does when a session is created in the main thread.
    """
    if _finishing is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _terminate)


def end_with_parent() -> None:
    """End this process as SIGTERM does once its parent has exited; for drivers, which `spark-submit` starts.

    Killing `spark-submit` kills its JVM only. The driver would continue its work on the servers.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        threading.Thread(target=_watch_parent, args=(os.getppid(),), name="parent", daemon=True).start()


def end_now() -> NoReturn:
    """End as on SIGTERM; for the handler of another program, in the main thread.

    Raises:
        Terminated: always.
    """
    threading.Thread(target=_cancel_statements, name="termination", daemon=True).start()
    raise Terminated


def is_asked_to_end() -> bool:
    """Whether the process is ending; later errors, such as a cancelled statement, are no failures."""
    return _was_announced.is_set()


def _finish_first() -> bool:
    """Let the loop of `finish_on_sigterm` finish, if there is one, and this is the first signal."""
    if _finishing is None or _finishing.is_heard:
        return False
    # The thread sets the event: the main thread may be within it, and would wait for itself.
    _finishing.is_heard = True
    return True


def _terminate(signal_number: int, _frame: FrameType | None) -> None:
    if _finish_first():
        return
    # A further signal would not end the process sooner, and would interrupt the clean-up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _finishing is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _announce(signal_number)
    raise Terminated


def _end_after_grace(read_end: int) -> None:
    while True:
        received, finishing = os.read(read_end, 1)[0], _finishing
        if finishing is not None and received in _MESSAGES and not finishing.is_received:
            finishing.is_received = True
            finishing.stop.set()
        # The handler may be faster, and have left the loop.
        elif _was_announced.is_set() or received in ((signal.SIGTERM,) if finishing is None else _MESSAGES):
            break
    # In a thread of its own: a server that does not answer must not delay the exit.
    threading.Thread(target=_cancel_statements, name="cancel", daemon=True).start()
    time.sleep(GRACE_SECONDS)
    if not _was_announced.is_set():
        _announce(received)
    os._exit(EXIT_CODE)


def _cancel_statements() -> None:
    for _ in range(int(GRACE_SECONDS / _CANCEL_SECONDS)):
        for cancel in _cancellations:
            cancel()
        time.sleep(_CANCEL_SECONDS)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _announce(signal_number: int) -> None:
    _was_announced.set()
    # Not by `sys.stderr`, which the main thread may be using. The pipe may be closed.
    with contextlib.suppress(OSError):
        os.write(2, _MESSAGES[signal_number])
