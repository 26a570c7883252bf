"""`spark-submit jobs/replay.py [--config=PATH] [--to-lsn=LSN] SUBSCRIPTION …`.

Exits with 75 after a transient error of a subscription, once the others are applied. A permanent error is
only in the subscription's result: starting Spark again would change nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys

from cdc_replay.commands.replay import replay
from cdc_replay.config import load_config
from cdc_replay.errors import Retry
from cdc_replay.model.lsn import Lsn
from cdc_replay.private_files import set_private_umask
from cdc_replay.spark.exit_codes import ExitCode, errors_as_exit_codes
from cdc_replay.termination import end_on_sigterm, end_with_parent

set_private_umask()
end_on_sigterm()
end_with_parent()
logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
logging.getLogger("cdc_replay").setLevel(logging.INFO)
parser = argparse.ArgumentParser(description="Apply the change log to subscriptions of one publisher")
parser.add_argument("subscriptions", nargs="+")
parser.add_argument("--config")
parser.add_argument("--to-lsn", type=Lsn.parse)
with errors_as_exit_codes():
    arguments = parser.parse_args()
    outcomes = replay(load_config(arguments.config), arguments.subscriptions, to_lsn=arguments.to_lsn)
    for outcome in outcomes:
        sys.stdout.write(f"{json.dumps(outcome.to_dict())}\n")
    if any(outcome.retry is Retry.LATER for outcome in outcomes):
        sys.exit(ExitCode.LATER)
