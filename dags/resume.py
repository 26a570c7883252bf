"""`resume__<subscription>`: let what is parked be replayed again, with or without what parked it."""

from __future__ import annotations

from cdc_replay.airflow import ResumeDag, load_config

config = load_config()
for subscription in config.subscriptions:
    ResumeDag(subscription, config=config)
