"""What a merge would change: the number of rows, and the first keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, LiteralString

from psycopg import sql

from cdc_replay.compare.digest import LONGEST_KEY
from cdc_replay.compare.row_comparison import RowComparison, open_comparison
from cdc_replay.compare.staging import StagedRows, comparison_errors
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.identifiers import commas, names
from cdc_replay.subscriber.apply_connection import pinned_text_formats
from cdc_replay.subscriber.as_owner import act_on

_DELETED: Final = """
    from {target} as rows join {surplus} as surplus
        on rows.tableoid = surplus.relation and rows.ctid = surplus.row_id
    where {is_deleted}
"""

_UPDATED: Final = "from {pairs} as pairs join {staged} as rows on rows.ctid = pairs.staged_row_id"

_INSERTED: Final = """
    from {missing} as missing join {staged} as rows on rows.ctid = missing.row_id where {is_inserted}
"""

_FIRST_KEYS: Final = """
    select count(*) over (), {shown} {rows} order by {order} limit {limit}
"""

KEYS_SHOWN: Final = 5
"""First keys of a table's rows that would be deleted, updated and inserted."""


@dataclass(frozen=True, slots=True)
class PreviewedRows:
    """The number of rows that a merge would change in one way, and the first keys."""

    rows: int = 0
    keys: tuple[str, ...] = ()


def preview(connection: Connection, staged: StagedRows) -> tuple[PreviewedRows, PreviewedRows, PreviewedRows]:
    """The rows that `merge` would insert, update and delete; writes temporary tables of its own only.

    Raises:
        As `comparison_errors`.
    """
    if staged.table is None:
        return PreviewedRows(), PreviewedRows(), PreviewedRows()
    target = staged.pair.target
    with (
        comparison_errors(staged.pair.name),
        connection.transaction(force_rollback=True),
        act_on(connection, [target], only_reads=True) as sessions,
        open_comparison(connection, sessions.session_for(target), staged, staged.table) as comparison,
    ):
        comparison.compare()
        with pinned_text_formats(connection):
            return (
                _preview(comparison, _INSERTED),
                _preview(comparison, _UPDATED),
                _preview(comparison, _DELETED),
            )


def _preview(comparison: RowComparison, rows: LiteralString) -> PreviewedRows:
    pair = comparison.pair
    key = pair.key
    of_key = [sql.Identifier("rows", name) for name in key]
    texts = commas(sql.SQL("format('%s', {})").format(column) for column in of_key)
    whole = sql.SQL("left(row({})::text, {})").format(names(pair.columns, "rows"), sql.Literal(LONGEST_KEY))
    is_ordered = key and all(pair.target.column(name).less for name in key)
    rows_found = comparison.query(
        _FIRST_KEYS,
        shown=texts if key else whole,
        rows=comparison.format(rows),
        order=commas(of_key) if is_ordered else texts if key else whole,
        limit=sql.Literal(KEYS_SHOWN),
    )
    return PreviewedRows(
        rows_found[0][0] if rows_found else 0,
        tuple(f"({', '.join(key)})=({', '.join(shown)})" if key else shown[0] for _, *shown in rows_found),
    )
