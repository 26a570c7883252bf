"""Writes `docs/semantics.md`: each rule of `docs/rules.yaml`, with one module and one test that cite it.

A file cites a rule as `R4.4` or, for several, as `R2.1-R2.9`. A rule that is cited but not in the list is an
error, so a number in an error message always has an anchor on the page: `python tools/semantics_page.py`.

The module of a rule is the one that explains it: first those of the rooms of its section, then those that
cite it in their header, then the one that cites it most, then the one that cites the fewest other rules. The
test is chosen likewise; all of a scenario counts as its header.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
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

ROOMS: Final[Mapping[str, tuple[str, ...]]] = {
    "Wire format and slot functions": ("pgoutput", "postgres", "capture"),
    "Which relation's rules apply": ("publication",),
    "Row filters": ("publication", "filters"),
    "UPDATE transformation": ("replay/route", "replay/toast"),
    "What publications may say": ("publication", "filters"),
    "Column lists": ("publication",),
    "Initial synchronisation": ("snapshot", "publication"),
    "Apply": ("replay/apply", "subscriber", "replay"),
    "Transactions": ("capture", "catalog"),
    "Gaps of native replication": (),
}
"""Section → the packages in which its rules are at home, the most likely one first."""

_CITATION: Final = re.compile(r"R(\d+)\.(\d+)(?:-R(\d+)\.(\d+))?")

Weight: TypeAlias = tuple[int, int, int]
"""How much a file says about a rule: 2 in the first line, 1 in the header, 0 elsewhere; how often;
less the number of rules that it cites."""
Citations: TypeAlias = Mapping[str, Mapping[Path, Weight]]
"""Rule → the files that cite it."""

_INTRODUCTION: Final = """\
# Semantics

*Generated from `docs/rules.yaml` and from the rule numbers in code and tests: `make docs`.*

Each rule says what PostgreSQL 15 to 18 do, and so what a subscriber must hold. Error messages end with the
number of the rule that they enforce, such as `[R2.17]`.

Beside each rule are the module that explains it and one test of it. Tests in *italics* are conformance
scenarios, which run beside a real native subscription. `git grep -w R4.4` finds all that cites a rule. A
rule without a module needs no code, or is a [known limit](compatibility.md#known-limits).

| term | meaning |
| --- | --- |
| leaf | the relation in which a row physically changed |
| published relation | the relation under whose name the change is sent: the leaf or one of its ancestors |
| via root | the publication option `publish_via_partition_root` |
| effective publications | the subscribed publications that contribute filters and column lists (R2.6) |
| RI | replica identity |
| B, C, O, R, I, U, D, T, M, … | the bytes of pgoutput's messages, see [pgoutput](pgoutput.md#messages) |
| K, O in a message | its old tuple is the key, or the whole row |
| n, t, u, b | the kinds of a value: NULL, text, unchanged and not sent, binary |
"""


class UnknownRule(Exception):
    """A file names a rule that is not in the list."""


def rules() -> dict[str, dict[str, str]]:
    """The rules in words, by section."""
    loaded: dict[str, dict[str, str]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return loaded


def citations(files: Iterable[Path], known: Iterable[str]) -> Citations:
    """Which of `files` cite which rule, and how much.

    Raises:
        UnknownRule: if one cites a rule that is not `known`.
    """
    rules = set(known)
    citing: defaultdict[str, dict[Path, Weight]] = defaultdict(dict)
    for file in sorted(files):
        text = file.read_text(encoding="utf-8")
        header = _header(file, text)
        cited, explained = _cited(text, rules), _cited(header, rules)
        titled = _cited(header.partition("\n")[0], rules)
        if unknown := cited.keys() - rules:
            raise UnknownRule(f"{file.relative_to(ROOT)} cites {', '.join(sorted(unknown))}")
        for rule, count in cited.items():
            citing[rule][file] = (int(rule in explained) + int(rule in titled), count, -len(cited))
    return citing


def _header(file: Path, text: str) -> str:
    """What counts as the place to explain a rule: a module's docstring, all of a scenario."""
    return ast.get_docstring(ast.parse(text)) or "" if file.suffix == ".py" else text


def _cited(text: str, known: set[str]) -> Counter[str]:
    """Rule → how often its number stands in the text; 0 for a rule that only a range covers."""
    cited: Counter[str] = Counter()
    for section, first, last_section, last in (match.groups() for match in _CITATION.finditer(text)):
        cited[f"R{section}.{first}"] += 1
        if last is None:
            continue
        cited[f"R{last_section}.{last}"] += 1
        if section == last_section:
            within = (f"R{section}.{rule}" for rule in range(int(first), int(last)))
            cited.update({rule: 0 for rule in within if rule in known})
    return cited


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
    code, tests = citations(code_files(), known), citations(test_files(), known)
    parts = [_INTRODUCTION]
    for title, section in sections.items():
        parts += [f"## {title}\n", _table(section, ROOMS[title], code, tests)]
    return "\n".join(parts)


def _table(section: Mapping[str, str], rooms: Sequence[str], code: Citations, tests: Citations) -> str:
    lines = ["| rule | PostgreSQL | module | test |", "| --- | --- | --- | --- |"]
    for rule, sentence in section.items():
        module, test = _first(code.get(rule, {}), rooms), _first(tests.get(rule, {}))
        lines.append(f'| <a id="{rule}"></a>{rule} | {sentence} | {_module(module)} | {_test(test)} |')
    return "\n".join(lines) + "\n"


def _first(citing: Mapping[Path, Weight], rooms: Sequence[str] = ()) -> Path | None:
    """The file that says most about the rule; of equals the first by name."""

    def order(file: Path) -> tuple[int, tuple[int, ...], Path]:
        within = (index for index, room in enumerate(rooms) if (CODE / room) in file.parents)
        return next(within, len(rooms)), tuple(-weight for weight in citing[file]), file

    return min(citing, key=order, default=None)


def _module(file: Path | None) -> str:
    if file is None:
        return ""
    return _link(file.relative_to(CODE).with_suffix("").as_posix().removesuffix("/__init__"), file)


def _test(file: Path | None) -> str:
    if file is None:
        return ""
    name = _link(file.stem.removeprefix("test_"), file)
    return f"*{name}*" if file.suffix == ".yaml" else name


def _link(text: str, file: Path) -> str:
    return f"[{text}](../{file.relative_to(ROOT).as_posix()})"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
