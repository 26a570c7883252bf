"""Filters that only PostgreSQL can answer exactly: rows are evaluated on the publisher.

On the executors, for each Arrow batch and each check: the values that the check reads, of the rows that it is
asked about, go to the server, and the answers come back. That is one round trip per batch and check, and none
per row; equal values go only once (immutable functions give them equal answers, R5.3), which halves the work
for an UPDATE that changes nothing that the filter reads. A task holds one connection, opened for the first
row that needs it and closed with the task.

An error of the filter (a division by zero) stops a native subscription too (R1.36). It is raised for a row
only where PostgreSQL would have evaluated the filter for it: the routes and kinds of a check say which. It
names the publication, the filter, and the row.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.check_table import Question
from cdc_replay.filters.compile import ServerFilter, shown
from cdc_replay.filters.server_session import NULL, Answers, Failure, FilterFailed, FilterSession
from cdc_replay.model.frames import ChangeKind
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import Generated, RowFilter, TableColumn
from cdc_replay.model.relation import QualifiedName

Indices: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]

ROW_KINDS: Final = frozenset({ChangeKind.INSERT, ChangeKind.UPDATE, ChangeKind.DELETE})
"""The kinds of change that have rows to filter."""

MAX_SHOWN: Final = 80
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True)
class ServerCheck:
    """Filters to ask PostgreSQL about, whether one is true, and which rows to ask it about.

    Its answer is element `number` of the answers. It is asked about rows whose `route` is in `routes` and
    whose `kind` is in `kinds`. `columns` says where in a row's value array each column is; None where the row
    does not have it, as for a generated column, which is computed, or one that the relation got later, which
    is NULL.
    """

    number: int
    routes: frozenset[int]
    filters: tuple[RowFilter, ...]
    columns: tuple[tuple[TableColumn, int | None], ...]
    table: QualifiedName
    kinds: frozenset[ChangeKind] = ROW_KINDS
    key: tuple[tuple[str, int], ...] = ()
    """The columns by which a row is named in an error, each with its position in the value array."""
    unknown_if_changed: str | None = None
    """A column whose value an UPDATE or DELETE does not bring, not even for its computation."""

    @classmethod
    def of(
        cls,
        compiled: ServerFilter,
        held: Sequence[str],
        *,
        number: int,
        routes: Iterable[int],
        kinds: Iterable[ChangeKind] = ROW_KINDS,
    ) -> Self:
        """The check of a compiled filter, over rows whose value arrays hold the columns `held` in order."""
        at = {name: position for position, name in enumerate(held)}
        columns = tuple(_source(column, at.get(column.name)) for column in compiled.columns)
        return cls(
            number=number,
            routes=frozenset(routes),
            filters=compiled.filters,
            columns=columns,
            table=compiled.table,
            kinds=frozenset(kinds),
            key=tuple((name, at[name]) for name in compiled.key or at if name in at),
            unknown_if_changed=next((name for name in compiled.only_in_key if name not in at), None),
        )

    @property
    def question(self) -> Question:
        """What the server is asked."""
        return Question(self.number, self.filters, tuple(column for column, _ in self.columns), self.table)


def _source(column: TableColumn, position: int | None) -> tuple[TableColumn, int | None]:
    """A generated column whose value was sent (R6.9) is a column like any other."""
    if position is not None and column.generated is not Generated.NO:
        return dataclasses.replace(column, generated=Generated.NO), position
    return column, position


def server_answers(
    batch: pa.RecordBatch, checks: Sequence[ServerCheck], session: FilterSession, rows: Sequence[str]
) -> dict[str, np.ndarray[tuple[int, int], np.dtype[np.int8]]]:
    """PostgreSQL's answers about a batch of rows.

    Args:
        batch: has `route int`, `kind string`, the columns that `rows` names, and `commit_lsn bigint` if
            errors shall say which transaction it was.
        checks: each with its own number; numbers are positions in the answers.
        session: where to ask: on the publisher, whose role must be allowed to create temporary tables.
        rows: columns of values (`array<string>`: PostgreSQL's text, NULL for NULL and for what was not sent).

    Returns:
        For each of `rows` an array with a line per row and a column per check: 1 for TRUE, 0 for FALSE,
        `NULL` where the filter is NULL, the check is not asked about that row, or the row has no values.

    Raises:
        InvalidFilter: if evaluating a filter fails.
        ServerUnavailable, MissingPrivilege: if the server cannot be asked.
    """
    width = max((check.number + 1 for check in checks), default=0)
    answers = {source: np.full((batch.num_rows, width), NULL, np.int8) for source in rows}
    for check in checks:
        asked = {source: _asked(batch, check, source) for source in rows}
        found = _found(batch, check, asked, session)
        for source, indices in asked.items():
            answers[source][indices, check.number], found = found[: len(indices)], found[len(indices) :]
    return answers


def _asked(batch: pa.RecordBatch, check: ServerCheck, source: str) -> Indices:
    """The rows of the batch whose values in `source` the check is asked about."""
    mask = pc.and_(_is_in(batch, "route", check.routes), batch.column(source).is_valid())
    if check.kinds != ROW_KINDS:
        mask = pc.and_(mask, _is_in(batch, "kind", {kind.value for kind in check.kinds}))
    indices: Indices = pc.indices_nonzero(mask).to_numpy()
    return indices


def _is_in(batch: pa.RecordBatch, name: str, wanted: Iterable[int] | Iterable[str]) -> pa.Array:
    column = batch.column(name)
    return pc.is_in(column, value_set=pa.array(list(wanted), type=column.type))


def _found(
    batch: pa.RecordBatch, check: ServerCheck, asked: Mapping[str, Indices], session: FilterSession
) -> Answers:
    """The answers for the rows of all sources, one after the other.

    Raises:
        InvalidFilter: if the filter fails for one of them.
    """
    tables = [_values(batch.column(source), indices, check) for source, indices in asked.items()]
    values, numbers = _distinct(pa.concat_tables(tables))
    if values.num_rows == 0:
        return np.empty(0, np.int8)
    _check_known(batch, check, asked)
    try:
        return session.answers(check.question, values)[numbers]
    except FilterFailed as failed:
        failure = failed.failure
        rows = [(source, int(index)) for source, indices in asked.items() for index in indices]
        where = None if failure.row is None else rows[int(np.flatnonzero(numbers == failure.row)[0])]
        culprit = _culprit(check, values, failure.row, session)
        raise _explained(check, culprit, failure, _described(batch, check, where)) from failed


def _check_known(batch: pa.RecordBatch, check: ServerCheck, asked: Mapping[str, Indices]) -> None:
    """Refuse to take NULL for a value that the publisher had and did not send."""
    if check.unknown_if_changed is None:
        return
    changed = _is_in(batch, "kind", {ChangeKind.UPDATE.value, ChangeKind.DELETE.value}).to_numpy(False)
    for source, indices in asked.items():
        for index in indices[changed[indices]][:1]:
            raise InvalidFilter(
                f'cannot evaluate a row filter of table "{check.table}": the value of generated column'
                f' "{check.unknown_if_changed}" is not sent',
                detail=f"The filter is {shown(check.filters)}. The column is part of the replica identity,"
                " the columns from which it is computed are not."
                f"{_described(batch, check, (source, int(index)))}",
                hint="Set the table's REPLICA IDENTITY to FULL, or to an index that has these columns too,"
                f" then copy the table again: `cdc-replay snapshot … --table {check.table}`.",
                rule="R3.13",
            )


def _values(source: pa.Array, indices: Indices, check: ServerCheck) -> pa.Table:
    """The values that the check reads, one string column each; a generated column is not among them."""
    taken = source.take(pa.array(indices))
    none = pa.nulls(len(indices), pa.string())
    sent = [position for column, position in check.columns if column.generated is Generated.NO]
    columns = [none if position is None else pc.list_element(taken, position) for position in sent]
    # The first column keeps the count of rows where a filter reads no column at all.
    numbers = pa.nulls(len(indices), pa.int64())
    return pa.Table.from_arrays([numbers, *columns], names=[str(index) for index in range(len(columns) + 1)])


def _distinct(values: pa.Table) -> tuple[pa.Table, Indices]:
    """Each row of values once, and for each row of `values` which of those it is."""
    numbers = np.zeros(values.num_rows, np.int64)
    for column in values.columns[1:]:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy()
        # No overflow: both factors are at most the count of rows of a batch, twice.
        numbers = pa.array(numbers * len(encoded.dictionary) + codes).dictionary_encode().indices.to_numpy()
    _, first = np.unique(numbers, return_index=True)
    return values.take(pa.array(first)), numbers.astype(np.uint64)


# ---- errors


def _culprit(
    check: ServerCheck, values: pa.Table, row: int | None, session: FilterSession
) -> RowFilter | None:
    """Whose filter fails for the row: the first that does, since none before it is TRUE (R3.8)."""
    if row is None:
        return check.filters[0] if len(check.filters) == 1 else None
    for row_filter in check.filters:
        try:
            session.answers(dataclasses.replace(check.question, filters=(row_filter,)), values.slice(row, 1))
        except FilterFailed:
            return row_filter
    return None


def _described(batch: pa.RecordBatch, check: ServerCheck, where: tuple[str, int] | None) -> str:
    """The row by its key, and the transaction that changed it."""
    if where is None:
        return ""
    source, index = where
    held = batch.column(source)[index].as_py()
    names = ", ".join(name for name, _ in check.key)
    key = ", ".join(_shown(held[position]) for _, position in check.key)
    described = f" The row has ({names})=({key})."
    if "commit_lsn" in batch.schema.names:
        described += (
            f" It was changed by the transaction that ends at {Lsn(batch['commit_lsn'][index].as_py())}."
        )
    return described


def _shown(value: str | None) -> str:
    """A value as PostgreSQL shows a key, but on one line and not longer than a line."""
    if value is None:
        return "null"
    text = _CONTROL.sub(" ", value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _explained(
    check: ServerCheck, culprit: RowFilter | None, failure: Failure, described: str
) -> InvalidFilter:
    whose = f' of publication "{culprit.publication}"' if culprit and culprit.publication else ""
    filter_sql = culprit.sql if culprit else shown(check.filters)
    return InvalidFilter(
        f'cannot evaluate a row filter of table "{check.table}": {failure.said}'
        + (f" (SQLSTATE {failure.sqlstate})" if failure.sqlstate else ""),
        detail=f"The filter{whose} is {filter_sql}.{described}",
        hint="Decoding for a native subscription stops at this change for good. Change the filter so that it"
        f" holds for every row, then copy the table again: `cdc-replay snapshot … --table {check.table}`.",
        rule="R1.36",
    )
