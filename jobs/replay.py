"""`spark-submit jobs/replay.py [--config=PATH] [--to-lsn=LSN] SUBSCRIPTION …`.

Exits 0 when every subscription has its result, good or bad, and 1 when the application itself failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys

from cdc_replay.commands.replay import replay
from cdc_replay.config import load_config
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.lsn import Lsn

logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
logging.getLogger("cdc_replay").setLevel(logging.INFO)
parser = argparse.ArgumentParser(description="Apply the change log to subscriptions of one publisher")
parser.add_argument("subscriptions", nargs="+")
parser.add_argument("--config")
parser.add_argument("--to-lsn", type=Lsn.parse)
arguments = parser.parse_args()
try:
    for outcome in replay(load_config(arguments.config), arguments.subscriptions, to_lsn=arguments.to_lsn):
        sys.stdout.write(f"{json.dumps(outcome.to_dict())}\n")
except CdcReplayError as error:
    sys.exit(str(error))
