"""Tables whose rows the publisher rewrote, which sends nothing (R9.3, R11.9).

    ALTER TABLE t ALTER v TYPE bigint USING v * 100        the rows of t have other values now
    ALTER TABLE t ADD c float DEFAULT random()             and here, the subscriber's own default

The publisher's event trigger says so by a message in the same transaction (`catalog.ddl_change`). Replay
applies the table's changes before and behind it as natively. A window ends behind the transaction, so that
none holds the keys of one row in two forms. The commit that brings the table there marks it: its values have
not been compared since (`subscription_table.rewritten_at`).

`sync`, `snapshot` and `refresh` compare the values of marked tables (`replay.rewritten_values`). Killed
before that, they are marked still.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.catalog.ddl_change import REWRITE_PREFIX, parse_rewrite
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.queries import LogSummary
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublisherCatalog, Table
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.model.table_state import Parked, Ready
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.resolve import resolve
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.subscriber import subscription_tables
from cdc_replay.subscriber.session import SubscriptionSession

logger = logging.getLogger(__name__)

PARKED_BY_REWRITE: Final = "its rows on the publisher were rewritten by the transaction that committed at "
"""So begins the reason of a table that an earlier version parked before a rewrite, and did not mark."""


@dataclass(frozen=True, slots=True)
class TableRewrites:
    """The tables of a window that were rewritten, each with the ends of the commits that did it, in order.

    `catalogs` are those in force anywhere in the window.
    """

    commits: Mapping[RelationId, tuple[Lsn, ...]]
    catalogs: tuple[PublisherCatalog, ...]

    @property
    def last(self) -> Mapping[RelationId, Lsn]:
        """The end of the last commit that rewrote a table."""
        return {relation: ends[-1] for relation, ends in self.commits.items()}

    def published(
        self, publications: Sequence[str], renamed: Mapping[RelationId, QualifiedName] | None = None
    ) -> dict[QualifiedName, frozenset[Lsn]]:
        """The published relations of the rewritten tables, under any of the catalogs, with their commits.

        By name; those of `renamed` by the name that is given there.
        """
        found: dict[QualifiedName, frozenset[Lsn]] = {}
        for relation, ends in self.commits.items():
            for catalog in self.catalogs:
                for table in _published(catalog, relation, publications):
                    name = (renamed or {}).get(table.id, table.name)
                    found[name] = found.get(name, frozenset()) | set(ends)
        return found


NONE: Final = TableRewrites({}, ())


def rewrites_in(change_log: ChangeLog, window: Window, summary: LogSummary) -> TableRewrites:
    """The rewrites of `window`; reads the log only if its summary has messages that are no changes."""
    if summary.logical is None:
        return NONE
    commits: dict[RelationId, tuple[Lsn, ...]] = {}
    for message in change_log.logical_messages(summary.logical, REWRITE_PREFIX):
        try:
            for relation in parse_rewrite(message.content):
                commits[relation] = (*commits.get(relation, ()), message.commit_lsn)
        except InvalidMessage as error:
            # Whoever may emit messages may give them any prefix.
            logger.warning("%s: its transaction committed at %s", error.message, message.commit_lsn)
    if not commits:
        return NONE
    return TableRewrites(commits, tuple(catalog_history(change_log).within(window).values()))


def _published(
    catalog: PublisherCatalog, relation: RelationId, publications: Sequence[str]
) -> Iterator[Table]:
    if relation not in catalog.tables:
        return
    leaves = [relation]
    if catalog.tables[relation].is_partitioned:
        leaves += [each for each in catalog.tables if relation in {a.id for a in catalog.ancestors(each)}]
    for leaf in leaves:
        if (found := resolve(catalog, publications, leaf)) is not None:
            yield found.table


def first_rewrites(
    behind: Mapping[QualifiedName, Lsn],
    rewrites: TableRewrites,
    publications: Sequence[str],
    renamed: Mapping[RelationId, QualifiedName],
) -> dict[QualifiedName, Lsn]:
    """Those of `behind` (a table's applied LSN) that were rewritten since; the end of the first commit."""
    return {
        table: min(since)
        for table, ends in rewrites.published(publications, renamed).items()
        if table in behind and (since := [end for end in ends if end > behind[table]])
    }


@dataclass(frozen=True, slots=True)
class RewrittenTable:
    """A table of which values have not been compared since the rewrite that ended at `lsn`."""

    table: QualifiedName
    subscription: str
    lsn: Lsn

    @property
    def notice(self) -> str:
        """One sentence, with the remedy."""
        return (
            f"its rows on the publisher were rewritten by the transaction that committed at {self.lsn}, which"
            f" sends no changes, and its values have not been compared since; `cdc-replay sync"
            f" {self.subscription}` or `cdc-replay snapshot {self.subscription}` brings what differs"
        )

    def __str__(self) -> str:
        return f"{self.table}: {self.notice} (R11.9)"


def rewritten_tables(connection: Connection, subscription: str) -> dict[QualifiedName, RewrittenTable]:
    """The subscription's tables of which values have not been compared since a rewrite, by name."""
    marked = subscription_tables.rewritten_tables(connection, subscription).items()
    return {table: RewrittenTable(table, subscription, lsn) for table, lsn in marked}


def release_rewritten(session: SubscriptionSession, log_start: Lsn) -> None:
    """Let tables go on, and be compared, that were parked before a rewrite, if the log has their changes."""
    name = session.subscription.name
    for table, found in session.table_states().items():
        if not isinstance(found, Parked) or not found.reason.startswith(PARKED_BY_REWRITE):
            continue
        if found.applied_lsn >= log_start:
            with session.connection.transaction():
                subscription_tables.set_table_state(session.connection, name, table, Ready(found.applied_lsn))
                subscription_tables.mark_rewritten(session.connection, name, [table], found.applied_lsn)
