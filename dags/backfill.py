"""`backfill__<subscription>`: apply a past range of the change log again."""

from __future__ import annotations

from cdc_replay.airflow import BackfillDag, load_config

config = load_config()
for subscription in config.subscriptions:
    BackfillDag(subscription, config=config)
