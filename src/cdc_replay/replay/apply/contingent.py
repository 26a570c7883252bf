"""Driver: contingent lineages, folded once more where the target lacks a row that they start from.

A row that moves takes later changes of its new key along. If the subscriber lacks that row, a native worker
skips the move, and what comes for the new key changes whatever row the subscriber has there (R8.4):

    subscriber has 11          UPDATE … SET id = 11 WHERE id = 1    finds nothing
                               UPDATE … SET v = 'x' WHERE id = 11   changes the subscriber's own row

The fold does not know the subscriber's rows. It marks the lineages in which this matters
(`replay.compact.fold_reference`), and their changes are staged beside their net changes:

    1. Do all rows that their net changes are for exist? As a rule they do, and that is all.
    2. If not, the changes come back, part by part: which of their keys does the target have?
    3. They are folded once more, with that knowledge, and take the place of the first net changes.

Where only the partitions of the target have keys (`SubscribedTable.is_by_leaf`) all changes are contingent,
and folded here only: which of them are for one row depends on the partition that their old rows lead to.

All of it is before any row of the target is changed, in the window's transaction, so that a second attempt
does it anew.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
from psycopg import sql

from cdc_replay.model.frames import NetKind
from cdc_replay.model.subscription import ConflictPolicy
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.apply.conflicts import key_text
from cdc_replay.replay.apply.encoding import Encoding, StagedPart, csv_of
from cdc_replay.replay.apply.merge_sql import Statements
from cdc_replay.replay.apply.stage_table import StageTable, copy_statement
from cdc_replay.replay.apply.staging import StagedTable
from cdc_replay.replay.apply.transient_keys import TransientKeys
from cdc_replay.replay.contingent_changes import Key, Refold, changes_of
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.staged_columns import check_types
from cdc_replay.subscriber.tables import TargetTable

_REFOLDED: Final = 1 << 62
"""The attempt of what is staged here; no task has it."""


def statements_for(
    connection: Connection, session: TargetSession, target: TargetTable, staged: StagedTable
) -> Statements:
    """The statements for what is staged, which the session can read."""
    if not session.is_of_owner:
        return Statements(target, staged)
    connection.execute(staged.table.create_view_statement)
    session.share(staged.table.view)
    return Statements(target, staged, has_view=True)


def pair_rows(
    connection: Connection, session: TargetSession, statements: Statements, *, shared: bool = False
) -> None:
    """Find the rows of a target without a key, as `Statements.pair` says."""
    if session.is_of_owner:
        connection.execute(statements.pair_table())
        session.share(statements.pair_name)
    for statement in statements.pair(shared=shared):
        session.execute(statement)
    connection.execute(statements.analyze_pairs())


@dataclass(frozen=True, slots=True)
class Settled:
    """What is to be merged, and the keys of changes that are known to have found nothing, by kind."""

    staged: StagedTable
    missing_keys: Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class _Probe:
    """Which rows a target has of keys that are not staged."""

    connection: Connection
    session: TargetSession
    target: TargetTable
    table: StageTable

    def look(self, keys: Sequence[Key]) -> tuple[Mapping[Key, int], Mapping[Key, Key]]:
        """How many rows the target has of each key, at most as often as it is named; which are the same.

        Two keys are if they lead to one leaf and have its key in common.
        """
        self.connection.execute(self.table.create_statement)
        if self.table.is_of_another:
            check_types(self.connection, self.table.identifier, self.table.target)
        staged = StagedTable(self.table, (_nothing_yet(self.table),))
        statements = statements_for(self.connection, self.session, self.target, staged)
        columns = [
            pa.repeat(pa.scalar(_REFOLDED), len(keys)),
            pa.repeat(pa.scalar(NetKind.DELETE.value), len(keys)),
            pa.array(range(1, len(keys) + 1)),
            *(pa.array([key[place] for key in keys], pa.string()) for place in range(len(self.table.keys))),
        ]
        with self.connection.cursor() as cursor, cursor.copy(statements.copy_probes()) as copy:
            copy.write(csv_of(columns))
        _find(self.connection, self.session, statements, shared=True)
        found = self.session.query(statements.found_rows())
        _forget(self.connection, statements)
        same = self._same(keys, statements)
        self.connection.execute(sql.SQL("drop table {} cascade").format(self.table.identifier))
        rows: collections.Counter[Key] = collections.Counter(
            key for (number,) in found if (key := keys[number - 1]) not in same
        )
        rows.update({same[keys[number - 1]]: 1 for (number,) in found if keys[number - 1] in same})
        return rows, same

    def _same(self, keys: Sequence[Key], statements: Statements) -> dict[Key, Key]:
        if not self.table.is_by_leaf:
            return {}
        firsts: dict[tuple[int, int], Key] = {}
        return {
            keys[number - 1]: firsts.setdefault((leaf, rank), keys[number - 1])
            for statement in statements.same_keys()
            for number, leaf, rank in self.session.query(statement)
        }


def _nothing_yet(table: StageTable) -> StagedPart:
    gone = TransientKeys.of(np.zeros(0, np.int64))
    return StagedPart(table.index, _REFOLDED, {}, frozenset(), frozenset(), {}, gone)


def settled(
    connection: Connection,
    session: TargetSession,
    statements: Statements,
    policy: ConflictPolicy,
    refold: Refold | None,
) -> Settled:
    """What is staged as it is right for the rows that the target has; `statements` are for all of it.

    Raises:
        ValueError: if there are contingent changes, and nobody to fold them.
    """
    staged, target = statements.staged, statements.target
    contingent = tuple(part for part in staged.parts if part.is_contingent)
    mine = StagedTable(staged.table, contingent)
    if not contingent or not (
        staged.table.is_by_leaf or _lacks_rows(connection, session, replace(statements, staged=mine))
    ):
        return Settled(staged, {})
    if refold is None:
        raise ValueError("contingent changes are staged, and nobody folds them")
    encoding = Encoding({staged.table.index: staged.table}, frozenset(), _REFOLDED)
    probe = _Probe(connection, session, target, replace(staged.table, name=f"{staged.table.name}_probe"))
    conflicts: collections.Counter[str] = collections.Counter()
    missing_keys: dict[str, list[str]] = {}
    for text in _changes(connection, mine):
        changes = refold(changes_of(text), policy=policy, is_keyed=staged.table.is_keyed)
        found = changes.refolded(*probe.look(changes.keys))
        _copy(connection, staged.table, encoding, found.net)
        conflicts.update({kind.value: count for kind, count in found.conflicts.items()})
        for kind, key in found.conflict_keys:
            shown = missing_keys.setdefault(kind.value, [])
            shown.append(key_text(staged.table.keys, key[: len(staged.table.keys)]))
    part = replace(encoding.part(staged.table.index), conflicts=dict(conflicts))
    others = (part for part in staged.parts if not part.is_contingent)
    return Settled(StagedTable(staged.table, (*others, part)), missing_keys)


def _changes(connection: Connection, staged: StagedTable) -> Iterator[str]:
    """The changes that came with what is staged, a part of them at a time."""
    read = sql.SQL("select changes from {} where attempt = any (%s) order by ctid")
    with connection.cursor(name="contingent") as cursor:
        cursor.itersize = 1
        cursor.execute(read.format(staged.table.changes_identifier), (staged.attempts,))
        for (text,) in cursor:
            yield text


def _copy(connection: Connection, table: StageTable, encoding: Encoding, net: pa.RecordBatch) -> None:
    """Stage net changes."""
    if not net.num_rows:
        return
    with connection.cursor() as cursor, cursor.copy(copy_statement(table.identifier)) as copy:
        for _, _, text in encoding.texts([net]):
            copy.write(text)


def _lacks_rows(connection: Connection, session: TargetSession, statements: Statements) -> bool:
    """Whether the target lacks a row for one of the net changes that are staged."""
    _find(connection, session, statements)
    [(lacks,)] = session.query(statements.lacks_rows())
    _forget(connection, statements)
    return bool(lacks)


def _find(
    connection: Connection, session: TargetSession, statements: Statements, *, shared: bool = False
) -> None:
    connection.execute(statements.analyze())
    if not statements.staged.table.is_keyed:
        pair_rows(connection, session, statements, shared=shared)


def _forget(connection: Connection, statements: Statements) -> None:
    if not statements.staged.table.is_keyed:
        connection.execute(statements.forget_pairs())
