"""Evaluates filters on the publisher, if only PostgreSQL can answer them exactly.

For each Arrow batch and check, executors send the values that the check reads to the server, which returns
the answers: one round trip per batch and check. Equal values are sent once (immutable functions give them
equal answers, R5.3), which halves the work for an UPDATE that changes nothing that the filter reads. A task
has one connection, opened for the first row that needs it.

An error of the filter (a division by zero) stops a native subscription too (R1.36). It is raised only for
rows for which PostgreSQL would evaluate the filter: those of the check's routes and kinds. It names the
publication, the filter, and the row.
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
from cdc_replay.filters.compile import ServerFilter, filters_sql
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
    """The OR of filters that PostgreSQL evaluates, and for which rows.

    Its answer is element `check_id` of the answers, for rows whose `route` is in `routes` and whose `kind` is
    in `kinds`. `columns` has each column's position in a row's value array; None if the row does not have it:
    a generated column, which is computed, or one added later, which is NULL.
    """

    check_id: int
    routes: frozenset[int]
    filters: tuple[RowFilter, ...]
    columns: tuple[tuple[TableColumn, int | None], ...]
    table: QualifiedName
    kinds: frozenset[ChangeKind] = ROW_KINDS
    key: tuple[tuple[str, int], ...] = ()
    """The columns by which an error identifies its row, with their positions in the value array."""
    unknown_if_changed: str | None = None
    """A generated column that an UPDATE or DELETE neither sends nor has the source columns of."""

    @classmethod
    def from_filter(
        cls,
        compiled: ServerFilter,
        available_columns: Sequence[str],
        *,
        check_id: int,
        routes: Iterable[int],
        kinds: Iterable[ChangeKind] = ROW_KINDS,
    ) -> Self:
        """The check of a compiled filter, over rows whose value arrays hold `available_columns`."""
        position_of = {name: position for position, name in enumerate(available_columns)}
        columns = tuple(_source(column, position_of.get(column.name)) for column in compiled.columns)
        return cls(
            check_id=check_id,
            routes=frozenset(routes),
            filters=compiled.filters,
            columns=columns,
            table=compiled.table,
            kinds=frozenset(kinds),
            key=tuple(
                (name, position_of[name]) for name in compiled.key or position_of if name in position_of
            ),
            unknown_if_changed=next((name for name in compiled.only_in_key if name not in position_of), None),
        )

    @property
    def question(self) -> Question:
        """The question for the server."""
        return Question(self.check_id, self.filters, tuple(column for column, _ in self.columns), self.table)


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
        checks: each with its own `check_id`, its position in the answers.
        session: on the publisher; its role must be allowed to create temporary tables.
        rows: columns of values (`array<string>`: PostgreSQL's text, NULL for NULL and for what was not sent).

    Returns:
        For each of `rows` an array with a line per row and a column per check: 1 for TRUE, 0 for FALSE,
        `NULL` if the filter is NULL, the check does not include the row, or the row has no values.

    Raises:
        InvalidFilter: if evaluating a filter fails.
        ServerUnavailable, MissingPrivilege: if the server cannot evaluate filters.
    """
    width = max((check.check_id + 1 for check in checks), default=0)
    answers = {source: np.full((batch.num_rows, width), NULL, np.int8) for source in rows}
    for check in checks:
        selected = {source: _select_rows(batch, check, source) for source in rows}
        values = _answer_rows(batch, check, selected, session)
        for source, indices in selected.items():
            answers[source][indices, check.check_id] = values[: len(indices)]
            values = values[len(indices) :]
    return answers


def _select_rows(batch: pa.RecordBatch, check: ServerCheck, source: str) -> Indices:
    """The rows of the batch for whose values in `source` the check is evaluated."""
    mask = pc.and_(_is_in(batch, "route", check.routes), batch.column(source).is_valid())
    if check.kinds != ROW_KINDS:
        mask = pc.and_(mask, _is_in(batch, "kind", {kind.value for kind in check.kinds}))
    indices: Indices = pc.indices_nonzero(mask).to_numpy()
    return indices


def _is_in(batch: pa.RecordBatch, name: str, members: Iterable[int] | Iterable[str]) -> pa.Array:
    column = batch.column(name)
    return pc.is_in(column, value_set=pa.array(list(members), type=column.type))


def _answer_rows(
    batch: pa.RecordBatch, check: ServerCheck, selected: Mapping[str, Indices], session: FilterSession
) -> Answers:
    """The answers for the rows of all sources, one after the other.

    Raises:
        InvalidFilter: if the filter fails for one of them.
    """
    tables = [_values(batch.column(source), indices, check) for source, indices in selected.items()]
    values, distinct_ids = _deduplicate(pa.concat_tables(tables))
    if values.num_rows == 0:
        return np.empty(0, np.int8)
    _check_known(batch, check, selected)
    try:
        return session.answers(check.question, values)[distinct_ids]
    except FilterFailed as failed:
        failure = failed.failure
        rows = [(source, int(index)) for source, indices in selected.items() for index in indices]
        where = None if failure.row is None else rows[int(np.flatnonzero(distinct_ids == failure.row)[0])]
        culprit = _culprit(check, values, failure.row, session)
        raise _filter_error(check, culprit, failure, _describe_row(batch, check, where)) from failed


