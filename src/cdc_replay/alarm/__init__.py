"""Alarms: `observe` sees them in a status, `memory` knows what was told, `channels` send what is new.

    status, log folder ─▶ observe ─▶ Observed ─▶ Ledger.news ─▶ message ─▶ channels (mail, webhook)
                                                   ▲      │
                                                   └ told ┘

The memory is with the watcher: in Airflow's metadata database for tasks, in a private file for the command
line. So it is there when a publisher, a subscriber or a change log is not.
"""
