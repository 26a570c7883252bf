"""Whether the subscriber's tables can receive what is published, and still have their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cdc_replay.errors import TargetMismatch
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.owners import CANNOT_BECOME, Rights
from cdc_replay.subscriber.target_tables import TargetTable

_OIDS: Final = """
    select wanted.schema_name, wanted.table_name
    from unnest(%s::text[], %s::text[], %s::oid[]) as wanted (schema_name, table_name, relation)
    where not exists (
        select from pg_class as class
        join pg_namespace as namespace on namespace.oid = class.relnamespace
        where class.oid = wanted.relation and namespace.nspname = wanted.schema_name
            and class.relname = wanted.table_name
    )
"""
"""Those that have another name."""


@dataclass(frozen=True, slots=True)
class _TargetProblem:
    """Why a table cannot take what is published, what to do about it, and the rule."""

    table: QualifiedName
    text: str
    remedy: str = "Create what is missing with the publisher's names (case-sensitive)."
    rule: str = "R8.1"


def check_targets(
    wanted: Mapping[QualifiedName, tuple[str, ...]], found: Mapping[QualifiedName, TargetTable]
) -> None:
    """Every wanted table can take the published columns `wanted` gives for it (R8.1, R6.10, R8.21).

    Raises:
        TargetMismatch: otherwise, with everything that is missing or in the way.
    """
    faults = [fault for name, columns in wanted.items() for fault in _faults(name, columns, found.get(name))]
    if faults:
        names = sorted({fault.table for fault in faults})
        rules = {fault.rule for fault in faults}
        remedies = dict.fromkeys(fault.remedy for fault in faults)
        raise TargetMismatch(
            f"the subscriber cannot receive {len(names)} of the published tables",
            detail="\n".join(f"{_quoted(fault.table)}: {fault.text}" for fault in faults),
            hint=" ".join([*remedies, "Then run it again."]),
            rule=rules.pop() if len(rules) == 1 else "R8.1",
            table=(names[0].schema, names[0].name) if len(names) == 1 else None,
        )


def check_names(connection: Connection, relations: Mapping[QualifiedName, int]) -> None:
    """Each name still leads to the table with this oid: what the caller has done by name was done to it.

    For tables that the transaction has written to, and so locked. Nobody renames them before its end, but
    somebody may have before its first statement.

    Raises:
        TargetMismatch: naming one that does not.
    """
    names = ([name.schema for name in relations], [name.name for name in relations])
    for schema, name in connection.execute(_OIDS, (*names, list(relations.values()))).fetchall():
        raise renamed_target(QualifiedName(schema, name))


def renamed_target(name: QualifiedName) -> TargetMismatch:
    """The error of work that was planned for a table which does not have that name any more."""
    return TargetMismatch(
        f'table "{name.schema}"."{name.name}" of the subscriber was renamed, dropped or made anew meanwhile',
        hint="Run the command again: nothing of it was done.",
        rule="R7.12",
        table=(name.schema, name.name),
    )


def _faults(
    name: QualifiedName, columns: tuple[str, ...], table: TargetTable | None
) -> Iterator[_TargetProblem]:
    if table is None:
        yield _TargetProblem(name, "the table does not exist as a plain or partitioned table")
        return
    by_name = {column.name: column for column in table.columns}
    yield from _faults_of_rights(name, table)
    if table.rules:
        # A native worker does not rewrite what it does, so it does not see them (R8.13).
        names = ", ".join(f'"{rule}"' for rule in table.rules)
        yield _TargetProblem(
            name,
            f"rules would rewrite what is applied; disable them, or ENABLE RULE: {names}",
            "Let no rule be in force for replicated changes.",
            "R8.13",
        )
    if missing := missing_columns(columns, table):
        yield _TargetProblem(name, f"missing {missing}")
    if generated := [column for column in columns if column in by_name and by_name[column].is_generated]:
        yield _TargetProblem(
            name,
            "published, but generated on the subscriber: " + _listed(generated),
            "Do not publish a column that is generated on the subscriber, or make it a plain one there.",
        )


def _faults_of_rights(name: QualifiedName, table: TargetTable) -> Iterator[_TargetProblem]:
    """As a native worker refuses, which runs as the owner of the table."""
    owner = table.acting.owner
    if table.acting.rights is Rights.REFUSED:
        yield _TargetProblem(
            name,
            f'it is owned by "{owner}", and the role of the subscription cannot SET ROLE to "{owner}"',
            CANNOT_BECOME.format(owner=owner),
            "R8.21",
        )
    elif table.acting.rights.is_owners and table.acting.forces_row_security:
        yield _TargetProblem(
            name,
            f'row-level security is forced on its owner "{owner}"',
            "Give the owner BYPASSRLS, or let it be NO FORCE ROW LEVEL SECURITY.",
            "R8.21",
        )
    elif table.row_security and not table.acting.rights.is_owners:
        yield _TargetProblem(
            name,
            "row-level security is enabled and the role does not bypass it",
            "Give the role BYPASSRLS, or make it the owner of the table without FORCE ROW LEVEL SECURITY.",
            "R8.21",
        )


def missing_columns(columns: Iterable[str], table: TargetTable) -> str:
    """Those of `columns` that the table lacks, as people read them; empty if it lacks none."""
    there = {column.name for column in table.columns}
    missing = [column for column in columns if column not in there]
    return _listed(missing) if missing else ""


def _listed(columns: list[str]) -> str:
    word = "column" if len(columns) == 1 else "columns"
    return f"{word} " + ", ".join(f'"{column}"' for column in columns)


def _quoted(name: QualifiedName) -> str:
    return f'table "{name.schema}"."{name.name}"'
