"""Tables that foreign keys link whose triggers fire in replicating sessions (R8.13).

Chains are ordered from the referenced end. In a circle one of the foreign keys does not count.
"""

from __future__ import annotations

from collections.abc import Iterable

from cdc_replay.errors import ApplyConflict
from cdc_replay.model.relation import QualifiedName
from cdc_replay.subscriber.target_tables import TargetTable


def group_tables(targets: Iterable[TargetTable]) -> list[list[TargetTable]]:
    """Each target that no foreign key links with another one, then all others, referenced ones first."""
    by_oid = {target.oid: target for target in targets}
    referenced = referenced_tables(by_oid.values())
    linked: list[TargetTable] = []
    seen: set[int] = set()

    def visit(target: TargetTable) -> None:
        if target.oid in seen:
            return
        seen.add(target.oid)
        links = target.references & by_oid.keys()
        for oid in sorted(links):
            visit(by_oid[oid])
        if links or target.oid in referenced:
            linked.append(target)

    for target in by_oid.values():
        visit(target)
    linked_oids = {target.oid for target in linked}
    alone = [[target] for target in by_oid.values() if target.oid not in linked_oids]
    return [*alone, linked] if linked else alone


def referenced_tables(targets: Iterable[TargetTable]) -> frozenset[int]:
    """The oids of the tables that these refer to."""
    return frozenset[int]().union(*(target.references for target in targets))


def deletion_acts(target: QualifiedName, why: str) -> ApplyConflict:
    """The error for a table whose foreign keys would act on a deletion that a native worker does not see."""
    return ApplyConflict(
        f'a foreign key that refers to table "{target.schema}"."{target.name}" of the subscriber would change'
        " rows of other tables",
        detail=f"{why} ON DELETE CASCADE, SET NULL or SET DEFAULT acts on it, as the foreign key's triggers"
        " are ENABLE ALWAYS or REPLICA.",
        hint="On the subscriber, let these triggers fire in ordinary sessions only:"
        f" `ALTER TABLE {target} ENABLE TRIGGER …`.",
        rule="R8.13",
        table=(target.schema, target.name),
    )
