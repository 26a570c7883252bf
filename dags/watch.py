"""`watch__<publisher>`: trigger the replay of subscriptions that lag behind the change log.

Groups with their own schedule are skipped. New DAGs of this kind are not paused: they trigger nothing while
the replay DAG is paused. `CDC_REPLAY_WATCH_SCHEDULE` is as that of `capture__<publisher>` (default 30).
"""

from __future__ import annotations

from cdc_replay.airflow import WatchDag, followed_groups, load_config

config = load_config()
for publisher in config.publishers:
    if followed_groups(config, publisher):
        WatchDag(publisher, config=config)
