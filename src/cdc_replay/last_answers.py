"""The servers' last answers to `status`, kept between two commands for a time in which one is down.

One private file per configuration file, in `$XDG_STATE_HOME/cdc_replay`. It has names, positions, states and
times. Errors and notices are left out: they may name keys of rows, or addresses. A file that cannot be read
or written is no error: a status without earlier answers is a status, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from pydantic import TypeAdapter

from cdc_replay.model.status import LogRange, PublisherStatus, SubscriberStatus
from cdc_replay.private_files import FILE_MODE, make_folder

Value: TypeAlias = PublisherStatus | SubscriberStatus | LogRange

LARGEST_FILE: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class _Kept:
    answered_at: float
    value: Value


_FILE: Final = TypeAdapter(dict[str, _Kept])


def state_file(config_file: Path) -> Path:
    """The file for the servers of this configuration file."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:  # a user without a home: nothing can be kept
        base = os.devnull
    name = hashlib.sha256(os.fsencode(config_file)).hexdigest()[:16]
    return Path(base) / "cdc_replay" / f"status-{name}.json"


def read_answers(file: Path) -> dict[str, tuple[Value, float]]:
    """The answers and their age in seconds; none if the file is missing, damaged or another user's."""
    try:
        status = file.stat()
        if status.st_uid != os.geteuid() or status.st_size > LARGEST_FILE:
            return {}
        kept = _FILE.validate_json(file.read_bytes())
    except (OSError, ValueError):
        return {}
    now = time.time()
    return {key: (answer.value, max(0.0, now - answer.answered_at)) for key, answer in kept.items()}


def write_answers(file: Path, answers: Mapping[str, tuple[Value, float]]) -> None:
    """Replace the file by these answers, without what may hold values of rows."""
    now = time.time()
    kept = {key: _Kept(now - age, without_values(value)) for key, (value, age) in answers.items()}
    with contextlib.suppress(OSError):
        make_folder(file.parent)
        partial = file.with_suffix(f".{os.getpid()}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(_FILE.dump_json(kept))
        partial.replace(file)


def without_values(value: Value) -> Value:
    """The answer without texts of errors."""
    match value:
        case PublisherStatus():
            return replace(value, error=None)
        case SubscriberStatus(subscription, tables):
            outcome = (subscription.last_replay or "").partition(":")[0] or None
            return replace(
                value,
                subscription=replace(
                    subscription,
                    error=None,
                    behind_reason=None,
                    parked=None if subscription.parked is None else "parked",
                    last_replay=outcome,
                ),
                tables=tuple(
                    replace(table, notice=None, state=table.state.partition(":")[0]) for table in tables
                ),
            )
        case LogRange():
            return value
