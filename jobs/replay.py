"""`spark-submit jobs/replay.py …`: runs `cdc_replay.jobs.replay`."""

from __future__ import annotations

from cdc_replay.jobs.replay import main

main()
