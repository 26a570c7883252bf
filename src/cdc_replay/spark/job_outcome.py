"""What a Spark application reports to the task that started it: its results, and why it failed.

It writes a private file that the environment of its driver names. The output of `spark-submit` is no such
channel: it has the lines of the JVM and of all libraries, and a line could be forged. Without the variable,
for a person or in deploy mode cluster, nothing is written. A killed application leaves no file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc_replay.errors import Retry
from cdc_replay.model.results import Json

OUTCOME_FILE: Final = "CDC_REPLAY_OUTCOME_FILE"

REASONS_SHOWN: Final = 5
"""An alert names so many failed subscriptions of a group."""

LONGEST_REASON: Final = 2000
"""Characters. An error of the JVM repeats its whole trace, which is in the log."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The results of an application's command, or the error that ended it, and Spark's id of it."""

    results: Sequence[Mapping[str, Json]] = ()
    error: str | None = None
    application: str | None = None
    """Such as `app-20261125093847-0012`; None if no session was started."""

    @property
    def reason(self) -> str | None:
        """Why the application failed, in the words of its errors; None if it does not say."""
        reasons = [self.error] if self.error else list(self._transient_errors())
        hidden = len(reasons) - REASONS_SHOWN
        shown = [reason[:LONGEST_REASON] for reason in reasons[:REASONS_SHOWN]]
        return "\n".join([*shown, *([f"and {hidden} more"] if hidden > 0 else [])]) or None

    def _transient_errors(self) -> Iterator[str]:
        """Those that make a replay fail; a permanent one is for the subscription's own report."""
        for result in self.results:
            if result.get("error") and result.get("retry") == Retry.LATER.value:
                yield f'subscription "{result["subscription"]}": {result["error"]}'


def write_outcome(outcome: JobOutcome) -> None:
    """Write the file that the environment names, if it names one."""
    path = os.environ.get(OUTCOME_FILE)
    if path:
        content = {
            "results": [dict(result) for result in outcome.results],
            "error": outcome.error,
            "application": outcome.application,
        }
        Path(path).write_text(json.dumps(content), encoding="utf-8")


def read_outcome(path: Path) -> JobOutcome:
    """What the application wrote; an empty outcome if it wrote nothing, or was killed while it wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return JobOutcome()
    return JobOutcome(tuple(content["results"]), content["error"], content.get("application"))
