"""Start and output of an application."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from cdc_replay.errors import CdcReplayError
from cdc_replay.model.printable import LogLineFormatter
from cdc_replay.model.results import Result
from cdc_replay.private_files import set_private_umask
from cdc_replay.spark.exit_codes import errors_as_exit_codes
from cdc_replay.spark.job_outcome import JobOutcome, write_outcome
from cdc_replay.spark.session import running_application
from cdc_replay.termination import end_on_sigterm, end_with_parent, end_without_collecting

AnyResult = TypeVar("AnyResult", bound=Result)


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """The arguments, default those of this process, with those that all applications have."""
    parser.add_argument("--config")
    return parser.parse_args(arguments)


def run(
    parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], tuple[AnyResult, ...]]
) -> tuple[AnyResult, ...]:
    """Run a command with the arguments of this process; print one line of JSON for each result.

    Raises:
        SystemExit: with a code of `ExitCode`, if the command raises an error of ours.
    """
    end_without_collecting()
    set_private_umask()
    end_on_sigterm()
    end_with_parent()
    handler = logging.StreamHandler()
    handler.setFormatter(LogLineFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("cdc_replay").setLevel(logging.INFO)
    with errors_as_exit_codes(), _errors_as_outcome():
        results = command(parse_arguments(parser))
        for result in results:
            sys.stdout.write(f"{json.dumps(result.to_dict())}\n")
        write_outcome(JobOutcome([result.to_dict() for result in results], application=running_application()))
    return results


@contextlib.contextmanager
def _errors_as_outcome() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        ours = isinstance(error, CdcReplayError)
        reason = str(error) if ours else f"{type(error).__name__}: {error}"
        write_outcome(JobOutcome(error=reason, application=running_application()))
        raise
