"""`spark-submit jobs/backfill.py --from=P --to=P [--into-conn-id=ID] [--dry-run] SUBSCRIPTION`.

A position P is an LSN or a time. The connection of another database is looked up in the environment.
"""

from __future__ import annotations

import argparse

from cdc_replay.commands.backfill import backfill
from cdc_replay.config import load_config
from cdc_replay.jobs.application import run
from cdc_replay.model.results import BackfillResult
from cdc_replay.postgres.environment_connection import connection_from_environment
from cdc_replay.terminal.progress import ProgressLog


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the application."""
    parser = argparse.ArgumentParser(description="Apply a past range of the change log again")
    parser.add_argument("subscription")
    parser.add_argument("--from", required=True, dest="start", metavar="LSN|TIMESTAMP")
    parser.add_argument("--to", required=True, dest="end", metavar="LSN|TIMESTAMP")
    parser.add_argument("--into-conn-id")
    parser.add_argument("--dry-run", action="store_true")
    return parser


def command(arguments: argparse.Namespace) -> tuple[BackfillResult, ...]:
    """Run the command of these arguments.

    Raises:
        CdcReplayError: as the command.
    """
    conn_id, config = arguments.into_conn_id, load_config(arguments.config)
    into = connection_from_environment(conn_id) if conn_id else None
    subscription, start, end = arguments.subscription, arguments.start, arguments.end
    dry_run, report = arguments.dry_run, ProgressLog()
    return (backfill(config, subscription, start, end, into=into, dry_run=dry_run, report=report),)


def main() -> None:
    """Run the application with the arguments of this process."""
    run(build_parser(), command)


if __name__ == "__main__":
    main()
