"""Writes `docs/semantics.md`: each rule of `docs/rules.yaml` with the code and the tests that name it.

Files name a rule as `R4.4`, or a range as `R2.1-R2.9`. A rule that is not in the list is an error: every
number in an error message can be looked up. Run `python tools/semantics_page.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
RULES: Final = ROOT / "docs" / "rules.yaml"
PAGE: Final = ROOT / "docs" / "semantics.md"

CODE: Final = ROOT / "src" / "cdc_replay"
TESTS: Final = ROOT / "tests"
SCENARIOS: Final = TESTS / "conformance" / "scenarios"

_MENTION: Final = re.compile(r"R(\d+)\.(\d+)(?:-R(\d+)\.(\d+))?")

Mentions: TypeAlias = Mapping[str, Sequence[Path]]
"""Rule → the files that name it, in order."""

_INTRODUCTION: Final = """\
# Semantics: what PostgreSQL does, and where this software does it

*This page is made from `docs/rules.yaml` and from the rule numbers in code and tests: `make docs`.*

A rule says what PostgreSQL 15 to 18 do, and so what a subscriber must hold. Error messages end with the rule
that they enforce, such as `[R2.17]`. A rule without code needs none, or is a limit that the
[README](../README.md) names. Tests in *italics* are conformance scenarios, which run beside a real native
subscription.

Leaf: the relation in which a row physically changed. Published relation: the one under whose name the change
is sent, the leaf or one of its ancestors. Via root: the option `publish_via_partition_root`. RI: replica
identity. Letters are those of messages (B, C, R, I, U, D, T, …) and of values (n, t, u, b) on the wire.
"""


class UnknownRule(Exception):
    """A file names a rule that is not in the list."""


def rules() -> dict[str, dict[str, str]]:
    """The text of each rule, by section."""
    loaded: dict[str, dict[str, str]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return loaded


def find_mentions(files: Iterable[Path], known: Iterable[str]) -> Mentions:
    """The files that name each rule.

    Raises:
        UnknownRule: if one names a rule that is not `known`.
    """
    known_rules = set(known)
    files_by_rule: defaultdict[str, list[Path]] = defaultdict(list)
    for file in sorted(files):
        mentioned = set(_mentioned_rules(file.read_text(encoding="utf-8"), known_rules))
        if unknown := mentioned - known_rules:
            raise UnknownRule(f"{file.relative_to(ROOT)} names {', '.join(sorted(unknown))}")
        for rule in mentioned:
            files_by_rule[rule].append(file)
    return files_by_rule


def _mentioned_rules(text: str, known: set[str]) -> Iterator[str]:
    for match in _MENTION.finditer(text):
        section, first, last_section, last = match.groups()
        yield f"R{section}.{first}"
        if last is None:
            continue
        yield f"R{last_section}.{last}"
        if section == last_section:
            between = (f"R{section}.{ordinal}" for ordinal in range(int(first), int(last)))
            yield from (rule for rule in between if rule in known)


def code_files() -> Iterator[Path]:
    """The modules of the package."""
    return CODE.rglob("*.py")


def test_files() -> Iterator[Path]:
    """Test modules and scenarios."""
    yield from TESTS.rglob("test_*.py")
    yield from SCENARIOS.rglob("*.yaml")


def render() -> str:
    """The text of the page.

    Raises:
        UnknownRule: if a file names a rule that is not in the list.
    """
    sections = rules()
    known = [rule for section in sections.values() for rule in section]
    code, tests = find_mentions(code_files(), known), find_mentions(test_files(), known)
    parts = [_INTRODUCTION]
    for title, section in sections.items():
        parts += [f"## {title}\n", _table(section, code, tests)]
    return "\n".join(parts)


def _table(section: Mapping[str, str], code: Mentions, tests: Mentions) -> str:
    lines = ["| rule | PostgreSQL | code | tests |", "| --- | --- | --- | --- |"]
    for rule, text in section.items():
        modules = "<br>".join(_module(file) for file in code.get(rule, ())) or "-"
        test_links = "<br>".join(_test(file) for file in tests.get(rule, ())) or "-"
        lines.append(f"| {rule} | {text} | {modules} | {test_links} |")
    return "\n".join(lines) + "\n"


def _module(file: Path) -> str:
    return _link(file.relative_to(CODE).with_suffix("").as_posix(), file)


def _test(file: Path) -> str:
    if file.suffix == ".yaml":
        return f"*{_link(file.stem, file)}*"
    return _link(file.relative_to(TESTS).with_suffix("").as_posix(), file)


def _link(text: str, file: Path) -> str:
    return f"[{text}](../{file.relative_to(ROOT).as_posix()})"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
