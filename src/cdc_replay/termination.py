"""Ending when somebody asks for it with SIGTERM: Airflow, systemd, a container's engine, a person.

What is not committed is rolled back, as after any kill; what is more, no statement is left running on a
server, and the process says that it ends. Who asks does not wait for long: Airflow kills after five seconds.

| after      | happens                                                                                     |
|------------|---------------------------------------------------------------------------------------------|
| at once    | `Terminated` is raised in the main thread; statements of all threads are cancelled          |
| by itself  | contexts are left, sessions close, the JVM ends with its parent and Spark's workers with it |
| 4 seconds  | whatever still keeps the process from ending is left as it is                               |

`Terminated` is a `SystemExit`: nothing takes it for a failure that is to be told, or tried again. What fails
while contexts are left can take its place; `is_asked_to_end` tells.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, NoReturn

EXIT_CODE: Final = 128 + signal.SIGTERM
GRACE_SECONDS: Final = 4.0

_CANCEL_EVERY_SECONDS: Final = 0.5
_LOOK_EVERY_SECONDS: Final = 1.0

_LINE: Final = b"cdc-replay: terminated by SIGTERM; what is not committed is rolled back\n"

_cancellations: list[Callable[[], None]] = []
_told = threading.Event()


class Terminated(SystemExit):
    """The process was asked to end."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


def cancel_on_termination(cancel: Callable[[], None]) -> None:
    """Have a function called, by another thread and more than once, when the process is to end."""
    _cancellations.append(cancel)


def end_on_sigterm() -> None:
    """Have SIGTERM end this process, as told above; for programs, which own their process."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Not in the handler: that waits until the main thread is back from whatever library it is in.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_end_in_time, args=(reading,), name="termination", daemon=True).start()
    signal.signal(signal.SIGTERM, _terminate)


def end_with_parent() -> None:
    """End this process as SIGTERM does once its parent is gone; for drivers, which `spark-submit` starts.

    Whoever kills `spark-submit` kills its JVM only. The driver would go on with what it does on the servers.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        threading.Thread(target=_watch_parent, args=(os.getppid(),), name="parent", daemon=True).start()


def end_now() -> NoReturn:
    """What SIGTERM does, called by another program's handler of it, in the main thread.

    Raises:
        Terminated: always.
    """
    threading.Thread(target=_cancel_statements, name="termination", daemon=True).start()
    raise Terminated


def is_asked_to_end() -> bool:
    """Whether SIGTERM has come; what fails after that, such as a cancelled statement, is no failure."""
    return _told.is_set()


def _terminate(_number: int, _frame: FrameType | None) -> None:
    # Asking again does not end it sooner, and would break off what tidies up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _tell()
    raise Terminated


def _end_in_time(reading: int) -> None:
    while os.read(reading, 1)[0] != signal.SIGTERM:
        pass
    # Beside this: a server that does not answer must not hold it up.
    threading.Thread(target=_cancel_statements, name="cancel", daemon=True).start()
    time.sleep(GRACE_SECONDS)
    if not _told.is_set():
        _tell()
    os._exit(EXIT_CODE)


def _cancel_statements() -> None:
    for _ in range(int(GRACE_SECONDS / _CANCEL_EVERY_SECONDS)):
        for cancel in _cancellations:
            cancel()
        time.sleep(_CANCEL_EVERY_SECONDS)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _tell() -> None:
    _told.set()
    # Not by `sys.stderr`, which the main thread may be in the middle of. Who reads it may be gone.
    with contextlib.suppress(OSError):
        os.write(2, _LINE)
