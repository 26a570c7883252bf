"""`spark-submit jobs/replay.py [--config=PATH] [--to-lsn=LSN] [--follow-for=SECONDS] SUBSCRIPTION …`.

Exits with 75 after a transient error of a subscription, once the others are applied. A permanent error is
only in the subscription's result: starting Spark again would change nothing.
"""

from __future__ import annotations

import argparse
import sys

from cdc_replay.commands.replay import replay
from cdc_replay.commands.replay_and_follow import replay_and_follow
from cdc_replay.config import load_config
from cdc_replay.errors import Retry
from cdc_replay.jobs.application import run
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import ReplayResult
from cdc_replay.spark.exit_codes import ExitCode
from cdc_replay.terminal.progress import ProgressLog


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the application."""
    parser = argparse.ArgumentParser(description="Apply the change log to subscriptions of one publisher")
    parser.add_argument("subscriptions", nargs="+")
    parser.add_argument("--to-lsn", type=Lsn.parse)
    parser.add_argument("--follow-for", type=float, default=0.0)
    return parser


def command(arguments: argparse.Namespace) -> tuple[ReplayResult, ...]:
    """Run the command of these arguments.

    Raises:
        CdcReplayError: as the command.
    """
    config, upto, report = load_config(arguments.config), arguments.to_lsn, ProgressLog()
    names = arguments.subscriptions
    if arguments.follow_for:
        return replay_and_follow(config, names, to_lsn=upto, seconds=arguments.follow_for, report=report)
    return replay(config, names, to_lsn=upto, report=report)


def main() -> None:
    """Run the application with the arguments of this process."""
    results = run(build_parser(), command)
    if any(result.retry is Retry.LATER for result in results):
        sys.exit(ExitCode.LATER)


if __name__ == "__main__":
    main()
