"""`spark-submit jobs/backfill.py …`: runs `cdc_replay.jobs.backfill`."""

from __future__ import annotations

from cdc_replay.jobs.backfill import main

main()
