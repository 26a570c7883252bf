"""The program that is killed: `cdc-replay`, with tables cut into chunks that a test can afford."""

from __future__ import annotations

import sys

from cdc_replay.snapshot import plan

CHUNK_BYTES = 64 * 1024


def main() -> None:
    # Before `load` is imported, which takes it as a default.
    plan.CHUNK_BYTES = CHUNK_BYTES  # type: ignore[misc]
    from cdc_replay.cli import main as run

    run(sys.argv[1:])


if __name__ == "__main__":
    main()
