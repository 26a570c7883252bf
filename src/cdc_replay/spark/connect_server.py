"""A Spark Connect server with the settings that this package's jobs want.

    python -m cdc_replay.spark.connect_server [--host HOST] [--port PORT] [--master URL] [--conf KEY=VALUE …]

The process becomes the server: it ends by a signal. The server's token is that of the environment variable
`SPARK_CONNECT_AUTHENTICATE_TOKEN`. Without one, everybody who reaches the port can run code in it, so it
listens on loopback unless told otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Final

from cdc_replay.private_files import set_private_umask
from cdc_replay.spark.java import local_environment
from cdc_replay.spark.session import DEFAULTS

SERVER_CLASS: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"

TOKEN: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105 - the name of Spark's variable

SETTINGS: Final[dict[str, str]] = {
    # A client that was killed asks for no results: what it had started ends soon, and frees its locks.
    "spark.connect.execute.manager.detachedTimeout": "20s",
    "spark.connect.execute.manager.maintenanceInterval": "5s",
    # Sessions are released at the end of a task. Those of killed tasks remain.
    "spark.connect.session.manager.defaultSessionTimeout": "10m",
    "spark.log.level": "WARN",
}
"""Beside the defaults of every session."""


LOCAL: Final = re.compile(r"local\[(\*|\d+)\]")


def server_settings(host: str, port: int) -> dict[str, str]:
    """The settings of a server that listens there."""
    listening = {"spark.connect.grpc.binding.address": host, "spark.connect.grpc.binding.port": str(port)}
    return DEFAULTS | SETTINGS | listening


def parallelism_of(master: str) -> dict[str, str]:
    """The number of cores of a local master as a setting: so no session has to find out."""
    local = LOCAL.fullmatch(master)
    if local is None:
        return {}
    cores = len(os.sched_getaffinity(0)) if local[1] == "*" else int(local[1])
    return {"spark.default.parallelism": str(cores)}


def server_command(master: str, settings: Mapping[str, str]) -> list[str]:
    """The command that starts it. A token is not among the settings: every user sees the arguments."""
    options = [f"--conf={key}={value}" for key, value in settings.items()]
    return ["spark-submit", f"--master={master}", f"--class={SERVER_CLASS}", *options, "spark-internal"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Become the server."""
    parser = argparse.ArgumentParser(description="Start a Spark Connect server for cdc-replay")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: loopback only")
    parser.add_argument("--port", type=int, default=15002)
    parser.add_argument("--master", default="local[*]")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    own = dict(setting.split("=", 1) for setting in options.conf)
    set_private_umask()
    settings = server_settings(options.host, options.port) | parallelism_of(options.master) | own
    command = server_command(options.master, settings)
    environment = local_environment() | os.environ
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        parser.error("spark-submit is not on PATH")
    os.execvpe(program, command, environment)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
