"""`replay__<group>`: one Spark application applies the change log to all subscriptions of the group.

Runs when the change log has new transactions, and when `watch__<publisher>` finds a lagging subscription; or
else on the group's schedule.
"""

from __future__ import annotations

from cdc_replay.airflow import ReplayDag, load_config

config = load_config()
for group in config.groups.values():
    ReplayDag(group.subscriptions, config=config)
