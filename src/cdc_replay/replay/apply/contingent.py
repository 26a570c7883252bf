"""Driver: contingent lineages, folded again if the target lacks a row that they start from.

A row whose key changes takes later changes of its new key along. If the subscriber lacks that row, a native
worker skips the move, and changes of the new key go to whatever row the subscriber has there (R8.4):

    subscriber has 11          UPDATE … SET id = 11 WHERE id = 1    matches no row
                               UPDATE … SET v = 'x' WHERE id = 11   changes the subscriber's own row

The fold does not know the subscriber's rows. It marks lineages in which this matters
(`replay.compact.fold_reference`), and their changes are staged next to their net changes:

    1. Do all rows that the net changes start from exist? Usually they do, and nothing else is done.
    2. If not, the changes are read back, part by part: which of their keys does the target have?
    3. They are folded again with that knowledge, and replace the first net changes.

If only the target's partitions have keys (`SubscribedTable.is_by_leaf`), all changes are contingent, and are
folded here only: which of them belong to one row depends on the partition that their old rows belong to.

This comes before any row of the target is changed, inside the window's transaction: a retry repeats it.
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
from cdc_replay.replay.apply.encoding import CsvEncoder, StagedPart, to_copy_csv
from cdc_replay.replay.apply.merge_sql import Statements
from cdc_replay.replay.apply.pair_sql import PAIR_COLUMNS
from cdc_replay.replay.apply.stage_table import StageTable, copy_statement
from cdc_replay.replay.apply.staging import StagedTable
from cdc_replay.replay.apply.transient_keys import TransientKeys
from cdc_replay.replay.contingent_changes import Key, Refold, parse_changes
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.target_statements import lock_out_writers
from cdc_replay.subscriber.target_tables import TargetTable

_REFOLD_ATTEMPT: Final = 1 << 62
"""The attempt number of refolded changes; no task has it."""


def statements_for(
    connection: Connection, session: TargetSession, target: TargetTable, staged: StagedTable
) -> Statements:
    """The statements for the staged changes, which the session can read."""
    if not session.runs_as_owner:
        return Statements(target, staged)
    staged.table.share(connection, session)
    return Statements(target, staged, has_view=True)


def pair_rows(
    connection: Connection, session: TargetSession, statements: Statements, *, shared: bool = False
) -> None:
    """Locate the rows of a target without a key (`Statements.pair_equal_rows`).

    The lock keeps concurrent writers from changing the ctids.
    """
    into = session.into_temporary(statements.pair_name, [sql.SQL(PAIR_COLUMNS)])
    session.execute(lock_out_writers(statements.target))
    session.execute(statements.pair_equal_rows(into, shared=shared))
    connection.execute(statements.analyze_pairs())


@dataclass(frozen=True, slots=True)
class SettledChanges:
    """What to merge, and the keys of changes that are known to match no row, by conflict kind."""

    staged: StagedTable
    missing_keys: Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class _Probe:
    connection: Connection
    session: TargetSession
    target: TargetTable
    table: StageTable

    def look_up(self, keys: Sequence[Key]) -> tuple[Mapping[Key, int], Mapping[Key, Key]]:
        """The number of the target's rows by key, and the keys that are the same row as another key.

        A row is counted once per mention of its key. Two keys are the same if they belong to one leaf and
        agree in its key.
        """
        self.table.create(self.connection)
        self.table.staged_columns.check_types(self.connection, self.table.identifier)
        staged = StagedTable(self.table, (_empty_part(self.table),))
        statements = statements_for(self.connection, self.session, self.target, staged)
        columns = [
            pa.repeat(pa.scalar(_REFOLD_ATTEMPT), len(keys)),
            pa.repeat(pa.scalar(NetKind.DELETE.value), len(keys)),
            pa.array(range(1, len(keys) + 1)),
            *(
                pa.array([key[position] for key in keys], pa.string())
                for position in range(len(self.table.keys))
            ),
        ]
        with self.connection.cursor() as cursor, cursor.copy(statements.copy_probes()) as copy:
            copy.write(to_copy_csv(columns))
        _locate_rows(self.connection, self.session, statements, shared=True)
        matched = self.session.query(statements.matched_deletes())
        _drop_pairs(self.connection, statements)
        same_rows = self._same_row_keys(keys, statements)
        self.connection.execute(sql.SQL("drop table {} cascade").format(self.table.identifier))
        rows: collections.Counter[Key] = collections.Counter(
            key for (index,) in matched if (key := keys[index - 1]) not in same_rows
        )
        rows.update({same_rows[keys[index - 1]]: 1 for (index,) in matched if keys[index - 1] in same_rows})
        return rows, same_rows

    def _same_row_keys(self, keys: Sequence[Key], statements: Statements) -> dict[Key, Key]:
        if not self.table.is_by_leaf:
            return {}
        firsts: dict[tuple[int, int], Key] = {}
        return {
            keys[index - 1]: firsts.setdefault((leaf, rank), keys[index - 1])
            for statement in statements.group_by_leaf_key()
            for index, leaf, rank in self.session.query(statement)
        }


def _empty_part(table: StageTable) -> StagedPart:
    transient_keys = TransientKeys.encode(np.zeros(0, np.int64))
    return StagedPart(table.index, _REFOLD_ATTEMPT, {}, frozenset(), frozenset(), {}, transient_keys)


def settle_contingent(
    connection: Connection,
    session: TargetSession,
    statements: Statements,
    policy: ConflictPolicy,
    refold: Refold | None,
) -> SettledChanges:
    """The staged changes, with contingent ones corrected for the rows that the target has.

    Raises:
        ValueError: if there are contingent changes, and no `refold`.
    """
    staged, target = statements.staged, statements.target
    contingent = tuple(part for part in staged.parts if part.is_contingent)
    contingent_table = StagedTable(staged.table, contingent)
    if not contingent or not (
        staged.table.is_by_leaf
        or _lacks_rows(connection, session, replace(statements, staged=contingent_table))
    ):
        return SettledChanges(staged, {})
    if refold is None:
        raise ValueError("contingent changes are staged, and there is no way to fold them again")
    encoding = CsvEncoder({staged.table.index: staged.table}, frozenset(), _REFOLD_ATTEMPT)
    probe = _Probe(connection, session, target, replace(staged.table, name=f"{staged.table.name}_probe"))
    conflicts: collections.Counter[str] = collections.Counter()
    missing_keys: dict[str, list[str]] = {}
    for text in _changes(connection, contingent_table):
        changes = refold(parse_changes(text), policy=policy, is_keyed=staged.table.is_keyed)
        refolded = changes.fold_again(*probe.look_up(changes.keys))
        _stage_net_changes(connection, staged.table, encoding, refolded.net)
        conflicts.update({kind.value: count for kind, count in refolded.conflicts.items()})
        for kind, key in refolded.conflict_keys:
            shown = missing_keys.setdefault(kind.value, [])
            shown.append(key_text(staged.table.keys, key[: len(staged.table.keys)]))
    part = replace(encoding.part(staged.table.index), conflicts=dict(conflicts))
    unconditional = (part for part in staged.parts if not part.is_contingent)
    return SettledChanges(StagedTable(staged.table, (*unconditional, part)), missing_keys)


def _changes(connection: Connection, staged: StagedTable) -> Iterator[str]:
    """The changes that the staged net changes come from, one part at a time."""
    read = sql.SQL("select changes from {} where attempt = any (%s) order by ctid")
    with connection.cursor(name="contingent") as cursor:
        cursor.itersize = 1
        cursor.execute(read.format(staged.table.changes_identifier), (staged.attempts,))
        for (text,) in cursor:
            yield text


def _stage_net_changes(
    connection: Connection, table: StageTable, encoding: CsvEncoder, net: pa.RecordBatch
) -> None:
    if not net.num_rows:
        return
    with connection.cursor() as cursor, cursor.copy(copy_statement(table.identifier)) as copy:
        for _, _, text in encoding.encode([net]):
            copy.write(text)


def _lacks_rows(connection: Connection, session: TargetSession, statements: Statements) -> bool:
    _locate_rows(connection, session, statements)
    [(lacks,)] = session.query(statements.has_unmatched())
    _drop_pairs(connection, statements)
    return bool(lacks)


def _locate_rows(
    connection: Connection, session: TargetSession, statements: Statements, *, shared: bool = False
) -> None:
    connection.execute(statements.analyze())
    if not statements.staged.table.is_keyed:
        pair_rows(connection, session, statements, shared=shared)


def _drop_pairs(connection: Connection, statements: Statements) -> None:
    if not statements.staged.table.is_keyed:
        connection.execute(statements.drop_pairs())
