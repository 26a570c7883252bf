"""The plugin in Airflow's plugins folder, whose files every Airflow process executes."""

from __future__ import annotations

from cdc_replay.airflow.plugin import CdcReplayPlugin

__all__ = ["CdcReplayPlugin"]
