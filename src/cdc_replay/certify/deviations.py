"""Rows that differ from a native subscription by a documented deviation; all others fail the certificate.

| deviation          | rows                  | evidence                                         |
|--------------------|-----------------------|--------------------------------------------------|
| R4.6 unsent value  | of both, other values | only natively NULL, the publisher has ours       |
| R11.9 rewrite      | of both, other values | the log has the rewrite, the publisher has ours  |
| R1.11 text         | of both, other values | only columns whose text a session decides        |
| R9.12, R7.5, R7.11 | any                   | the key differed when both began to follow       |
| R9.10 definition   | any                   | what is published of the table changed meanwhile |

The evidence is for each row, except for the last line. A key that was equal at first and differs later is
never excused by what was before: both have got the same changes since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.certify.differing_columns import RowOnSides
from cdc_replay.compare.comparison import Comparison, NotCompared
from cdc_replay.compare.difference import Difference, DifferenceKind
from cdc_replay.model.certificate import (
    DEVIATION_TEXTS,
    CertifiedTable,
    Deviation,
    ExplainedRows,
    TableOutcome,
)
from cdc_replay.model.publication import TableColumn
from cdc_replay.subscriber.target_tables import TargetColumn, TargetTable

KEYS_KEPT: Final = 3
"""Keys that the certificate names, of each deviation and of what is not explained."""

_SESSION_TYPES: Final = ("timestamp with time zone", "time with time zone", "bytea")
"""Types of pg_catalog whose output depends on a setting that a native walsender does not pin (R1.11)."""


@dataclass(frozen=True, slots=True)
class TableFacts:
    """What is known of a table beside its rows.

    `history` is why rows may have differed from the start, and `differed_at_start` are the hashes of the keys
    that did. `may_be_unsent` are the columns with values that an UPDATE may not send, empty without a row
    filter. `by_session` are the columns of R1.11.
    """

    history: Deviation | None = None
    differed_at_start: frozenset[str] = frozenset()
    definition_changed: bool = False
    is_rewritten: bool = False
    may_be_unsent: frozenset[str] = frozenset()
    by_session: frozenset[str] = frozenset()


def explain_row(
    kind: DifferenceKind, key_hash: str, row: RowOnSides | None, facts: TableFacts
) -> Deviation | None:
    """The deviation that explains a row, or None; `row` is given for rows that both sides have."""
    if facts.definition_changed:
        return Deviation.DEFINITION_CHANGED
    if facts.history is not None and key_hash in facts.differed_at_start:
        return facts.history
    if kind is not DifferenceKind.DIFFERENT or row is None or not row.differing:
        return None
    return _explain_values(row, row.differing, facts)


def _explain_values(row: RowOnSides, columns: Sequence[str], facts: TableFacts) -> Deviation | None:
    if facts.by_session.issuperset(columns):
        return Deviation.TEXT_OF_SESSION
    if not row.publisher_agrees(columns):
        return None
    if facts.may_be_unsent.issuperset(columns) and all(map(row.is_null_natively, columns)):
        return Deviation.UNSENT_VALUE
    return Deviation.TABLE_REWRITTEN if facts.is_rewritten else None


def columns_by_session(published: Iterable[TableColumn], target: TargetTable) -> frozenset[str]:
    """The columns whose values are stored as texts that a session of the publisher writes (R1.11)."""
    own = {column.name: column for column in target.columns}
    return frozenset(
        column.name
        for column in published
        if column.name in own and _is_text_of_session(column, own[column.name])
    )


def _is_text_of_session(published: TableColumn, own: TargetColumn) -> bool:
    """Whether the stored text is the publisher's: natively, or here as well."""
    # Which schema is part of a name depends on the search path.
    if published.holds_names or own.is_opaque:
        return True
    element = _without_precision(published.type_sql).removesuffix("[]")
    return element in _SESSION_TYPES and own.base_type_sql != published.type_sql


def _without_precision(type_sql: str) -> str:
    """`timestamp(3) with time zone` without its precision."""
    before, parenthesis, after = type_sql.partition("(")
    return before + after.partition(")")[2] if parenthesis else type_sql


@dataclass(slots=True)
class _Explained:
    rows: dict[Deviation, int] = field(default_factory=dict)
    keys: dict[Deviation, list[str]] = field(default_factory=dict)

    def add(self, deviation: Deviation, key: str) -> None:
        self.rows[deviation] = self.rows.get(deviation, 0) + 1
        if len(kept := self.keys.setdefault(deviation, [])) < KEYS_KEPT:
            kept.append(key)

    def results(self) -> tuple[ExplainedRows, ...]:
        return tuple(
            ExplainedRows(deviation, DEVIATION_TEXTS[deviation], rows, tuple(self.keys[deviation]))
            for deviation, rows in self.rows.items()
        )


def certify_table(
    name: str, compared: Comparison | NotCompared, rows: Mapping[str, RowOnSides], facts: TableFacts
) -> CertifiedTable:
    """The table of the certificate; `rows` are those of the listed differences, by the hash of the key.

    A difference that was counted but not listed is not explained, unless the table's definition changed.
    """
    if isinstance(compared, NotCompared):
        return CertifiedTable(name, TableOutcome.NOT_COMPARED, reason=compared.reason)
    explained, unexplained = _Explained(), []
    counts = dict(compared.differences.counts)
    for difference in compared.differences.first:
        row = rows.get(difference.key_hash)
        deviation = explain_row(difference.kind, difference.key_hash, row, facts)
        if deviation is None:
            unexplained.append(difference)
        else:
            explained.add(deviation, difference.key)
            counts[difference.kind] -= 1
    unexplained_kinds = {difference.kind for difference in unexplained}
    for kind, kept in compared.differences.kept.items():
        # Equal rows of a table without a key count one by one, and are listed once.
        is_listed = len(kept) < compared.differences.limit and compared.differences.exact
        if facts.definition_changed or (is_listed and kind not in unexplained_kinds):
            counts[kind] = 0
    left = {kind.value: count for kind, count in counts.items() if count}
    is_unknown = not compared.differences.exact and not facts.definition_changed
    if left or is_unknown:
        outcome = TableOutcome.DIFFERS
    else:
        outcome = TableOutcome.DEVIATES if explained.rows else TableOutcome.EQUAL
    return CertifiedTable(
        name,
        outcome,
        native_rows=compared.publisher_rows,
        our_rows=compared.subscriber_rows,
        differences=left,
        keys=_keys(unexplained),
        deviations=explained.results(),
        reason="more rows differ than were listed" if is_unknown else None,
    )


def _keys(differences: Sequence[Difference]) -> tuple[str, ...]:
    return tuple(f"{difference.kind.value} {difference.key}" for difference in differences[:KEYS_KEPT])


def listed_keys(compared: Comparison | NotCompared, kinds: Collection[DifferenceKind]) -> list[str]:
    """The hashes of the keys of the listed differences of these kinds."""
    if isinstance(compared, NotCompared):
        return []
    return sorted(
        {difference.key_hash for difference in compared.differences.first if difference.kind in kinds}
    )
