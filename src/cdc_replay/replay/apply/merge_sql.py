"""The SQL that merges staged net changes into one target; composed here, run by `replay.apply.merge`.

`TargetSql` has the aliases and the conditions that join them, `PairStatements` the search for rows without a
key of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.frames import NetKind
from cdc_replay.postgres.identifiers import commas, names
from cdc_replay.replay.apply.pair_sql import PairStatements
from cdc_replay.replay.apply.target_sql import all_of, qualified, texts
from cdc_replay.subscriber.staged_columns import column_definition
from cdc_replay.subscriber.target_statements import insert_rows
from cdc_replay.subscriber.target_tables import TargetColumn

KEY_CHANGES: Final = sql.SQL("staged.moved")

KEY_STAYS: Final = sql.SQL("staged.moved is not true")

# A backfill turns UPDATEs of older rows into INSERTs: they have no ordinal (`replay.compact.backfill`).
_IN_LOG_ORDER: Final = sql.SQL(" order by staged.born nulls first")

_DELETE: Final = (
    "delete from {target} as target using {stage} as staged{pairs} where {staged_rows} and {key_match}"
)

_DELETE_UNSTAGED: Final = """
    delete from {target} as target
    where not exists (select from {stage} as staged where {staged_rows} and {same})
"""

# Counts and keys of the rows in `missing` that staged changes should have found.
_EXPECTED: Final = """
    (select coalesce(sum(update_missing), 0) from missing),
    array(select key from missing where update_missing > 0 limit {limit}),
    (select coalesce(sum(delete_missing), 0) from missing),
    array(select key from missing where delete_missing > 0 limit {limit})
"""

_DELETE_AND_REPORT: Final = """
    with deleted as (
        {delete} returning staged.ctid as staged_ctid
    ),
    missing as (
        select staged.update_missing, staged.delete_missing, {key} as key
        from {stage} as staged left join deleted on deleted.staged_ctid = staged.ctid
        where {staged_rows} and deleted.staged_ctid is null
    )
    select (select count(*) from deleted), {expected}
"""

_MISSING_CHANGES: Final = """
    with missing as (
        select staged.update_missing, staged.delete_missing, {key} as key
        from {stage} as staged
        where {staged_rows} and (staged.update_missing > 0 or staged.delete_missing > 0)
    )
    select {expected}
"""

_DETACH: Final = """
    {into}
    select staged.ctid as staged_ctid, {columns}
    from {target} as target, {stage} as staged{pairs} where {staged_rows} and {key_match}
"""

_UNMATCHED: Final = """
    with missing as (
        select staged.update_missing, {key} as key
        from {stage} as staged where {staged_rows} and staged.update_missing > 0 and {free}
    )
    select coalesce(sum(update_missing), 0), array(select key from missing limit {limit}) from missing
"""

_PHYSICAL_ORDER: Final = """
    with sampled as materialized (
        select staged.* from {stage} as staged tablesample system ({percent}) repeatable (0)
        where {staged_rows}
    ),
    ordered as (
        select target.ctid as target_ctid, lag(target.ctid) over (order by {key}) as previous_ctid
        from {target} as target, sampled as staged where {key_match}
    )
    select coalesce(avg(case when target_ctid > previous_ctid then 1 else -1 end), 0)
    from ordered where previous_ctid is not null
"""

_NOT_BEFORE_FIRST_KEY: Final = """
    not ({key} operator({less}) (
        select staged.b0 from {stage} as staged where {staged_rows}
        order by staged.b0 using operator({less}) limit 1
    ))
"""

_BLOCKING_ROWS: Final = """
    select count(*) over (), {key} from {target} as target, {rows} where {same} limit {limit}
"""

# `target` has the keys that rows have after the window, or for a while.
_TAKES_FREED_KEYS: Final = """
    select exists (
        select from (select {new_keys} from {stage} as staged where {takers}) as target, {stage} as staged
        where {staged_rows} and {key_match}
    )
