"""`capture__<publisher>`: set up the slot if it is missing, then pull its changes into the change log.

`CDC_REPLAY_CAPTURE_SCHEDULE` is a number of seconds (default 60), a cron expression or preset, or `none` for
runs that a person or another system starts.
"""

from __future__ import annotations

from cdc_replay.airflow import CaptureDag, load_config

config = load_config()
for publisher in config.publishers:
    CaptureDag(publisher, config=config)
