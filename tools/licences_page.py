"""Writes `docs/licences.md`: the distributions that the pipeline runs with, and their licences.

The distributions are those of `requirements.lock`, the licences those of their metadata. A licence that is
not in `ALLOWED` is an error. Run `python tools/licences_page.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parents[1]
LOCK: Final = ROOT / "requirements.lock"
PAGE: Final = ROOT / "docs" / "licences.md"

ALLOWED: Final = frozenset({
    "0BSD", "Apache-2.0", "Artistic", "BSD", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC",
    "LGPL-3.0-only", "LLVM-exception", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0", "Unlicense", "Zlib",
})  # fmt: skip
"""LGPL is psycopg's, which is used unmodified and can be replaced; no GPL or AGPL: they are incompatible with
this project's licence."""

CLASSIFIERS: Final[Mapping[str, str]] = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}

STATED: Final[Mapping[str, str]] = {
    # Artistic or GPL, by the user's choice.
    "text-unidecode": "Artistic",
    # Not installed on every system and Python that runs this program.
    "colorama": "BSD",
    "pyyaml-ft": "MIT",
    # The metadata has a text in place of a name.
    "protobuf": "BSD-3-Clause",
}
"""For distributions whose metadata does not name a licence, or is not installed."""

_INTRODUCTION: Final = """\
# Licences

*This page is made from `requirements.lock` and from what is installed: `make docs`.*

What the pipeline runs with, and what each distribution says of its licence. The images of
`docker/Dockerfile` have these, the one of Spark's executors a part of them, and Debian's packages beside
them. Distributions that contain libraries of others, such as pyspark, numpy and psycopg-binary, bring the
texts of their licences along. The LGPL of psycopg asks that it can be replaced: it is a package of its own,
used as it comes. No licence is GPL or AGPL. What only development needs (`requirements-dev.lock`) is not
distributed, and not listed.

| distribution | version | licence |
| --- | --- | --- |
"""


VENDORED: Final = ROOT / "src" / "cdc_replay" / "airflow" / "page" / "static" / "uPlot.iife.min.js"
"""A library that is part of the package: its licence is in `uPlot.LICENSE` beside it."""

_VENDORED: Final = """
Part of this package are files of [uPlot](https://github.com/leeoniya/uPlot), unmodified, with their licence
beside them (`src/cdc_replay/airflow/page/static`): they draw the charts of the page in Airflow.

| files | version | licence |
| --- | --- | --- |
"""


class LicenceNotAllowed(Exception):
    """A distribution has a licence that is not in `ALLOWED`, or none."""


def read_lock(lock: Path) -> Iterator[Requirement]:
    """The distributions of a lock file, with their versions."""
    for line in lock.read_text(encoding="utf-8").splitlines():
        if re.match(r"[A-Za-z0-9]", line):
            yield Requirement(line.removesuffix("\\"))


def versions(lock: Path) -> dict[str, str]:
    """The version by name; several if it depends on the Python."""
    pinned: dict[str, list[str]] = {}
    for requirement in read_lock(lock):
        pinned.setdefault(requirement.name, []).append(str(requirement.specifier).removeprefix("=="))
    return {name: ", ".join(several) for name, several in pinned.items()}


def licence(name: str) -> str:
    """The licence of a distribution.

    Raises:
        LicenceNotAllowed: if it is not one of `ALLOWED`.
    """
    expression = STATED.get(name) or _in_metadata(metadata.metadata(name))
    check(name, expression)
    return expression


def check(name: str, expression: str) -> None:
    """Check that all parts of a licence are allowed.

    Raises:
        LicenceNotAllowed: if one is not, or there is none.
    """
    parts = set(re.findall(r"[\w.+-]+", expression)) - {"AND", "OR", "WITH"}
    if not parts or parts - ALLOWED:
        raise LicenceNotAllowed(f"{name}: {expression or 'no licence'}")


def _in_metadata(content: metadata.PackageMetadata) -> str:
    """The SPDX expression, else the classifiers, else the free text of the field `License`."""
    if expressions := content.get_all("License-Expression"):
        return str(expressions[0])
    classifiers = [text for text in content.get_all("Classifier") or () if text.startswith("License :: ")]
    names = [text.rpartition(" :: ")[2] for text in classifiers]
    return ", ".join(CLASSIFIERS.get(name, name) for name in names) or "".join(
        content.get_all("License") or ()
    )


def render() -> str:
    """The page."""
    rows = (f"| {name} | {version} | {licence(name)} |\n" for name, version in versions(LOCK).items())
    return f"{_INTRODUCTION}{''.join(rows)}{_VENDORED}| uPlot | {vendored_version()} | MIT |\n"


def vendored_version() -> str:
    """The version in the first line of the vendored file."""
    with VENDORED.open(encoding="utf-8") as file:
        _, _, version = file.readline().partition("(v")
    return version.partition(")")[0]


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
