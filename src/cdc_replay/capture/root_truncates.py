"""Root peeks: find the partitioned tables that the TRUNCATEs of a pull named (R2.14).

A capture in leaf identity receives the same message for `TRUNCATE root` and `TRUNCATE leaf1, leaf2`. A
subscription to the root, via root, receives the first and not the second (R2.13). So a pull that may contain
such a statement peeks its range again with each root publication that has members, and merges the result into
its rows before they are committed (`truncate_rows`). The range is the same: it ends at the end of a
transaction, or at the end of the first peek (R1.23).

| in the range                                        | detected by                                      |
|-----------------------------------------------------|--------------------------------------------------|
| TRUNCATE of a member                                | Ts on all leaves that it has in some catalog     |
| PREPARE of a transaction with DDL                   | its messages: no catalog has its tree            |
| COMMIT PREPARED of a transaction that named members | what root peeks stored at PREPARE, see below     |

The catalogs are those from before to after the range. Without event triggers (`catalog_tracker`) only these
two are known. Then a T on one leaf is enough: the member may have had that leaf alone in between. What is
missed is a partition that is attached, truncated with its root and detached between two pulls.

The TRUNCATEs of a prepared transaction are stored like its rows, in one folder per root publication, because
the slot sends them once (R9.8). They are read when the range with COMMIT PREPARED is peeked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from cdc_replay.capture.change_origins import read_local_changes
from cdc_replay.capture.publications import ROOT_PUBLICATIONS
from cdc_replay.capture.transactions import CaptureCounts, TransactionAssembler
from cdc_replay.capture.truncate_rows import (
    RootTruncate,
    RootTruncateMerger,
    parse_truncates,
    union_truncates,
)
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.prepared_transactions import PreparedKey
from cdc_replay.changelog.segment import Segment
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublishAction, PublisherCatalog, Table
from cdc_replay.model.relation import Relation, RelationId
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.peek import PeekOptions, peek
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from cdc_replay.publication.partition_root import contains, excepts, publishes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RootTruncates:
    """TRUNCATEs of partitioned tables, and these tables' relations by version.

    `resolved` are prepared transactions to remove once the pull is committed, by root publication.
    """

    truncates: tuple[RootTruncate, ...]
    relations: Mapping[int, Relation]
    resolved: Mapping[str, Sequence[PreparedKey]]


@dataclass(frozen=True, slots=True)
class PullRange:
    """The range of one pull, and the catalogs `before` (None if unknown) and after it (`now`).

    `between` builds the known catalogs in between, one after the other: many, after many DDL commands.
    `is_exact`: there were no others, since event triggers report each.
    """

    after: Lsn
    upto: Lsn
    before: PublisherCatalog | None
    now: PublisherCatalog
    between: Callable[[], Iterable[PublisherCatalog]]
    is_exact: bool

    def each_catalog(self) -> Iterator[PublisherCatalog]:
        """All known catalogs, in order."""
        if self.before is not None:
            yield self.before
        yield from self.between()
        yield self.now


class RootPeeks:
    """Peeks one publisher's slot with the root publications; `with_origins` also reads changes' origins."""

    def __init__(self, connection: Connection, log: ChangeLog, slot: str, *, with_origins: bool) -> None:
        self._connection = connection
        self._log = log
        self._slot = slot
        self._with_origins = with_origins

    def read(self, pull: PullRange, first: TransactionAssembler) -> RootTruncates:
        """Run the root peeks of a pull, those that the result of the `first` peek makes necessary.

        Raises:
            SlotMissing, SlotActive, SlotLost, PublicationMissing, MissingPrivilege: as for `peek`.
        """
        may_have_root = may_have_truncated_a_member(pull, first.truncated_in_peek)
        # A prepared transaction may have created its members.
        may_have_member = _has_contents if first.has_prepared_ddl else _has_members
        named = {
            name
            # A publication may have had members only in between.
            for catalog in (pull.each_catalog() if first.has_prepared_ddl or may_have_root else ())
            for name in ROOT_PUBLICATIONS
            if may_have_member(catalog, name)
        }
        peeks = [
            self._peek(name, pull, first.truncated_in_peek)
            for name in ROOT_PUBLICATIONS
            if name in named or self._has_stored(name, first.decided_xids)
        ]
        return RootTruncates(
            union_truncates(truncate for peeked in peeks for truncate in peeked.truncates),
            {version: relation for peeked in peeks for version, relation in peeked.relations.items()},
            {name: keys for peeked in peeks for name, keys in peeked.resolved.items()},
        )

    def forget(self, roots: RootTruncates) -> None:
        """Remove stored TRUNCATEs of prepared transactions whose outcome is durable now."""
        for name, keys in roots.resolved.items():
            self._log.prepared_roots(name).remove(keys)

    def _has_stored(self, name: str, decided: Set[int]) -> bool:
        return bool(decided) and any(key.xid in decided for key in self._log.prepared_roots(name).list_keys())

    def _peek(self, name: str, pull: PullRange, known: Set[RelationId]) -> RootTruncates:
        options = PeekOptions(self._slot, (name,), messages=False)
        local = None
        if self._with_origins:
            local = read_local_changes(self._connection, options, upto_lsn=pull.upto, upto_nchanges=None)
        batches = peek(self._connection, options, upto_lsn=pull.upto, upto_nchanges=None)
        with (
            contextlib.closing(batches),
            TransactionAssembler(pull.after, self._log.prepared_roots(name), local) as assembler,
        ):
            truncates = tuple(
                dataclasses.replace(truncate, relations=added)
                for raw in batches
                for rows in assembler.feed(raw)
                for truncate in parse_truncates(rows)
                # A publication FOR ALL TABLES also returns the relations of the first peek.
                if (added := tuple(filter(lambda oid: oid not in known, truncate.relations)))
            )
        logger.info(
            "peeked (%s, %s] again with publication %s: %d TRUNCATEs of partitioned tables",
            pull.after, pull.upto, name, len(truncates),
        )  # fmt: skip
        return RootTruncates(truncates, assembler.relations, {name: assembler.resolved})


def merge_root_truncates(
    log: ChangeLog, segments: tuple[Segment, ...], roots: RootTruncates
) -> tuple[tuple[Segment, ...], CaptureCounts]:
    """Merge TRUNCATEs of partitioned tables into the segments; also returns the counts of added rows.

    Segments are rewritten one row group at a time, and the old files removed: the rows of a pull stay in
    order.
    """
    if not roots.truncates:
        return segments, CaptureCounts()
    rows = RootTruncateMerger(log.read(segments), roots.truncates)
    merged = log.write(rows)
    log.discard(segments)
    return merged, CaptureCounts(rows.transactions, rows.messages)


def may_have_truncated_a_member(pull: PullRange, truncated: Set[RelationId]) -> bool:
    """Whether a statement of the range may have named a member, if the first peek has Ts on `truncated`.

    Such a statement truncates all of the leaves that the member has then (R2.13), maybe none.
    """
    members: set[RelationId] = set()
    unknown = truncated
    for catalog in pull.each_catalog():
        members.update(table.id for table in _all_members(catalog))
        unknown = {relation for relation in unknown if relation not in catalog.tables}
    if pull.before is None:
        return bool(truncated or members)
    if unknown or not members:
        return bool(unknown)
    if pull.is_exact:
        return _has_whole_tree(members, pull.each_catalog(), truncated)
    return any(
        not truncated.isdisjoint(before.get(member, ()))
        or not truncated.isdisjoint(after.get(member, ()))
        or before.get(member, frozenset()).isdisjoint(after.get(member, ()))
        for before, after in itertools.pairwise(map(_captured_leaves, pull.each_catalog()))
        for member in members
    )


def _has_whole_tree(
    members: Set[RelationId], catalogs: Iterable[PublisherCatalog], truncated: Set[RelationId]
) -> bool:
    """Whether all leaves that a member has in one of the catalogs are truncated.

    A leaf that is not, is usually the same in all catalogs, so it is looked for only where it is not below
    the member any more. Thousands of new partitions are as many catalogs with as many tables.
    """
    left_out: dict[RelationId, RelationId] = {}
    for catalog in catalogs:
        for member in members:
            leaf = left_out.get(member)
            if leaf is None or not _is_captured_below(catalog, leaf, member):
                leaves = (leaf for leaf in catalog.tables if _is_captured_below(catalog, leaf, member))
                leaf = next((leaf for leaf in leaves if leaf not in truncated), None)
            if leaf is None:
                return True
            left_out[member] = leaf
    return False


def _is_captured_below(catalog: PublisherCatalog, leaf: RelationId, member: RelationId) -> bool:
    return leaf in catalog.tables and any(
        ancestor.id == member for ancestor in _captured_ancestors(catalog, catalog.tables[leaf])
    )


def _captured_leaves(catalog: PublisherCatalog) -> dict[RelationId, frozenset[RelationId]]:
    """By partitioned table the leaves below it whose TRUNCATEs the first peek receives."""
    leaves: dict[RelationId, set[RelationId]] = {}
    for table in catalog.tables.values():
        for ancestor in _captured_ancestors(catalog, table):
            leaves.setdefault(ancestor.id, set()).add(table.id)
    return {root: frozenset(relation_ids) for root, relation_ids in leaves.items()}


def _captured_ancestors(catalog: PublisherCatalog, table: Table) -> tuple[Table, ...]:
    """The partitioned tables above it, if it is a leaf whose TRUNCATEs the first peek receives."""
    if table.parent is None or table.is_partitioned or not table.is_publishable:
        return ()
    publication = catalog.publications.get(CAPTURE_PUBLICATIONS[PublishAction.TRUNCATE])
    ancestors = catalog.ancestors(table.id)
    return ancestors if publication is not None and publishes(publication, table, ancestors) else ()


def _all_members(catalog: PublisherCatalog) -> Iterator[Table]:
    for name in ROOT_PUBLICATIONS:
        yield from _members(catalog, name)


def _has_members(catalog: PublisherCatalog, name: str) -> bool:
    return bool(_members(catalog, name))


def _members(catalog: PublisherCatalog, name: str) -> tuple[Table, ...]:
    if not _has_contents(catalog, name):
        return ()
    publication = catalog.publications[name]
    listed = (catalog.tables[relation] for relation in publication.memberships if relation in catalog.tables)
    candidates = catalog.tables.values() if publication.all_tables or publication.schemas else listed
    return tuple(table for table in candidates if table.is_partitioned and _is_member(catalog, name, table))


def _is_member(catalog: PublisherCatalog, name: str, table: Table) -> bool:
    publication = catalog.publications.get(name)
    return (
        publication is not None
        and contains(publication, table)
        and not excepts(publication, table, catalog.ancestors(table.id))
    )


def _has_contents(catalog: PublisherCatalog, name: str) -> bool:
    """Whether the publication has tables, or will have those that are created."""
    publication = catalog.publications.get(name)
    return publication is not None and bool(
        publication.all_tables or publication.schemas or publication.memberships
    )
