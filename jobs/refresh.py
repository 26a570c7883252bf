"""`spark-submit jobs/refresh.py …`: runs `cdc_replay.jobs.refresh`."""

from __future__ import annotations

from cdc_replay.jobs.refresh import main

main()
