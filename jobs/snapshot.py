"""`spark-submit jobs/snapshot.py …`: runs `cdc_replay.jobs.snapshot`."""

from __future__ import annotations

from cdc_replay.jobs.snapshot import main

main()
