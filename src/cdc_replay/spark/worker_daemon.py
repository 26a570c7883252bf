"""The daemon from which executors fork Python workers: pyspark's own, with our modules loaded first.

- Loading Arrow and the compiled kernels takes two seconds of CPU. Forked workers have them already, also
  those that replace workers which Spark ended after a minute without work.
- A worker collects garbage after each task. Loaded objects are frozen, which saves it some ten milliseconds
  of CPU per task, and private copies of their memory pages.
- Spark puts its own archive of pyspark first on the path. Modules of an archive are compiled in each process,
  and each worker lists the archive: 0.4 s of the 7 s of CPU that a cold window costs. If the installed
  pyspark ships the archive, the installed modules are used.

Nothing runs before the fork, so no thread or pool is lost in it.
"""

from __future__ import annotations

import gc
import importlib
import socket
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from cdc_replay.private_files import set_private_umask
from cdc_replay.spark.preloaded_daemon import hand_over, take_over

_LOADED_BEFORE_THE_FORK = (
    "cdc_replay.replay.apply.staging",
    "cdc_replay.replay.window_job",
    "cdc_replay.arrow.key_hash",
    "cdc_replay.pgoutput.columnar",
    "cdc_replay.arrow.list_kernels",
    "pyspark.worker",
    # Arrow loads it when it first converts an array.
    "pandas",
)


def prefer_installed(package: str) -> None:
    """Remove archives that the installed package ships from the module search path."""
    archives = [entry for entry in sys.path if Path(entry).is_file()]
    installed = PathFinder.find_spec(package, [entry for entry in sys.path if entry not in archives])
    if installed is None or installed.origin is None:
        return
    folder = Path(installed.origin).parent
    for archive in archives:
        if folder in Path(archive).parents:
            sys.path.remove(archive)
            sys.path_importer_cache.pop(archive, None)


def load() -> None:
    """Load what workers need, before they are forked."""
    prefer_installed("pyspark")
    # There is none yet, and to look for it takes a fifth of the time.
    gc.disable()
    for name in _LOADED_BEFORE_THE_FORK:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def main() -> None:
    """Fork workers for Spark, which has started this process, or will start one that hands over to it.

    In the second case the argument is the socket's file descriptor.
    """
    set_private_umask()
    if sys.argv[1].isdecimal():
        load()
        with socket.socket(fileno=int(sys.argv[1])) as listener, take_over(listener):
            prefer_installed("pyspark")
            fork_workers()
    elif not hand_over():
        load()
        fork_workers()


def fork_workers() -> None:
    """Fork one whenever Spark asks for it, until Spark ends."""
    importlib.import_module("pyspark.daemon").manager()


if __name__ == "__main__":
    main()
