"""`watch__<publisher>`: trigger the replay of subscriptions that lag, and tell alarms.

Groups with their own schedule are not triggered. New DAGs of this kind are not paused: they trigger nothing
while the replay DAG is paused. `CDC_REPLAY_WATCH_SCHEDULE` is as that of `capture__<publisher>` (default 30).
"""

from __future__ import annotations

from cdc_replay.airflow import WatchDag, followed_groups, load_config

config = load_config()
for publisher in config.publishers:
    if config.alarms.notify or followed_groups(config, publisher):
        WatchDag(publisher, config=config)
