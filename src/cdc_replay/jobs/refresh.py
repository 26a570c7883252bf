"""`spark-submit jobs/refresh.py [--config=PATH] SUBSCRIPTION [--reconcile] [--dry-run]`."""

from __future__ import annotations

import argparse

from cdc_replay.commands.refresh import refresh
from cdc_replay.config import load_config
from cdc_replay.jobs.application import run
from cdc_replay.model.results import RefreshResult
from cdc_replay.terminal.progress import ProgressLog


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the application."""
    parser = argparse.ArgumentParser(description="Read the publications of a subscription again")
    parser.add_argument("subscription")
    parser.add_argument("--reconcile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    return parser


def command(arguments: argparse.Namespace) -> tuple[RefreshResult, ...]:
    """Run the command of these arguments.

    Raises:
        CdcReplayError: as the command.
    """
    config, options = load_config(arguments.config), arguments
    return (
        refresh(
            config,
            options.subscription,
            reconcile=options.reconcile,
            dry_run=options.dry_run,
            report=ProgressLog(),
        ),
    )


def main() -> None:
    """Run the application with the arguments of this process."""
    run(build_parser(), command)


if __name__ == "__main__":
    main()
