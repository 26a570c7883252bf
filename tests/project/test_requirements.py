"""Dependencies: four locks by hash, of which run time has two, and licences that somebody has looked at.

| file                      | holds                                                                     |
|---------------------------|---------------------------------------------------------------------------|
| `pyproject.toml`          | what the package and its `airflow` extra need, as ranges                   |
| `requirements-spark.in`   | what the package needs, with versions                                      |
| `requirements.in`         | that with the `airflow` extra, and one that must agree with another         |
| `requirements-spark.lock` | what the image of Spark's executors has                                    |
| `requirements.lock`       | what the image of Airflow has                                              |
| `requirements-dev.lock`   | what development needs besides                                             |
| `requirements-build.lock` | what builds packages from sources                                          |
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import licences_page
from fixtures.airflow import ROOT

RUN: Final = "requirements"
SPARK: Final = "requirements-spark"
DEVELOPMENT: Final = "requirements-dev"
BUILD: Final = "requirements-build"

OF_OTHERS: Final = {"sqlalchemy"}
"""Pinned although the package does not import them; `requirements.in` says why."""


def lock(name: str) -> Path:
    return ROOT / f"{name}.lock"


def requirements_in(name: str) -> list[Requirement]:
    text = (ROOT / f"{name}.in").read_text(encoding="utf-8")
    included = re.findall(r"^-r (\S+)\.in$", text, re.MULTILINE)
    own = [Requirement(line) for line in text.splitlines() if re.match(r"[A-Za-z]", line)]
    return own + [requirement for other in included for requirement in requirements_in(other)]


def package_requirements(*, airflow: bool = True) -> list[Requirement]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extra = project["optional-dependencies"]["airflow"] if airflow else []
    return [Requirement(text) for text in (*project["dependencies"], *extra)]


def locked_versions(name: str) -> dict[str, str]:
    """What a lock has for this Python on this system: version by name."""
    return {
        requirement.name: str(requirement.specifier).removeprefix("==")
        for requirement in licences_page.read_lock(lock(name))
        if requirement.marker is None or requirement.marker.evaluate()
    }


def needed(requirements: list[Requirement]) -> set[str]:
    """The names of all that these need, by the metadata of what is installed."""
    resolved: set[tuple[str, str]] = set()
    todo = [
        (canonicalize_name(requirement.name), extra)
        for requirement in requirements
        for extra in ("", *requirement.extras)
    ]
    while todo:
        name, extra = step = todo.pop()
        if step in resolved:
            continue
        resolved.add(step)
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(requirement.name), more) for more in ("", *requirement.extras)]
    return {str(name) for name, _ in resolved}


@pytest.mark.parametrize(("name", "airflow"), [(RUN, True), (SPARK, False)])
def test_requirements_are_those_of_the_package(name: str, airflow: bool) -> None:
    assert {requirement.name for requirement in package_requirements(airflow=airflow)} == {
        requirement.name for requirement in requirements_in(name)
    } - OF_OTHERS


@pytest.mark.parametrize("name", [RUN, SPARK, DEVELOPMENT, BUILD])
def test_locks_hold_what_is_wanted_by_version_and_hash(name: str) -> None:
    text = lock(name).read_text(encoding="utf-8")
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(list(licences_page.read_lock(lock(name))))
    for block in blocks:
        assert re.match(r"[\w.-]+==[\w.]+( ; [^\n]*)? \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+$", block), (
            block
        )
    versions = {canonicalize_name(key): version for key, version in locked_versions(name).items()}
    for requirement in requirements_in(name):
        assert requirement.specifier.contains(
            versions[canonicalize_name(requirement.name)], prereleases=True
        ), requirement


def test_versions_are_those_that_the_package_allows() -> None:
    for requirement in package_requirements():
        assert requirement.specifier.contains(locked_versions(RUN)[requirement.name]), requirement
    with (ROOT / "pyproject.toml").open("rb") as file:
        (builder,) = map(Requirement, tomllib.load(file)["build-system"]["requires"])
    assert builder.specifier.contains(locked_versions(BUILD)[builder.name])


@pytest.mark.parametrize("name", [RUN, SPARK, DEVELOPMENT])
def test_locks_hold_what_is_needed_and_nothing_else(name: str) -> None:
    assert {canonicalize_name(requirement) for requirement in locked_versions(name)} == needed(
        requirements_in(name)
    )


def test_what_is_installed_is_what_is_locked() -> None:
    locked = locked_versions(RUN) | locked_versions(DEVELOPMENT)
    assert {name: metadata.version(name) for name in locked} == locked


@pytest.mark.parametrize("name", [SPARK, DEVELOPMENT])
def test_other_locks_have_the_versions_of_run_time(name: str) -> None:
    run, other = licences_page.versions(lock(RUN)), licences_page.versions(lock(name))
    shared = run.keys() & other.keys()
    assert {name: run[name] for name in shared} == {name: other[name] for name in shared}


def test_executors_have_no_more_than_airflow() -> None:
    assert locked_versions(SPARK).keys() < locked_versions(RUN).keys()


def test_run_time_has_no_servers_tests_or_linters() -> None:
    only_imported_there = {"httpx"}
    development = {
        canonicalize_name(requirement.name) for requirement in requirements_in(DEVELOPMENT)
    } - only_imported_there
    assert not development & {canonicalize_name(name) for name in locked_versions(RUN)}


def pip_installs(path: Path) -> Iterator[str]:
    text = (
        path.read_text(encoding="utf-8")
        .replace("\\\n", " ")
        .replace("$(PIP_INSTALL)", "pip install --no-deps")
    )
    for line in text.splitlines():
        for command in line.split("&&"):
            if re.search(r"\bpip install\b", command) and ":=" not in command:
                yield command.strip()


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("Makefile", [["requirements.lock", "requirements-dev.lock"]]),
        ("docker/Dockerfile", [["requirements-spark.lock"], ["requirements.lock"]]),
        ("docs/security.md", [["requirements.lock"]]),
    ],
)
def test_nothing_is_installed_or_built_without_hashes(name: str, files: list[list[str]]) -> None:
    """What builds first, then the locks, and the package itself."""
    builder, *others = pip_installs(ROOT / name)
    assert builder.endswith("--no-deps --require-hashes -r requirements-build.lock")
    (package,) = [command for command in others if command.endswith(" .")]
    locks = [command for command in others if command != package]
    assert all("--no-deps" in command and "--no-build-isolation" in command for command in others)
    assert all("--require-hashes" in command for command in locks)
    assert [re.findall(r"-r (\S+)", command) for command in locks] == files


def test_images_are_given_by_digest() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^FROM (.*)$", dockerfile, re.MULTILINE) == [
        "${BASE_IMAGE} AS spark",
        "spark AS airflow",
    ]
    (default,) = re.findall(r"^ARG BASE_IMAGE=(.*)$", dockerfile, re.MULTILINE)
    assert re.fullmatch(r"python:\S+@sha256:[0-9a-f]{64}", default)
    compose = (ROOT / "docker-compose.yaml").read_text(encoding="utf-8")
    assert f"BASE_IMAGE: ${{BASE_IMAGE:-{default}}}" in compose
    images = re.findall(r"^ +image: (.*)$", compose, re.MULTILINE)
    (image,) = [image for image in images if not image.startswith("cdc-replay-")]
    assert re.fullmatch(r"\$\{POSTGRES_IMAGE:-postgres:\S+@sha256:[0-9a-f]{64}\}", image)
    for name in ("BASE_IMAGE", "POSTGRES_IMAGE"):
        assert f"`{name}`" in (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_licences_page_is_up_to_date() -> None:
    assert licences_page.PAGE.read_text(encoding="utf-8") == licences_page.render(), "run `make docs`"


@pytest.mark.parametrize(
    "licence",
    ["GPL-3.0-only", "MIT AND AGPL-3.0-or-later", "(MIT OR GPL-2.0-only)",
     "MIT, GNU General Public License (GPL)", "Proprietary", ""],
)  # fmt: skip
def test_licences_that_nobody_has_looked_at_are_refused(licence: str) -> None:
    with pytest.raises(licences_page.LicenceNotAllowed):
        licences_page.check("example", licence)


def test_unknown_licence_beside_a_known_one_is_refused() -> None:
    """A licence in a classifier that is not known is not lost beside one that is."""
    content: Any = metadata.metadata("text-unidecode")
    with pytest.raises(licences_page.LicenceNotAllowed):
        licences_page.check("text-unidecode", licences_page._in_metadata(content))  # noqa: SLF001
