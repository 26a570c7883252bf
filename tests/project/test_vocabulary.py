"""Retired words are no identifiers: one word has one meaning, and a name names its thing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from fixtures.airflow import ROOT

SOURCES: Final = ("src", "plugins", "dags", "jobs", "demo", "tools")

RETIRED: Final = frozenset(
    {
        "alike", "aside", "asked", "asker", "at_work", "behind", "beside_others", "born", "brought",
        "each", "found", "from_", "gone", "held", "inquiry", "it", "item", "lane", "lanes",
        "lets_others_work", "moment", "moments", "number", "numbers", "obstacle", "one", "opened",
        "passed", "place", "places", "questionnaire", "remembered", "said", "settled", "spread",
        "standing", "stretch", "stretches", "taken", "tally", "together", "told", "verdicts", "what",
        "wish",
    }
)  # fmt: skip
"""Words with several meanings, and participles that name no thing; leading underscores do not count."""

FOREIGN: Final = frozenset({"item"})
"""Attributes of other libraries: `numpy.ndarray.item`."""


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every identifier of a syntax tree with its line: all texts in its nodes that are no constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) or _is_foreign(node):
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield from ((name, getattr(node, "lineno", 0)) for name in text.split("."))


def _is_foreign(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in FOREIGN


def retired_words(text: str) -> list[str]:
    """`line: identifier` for each retired identifier of a module's text."""
    return [
        f"{line}: {name}"
        for name, line in identifiers(ast.parse(text))
        if name.lower().lstrip("_") in RETIRED
    ]


def modules(path: str) -> list[Path]:
    location = ROOT / path
    return sorted(location.rglob("*.py")) if location.is_dir() else [location]


@pytest.mark.parametrize("path", SOURCES)
def test_sources_have_no_retired_identifier(path: str) -> None:
    files = modules(path)
    assert files
    uses = [
        f"{file.relative_to(ROOT)}:{use}" for file in files for use in retired_words(file.read_text("utf-8"))
    ]
    assert uses == []


@pytest.mark.parametrize(
    "text",
    [
        "found = 1",
        "_found: int = 1",
        "for each in (): pass",
        "[1 for each in ()]",
        "lambda told: 1",
        "def said(): pass",
        "async def said(): pass",
        "class Opened: pass",
        "def f(*, at_work): pass",
        "def f(*said, **_): pass",
        "f(behind=1)",
        "x.lane",
        "x.item = 1",
        "import a as gone",
        "import b.gone",
        "from a.gone import b",
        "from a import gone",
        "try: pass\nexcept E as told: pass",
        "with a as held: pass",
        "if (held := 1): pass",
        "match x:\n case born: pass",
        "match x:\n case [*born]: pass",
        "match x:\n case {**born}: pass",
        "match x:\n case C(born=1): pass",
        "def f():\n global aside",
    ],
)
def test_retired_word_is_seen_wherever_an_identifier_can_stand(text: str) -> None:
    assert retired_words(text)


@pytest.mark.parametrize(
    "text", ["'found'", "x['each']", "x.item()", "# told\nfounder = 1", "behind_bytes = 1"]
)
def test_texts_and_longer_names_are_free(text: str) -> None:
    assert not retired_words(text)
