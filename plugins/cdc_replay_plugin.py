"""What Airflow finds when it looks for plugins: it executes every file of this folder, in every process."""

from __future__ import annotations

from cdc_replay.airflow.plugin import CdcReplayPlugin

__all__ = ["CdcReplayPlugin"]
