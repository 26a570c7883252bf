"""`refresh__<subscription>`: read the publications again, as REFRESH PUBLICATION does."""

from __future__ import annotations

from cdc_replay.airflow import RefreshDag, load_config

config = load_config()
for subscription in config.subscriptions:
    RefreshDag(subscription, config=config)
