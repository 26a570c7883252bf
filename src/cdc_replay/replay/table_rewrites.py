"""Tables whose rows the publisher rewrote, which sends no changes (R9.3, R11.9).

    ALTER TABLE t ALTER v TYPE bigint USING v * 100        the rows of t have other values now
    ALTER TABLE t ADD c float DEFAULT random()             and here, the subscriber's own default

The publisher's event trigger emits a message in the same transaction (`catalog.ddl_change`). Replay applies
the table's earlier and later changes as natively. A window ends after the transaction: the keys of one row
have two forms at most within that transaction. The commit that advances the table to it marks the table as
not compared since (`subscription_table.rewritten_at`).

`sync`, `snapshot` and `refresh` compare the values of marked tables (`replay.rewritten_values`). If they are
killed, the tables stay marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cdc_replay.catalog.ddl_change import REWRITE_PREFIX, parse_rewrite
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.queries import LogSummary
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublisherCatalog, Table
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.resolve import resolve
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.table_notice import TableNotice
from cdc_replay.subscriber import subscription_tables


@dataclass(frozen=True, slots=True)
class TableRewrites:
    """The tables that a window rewrites, each with the LSNs of the commits that did it, in order.

    `catalogs` are those in force anywhere in the window. `invalid` are sentences about messages that only
    look like those of the event trigger: every role may emit messages with their prefix.
    """

    commits: Mapping[RelationId, tuple[Lsn, ...]] = field(default_factory=dict)
    catalogs: tuple[PublisherCatalog, ...] = ()
    invalid: tuple[str, ...] = ()

    def published(
        self, publications: Sequence[str], renamed: Mapping[RelationId, QualifiedName] | None = None
    ) -> dict[QualifiedName, frozenset[Lsn]]:
        """The published relations of the rewritten tables, under any of the catalogs, with their commits.

        By name; `renamed` has other names for some of them.
        """
        commits_by_name: dict[QualifiedName, frozenset[Lsn]] = {}
        for relation, ends in self.commits.items():
            for catalog in self.catalogs:
                for table in _published(catalog, relation, publications):
                    name = (renamed or {}).get(table.id, table.name)
                    commits_by_name[name] = commits_by_name.get(name, frozenset()) | set(ends)
        return commits_by_name


def rewrites_in(change_log: ChangeLog, window: Window, summary: LogSummary) -> TableRewrites:
    """The rewrites of `window`; reads the log only if its summary has logical messages."""
    if summary.logical is None:
        return TableRewrites()
    commits: dict[RelationId, tuple[Lsn, ...]] = {}
    invalid: list[str] = []
    for message in change_log.logical_messages(summary.logical, REWRITE_PREFIX):
        try:
            for relation in parse_rewrite(message.content):
                commits[relation] = (*commits.get(relation, ()), message.commit_lsn)
        except InvalidMessage as error:
            invalid.append(f"{error.message}: its transaction committed at {message.commit_lsn}")
    catalogs = tuple(catalog_history(change_log).within(window).values()) if commits else ()
    return TableRewrites(commits, catalogs, tuple(invalid))


def _published(
    catalog: PublisherCatalog, relation: RelationId, publications: Sequence[str]
) -> Iterator[Table]:
    if relation not in catalog.tables:
        return
    leaves = [relation]
    if catalog.tables[relation].is_partitioned:
        leaves += [leaf for leaf in catalog.tables if relation in {a.id for a in catalog.ancestors(leaf)}]
    for leaf in leaves:
        if (resolved := resolve(catalog, publications, leaf)) is not None:
            yield resolved.table


def first_rewrites(
    applied_lsns: Mapping[QualifiedName, Lsn],
    rewrites: TableRewrites,
    publications: Sequence[str],
    renamed: Mapping[RelationId, QualifiedName],
) -> dict[QualifiedName, Lsn]:
    """The first commit that rewrote each of these tables after its applied LSN."""
    return {
        table: min(since)
        for table, ends in rewrites.published(publications, renamed).items()
        if table in applied_lsns and (since := [end for end in ends if end > applied_lsns[table]])
    }


def rewritten_tables(connection: Connection, subscription: str) -> dict[QualifiedName, TableNotice]:
    """The subscription's tables whose values have not been compared since a rewrite, by name."""
    return {
        table: TableNotice(
            table,
            f"its rows on the publisher were rewritten by the transaction that committed at {lsn}, which"
            " sends no changes, and its values have not been compared since; `cdc-replay sync"
            f" {subscription}` or `cdc-replay snapshot {subscription}` updates the rows that differ",
            "R11.9",
        )
        for table, lsn in subscription_tables.rewritten_tables(connection, subscription).items()
    }
