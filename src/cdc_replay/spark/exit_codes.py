"""How the scripts in `jobs/` tell whoever started them whether starting them again can help.

| exit code | means                                                                             |
|-----------|-----------------------------------------------------------------------------------|
| 0         | done; what can only fail again has been recorded                                  |
| 65        | an error that waiting cannot help                                                 |
| 75        | an error that may pass; what could be done in spite of it is done and recorded    |
| 143       | it was asked to end by SIGTERM (`termination`), and may be started again          |
| others    | nothing of ours: Python, the JVM and `spark-submit` use 1 and 2, signals 128 and up |

The two are `EX_DATAERR` and `EX_TEMPFAIL` of sysexits.h. In deploy-mode client `spark-submit` exits as its
driver does.
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
    """Something has to be changed first."""
    LATER = 75
    """The cause may pass by itself."""


@contextlib.contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Tell our errors on standard error, without a traceback, and exit with the code of their class.

    Raises:
        SystemExit: in place of a `CdcReplayError`, and of any error once the job is asked to end.
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
