"""`spark-submit jobs/refresh.py [--config=PATH] SUBSCRIPTION [--reconcile] [--dry-run]`."""

from __future__ import annotations

import argparse
import json
import logging
import sys

from cdc_replay.commands.refresh import refresh
from cdc_replay.config import load_config
from cdc_replay.private_files import set_private_umask
from cdc_replay.spark.exit_codes import errors_as_exit_codes
from cdc_replay.termination import end_on_sigterm, end_with_parent

set_private_umask()
end_on_sigterm()
end_with_parent()
logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
logging.getLogger("cdc_replay").setLevel(logging.INFO)
parser = argparse.ArgumentParser(description="Read the publications of a subscription again")
parser.add_argument("subscription")
parser.add_argument("--config")
parser.add_argument("--reconcile", action="store_true")
parser.add_argument("--dry-run", action="store_true")
arguments = parser.parse_args()
with errors_as_exit_codes():
    config = load_config(arguments.config)
    result = refresh(config, arguments.subscription, reconcile=arguments.reconcile, dry_run=arguments.dry_run)
    sys.stdout.write(f"{json.dumps(result.to_dict())}\n")
