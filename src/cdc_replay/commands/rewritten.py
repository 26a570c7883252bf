"""Tables whose rows the publisher rewrote, which sends nothing (R9.3, R11.9).

    ALTER TABLE t ALTER id TYPE bigint USING id + 100      every id is another one now
    UPDATE t SET a = 1 WHERE id = 101                      sent; a native subscriber has no such row

The publisher's event trigger says so by a message in the same transaction (`catalog.delta`). Where the
subscriber mirrors the table, what a window would do to it has no meaning then, neither before the rewrite nor
after it: replay parks the table at the position that it has, and goes on with the others. The next `snapshot`
makes it what it is on the publisher at a later one, and moves only rows that differ.

Elsewhere that would take away what the subscriber rightly has: rows whose DELETE is not published, or that
came by another row filter. There the changes are applied as natively, and the log tells of the rewrite. A
window ends behind it, so that none holds the keys of one row in two forms.

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
from cdc_replay.commands.changed_filters import changed_filters
from cdc_replay.commands.opened import Opened
from cdc_replay.commands.window import catalog_history
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.model.table_state import Parked
from cdc_replay.publication.mirror import why_not_mirrored
from cdc_replay.publication.resolve import resolve, synced_tables
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
    """The rewrites of `window`; reads the log only if its summary has messages that are no changes."""
    if summary.logical is None:
        return NONE
    last: dict[RelationId, Lsn] = {}
    for message in change_log.logical_messages(summary.logical, REWRITE_PREFIX):
        try:
            last |= dict.fromkeys(parse_rewrite(message.content), message.commit_lsn)
        except InvalidMessage as error:
            # Whoever may emit messages may give them any prefix.
            log.warning("%s: its transaction committed at %s", error.message, message.commit_lsn)
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


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The tables of a subscription that were rewritten, each with the end of the last commit that did it.

    `parked` are to be reconciled. The others go on, each for the reason that `going_on` gives.
    """

    at: Mapping[QualifiedName, Lsn]
    going_on: Mapping[QualifiedName, str]

    @property
    def parked(self) -> frozenset[QualifiedName]:
        """The tables to park."""
        return frozenset(self.at.keys() - self.going_on.keys())

    @property
    def first_end(self) -> Lsn | None:
        """The end of the first transaction behind which a table goes on that it has rewritten."""
        return min((self.at[table] for table in self.going_on), default=None)


def rewritten_since(
    at_work: Opened, change_log: ChangeLog, behind: Mapping[QualifiedName, Lsn], rewrites: Rewrites
) -> Rewritten:
    """Those of `behind` (a table's applied LSN) that were rewritten since."""
    publications = at_work.subscription.publications
    published = rewrites.published(publications).items()
    at = {table: end for table, end in published if table in behind and end > behind[table]}
    if not at:
        return Rewritten({}, {})
    if not at_work.subscription.copy_data:
        return Rewritten(at, dict.fromkeys(at, "copy_data is false"))
    going_on = {
        table: reason
        for catalog in rewrites.catalogs
        for table, reason in _not_mirrored(catalog, publications)
        if table in at
    }
    for table in changed_filters(at_work.connection, at_work.subscription, change_log.uri):
        if table in at:
            going_on[table] = "its row filter or columns have changed since its rows were brought"
    return Rewritten(at, going_on)


def _not_mirrored(
    catalog: PublisherCatalog, publications: Sequence[str]
) -> Iterator[tuple[QualifiedName, str]]:
    for synced in synced_tables(catalog, publications):
        if reason := why_not_mirrored(catalog, publications, synced):
            yield synced.table.name, reason


def tell_of(at_work: Opened, rewritten: Rewritten) -> None:
    """Log which tables go on although they were rewritten."""
    name = at_work.subscription.name
    for table, reason in rewritten.going_on.items():
        log.warning(
            "subscription %s: table %s goes on although its rows on the publisher were rewritten by the"
            " transaction that committed at %s, which sends no changes (R11.9), because %s;"
            " `cdc-replay refresh %s --reconcile` brings what differs",
            *(name, table, rewritten.at[table], reason, name),
        )


def without_rewritten(
    at_work: Opened, behind: Mapping[QualifiedName, Lsn], rewritten: Rewritten
) -> dict[QualifiedName, Lsn]:
    """`behind` without those that are to be reconciled: they are parked."""
    kept = dict(behind)
    for table in sorted(rewritten.parked):
        rewritten_at = rewritten.at[table]
        reason = (
            f"its rows on the publisher were rewritten by the transaction that committed at {rewritten_at},"
            " which sends no changes (R11.9); the next snapshot or sync brings what differs"
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
