"""The program that is disturbed: like `cdc-replay batch`, with a failpoint before each command line.

    FAILPOINT<tab>COMMAND …

The failpoint holds in this process for that line. Spark workers have theirs from Spark's configuration.
"""

from __future__ import annotations

import importlib
import os
import sys

from cdc_replay import failpoints
from cdc_replay.cli import run_line
from cdc_replay.commands.batch import batch


def main() -> None:
    for line in sys.stdin:
        failpoint, _, command = line.partition("\t")
        os.environ[failpoints.VARIABLE] = failpoint
        # It counts anew how often a point is reached; whoever has imported the function sees that.
        importlib.reload(failpoints)
        batch([command], sys.stdout, run_line)


if __name__ == "__main__":
    main()
