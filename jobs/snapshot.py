"""`spark-submit jobs/snapshot.py [--config=PATH] [--table=SCHEMA.TABLE …] SUBSCRIPTION`."""

from __future__ import annotations

import argparse
import json
import logging
import sys

from cdc_replay.commands.snapshot import snapshot
from cdc_replay.config import load_config
from cdc_replay.model.relation import QualifiedName
from cdc_replay.private_files import set_private_umask
from cdc_replay.spark.exit_codes import errors_as_exit_codes
from cdc_replay.termination import end_on_sigterm, end_with_parent

set_private_umask()
end_on_sigterm()
end_with_parent()
logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
logging.getLogger("cdc_replay").setLevel(logging.INFO)
parser = argparse.ArgumentParser(description="Copy the initial state of a subscription")
parser.add_argument("subscription")
parser.add_argument("--config")
parser.add_argument("--table", action="append", default=[], dest="tables", metavar="SCHEMA.TABLE")
arguments = parser.parse_args()
with errors_as_exit_codes():
    tables = [QualifiedName(*table.split(".", 1)) for table in arguments.tables]
    result = snapshot(load_config(arguments.config), arguments.subscription, tables=tables)
    sys.stdout.write(f"{json.dumps(result.to_dict())}\n")
