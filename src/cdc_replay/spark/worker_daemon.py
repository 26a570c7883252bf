"""What Spark starts on an executor to fork Python workers from: pyspark's daemon, our modules loaded first.

Loading Arrow and the compiled kernels takes two seconds of CPU. Forked workers have them already, also those
that take the place of workers which Spark has ended after a minute without work.

A worker collects garbage after each task, and would look at all that was loaded: some ten milliseconds of CPU
per task, and memory of its own for each object that it looks at. So that is put out of the collector's sight.

Spark puts its own archive of pyspark before all else. What is loaded from an archive is compiled in each
process, and each worker lists the archive anew: a second and a half of CPU. Where the installed pyspark has
brought the archive along, what is installed is taken.

Arrow would load pandas, which nobody uses here: a third of a second.

Nothing is run before the fork, so there is no thread or pool to be lost in it.
"""

from __future__ import annotations

import gc
import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pyarrow as pa

from cdc_replay.private_files import set_private_umask

_LOADED_BEFORE_THE_FORK = (
    "cdc_replay.replay.apply.staging",
    "cdc_replay.replay.window_job",
    "cdc_replay.arrow.key_hash",
    "cdc_replay.pgoutput.columnar",
    "cdc_replay.arrow.take_kernel",
    "pyspark.worker",
)


def prefer_installed(package: str) -> None:
    """Take archives that an installed package has brought along out of the search for modules."""
    archives = [place for place in sys.path if Path(place).is_file()]
    installed = PathFinder.find_spec(package, [place for place in sys.path if place not in archives])
    if installed is None or installed.origin is None:
        return
    folder = Path(installed.origin).parent
    for archive in archives:
        if folder in Path(archive).parents:
            sys.path.remove(archive)
            sys.path_importer_cache.pop(archive, None)


class _WithoutPandas:
    """Finds no pandas; for `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


def arrow_without_pandas() -> None:
    """Have Arrow do without pandas, which it loads, if it is there, when it first makes an array of a list.

    Whoever imports pandas gets it as before.
    """
    sys.meta_path.insert(0, _WithoutPandas)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(_WithoutPandas)


if __name__ == "__main__":
    set_private_umask()
    prefer_installed("pyspark")
    arrow_without_pandas()
    for name in _LOADED_BEFORE_THE_FORK:
        importlib.import_module(name)
    gc.freeze()
    importlib.import_module("pyspark.daemon").manager()
