"""What happened to a table beside changes of its rows: other definitions, rewrites, the copy; in order."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from cdc_replay.catalog.history import FOR_ALL, CatalogHistory
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.queries import LogSummary
from cdc_replay.errors import PublicationRefused
from cdc_replay.explain_row.progress import Progress
from cdc_replay.model.explained_row import EventKind, TableEvent
from cdc_replay.model.lsn import Window
from cdc_replay.model.publication import PublishAction, PublisherCatalog
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.publication.effective_filter import ROW_ACTIONS
from cdc_replay.publication.resolve import PublishedRelation, resolve
from cdc_replay.replay.table_rewrites import rewrites_in


def definition_events(
    history: CatalogHistory,
    catalogs: Mapping[int, PublisherCatalog],
    publications: Sequence[str],
    leaf: RelationId,
) -> Iterator[tuple[TableEvent, PublisherCatalog]]:
    """Where the publications began to publish the leaf in another way (R9.12), for all transactions.

    Each with the catalog before.
    """
    for_all = [
        (history.versions[version].from_lsn, catalog)
        for version, catalog in sorted(catalogs.items())
        if history.versions[version].owner == FOR_ALL
    ]
    for (_, before), (lsn, after) in itertools.pairwise(for_all):
        if before is not after and (differences := tuple(_differences(before, after, publications, leaf))):
            gained = _gained(before, after, publications, leaf)
            yield TableEvent(lsn, EventKind.DEFINITION, "; ".join(differences), gained), before


def _differences(
    before: PublisherCatalog, after: PublisherCatalog, publications: Sequence[str], leaf: RelationId
) -> Iterator[str]:
    old, new = (_resolve(catalog, publications, leaf) for catalog in (before, after))
    if isinstance(old, str) or isinstance(new, str):
        if old != new:
            yield new if isinstance(new, str) else f"it is published as {new.table.name} now"
        return
    if old.table.id != new.table.id:
        yield f"it is published as {new.table.name} now, instead of {old.table.name}"
    yield from _filter_differences(old, new)
    if (PublishAction.TRUNCATE in old.actions) != (PublishAction.TRUNCATE in new.actions):
        yield f"truncate is {'' if PublishAction.TRUNCATE in new.actions else 'not '}published now"
    lost, gained = set(old.columns) - set(new.columns), set(new.columns) - set(old.columns)
    if gained or lost:
        changes = [f"+{name}" for name in sorted(gained)] + [f"-{name}" for name in sorted(lost)]
        yield f"published columns: {', '.join(changes)}"


def _filter_differences(old: PublishedRelation, new: PublishedRelation) -> Iterator[str]:
    """Which rows are published, where that differs; actions with equal row filters together."""
    actions: dict[tuple[str, str], list[str]] = {}
    for action in ROW_ACTIONS:
        actions.setdefault((_filter_of(old, action), _filter_of(new, action)), []).append(action.value)
    for (earlier, later), changed in actions.items():
        if earlier != later:
            of = "" if len(changed) == len(ROW_ACTIONS) else f" for {' and '.join(changed)}"
            yield f"rows published{of}: {later}, before that {earlier}"


def _gained(
    before: PublisherCatalog, after: PublisherCatalog, publications: Sequence[str], leaf: RelationId
) -> tuple[str, ...]:
    """The columns that are published after, and were not before although the table had them."""
    old, new = (_resolve(catalog, publications, leaf) for catalog in (before, after))
    if isinstance(old, str) or isinstance(new, str):
        return ()
    existing = {column.name for column in old.table.columns}
    return tuple(name for name in new.columns if name in existing and name not in old.columns)


def _resolve(
    catalog: PublisherCatalog, publications: Sequence[str], leaf: RelationId
) -> PublishedRelation | str:
    if leaf not in catalog.tables:
        return "the table does not exist"
    try:
        published = resolve(catalog, publications, leaf)
    except PublicationRefused as refusal:
        return f"PostgreSQL refuses the publications: {refusal.message}"
    return "no publication of the subscription publishes the table" if published is None else published


def _filter_of(published: PublishedRelation, action: PublishAction) -> str:
    if action not in published.actions:
        return "none"
    filters = published.filters[action]
    return "all" if filters is None else " OR ".join(row_filter.sql for row_filter in filters)


def rewrite_events(
    change_log: ChangeLog, window: Window, relations: Collection[RelationId]
) -> Iterator[TableEvent]:
    """The transactions in which the publisher rewrote one of the tables."""
    # A summary of the log reads more columns than the kind of each message, which is all that is needed.
    rewrites = rewrites_in(change_log, window, LogSummary(0, 0, logical=window))
    commits = {lsn for relation in relations for lsn in rewrites.commits.get(relation, ())}
    for lsn in sorted(commits):
        text = "the publisher rewrote the table's rows, which sends no changes (R11.9)"
        yield TableEvent(lsn, EventKind.REWRITE, text)


def copy_event(progress: Progress, table: QualifiedName) -> TableEvent | None:
    """The last copy or reconciliation of the subscriber's table."""
    if progress.copied_at is None:
        return None
    if not progress.is_copied:
        text = f"table {table} was added to the subscription, without its rows (copy_data: false)"
        return TableEvent(progress.copied_at, EventKind.COPY, text)
    by = progress.copied_by
    filters = "all rows" if by is None or by.filters is None else f"rows {' OR '.join(sorted(by.filters))}"
    text = f"table {table} of the subscriber was copied or reconciled as of here: {filters}"
    return TableEvent(progress.copied_at, EventKind.COPY, text)
