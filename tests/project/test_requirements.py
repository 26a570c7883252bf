"""Dependencies: three locks by hash, of which run time has one, and licences that somebody has looked at.

| file                      | holds                                                                     |
|---------------------------|---------------------------------------------------------------------------|
| `pyproject.toml`          | what the package and its `airflow` extra need, as ranges                   |
| `requirements.in`         | the same with versions, and two that must agree with others                |
| `requirements.lock`       | that with all it needs: what the image has                                 |
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
DEVELOPMENT: Final = "requirements-dev"
BUILD: Final = "requirements-build"

OF_OTHERS: Final = {"pyspark-client", "sqlalchemy"}
"""Pinned although the package does not import them; `requirements.in` says why."""


def lock(name: str) -> Path:
    return ROOT / f"{name}.lock"


def requirements_in(name: str) -> list[Requirement]:
    lines = (ROOT / f"{name}.in").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if re.match(r"[A-Za-z]", line)]


def package_requirements() -> list[Requirement]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = [text for several in project["optional-dependencies"].values() for text in several]
    return [Requirement(text) for text in (*project["dependencies"], *extras)]


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


def test_requirements_are_those_of_the_package() -> None:
    assert {requirement.name for requirement in package_requirements()} == {
        requirement.name for requirement in requirements_in(RUN)
    } - OF_OTHERS


@pytest.mark.parametrize("name", [RUN, DEVELOPMENT, BUILD])
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


@pytest.mark.parametrize("name", [RUN, DEVELOPMENT])
def test_locks_hold_what_is_needed_and_nothing_else(name: str) -> None:
    assert {canonicalize_name(requirement) for requirement in locked_versions(name)} == needed(
        requirements_in(name)
    )


def test_what_is_installed_is_what_is_locked() -> None:
    locked = locked_versions(RUN) | locked_versions(DEVELOPMENT)
    assert {name: metadata.version(name) for name in locked} == locked


def test_development_has_the_versions_of_run_time() -> None:
    run, development = licences_page.versions(lock(RUN)), licences_page.versions(lock(DEVELOPMENT))
    shared = run.keys() & development.keys()
    assert {name: run[name] for name in shared} == {name: development[name] for name in shared}


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


@pytest.mark.parametrize("name", ["Makefile", "docker/Dockerfile", "docs/security.md"])
def test_nothing_is_installed_or_built_without_hashes(name: str) -> None:
    """In this order: what builds, the locks, the package itself."""
    builder, *locks, package = pip_installs(ROOT / name)
    assert builder.endswith("--no-deps --require-hashes -r requirements-build.lock")
    assert package.endswith(" .")
    assert len(locks) == 1
    assert all("--no-deps" in command for command in (builder, *locks, package))
    assert all("--no-build-isolation" in command for command in (*locks, package))
    assert "--require-hashes" in locks[0]
    files = re.findall(r"-r (\S+)", locks[0])
    assert files == ["requirements.lock", *(["requirements-dev.lock"] if name == "Makefile" else [])]


def test_images_are_given_by_digest() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^FROM (.*)$", dockerfile, re.MULTILINE) == ["${BASE_IMAGE}"]
    (default,) = re.findall(r"^ARG BASE_IMAGE=(.*)$", dockerfile, re.MULTILINE)
    assert re.fullmatch(r"python:\S+@sha256:[0-9a-f]{64}", default)
    compose = (ROOT / "docker-compose.yaml").read_text(encoding="utf-8")
    assert f"BASE_IMAGE: ${{BASE_IMAGE:-{default}}}" in compose
    images = re.findall(r"^ +image: (.*)$", compose, re.MULTILINE)
    (image,) = [image for image in images if image != "cdc-replay"]
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
