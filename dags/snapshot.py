"""`snapshot__<subscription>`: copy the tables that need it, or those named, under one exported snapshot."""

from __future__ import annotations

from cdc_replay.airflow import SnapshotDag, load_config

config = load_config()
for subscription in config.subscriptions:
    SnapshotDag(subscription, config=config)
