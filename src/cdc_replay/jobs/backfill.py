"""`spark-submit jobs/backfill.py --from=P --to=P [OPTION …] SUBSCRIPTION`.

Options: `--table=SCHEMA.TABLE`, more than once; `--into-conn-id=ID`; `--dry-run`. A position P is an LSN or a
time. The connection of another database is looked up in the environment.
"""

from __future__ import annotations

import argparse

from cdc_replay.commands.backfill import backfill
from cdc_replay.config import load_config
from cdc_replay.jobs.application import run
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import BackfillResult
from cdc_replay.postgres.environment_connection import connection_from_environment
from cdc_replay.terminal.progress import ProgressLog


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the application."""
    parser = argparse.ArgumentParser(description="Apply a past range of the change log again")
    parser.add_argument("subscription")
    parser.add_argument("--from", required=True, dest="start", metavar="LSN|TIMESTAMP")
    parser.add_argument("--to", required=True, dest="end", metavar="LSN|TIMESTAMP")
    parser.add_argument("--table", action="append", default=[], dest="tables", metavar="SCHEMA.TABLE")
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
    return (
        backfill(
            config,
            subscription,
            start,
            end,
            tables=[QualifiedName.parse(table) for table in arguments.tables],
            into=into,
            dry_run=arguments.dry_run,
            report=ProgressLog(),
        ),
    )


def main() -> None:
    """Run the application with the arguments of this process."""
    run(build_parser(), command)


if __name__ == "__main__":
    main()