"""

_FREES_KEY: Final = sql.SQL("(staged.kind = 'D' or staged.moved)")


@dataclass(frozen=True, slots=True)
class Statements(PairStatements):
    """The statements for one target and its staged changes."""

    @property
    def cannot_update_in_place(self) -> bool:
        """UPDATE cannot set a published column (GENERATED ALWAYS AS IDENTITY), or has none to set."""
        keys = {column.name for column in self.staged.table.keys} if self.staged.table.is_keyed else set()
        settable = self._settable()
        blocked = any(not column.is_settable and column.name not in keys for column in self.published)
        return blocked or not settable

    @property
    def cannot_move_in_place(self) -> bool:
        """UPDATE cannot set a column of the key (GENERATED ALWAYS AS IDENTITY)."""
        return not all(column.is_settable for column in self.staged.table.keys)

    @property
    def has_index_order(self) -> bool:
        """The target is one heap, and its index has an order."""
        keys = self.staged.table.keys
        is_ordered = self.staged.table.has_own_key and all(column.less is not None for column in keys)
        # A view cannot be sampled.
        return is_ordered and not self.target.is_partitioned and not self.has_view

    def delete_unstaged(self) -> sql.Composed:
        """DELETE of the rows that are not inserted."""
        inserted = self.staged_rows(NetKind.INSERT)
        return self._fill(_DELETE_UNSTAGED, staged_rows=inserted, same=self.occupies_inserted_key)

    def analyze(self) -> sql.Composed:
        """ANALYZE the staging table: without statistics the planner takes it for small.

        The columns that select and join rows are enough, unless whole rows are compared.
        """
        stage = self.staged.table
        if not stage.is_keyed:
            return sql.SQL("analyze {}").format(stage.identifier)
        columns = names(("attempt", "kind", *self._base_names, *(f"v{n}" for n in stage.key_positions)))
        return sql.SQL("analyze {} ({})").format(stage.identifier, columns)

    def max_key(self) -> sql.Composed:
        """The greatest key of the target, which has one column; NULL if the target is empty."""
        [key] = self.staged.table.keys
        return self._fill("select max({key}) from {target} as target", key=qualified("target", key.name))

    def copy_transient_keys(self) -> sql.Composed:
        """COPY of keys of transient rows, as rows of CSV: attempt, kind, key."""
        return sql.SQL("copy {} (attempt, kind, b0) from stdin (format csv)").format(
            self.staged.table.identifier
        )

    def physical_order(self, kind: NetKind, rows: int) -> sql.Composed:
        """1 if rows lie in key order, -1 if in reverse order, about 0 if in none.

        Measured on a sample of about `rows` staged changes of `kind`: the share of rows stored after the row
        with the next smaller key, less the share stored before it. A table of two sorted runs, such as one in
        which some rows were updated before, yields 0.5 at least.
        """
        percent = min(100.0, 100.0 * rows / self.staged.count(kind))
        key = self._as_in_index(self._base_names)
        return self._fill(
            _PHYSICAL_ORDER, percent=sql.Literal(percent), staged_rows=self.staged_rows(kind), key=commas(key)
        )

    def skip_to_first_key(self, statement: sql.Composed, kind: NetKind) -> sql.Composed:
        """`statement`, which joins staged changes of `kind`, with a lower bound on the target's key.

        Smaller keys cannot match, but a merge join would read their index entries and rows.
        """
        column = self.staged.table.keys[0]
        if column.less is None:
            return statement
        first = self._fill(
            _NOT_BEFORE_FIRST_KEY,
            key=qualified("target", column.name),
            less=sql.SQL("{}.{}").format(sql.Identifier(column.less.schema), sql.SQL(column.less.name)),
            staged_rows=self.staged_rows(kind),
        )
        return sql.SQL("{} and {}").format(statement, first)

    def takes_freed_keys(self) -> sql.Composed:
        """Whether a row takes a key that another one had before the window, and does not keep."""
        key = zip(self.staged.table.keys, self.staged.table.key_positions, self._base_names, strict=True)
        return self._fill(
            _TAKES_FREED_KEYS,
            new_keys=commas(
                sql.SQL("coalesce({}, {}) as {}").format(
                    qualified("staged", f"v{position}"),
                    qualified("staged", base),
                    sql.Identifier(column.name),
                )
                for column, position, base in key
            ),
            takers=self.staged_rows(NetKind.INSERT, NetKind.UPDATE, NetKind.TRANSIENT, NetKind.TRANSIT),
            staged_rows=self.staged_rows(NetKind.DELETE, NetKind.UPDATE, condition=_FREES_KEY),
        )

    def delete(self) -> sql.Composed:
        """Delete the rows of staged DELETEs."""
        return self._fill(_DELETE, staged_rows=self.staged_rows(NetKind.DELETE))

    def delete_at_passed_keys(self, kind: NetKind) -> sql.Composed:
        """Delete the subscriber's rows at transient or transit keys."""
        return self._fill(
            "delete from {target} as target using {stage} as staged where {occupied}",
            occupied=self.occupies_passed_key(kind),
        )

    def report_missing_after(self, delete: sql.Composed, kind: NetKind) -> sql.Composed:
        """Delete rows of staged changes: (deleted, update_missing, keys, delete_missing, keys)."""
        return self._report_missing(_DELETE_AND_REPORT, kind, delete=delete)

    def missing_changes(self, kind: NetKind) -> sql.Composed:
        """(update_missing, keys, delete_missing, keys) of changes that are known to match no row."""
        return self._report_missing(_MISSING_CHANGES, kind)

    def detached_columns(self, *, keep_originals: bool) -> list[sql.Composable]:
        """The columns that `detach_rows` fills, for DDL."""
        columns = (
            column_definition(f"{letter}{index}", column)
            for letter in ("co" if keep_originals else "c")
            for index, column in enumerate(self.target.writable)
        )
        return [sql.SQL("staged_ctid tid"), *columns]

    def detach_rows(
        self, into: sql.Composable, condition: sql.SQL, *, keep_originals: bool
    ) -> list[sql.Composed]:
        """Move rows to update `into` a temporary table: new values in `c0`…, original ones in `o0`…."""
        columns = [
            sql.SQL("{} as {}").format(self._merged_value(column), sql.Identifier(f"c{index}"))
            for index, column in enumerate(self.target.writable)
        ]
        if keep_originals:
            columns += [
                sql.SQL("{} as {}").format(qualified("target", column.name), sql.Identifier(f"o{index}"))
                for index, column in enumerate(self.target.writable)
            ]
        staged_rows = self.staged_rows(NetKind.UPDATE, condition=condition)
        return [
            self._fill(_DETACH, into=into, columns=commas(columns), staged_rows=staged_rows),
            self._fill(_DELETE, staged_rows=staged_rows),
        ]

    def undetached(self, detached: sql.Identifier, condition: sql.SQL) -> sql.Composed:
        """(update_missing, keys) of the UPDATEs under `condition` that had no row to detach."""
        free = sql.SQL(
            "not exists (select from {} as detached where detached.staged_ctid = staged.ctid)"
        ).format(detached)
        staged_rows = self.staged_rows(NetKind.UPDATE, condition=condition)
        return self._fill(_UNMATCHED, free=free, staged_rows=staged_rows, key=self._base_key)

    def reinsert_rows(self, detached: sql.Identifier) -> sql.Composed:
        """Insert the detached rows with their new values."""
        return self._insert_all(sql.SQL("{} as detached").format(detached), "c")

    def restore_blocked(self, detached: sql.Identifier) -> sql.Composed:
        """Insert, with the original values, detached rows whose new key belongs to a row of the target."""
        blocked = sql.SQL(
            "with detached as (delete from {} as detached where {} returning detached.*) "
        ).format(detached, self._exists(self.occupies_detached_key, expected=True))
        return blocked + self._insert_all(sql.SQL("detached"), "o")

    def update(self, condition: sql.SQL) -> sql.Composed:
        """Overwrite the columns sent in the rows of staged UPDATEs."""
        assignments = [
            sql.SQL("{} = {}").format(
                sql.Identifier(column.name),
                self._value_or_current(index, column, index in self.staged.unsent),
            )
            for index, column in self._settable()
        ]
        return self._fill(
            "update {target} as target set {assignments} from {stage} as staged{pairs}"
            " where {staged_rows} and {key_match}",
            assignments=commas(assignments),
            staged_rows=self.staged_rows(NetKind.UPDATE, condition=condition),
        )

    def unmatched_updates(self, condition: sql.SQL) -> sql.Composed:
        """(update_missing, keys) of the UPDATEs under `condition` that match no row."""
        # An updated row has another ctid, but its pair is still in the table of pairs.
        free = sql.SQL("not exists (select from {})").format(self._matched_rows)
        staged_rows = self.staged_rows(NetKind.UPDATE, condition=condition)
        return self._fill(_UNMATCHED, free=free, staged_rows=staged_rows, key=self._base_key)

    def overwrite_blocking(self) -> sql.Composed:
        """Overwrite the columns sent in rows that have the key of staged INSERTs."""
        assignments = [
            sql.SQL("{} = {}").format(
                sql.Identifier(column.name), self._value_or_current(index, column, True)
            )
            for index, column in self._settable()
        ]
        return self._fill(
            "update {target} as target set {assignments} from {stage} as staged"
            " where {staged_rows} and {same}",
            assignments=commas(assignments),
            staged_rows=self.staged_rows(NetKind.INSERT),
            same=self.occupies_inserted_key,
        )

    def insert(self, omitted: str, *, only_free: bool) -> sql.Composed:
        """Insert the staged INSERTs that leave the columns `omitted` (a pattern) to their defaults.

        If the target shows the order of INSERTs, rows go in in log order, as in a native worker (R8.2,
        R8.13), but only within one pattern: each pattern has its own statement. Otherwise they go in in the
        order of the target's index: tasks stage them in hash order, in which index insertion is twice as
        slow.
        """
        columns = [
            (index, column)
            for index, column in enumerate(self.published)
            if omitted[index : index + 1] != "-"
        ]
        conditions = [self.staged_rows(NetKind.INSERT)]
        if len(self.staged.omitted) > 1:
            pattern = sql.Literal(omitted)
            sent = sql.Literal(" " * len(self.published))
            translated = sql.SQL("coalesce(translate(staged.kinds, 'ntu', '   '), {}) = {}")
            conditions.append(translated.format(sent, pattern))
        if only_free:
            conditions.append(self._exists(self.occupies_inserted_key, expected=False))
        rows = sql.SQL("select {values} from {stage} as staged where {where}{ordered}").format(
            # A table without columns still has a number of rows.
            values=commas(qualified("staged", f"v{index}") for index, _ in columns),
            stage=self.stage,
            where=all_of(conditions),
            ordered=_IN_LOG_ORDER if self.staged.table.inserts_in_log_order else self._ordered_by_key(),
        )
        return insert_rows(self.target, [column.name for _, column in columns], rows)

    def may_miss_updates(self) -> sql.Composed:
        """(update_missing, keys) of staged INSERTs whose key the target does not have."""
        free = self._exists(self.occupies_inserted_key, expected=False)
        staged_rows = self.staged_rows(NetKind.INSERT)
        key = texts(f"v{index}" for index in self.staged.table.key_positions)
        return self._fill(_UNMATCHED, free=free, staged_rows=staged_rows, key=key)

    def blocking_rows(self, rows: sql.Composable, same: sql.Composable) -> sql.Composed:
        """(total, key…) of rows of the target that block `rows`."""
        key = commas(
            sql.SQL("{}::text").format(qualified("target", column.name)) for column in self.staged.table.keys
        )
        return self._fill(_BLOCKING_ROWS, key=key, rows=rows, same=same)

    def delete_blocking(self, detached: sql.Identifier) -> sql.Composed:
        """Delete rows of the target that have the key of detached rows."""
        return self._fill(
            "delete from {target} as target using {detached} as detached where {same}",
            detached=detached,
            same=self.occupies_detached_key,
        )

    def occupies_passed_key(self, kind: NetKind) -> sql.Composed:
        """`target` has the transient or transit key of `staged`, and the window does not update it.

        An updated row may have left that key before; or its own key equals it, written in another way.
        """
        not_updated = self._fill(
            "not exists (select from {stage} as staged where {updated} and {key_match})",
            updated=self.staged_rows(NetKind.UPDATE),
        )
        return all_of([self.staged_rows(kind), self.key_match, not_updated])

    @property
    def occupies_detached_key(self) -> sql.Composed:
        """`target` has the key that `detached` moves to."""
        index_by_name = {column.name: index for index, column in enumerate(self.target.writable)}
        return self._same_key(
            qualified("detached", f"c{index_by_name[column.name]}") for column in self.staged.table.keys
        )

    def _ordered_by_key(self) -> sql.Composable:
        by = self._as_in_index(f"v{index}" for index in self.staged.table.key_positions)
        return sql.SQL(" order by {}").format(commas(by)) if by else sql.SQL("")

    def _report_missing(self, template: str, kind: NetKind, **parts: sql.Composable) -> sql.Composed:
        return self._fill(
            template,
            staged_rows=self.staged_rows(kind),
            key=self._base_key,
            expected=self._fill(_EXPECTED),
            **parts,
        )

    def _insert_all(self, rows: sql.Composable, letter: str) -> sql.Composed:
        columns = [column.name for column in self.target.writable]
        values = commas(qualified("detached", f"{letter}{index}") for index in range(len(columns)))
        return insert_rows(self.target, columns, sql.SQL("select {} from {}").format(values, rows))

    def _merged_value(self, column: TargetColumn) -> sql.Composed:
        for index, published in enumerate(self.published):
            if published.name == column.name:
                sent = self._value_or_current(index, column, index in self.staged.unsent)
                return sql.SQL("({})::{}").format(sent, sql.SQL(column.type_sql))
        return sql.SQL("{}").format(qualified("target", column.name))
