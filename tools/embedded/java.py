"""The environment in which `spark-submit` and its workers run on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cdc_replay.spark.java import local_environment


def spark_environment() -> dict[str, str]:
    """Java, this Python and loopback for Spark, and this environment's programs first on PATH."""
    scripts = str(Path(sys.executable).parent)
    return local_environment() | {"PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}
