"""What `doctor` finds: one check each, with what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from cdc_replay.errors import CdcReplayError
from cdc_replay.model.results import Result


class Verdict(enum.Enum):
    """Whether a command can run: as it is, with a reservation, or not."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One check of `subject`, such as `publisher shop`; `remedy` is empty if there is nothing to do."""

    subject: str
    verdict: Verdict
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DoctorResult(Result):
    """All checks; `error` names the subjects with one that failed."""

    checks: tuple[Check, ...]
    error: str | None = None


def failed_check(subject: str, error: Exception) -> Check:
    """The check that ended with this error."""
    if not isinstance(error, CdcReplayError):
        return Check(subject, Verdict.FAILED, " ".join(str(error).split()))
    detail = "" if error.detail is None else f": {error.detail}"
    return Check(subject, Verdict.FAILED, f"{error.message}{detail}", error.hint or "")
