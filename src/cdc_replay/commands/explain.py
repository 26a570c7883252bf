"""`explain`: per table what is published, how it is filtered, and where the filter is evaluated."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.capture.ddl.event_triggers import is_installed
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError, ChangeLogMissing
from cdc_replay.filters.compile import ServerFilter, compile_filter
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublishAction, PublisherCatalog, RowFilter, Table
from cdc_replay.model.results import Result
from cdc_replay.model.subscription import Subscription
from cdc_replay.postgres.connection import connect
from cdc_replay.publication.capture_coverage import uncaptured_leaves
from cdc_replay.publication.effective_filter import ROW_ACTIONS
from cdc_replay.publication.resolve import PublishedRelation, resolve, synced_tables
from cdc_replay.publication.restrictions import check_publications, warnings_for
from cdc_replay.replay.definition_drift import definition_drifts
from cdc_replay.replay.table_rewrites import rewritten_tables

BY_POSITION: Final = "exact by position: the publisher has the event triggers"
BY_PULL: Final = "as each pull finds them: the publisher has no event triggers"


@dataclass(frozen=True, slots=True)
class ExplainedTable:
    """One published relation; `leaves` is the number of tables whose changes go out under it.

    Leaves that are published with other actions or filters are a row of their own (R2.8).

    `insert`, `update` and `delete` are the effective filters as SQL, `-` for no filter, None where the action
    is not published. `evaluated_by` names Arrow or PostgreSQL per filter, and why PostgreSQL.
    """

    table: str
    leaves: int
    actions: tuple[str, ...]
    insert: str | None
    update: str | None
    delete: str | None
    evaluated_by: tuple[str, ...]
    identity: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExplainResult(Result):
    """What a subscription sees of its publisher as of `to_lsn`.

    `definitions` says from where in the stream on a changed definition is in force (R9.10, R9.11). `warnings`
    also names tables whose rows were brought with another row filter (R9.12), or rewritten since (R11.9).
    """

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    publications: tuple[str, ...]
    definitions: str
    tables: tuple[ExplainedTable, ...]
    warnings: tuple[str, ...]


def explain(config: Config, subscription: str) -> ExplainResult:
    """Read the publisher's definitions and say what they mean for the subscription.

    Raises:
        PublicationRefused: where PostgreSQL refuses to decode for these publications.
    """
    began = time.monotonic()
    found = config.subscription(subscription).subscription
    publisher = config.publisher(found.publisher)
    with connect(config.dsn_of(publisher), purpose=f"explain {subscription}") as connection:
        catalog = read_catalog(connection)
        is_exact = is_installed(connection, publisher.slot)
    check_publications(catalog, found.publications)
    return ExplainResult(
        subscription=subscription,
        from_lsn=catalog.lsn,
        to_lsn=catalog.lsn,
        seconds=time.monotonic() - began,
        publications=found.publications,
        definitions=BY_POSITION if is_exact else BY_PULL,
        tables=explain_tables(catalog, found.publications),
        warnings=(
            *warnings_for(catalog, found.publications),
            *_not_captured(catalog, found),
            *_changed(config, subscription, catalog),
        ),
    )


def _not_captured(catalog: PublisherCatalog, subscription: Subscription) -> tuple[str, ...]:
    missing = uncaptured_leaves(catalog, subscription, synced_tables(catalog, subscription.publications))
    if not missing:
        return ()
    return (f"not captured: {', '.join(missing)}; run `cdc-replay setup {subscription.publisher}` [R2.3]",)


def _changed(config: Config, subscription: str, catalog: PublisherCatalog) -> tuple[str, ...]:
    """Warnings of changed row filters and of rewrites; where the subscriber does not answer, one of that."""
    found = config.subscription(subscription)
    change_log = config.publisher(found.subscription.publisher).change_log
    try:
        with connect(config.dsn_of(found), purpose=f"explain {subscription}") as connection:
            rewritten = rewritten_tables(connection, subscription)
            changed = definition_drifts(connection, found.subscription, change_log, catalog)
    except ChangeLogMissing:
        return ()
    except CdcReplayError as error:
        return (f"whether row filters have changed since rows were brought is not known: {error.message}",)
    return tuple(map(str, (*changed.values(), *rewritten.values())))


def explain_tables(catalog: PublisherCatalog, publications: Sequence[str]) -> tuple[ExplainedTable, ...]:
    """The published relations in order of name."""
    alike: dict[Hashable, list[PublishedRelation]] = {}
    for table in sorted(catalog.tables.values(), key=lambda each: each.name):
        if table.is_partitioned:
            continue
        published = resolve(catalog, publications, table.id)
        if published is not None:
            filters = tuple(published.filters[action] for action in ROW_ACTIONS)
            alike.setdefault((published.table.name, published.actions, filters), []).append(published)
    return tuple(
        _explain(each, catalog) for each in sorted(alike.values(), key=lambda each: each[0].table.name)
    )


def _explain(published: Sequence[PublishedRelation], catalog: PublisherCatalog) -> ExplainedTable:
    first = published[0]
    filters: dict[RowFilter, None] = {}
    for each in first.filters.values():
        filters.update(dict.fromkeys(each or ()))
    return ExplainedTable(
        table=str(first.table.name),
        leaves=len(published),
        actions=tuple(action.value for action in PublishAction if action in first.actions),
        insert=_filter_sql(first, PublishAction.INSERT),
        update=_filter_sql(first, PublishAction.UPDATE),
        delete=_filter_sql(first, PublishAction.DELETE),
        evaluated_by=tuple(_evaluated_by(each, first.table) for each in filters),
        identity=_identity(catalog.tables[first.leaf]),
        columns=first.columns,
    )


def _filter_sql(published: PublishedRelation, action: PublishAction) -> str | None:
    if action not in published.actions:
        return None
    filters = published.filters[action]
    return "-" if filters is None else " OR ".join(each.sql for each in filters)


def _evaluated_by(row_filter: RowFilter, table: Table) -> str:
    compiled = compile_filter(row_filter, table)
    if isinstance(compiled, ServerFilter):
        return f"{row_filter.sql}: PostgreSQL, because {compiled.because}"
    return f"{row_filter.sql}: Arrow"


def _identity(leaf: Table) -> str:
    columns = ", ".join(leaf.key_columns)
    return f"{leaf.replica_identity.name.lower()}" + (f" ({columns})" if columns else "")
