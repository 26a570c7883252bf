"""The effects of a proposal, table by table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.model.proposed_change import PlannedTable, RowsOfTable, UnknownOldValues
from cdc_replay.model.publication import PublishAction, PublisherCatalog, RowFilter
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.proposal.logged_changes import ChangesOfTable, CountedChanges
from cdc_replay.proposal.row_counts import BothCopies
from cdc_replay.proposal.write_checks import SEARCHING, outside_identity
from cdc_replay.publication.capture_coverage import is_captured
from cdc_replay.publication.explain import ExplainedTable, explain_tables
from cdc_replay.publication.resolve import PublishedRelation, resolve, synced_tables

ALL_ROWS: Final = "all rows"
NOT_PUBLISHED: Final = "not published"


@dataclass(frozen=True, slots=True)
class BothDefinitions:
    """The publisher's catalog now and then, and the publications of the subscription."""

    now: PublisherCatalog
    then: PublisherCatalog
    publications: tuple[str, ...]

    @property
    def copies(self) -> dict[QualifiedName, BothCopies]:
        """The tables that the subscription lists now or then, each with its initial copies."""
        now, then = (
            {synced.table.name: synced for synced in synced_tables(catalog, self.publications)}
            for catalog in (self.now, self.then)
        )
        return {name: BothCopies(now.get(name), then.get(name)) for name in sorted({*now, *then})}


def planned_tables(
    both: BothDefinitions, rows: Mapping[QualifiedName, RowsOfTable], changes: CountedChanges
) -> tuple[PlannedTable, ...]:
    """The tables of which the proposal changes anything, in order of name."""
    explained_now, explained_then = (
        _by_table(explain_tables(catalog, both.publications)) for catalog in (both.now, both.then)
    )
    copies, unknown, uncaptured = both.copies, _unknown_old_values(both, changes), _uncaptured(both)
    tables = []
    for name in sorted({*copies, *changes.tables}):
        counted = changes.tables.get(name, ChangesOfTable())
        now, then = (explained.get(str(name), []) for explained in (explained_now, explained_then))
        columns_now, columns_then = (_columns(entries) for entries in (now, then))
        stays = bool(now) and bool(then)
        table = PlannedTable(
            table=str(name),
            membership=_membership(copies.get(name)),
            rows=rows.get(name),
            now=counted.now,
            then=counted.then,
            transitions=counted.transitions,
            added_columns=tuple(name for name in columns_then if stays and name not in columns_now),
            removed_columns=tuple(name for name in columns_now if stays and name not in columns_then),
            filters_now=_filters(now),
            filters_then=_filters(then),
            evaluated_by=tuple(dict.fromkeys(text for entry in then for text in entry.evaluated_by)),
        )
        if table.differs:
            tables.append(
                dataclasses.replace(
                    table, unknown_old_values=unknown.get(name, ()), uncaptured=name in uncaptured
                )
            )
    return tuple(tables)


def _membership(copies: BothCopies | None) -> str:
    if copies is None or (copies.now is not None and copies.then is not None):
        return "stays"
    return "new" if copies.now is None else "removed"


def _by_table(explained: Iterable[ExplainedTable]) -> dict[str, list[ExplainedTable]]:
    by_table: dict[str, list[ExplainedTable]] = {}
    for table in explained:
        by_table.setdefault(table.table, []).append(table)
    return by_table


def _columns(entries: Sequence[ExplainedTable]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(column for entry in entries for column in entry.columns))


def _filters(entries: Sequence[ExplainedTable]) -> dict[str, str | None] | None:
    """The effective filter of each action in words; several if leaves have different ones (R2.8)."""
    if not entries:
        return None
    words: dict[str, str | None] = {}
    for action in PublishAction:
        of_leaves = dict.fromkeys(_filter(entry, action) for entry in entries)
        words[action.value] = "; ".join(of_leaves)
    return words


def _filter(entry: ExplainedTable, action: PublishAction) -> str:
    if action.value not in entry.actions:
        return NOT_PUBLISHED
    printed = {"insert": entry.insert, "update": entry.update, "delete": entry.delete}.get(action.value)
    return ALL_ROWS if printed is None or printed == "-" else printed


def _uncaptured(both: BothDefinitions) -> set[QualifiedName]:
    """The published tables of which some changes are not in the log, since nothing captures them yet."""
    published = (
        resolve(both.then, both.publications, leaf.id)
        for leaf in both.then.tables.values()
        if not leaf.is_partitioned
    )
    return {
        entry.table.name
        for entry in published
        if entry is not None
        and not all(_is_captured(both.now, entry.leaf, action) for action in entry.actions)
    }


def _is_captured(now: PublisherCatalog, leaf: RelationId, action: PublishAction) -> bool:
    # Of now: event triggers let capture follow the proposal, but not for what is in the log already.
    return leaf in now.tables and is_captured(now, now.tables[leaf], action)


def _unknown_old_values(
    both: BothDefinitions, changes: CountedChanges
) -> dict[QualifiedName, tuple[UnknownOldValues, ...]]:
    """By published table, its leaves whose old rows lack columns that a changed filter reads."""
    by_table: dict[QualifiedName, tuple[UnknownOldValues, ...]] = {}
    for leaf in sorted(both.then.tables.values(), key=lambda table: table.name):
        if leaf.is_partitioned:
            continue
        now, then = (resolve(catalog, both.publications, leaf.id) for catalog in (both.now, both.then))
        if then is None or (now is not None and now.filters == then.filters):
            continue
        missing = dict.fromkeys(
            column
            for row_filter in _searched_filters(then)
            for column in outside_identity(row_filter, then.table, leaf)
        )
        if missing:
            unknown = UnknownOldValues(
                str(leaf.name), tuple(missing), changes.without_old_values.get(leaf.id, 0)
            )
            by_table[then.table.name] = (*by_table.get(then.table.name, ()), unknown)
    return by_table


def _searched_filters(published: PublishedRelation) -> Iterator[RowFilter]:
    for action in SEARCHING:
        if action in published.actions:
            yield from published.filters[action] or ()
