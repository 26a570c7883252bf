"""Start and output of an application."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from typing import TypeVar

from cdc_replay.model.results import Result
from cdc_replay.private_files import set_private_umask
from cdc_replay.spark.exit_codes import errors_as_exit_codes
from cdc_replay.termination import end_on_sigterm, end_with_parent

AnyResult = TypeVar("AnyResult", bound=Result)


def run(
    parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], tuple[AnyResult, ...]]
) -> tuple[AnyResult, ...]:
    """Run a command with the arguments of this process; print one line of JSON for each result.

    Raises:
        SystemExit: with a code of `ExitCode`, if the command raises an error of ours.
    """
    set_private_umask()
    end_on_sigterm()
    end_with_parent()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("cdc_replay").setLevel(logging.INFO)
    parser.add_argument("--config")
    with errors_as_exit_codes():
        results = command(parser.parse_args())
        for result in results:
            sys.stdout.write(f"{json.dumps(result.to_dict())}\n")
    return results
