"""Checks that the subscriber's tables can receive the published changes, and still are those of the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.errors import TargetMismatch
from cdc_replay.model.publication import STATE_SCHEMA
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.owners import CANNOT_BECOME, FORCED_ON_OWNER, UNFORCE, Rights
from cdc_replay.subscriber.target_tables import TargetTable

_CHANGED: Final = """
    select schema_name, table_name, rules from (
        select wanted.schema_name, wanted.table_name, class.oid is null as is_renamed,
            array(
                select rulename::text from pg_rewrite
                where ev_class = wanted.relation and ev_enabled in ('A', 'R') and ev_type <> '1'
                order by rulename
            ) as rules
        from unnest(%s::text[], %s::text[], %s::oid[]) as wanted (schema_name, table_name, relation)
        left join (
            pg_class as class join pg_namespace as namespace on namespace.oid = class.relnamespace
        ) on class.oid = wanted.relation and namespace.nspname = wanted.schema_name
            and class.relname = wanted.table_name
    ) as found
    where is_renamed or rules <> '{}'
"""


_SYSTEM_PREFIX: Final = "pg_"
"""Of schemas that no user can create."""


@dataclass(frozen=True, slots=True)
class _TargetProblem:
    """Why a table cannot receive what is published, the remedy, and the rule."""

    table: QualifiedName
    text: str
    remedy: str = "Create what is missing with the publisher's names (case-sensitive)."
    rule: str = "R8.1"


def check_targets(
    required_columns: Mapping[QualifiedName, tuple[str, ...]],
    targets: Mapping[QualifiedName, TargetTable],
    *,
    advice: str | None = None,
) -> None:
    """Check that every table can receive its published columns (R8.1, R6.10, R8.21).

    `advice` is another way out, for the hint.

    Raises:
        TargetMismatch: listing all problems.
    """
    problems = [
        problem
        for name, columns in required_columns.items()
        for problem in _problems(name, columns, targets.get(name))
    ]
    if problems:
        names = sorted({problem.table for problem in problems})
        rules = {problem.rule for problem in problems}
        remedies = dict.fromkeys(problem.remedy for problem in problems)
        raise TargetMismatch(
            f"the subscriber cannot receive {len(names)} of the published tables",
            detail="\n".join(f"{_quoted(problem.table)}: {problem.text}" for problem in problems),
            hint=" ".join(remedies if advice is None else [*remedies, advice]),
            rule=rules.pop() if len(rules) == 1 else "R8.1",
            table=(names[0].schema, names[0].name) if len(names) == 1 else None,
        )


def check_names(connection: Connection, relations: Mapping[QualifiedName, int]) -> None:
    """Check that each name still refers to the table with this oid, so that work by name reached it.

    For tables that the transaction has written to, and so locked: they cannot be renamed any more, but may
    have been renamed before the transaction's first statement. For the same reason there must be no rule: it
    would have rewritten the statements, and run its functions with our rights (R8.13, R8.21).

    Raises:
        TargetMismatch: naming a table that was renamed, or has rules.
    """
    names = ([name.schema for name in relations], [name.name for name in relations])
    for schema, name, rules in connection.execute(_CHANGED, (*names, list(relations.values()))).fetchall():
        changed = QualifiedName(schema, name)
        raise _refused_rules(changed, rules) if rules else renamed_target(changed)


def _refused_rules(name: QualifiedName, rules: Sequence[str]) -> TargetMismatch:
    return TargetMismatch(
        f"{_quoted(name)} of the subscriber has rules that rewrite applied changes: {_listed(rules)}",
        hint="Disable them, or ENABLE RULE, then run the command again: this transaction was rolled back.",
        rule="R8.13",
        table=(name.schema, name.name),
    )


def renamed_target(name: QualifiedName) -> TargetMismatch:
    """The error for a table that no longer has the name under which work on it was planned."""
    return TargetMismatch(
        f'table "{name.schema}"."{name.name}" of the subscriber was renamed, dropped or recreated meanwhile',
        hint="Run the command again: this transaction was rolled back.",
        rule="R7.12",
        table=(name.schema, name.name),
    )


def _problems(
    name: QualifiedName, columns: tuple[str, ...], table: TargetTable | None
) -> Iterator[_TargetProblem]:
    if table is None:
        yield _TargetProblem(name, "the table does not exist as a plain or partitioned table")
        return
    if name.schema == STATE_SCHEMA or name.schema.startswith(_SYSTEM_PREFIX):
        # The publisher chooses names: its rows would be positions of others, or roles of the server.
        yield _TargetProblem(
            name,
            "the subscriber's own table of this name is not for published rows",
            "Remove it from the publication.",
        )
        return
    by_name = {column.name: column for column in table.columns}
    yield from _rights_problems(name, table)
    if table.rules:
        # A native worker ignores rewrite rules (R8.13).
        yield _TargetProblem(
            name,
            f"rules would rewrite applied changes; disable them, or ENABLE RULE: {_listed(table.rules)}",
            "No rule may be enabled for replicated changes.",
            "R8.13",
        )
    if missing := missing_columns(columns, table):
        yield _TargetProblem(name, f"missing {missing}")
    if generated := [column for column in columns if column in by_name and by_name[column].is_generated]:
        yield _TargetProblem(
            name,
            "published, but generated on the subscriber: " + _column_list(generated),
            "Do not publish a column that is generated on the subscriber, or make it a plain column there.",
        )


def _rights_problems(name: QualifiedName, table: TargetTable) -> Iterator[_TargetProblem]:
    """As a native worker that runs as the table's owner refuses."""
    owner = table.acting.owner
    if table.acting.rights is Rights.REFUSED:
        yield _TargetProblem(
            name,
            f'it is owned by "{owner}", and the role of the subscription cannot SET ROLE to "{owner}"',
            CANNOT_BECOME.format(owner=owner),
            "R8.21",
        )
    elif table.acting.rights.runs_as_owner and table.acting.forces_row_security:
        yield _TargetProblem(
            name,
            FORCED_ON_OWNER.format(owner=owner),
            UNFORCE,
            "R8.21",
        )
    elif table.row_security and not table.acting.rights.runs_as_owner:
        yield _TargetProblem(
            name,
            "row-level security is enabled and the role does not bypass it",
            "Give the role BYPASSRLS, or make it the owner of the table without FORCE ROW LEVEL SECURITY.",
            "R8.21",
        )


def missing_columns(columns: Iterable[str], table: TargetTable) -> str:
    """The columns that the table lacks, as text; empty if it has all."""
    available = {column.name for column in table.columns}
    missing = [column for column in columns if column not in available]
    return _column_list(missing) if missing else ""


def _column_list(columns: list[str]) -> str:
    word = "column" if len(columns) == 1 else "columns"
    return f"{word} {_listed(columns)}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _quoted(name: QualifiedName) -> str:
    return f'table "{name.schema}"."{name.name}"'
