"""What Spark starts on an executor to fork Python workers from: pyspark's daemon, our modules loaded first.

Loading Arrow and the compiled kernels takes two seconds of CPU. Forked workers have them already, also those
that take the place of workers which Spark has ended after a minute without work.

A worker collects garbage after each task, and would look at all that was loaded: some ten milliseconds of CPU
per task, and memory of its own for each object that it looks at. So that is put out of the collector's sight.

Nothing is run before the fork, so there is no thread or pool to be lost in it.
"""

from __future__ import annotations

import gc
import importlib

from pyspark.daemon import manager

_LOADED_BEFORE_THE_FORK = (
    "cdc_replay.apply.staging",
    "cdc_replay.commands.flow",
    "cdc_replay.compact.hashing",
    "cdc_replay.pgoutput.columnar",
    "cdc_replay.taking.kernels",
    "pandas",  # by pyspark, as soon as a task has Arrow's batches
    "pyspark.worker",
)

if __name__ == "__main__":
    for name in _LOADED_BEFORE_THE_FORK:
        importlib.import_module(name)
    gc.freeze()
    manager()
