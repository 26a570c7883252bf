"""The second peeks: which partitioned tables the TRUNCATEs of a pull named (R2.14).

A capture in leaf identity sees `TRUNCATE root` and `TRUNCATE leaf1, leaf2` as the same message. To a
subscription to the root, via root, the first is sent and the second is not (R2.13). So a pull that may hold
such a statement reads its range once more with each root publication that has members, and adds what these
say to the rows of the first peek before anything names them (`truncates`). The range is the same: it ends
at the end of a transaction, or where the first peek ended as well (R1.23).

| in the range there is                                          | shows in                               |
|----------------------------------------------------------------|----------------------------------------|
| TRUNCATE of a member whose leaves are captured                 | a T on a partition in the first peek   |
| TRUNCATE of a member that has no leaf                          | the catalog: it may have none          |
| COMMIT PREPARED of a transaction that named a member           | what second peeks keep of it, see below|

Whether a relation is a partition, and a member has a leaf, is asked of the catalogs from before the range to
after it. Without event triggers (`definitions`) only these two are known: a partition that is attached,
truncated with its root and detached again between two pulls escapes that.

A prepared transaction's T is kept beside its content, in a folder per root publication, and for the same
reason: the slot sends it once (R9.8). It comes out at COMMIT PREPARED, when that range is peeked.
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
from cdc_replay.model.publication import Publication, PublisherCatalog, Table
from cdc_replay.model.relation import Relation, RelationId
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.peek import PeekOptions, peek
from cdc_replay.publication.partition_root import contains, excepts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RootTruncates:
    """What second peeks found: the TRUNCATEs of partitioned tables, and the shapes of these by version.

    `resolved` are the prepared transactions that need not wait any more, by root publication.
    """

    truncates: tuple[RootTruncate, ...]
    relations: Mapping[int, Relation]
    resolved: Mapping[str, Sequence[PreparedKey]]


@dataclass(frozen=True, slots=True)
class PullRange:
    """The transactions of one pull, and the catalogs of before and after them; `before` may be unknown.

    `between` gives those of between the two, as far as they are known; they are many after many commands.
    """

    after: Lsn
    upto: Lsn
    before: PublisherCatalog | None
    now: PublisherCatalog
    between: Callable[[], Iterable[PublisherCatalog]]

    @property
    def ends(self) -> tuple[PublisherCatalog, ...]:
        """Those of before and after, if they are known."""
        return (self.now,) if self.before is None else (self.before, self.now)

    @property
    def catalogs(self) -> tuple[PublisherCatalog, ...]:
        """Those that are known, in order."""
        first, *last = self.ends
        return (first, *self.between(), *last)


class RootPeeks:
    """Reads one publisher's slot with the root publications; `with_origins` tells their changes' origins."""

    def __init__(self, connection: Connection, log: ChangeLog, slot: str, *, with_origins: bool) -> None:
        self._connection = connection
        self._log = log
        self._slot = slot
        self._with_origins = with_origins

    def roots(self, pull: PullRange, first: TransactionAssembler) -> RootTruncates:
        """What the second peeks of a pull say, none of them if `first` shows that there is nothing.

        Raises:
            SlotMissing, SlotActive, SlotLost, PublicationMissing, MissingPrivilege: as for `peek`.
        """
        may_name_roots = names_a_partition(pull, first.truncated_in_peek) or has_unseen_root(pull)
        found = [
            self._peek(name, pull, first.truncated_in_peek)
            for name in ROOT_PUBLICATIONS
            if (may_name_roots and any(_members(catalog, name) for catalog in pull.ends))
            or self._waits(name, first.decided_xids)
        ]
        return RootTruncates(
            union_truncates(one for each in found for one in each.truncates),
            {version: relation for each in found for version, relation in each.relations.items()},
            {name: keys for each in found for name, keys in each.resolved.items()},
        )

    def forget(self, roots: RootTruncates) -> None:
        """Remove what was kept of prepared transactions whose outcome is durable now."""
        for name, keys in roots.resolved.items():
            self._log.prepared_roots(name).forget(keys)

    def _waits(self, name: str, decided: Set[int]) -> bool:
        return bool(decided) and any(key.xid in decided for key in self._log.prepared_roots(name).waiting())

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
                dataclasses.replace(one, relations=new)
                for raw in batches
                for rows in assembler.feed(raw)
                for one in parse_truncates(rows)
                # A publication of all tables also shows those that the first peek has shown.
                if (new := tuple(relation for relation in one.relations if relation not in known))
            )
        logger.info(
            "peeked (%s, %s] again with publication %s: %d TRUNCATEs of partitioned tables",
            pull.after, pull.upto, name, len(truncates),
        )  # fmt: skip
        return RootTruncates(truncates, assembler.relations, {name: assembler.resolved})


def merge_root_truncates(
    log: ChangeLog, segments: tuple[Segment, ...], roots: RootTruncates
) -> tuple[tuple[Segment, ...], CaptureCounts]:
    """The written segments with the TRUNCATEs of partitioned tables in them, and how much more that is.

    They are written anew, one row group at a time, and the old files are removed: a pull's rows stay in one
    file, in order, whatever it held.
    """
    if not roots.truncates:
        return segments, CaptureCounts()
    rows = RootTruncateMerger(log.read(segments), roots.truncates)
    merged = log.write(rows)
    log.discard(segments)
    return merged, CaptureCounts(rows.transactions, rows.messages)


def names_a_partition(pull: PullRange, truncated: Set[RelationId]) -> bool:
    """Whether one of these relations is, or may have been, a partition below a member."""
    if pull.before is None or not truncated:
        return bool(truncated)
    catalogs = pull.catalogs
    return any(_may_be_below_a_member(catalogs, relation) for relation in truncated)


def _may_be_below_a_member(catalogs: Sequence[PublisherCatalog], relation: RelationId) -> bool:
    known = [catalog for catalog in catalogs if relation in catalog.tables]
    return not known or any(
        _is_member(catalog, name, ancestor)
        for catalog in known
        for ancestor in catalog.ancestors(relation)
        for name in ROOT_PUBLICATIONS
    )


def has_unseen_root(pull: PullRange) -> bool:
    """Whether a member may have been truncated without a T on a leaf: it had no leaf at some time."""
    members = {table.id for catalog in pull.ends for table in _all_members(catalog)}
    if pull.before is None or not members:
        return bool(members)
    leaves = [_with_captured_leaves(catalog) for catalog in pull.catalogs]
    return any(
        before.get(member, frozenset()).isdisjoint(after.get(member, ()))
        for before, after in itertools.pairwise(leaves)
        for member in members
    )


def _with_captured_leaves(catalog: PublisherCatalog) -> dict[RelationId, frozenset[RelationId]]:
    leaves: dict[RelationId, set[RelationId]] = {}
    for table in catalog.tables.values():
        if table.parent is not None and not table.is_partitioned and table.is_publishable:
            for ancestor in catalog.ancestors(table.id):
                leaves.setdefault(ancestor.id, set()).add(table.id)
    return {root: frozenset(found) for root, found in leaves.items()}


def _all_members(catalog: PublisherCatalog) -> Iterator[Table]:
    for name in ROOT_PUBLICATIONS:
        yield from _members(catalog, name)


def _members(catalog: PublisherCatalog, name: str) -> tuple[Table, ...]:
    """The partitioned tables that a root publication holds."""
    publication = catalog.publications.get(name)
    if publication is None or _is_empty(publication):
        return ()
    return tuple(
        table
        for table in catalog.tables.values()
        if table.is_partitioned and _is_member(catalog, name, table)
    )


def _is_member(catalog: PublisherCatalog, name: str, table: Table) -> bool:
    publication = catalog.publications.get(name)
    return (
        publication is not None
        and contains(publication, table)
        and not excepts(publication, table, catalog.ancestors(table.id))
    )


def _is_empty(publication: Publication) -> bool:
    return not (publication.all_tables or publication.schemas or publication.memberships)
