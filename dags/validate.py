"""`validate__<subscription>`: prove with Great Expectations that the subscriber is consistent."""

from __future__ import annotations

from cdc_replay.airflow import ValidateDag, load_config

config = load_config()
for subscription in config.subscriptions:
    ValidateDag(subscription, config=config)
