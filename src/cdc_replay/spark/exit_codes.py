"""Exit codes of the scripts in `jobs/`: whether starting them again can help.

| exit code | meaning                                                                              |
|-----------|--------------------------------------------------------------------------------------|
| 0         | done; permanent errors are recorded in the result                                    |
| 65        | a permanent error                                                                    |
| 75        | a transient error; all work that it did not prevent is done and recorded             |
| 143       | ended by SIGTERM (`termination`); may be started again                               |
| others    | not ours: Python, the JVM and `spark-submit` use 1 and 2, signals 128 and up         |

65 and 75 are `EX_DATAERR` and `EX_TEMPFAIL` of sysexits.h. In deploy-mode client, `spark-submit` exits with
the code of its driver.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterator

from cdc_replay.errors import CdcReplayError
from cdc_replay.termination import EXIT_CODE, is_asked_to_end


class ExitCode(enum.IntEnum):
    """Why a job has failed."""

    NEVER = 65
    """A permanent error."""
    LATER = 75
    """A transient error."""


@contextlib.contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Print our errors to standard error without a traceback, and exit with the code of their class.

    Raises:
        SystemExit: instead of a `CdcReplayError`, or of any error after SIGTERM.
    """
    try:
        yield
    except Exception as error:
        if is_asked_to_end():
            sys.exit(EXIT_CODE)
        if not isinstance(error, CdcReplayError):
            raise
        sys.stderr.write(f"{error}\n")
        sys.exit(ExitCode[error.retry.name])
