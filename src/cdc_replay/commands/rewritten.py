"""Tables whose rows the publisher rewrote, which sends nothing (R9.3, R11.9).

    ALTER TABLE t ALTER id TYPE bigint USING id + 100      every id is another one now
    UPDATE t SET a = 1 WHERE id = 101                      sent; a native subscriber has no such row

The publisher's event trigger says so by a message in the same transaction (`catalog.delta`). What a window
would do to such a table has no meaning then, neither before the rewrite nor after it: replay parks the table
at the position that it has, and goes on with the others. The next `snapshot` copies it as of a later one.

A crash after the parking leaves a parked table, which is what it is; before it, the next run finds the same
message in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.catalog.delta import REWRITE_PREFIX, parse_rewrite
from cdc_replay.changelog.content import LogSummary
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.opened import Opened
from cdc_replay.commands.window import catalog_history
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.model.table_state import Parked
from cdc_replay.publication.resolve import resolve
from cdc_replay.subscriber import state

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rewrites:
    """The tables of a window that were rewritten, each with the end of the last commit that did it.

    `catalogs` are those in force anywhere in the window.
    """

    last: Mapping[RelationId, Lsn]
    catalogs: tuple[PublisherCatalog, ...]

    def published(self, publications: Sequence[str]) -> dict[QualifiedName, Lsn]:
        """The published relations of the rewritten tables, under any of the catalogs."""
        found: dict[QualifiedName, Lsn] = {}
        for relation, commit_lsn in self.last.items():
            for catalog in self.catalogs:
                for name in _published(catalog, relation, publications):
                    found[name] = max(commit_lsn, found.get(name, commit_lsn))
        return found


NONE: Final = Rewrites({}, ())


def rewrites_in(change_log: ChangeLog, window: Window, summary: LogSummary) -> Rewrites:
    """The rewrites of `window`; reads the log only if its summary has messages that are no changes.

    Raises:
        InvalidMessage: if what the log has is not what the event trigger writes.
    """
    if summary.logical is None:
        return NONE
    last = {
        relation: message.commit_lsn
        for message in change_log.logical_messages(summary.logical, REWRITE_PREFIX)
        for relation in parse_rewrite(message.content)
    }
    if not last:
        return NONE
    return Rewrites(last, tuple(catalog_history(change_log).within(window).values()))


def _published(
    catalog: PublisherCatalog, relation: RelationId, publications: Sequence[str]
) -> Iterator[QualifiedName]:
    if relation not in catalog.tables:
        return
    leaves = [relation]
    if catalog.tables[relation].is_partitioned:
        leaves += [each for each in catalog.tables if relation in {a.id for a in catalog.ancestors(each)}]
    for leaf in leaves:
        if (found := resolve(catalog, publications, leaf)) is not None:
            yield found.table.name


def without_rewritten(
    at_work: Opened, behind: Mapping[QualifiedName, Lsn], rewritten: Mapping[QualifiedName, Lsn]
) -> dict[QualifiedName, Lsn]:
    """`behind` (a table's applied LSN) without those that were rewritten since: they are parked."""
    kept = dict(behind)
    for table, rewritten_at in rewritten.items():
        if table not in behind or rewritten_at <= behind[table]:
            continue
        reason = (
            f"its rows on the publisher were rewritten by the transaction that committed at {rewritten_at},"
            " which sends no changes (R11.9); it is copied again by the next snapshot or sync"
        )
        applied_lsn = kept.pop(table)
        name = at_work.subscription.name
        state.set_table_state(at_work.connection, name, table, Parked(applied_lsn, reason))
        log.warning("subscription %s: table %s is parked at %s: %s", name, table, applied_lsn, reason)
    return kept


def waiting_for_copy(at_work: Opened) -> frozenset[QualifiedName]:
    """The parked tables that a snapshot copies without being asked for them."""
    if not at_work.subscription.copy_data:
        return frozenset()
    states = at_work.table_states().items()
    return frozenset(
        name for name, found in states if isinstance(found, Parked) and found.transaction is None
    )
