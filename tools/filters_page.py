"""Writes `docs/filters.md` from the rules in `cdc_replay.filters.rules`: `python tools/filters_page.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from cdc_replay.filters.expression import Type
from cdc_replay.filters.rules import (
    FUNCTIONS,
    RULES,
    SPARK_TYPES,
    STRUCTURE,
    UNKNOWN,
    Exact,
    OnServer,
    Signature,
)

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "filters.md"

_INTRODUCTION: Final = """\
# Row filters: in Spark or on the server

*This page is made from `src/cdc_replay/filters/rules.py` by `python tools/filters_page.py`.*

A row filter is read as PostgreSQL stored it, with operators, functions, types and collations resolved.
It is evaluated in Spark only if every part of it is exact there: in value, NULL, overflow, collation and
error. Otherwise PostgreSQL evaluates the whole filter, over the rows of the window that it decides
about, with one round trip per batch. No filter that PostgreSQL accepts is refused or approximated. `cdc-
replay explain` says for each filter where it is evaluated and why.
"""

_REST: Final = f"""\
Everything else: {UNKNOWN.because}.

A filter that reads a generated column is evaluated by PostgreSQL too, where the column is generated
again, and so is one with a constant whose stored form is not understood: text that is not plain ASCII,
dates outside of the years 1 to 9999, and arrays with NULLs or several dimensions that are written as one
constant.
"""


def render() -> str:
    """The text of the page."""
    exact = {signature: rule for signature, rule in RULES.items() if isinstance(rule, Exact)}
    server = {signature: rule for signature, rule in RULES.items() if isinstance(rule, OnServer)}
    types = ", ".join(f"`{Type(oid).sql_name}`" for oid in SPARK_TYPES)
    parts = [
        _INTRODUCTION,
        "## Exact in Spark\n",
        f"Columns and constants of the types {types}.\n",
        _table(("expression", "when"), ((f"`{name}`", when) for name, when in STRUCTURE.items())),
        _table(("operation", "types", "when"), _grouped(exact)),
        "## Evaluated by PostgreSQL\n",
        _table(("operation", "types", "because"), _grouped(server)),
        _REST,
    ]
    return "\n".join(parts)


def _grouped(rules: Mapping[Signature, Exact | OnServer]) -> Iterator[tuple[str, str, str]]:
    """Rows of (operations, argument types, what is said), those with the same types and words in one row."""
    arguments: dict[tuple[str, str], list[str]] = {}
    for signature, rule in rules.items():
        said = (rule.remark or "always") if isinstance(rule, Exact) else rule.because
        operation, types = _described(signature)
        arguments.setdefault((operation, said), []).append(types)
    operations: dict[tuple[str, str], list[str]] = {}
    for (operation, said), types_list in arguments.items():
        operations.setdefault(("; ".join(types_list), said), []).append(operation)
    for (types, said), names in operations.items():
        yield " ".join(names), types, said


def _described(signature: Signature) -> tuple[str, str]:
    name, *types = signature
    if signature in FUNCTIONS.values():
        return "cast", f"{types[0]} to {name}"
    return f"`{name}`", ", ".join(types)


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
