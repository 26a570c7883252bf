"""`spark-submit jobs/refresh.py [--config=PATH] SUBSCRIPTION`."""

from __future__ import annotations

import argparse
import json
import sys

from cdc_replay.commands.refresh import refresh
from cdc_replay.config import load_config
from cdc_replay.errors import CdcReplayError

parser = argparse.ArgumentParser(description="Read the publications of a subscription again")
parser.add_argument("subscription")
parser.add_argument("--config")
arguments = parser.parse_args()
try:
    result = refresh(load_config(arguments.config), arguments.subscription)
    sys.stdout.write(f"{json.dumps(result.to_dict())}\n")
except CdcReplayError as error:
    sys.exit(str(error))