def _check_known(batch: pa.RecordBatch, check: ServerCheck, selected: Mapping[str, Indices]) -> None:
    """Raise if a value that the publisher has not sent would be read as NULL."""
    if check.unknown_if_changed is None:
        return
    changed = _is_in(batch, "kind", {ChangeKind.UPDATE.value, ChangeKind.DELETE.value}).to_numpy(False)
    for source, indices in selected.items():
        for index in indices[changed[indices]][:1]:
            raise InvalidFilter(
                f'cannot evaluate a row filter of table "{check.table}": the value of generated column'
                f' "{check.unknown_if_changed}" is not sent',
                detail=f"The filter is {filters_sql(check.filters)}. The column is part of the replica"
                " identity, the columns from which it is computed are not."
                f"{_describe_row(batch, check, (source, int(index)))}",
                hint="Set the table's REPLICA IDENTITY to FULL, or to an index that has these columns too,"
                f" then copy the table again: `cdc-replay snapshot … --table {check.table.argument}`.",
                rule="R3.13",
            )


def _values(source: pa.Array, indices: Indices, check: ServerCheck) -> pa.Table:
    """The values that the check reads, one string column each, without generated columns."""
    selected_rows = source.take(pa.array(indices))
    none = pa.nulls(len(indices), pa.string())
    sent = [position for column, position in check.columns if column.generated is Generated.NO]
    columns = [none if position is None else pc.list_element(selected_rows, position) for position in sent]
    # The first column keeps the count of rows if a filter reads no column.
    counter = pa.nulls(len(indices), pa.int64())
    return pa.Table.from_arrays([counter, *columns], names=[str(index) for index in range(len(columns) + 1)])


def _deduplicate(values: pa.Table) -> tuple[pa.Table, Indices]:
    """The distinct rows, and for each row of `values` its position among them."""
    ids = np.zeros(values.num_rows, np.int64)
    for column in values.columns[1:]:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy()
        # No overflow: both factors are at most the count of rows of a batch, twice.
        ids = pa.array(ids * len(encoded.dictionary) + codes).dictionary_encode().indices.to_numpy()
    _, first = np.unique(ids, return_index=True)
    return values.take(pa.array(first)), ids.astype(np.uint64)


# ---- errors


def _culprit(
    check: ServerCheck, values: pa.Table, row: int | None, session: FilterSession
) -> RowFilter | None:
    """The first filter that fails for the row: none before it is TRUE (R3.8)."""
    if row is None:
        return check.filters[0] if len(check.filters) == 1 else None
    for row_filter in check.filters:
        try:
            session.answers(dataclasses.replace(check.question, filters=(row_filter,)), values.slice(row, 1))
        except FilterFailed:
            return row_filter
    return None


def _describe_row(batch: pa.RecordBatch, check: ServerCheck, where: tuple[str, int] | None) -> str:
    """The row by its key, and the transaction that changed it."""
    if where is None:
        return ""
    source, index = where
    values = batch.column(source)[index].as_py()
    names = ", ".join(name for name, _ in check.key)
    key = ", ".join(_shorten(values[position]) for _, position in check.key)
    described = f" The row has ({names})=({key})."
    if "commit_lsn" in batch.schema.names:
        described += (
            f" It was changed by the transaction that ends at {Lsn(batch['commit_lsn'][index].as_py())}."
        )
    return described


def _shorten(value: str | None) -> str:
    """A value as PostgreSQL shows a key, but on one line and not longer than a line."""
    if value is None:
        return "null"
    text = _CONTROL.sub(" ", value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _filter_error(
    check: ServerCheck, culprit: RowFilter | None, failure: Failure, described: str
) -> InvalidFilter:
    whose = f' of publication "{culprit.publication}"' if culprit and culprit.publication else ""
    filter_sql = culprit.sql if culprit else filters_sql(check.filters)
    return InvalidFilter(
        f'cannot evaluate a row filter of table "{check.table}": {failure.message}'
        + (f" (SQLSTATE {failure.sqlstate})" if failure.sqlstate else ""),
        detail=f"The filter{whose} is {filter_sql}.{described}",
        hint=f"{_first_remedy(check)} Change the filter so that it holds for every row, then copy the table"
        f" again: `cdc-replay snapshot … --table {check.table.argument}`.",
        rule="R1.36",
    )


def _first_remedy(check: ServerCheck) -> str:
    # Names are sent, no oids, and looked up when the filter is evaluated.
    if any(column.holds_names for column, _ in check.columns):
        return (
            "If a value names an object that was renamed or dropped since, give it its name back until the"
            " changes are replayed. Otherwise:"
        )
    return "Decoding for a native subscription stops at this change for good."
