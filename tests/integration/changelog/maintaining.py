"""A process that captures, compacts or prunes repeatedly, until a file `stop` exists.

Of two that change the log's segments, one may be refused; it then tries again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from cdc_replay.changelog.compaction import CompactionLimits
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.prune import prune
from cdc_replay.config import load_config
from cdc_replay.errors import ChangeLogConflict

EAGER = CompactionLimits(worthwhile=3)


def main() -> None:
    file = Path(sys.argv[1])
    config = load_config(file)
    uri = config.publisher("pub").change_log
    work: dict[str, Callable[[], object]] = {
        "capture": lambda: capture(config, "pub"),
        "compact": lambda: ChangeLog.open(uri).compact(EAGER),
        "prune": lambda: prune(config, "pub"),
    }
    once = work[sys.argv[2]]
    while not (file.parent / "stop").exists():
        if sys.argv[2] == "capture":
            once()
            continue
        with contextlib.suppress(ChangeLogConflict):
            once()


if __name__ == "__main__":
    main()
