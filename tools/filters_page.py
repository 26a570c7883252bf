"""Writes `docs/filters.md` from the rules in `cdc_replay.filters.rules`: `python tools/filters_page.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from cdc_replay.filters.expression import Type
from cdc_replay.filters.operators import FUNCTIONS, Signature
from cdc_replay.filters.rules import RULES, STRUCTURE, UNKNOWN, WITHOUT_A_RULE, Exact, OnServer
from cdc_replay.filters.sortable_forms import FORMS

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "filters.md"

_INTRODUCTION: Final = """\
# Row filters: in Arrow or on the server

*This page is generated from `src/cdc_replay/filters/rules.py` by `python tools/filters_page.py`.*

A row filter is read as PostgreSQL stored it, with operators, functions, types and collations resolved.
The Spark task that has decoded the rows evaluates it with Arrow's kernels if every part of it is exact
there: in value, NULL, overflow, collation and error. Otherwise PostgreSQL evaluates the whole filter, over
the rows of the window that it decides about, with one round trip per batch. No filter that PostgreSQL
accepts is refused or approximated. `cdc-replay explain` shows for each filter where it is evaluated and
why.
"""

_REST: Final = f"""\
Everything else has no rule and is evaluated by PostgreSQL ("{UNKNOWN.because}"):
"""


def render() -> str:
    """The text of the page."""
    exact = {signature: rule for signature, rule in RULES.items() if isinstance(rule, Exact)}
    server = {signature: rule for signature, rule in RULES.items() if isinstance(rule, OnServer)}
    types = ", ".join(f"`{Type(oid).sql_name}`" for oid in FORMS)
    parts = [
        _INTRODUCTION,
        "## Exact in Arrow\n",
        f"Columns and constants of the types {types}.\n",
        _table(("expression", "when"), ((f"`{name}`", when) for name, when in STRUCTURE.items())),
        _table(("operation", "types", "when"), _grouped(exact)),
        "## Evaluated by PostgreSQL\n",
        _table(("operation", "types", "because"), _grouped(server)),
        _REST,
        _table(("expression", "because"), ((name, because) for name, because in WITHOUT_A_RULE.items())),
    ]
    return "\n".join(parts)


def _grouped(rules: Mapping[Signature, Exact | OnServer]) -> Iterator[tuple[str, str, str]]:
    """Rows of (operations, argument types, text), those with the same types and text in one row."""
    arguments: dict[tuple[str, str], list[str]] = {}
    for signature, rule in rules.items():
        text = (rule.remark or "always") if isinstance(rule, Exact) else rule.because
        operation, types = _describe(signature)
        arguments.setdefault((operation, text), []).append(types)
    operations: dict[tuple[str, str], list[str]] = {}
    for (operation, text), types_list in arguments.items():
        operations.setdefault(("; ".join(types_list), text), []).append(operation)
    for (types, text), names in operations.items():
        yield " ".join(names), types, text


def _describe(signature: Signature) -> tuple[str, str]:
    name, *types = signature
    if signature in FUNCTIONS.values() and name in {member.sql_name for member in Type}:
        return "cast", f"{types[0]} to {name}" + ("(n)" if len(types) > 1 else "")
    return f"`{name}`".replace("|", "\\|"), ", ".join(types)


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
