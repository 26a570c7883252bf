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
# Row filters: in Spark or on the server

*This page is made from `src/cdc_replay/filters/rules.py` by `python tools/filters_page.py`.*

A row filter is read as PostgreSQL stored it, with operators, functions, types and collations resolved.
It is evaluated in Spark only if every part of it is exact there: in value, NULL, overflow, collation and
error. Otherwise PostgreSQL evaluates the whole filter, over the rows of the window that it decides
about, with one round trip per batch. No filter that PostgreSQL accepts is refused or approximated. `cdc-
replay explain` says for each filter where it is evaluated and why.

In Spark, the Python worker that has decoded the rows computes most filters itself, with Arrow's kernels.
Those with LIKE, GREATEST, LEAST or floating-point numbers go through Spark SQL: they cost a second pass
over the window.
"""

_REST: Final = f"""\
For everything else there is no rule, and what has none goes to PostgreSQL ("{UNKNOWN.because}"):
"""


def render() -> str:
    """The text of the page."""
    exact = {signature: rule for signature, rule in RULES.items() if isinstance(rule, Exact)}
    server = {signature: rule for signature, rule in RULES.items() if isinstance(rule, OnServer)}
    types = ", ".join(f"`{Type(oid).sql_name}`" for oid in FORMS)
    parts = [
        _INTRODUCTION,
        "## Exact in Spark\n",
        f"Columns and constants of the types {types}.\n",
        _table(("expression", "when"), ((f"`{name}`", when) for name, when in STRUCTURE.items())),
        _table(("operation", "types", "when"), _group(exact)),
        "## Evaluated by PostgreSQL\n",
        _table(("operation", "types", "because"), _group(server)),
        _REST,
        _table(("expression", "because"), ((name, because) for name, because in WITHOUT_A_RULE.items())),
    ]
    return "\n".join(parts)


def _group(rules: Mapping[Signature, Exact | OnServer]) -> Iterator[tuple[str, str, str]]:
    """Rows of (operations, argument types, remark); rules with the same types and remark share a row."""
    arguments: dict[tuple[str, str], list[str]] = {}
    for signature, rule in rules.items():
        remark = (rule.remark or "always") if isinstance(rule, Exact) else rule.because
        operation, types = _describe(signature)
        arguments.setdefault((operation, remark), []).append(types)
    operations: dict[tuple[str, str], list[str]] = {}
    for (operation, remark), types_list in arguments.items():
        operations.setdefault(("; ".join(types_list), remark), []).append(operation)
    for (types, remark), names in operations.items():
        yield " ".join(names), types, remark


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
