"""`spark-submit jobs/backfill.py --from=P --to=P [--into-conn-id=ID] [--dry-run] SUBSCRIPTION`.

A position P is an LSN or a time. The connection of another database is looked up in the environment.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys

from cdc_replay.commands.backfill import backfill
from cdc_replay.config import load_config
from cdc_replay.postgres.environment_connection import connection_from_environment
from cdc_replay.private_files import set_private_umask
from cdc_replay.spark.exit_codes import errors_as_exit_codes
from cdc_replay.termination import end_on_sigterm, end_with_parent

set_private_umask()
end_on_sigterm()
end_with_parent()
logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
logging.getLogger("cdc_replay").setLevel(logging.INFO)
parser = argparse.ArgumentParser(description="Apply a past range of the change log again")
parser.add_argument("subscription")
parser.add_argument("--config")
parser.add_argument("--from", required=True, dest="start", metavar="LSN|TIMESTAMP")
parser.add_argument("--to", required=True, dest="end", metavar="LSN|TIMESTAMP")
parser.add_argument("--into-conn-id")
parser.add_argument("--dry-run", action="store_true")
arguments = parser.parse_args()
with errors_as_exit_codes():
    into = connection_from_environment(arguments.into_conn_id) if arguments.into_conn_id else None
    config = load_config(arguments.config)
    result = backfill(
        config, arguments.subscription, arguments.start, arguments.end, into=into, dry_run=arguments.dry_run
    )
    sys.stdout.write(f"{json.dumps(result.to_dict())}\n")
