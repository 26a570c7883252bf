"""`spark-submit jobs/snapshot.py [--config=PATH] [--table=SCHEMA.TABLE …] SUBSCRIPTION`."""

from __future__ import annotations

import argparse

from cdc_replay.commands.snapshot import snapshot
from cdc_replay.config import load_config
from cdc_replay.jobs.application import run
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import SnapshotResult
from cdc_replay.terminal.progress import ProgressLog


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the application."""
    parser = argparse.ArgumentParser(description="Copy the initial state of a subscription")
    parser.add_argument("subscription")
    parser.add_argument("--table", action="append", default=[], dest="tables", metavar="SCHEMA.TABLE")
    return parser


def command(arguments: argparse.Namespace) -> tuple[SnapshotResult, ...]:
    """Run the command of these arguments.

    Raises:
        CdcReplayError: as the command.
    """
    tables = [QualifiedName.parse(table) for table in arguments.tables]
    config, subscription = load_config(arguments.config), arguments.subscription
    return (snapshot(config, subscription, tables=tables, report=ProgressLog()),)


def main() -> None:
    """Run the application with the arguments of this process."""
    run(build_parser(), command)


if __name__ == "__main__":
    main()
