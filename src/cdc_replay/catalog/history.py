"""The publisher's catalog over time: which version applies to which change (R9.10, R9.11).

The change log has *catalog entries*: full catalogs, and DDL changes (`ddl_change`).

| entry          | its position              | applies to                                               |
|----------------|---------------------------|----------------------------------------------------------|
| a full catalog | `from_lsn`                | all changes from there on                                |
| a DDL change   | `from_lsn`: its message;  | the later changes of its own transaction;                |
|                | `owner`: its transaction  | other transactions' changes from the end of its commit   |

The catalog of a change at `lsn`, in the transaction whose commit ends at `commit_lsn`, is

    the last full catalog at or before `lsn`,
    then the DDL changes of transactions that committed after it, up to `lsn`, in commit order,
    then the DDL changes of its own transaction up to `lsn`.

Two transactions with open DDL do not undo each other, because DDL changes replace single objects. For a
prepared transaction, its changes have their own positions and its commit is the COMMIT PREPARED.

A *version* is a range of positions with one catalog, for all transactions or for a single one (its owner):

    T1    BEGIN   ALTER at 20               change at 50      COMMIT, ends at 60
    T2                          ALTER, COMMIT, ends at 40
    for all from 0 | for T1 from 20 | for all from 40 | for T1 from 40 | for all from 60

Version ids follow commit order: later captures only append versions. Catalogs are built on demand.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from cdc_replay.catalog.ddl_change import apply_ddl_change, parse_ddl_change
from cdc_replay.catalog.json_form import catalog_from_json
from cdc_replay.errors import ChangeLogDamaged, InvalidMessage
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.publication import PublisherCatalog

FOR_ALL: Final = ZERO
"""The owner of a version that applies to every transaction: no commit ends there."""

_MOST_RECENT: Final = 4
"""So many catalogs are kept: of two publishers, the last one and the one before, which a window may span."""


class CatalogEntry(Protocol):
    """A full catalog as JSON, or, with an owner, a DDL change of that transaction."""

    @property
    def from_lsn(self) -> Lsn:
        """The first position it applies to, for all transactions or for its owner."""

    @property
    def text(self) -> str:
        """The JSON of the catalog, or the content of the message."""

    @property
    def owner(self) -> Lsn | None:
        """The end of its transaction's commit; None for a full catalog."""


class CatalogVersion(NamedTuple):
    """The first position a catalog applies to, and its owner: the end of a commit, or `FOR_ALL`."""

    owner: Lsn
    from_lsn: Lsn


class CatalogHistory:
    """All captured versions of the publisher's catalog."""

    def __init__(self, entries: Iterable[CatalogEntry]) -> None:
        ordered = sorted(
            entries, key=lambda entry: (_visible_from(entry), entry.owner is None, entry.from_lsn)
        )
        self._entries = ordered
        self._visible_from = [_visible_from(entry) for entry in ordered]
        self._full_indexes = [index for index, entry in enumerate(ordered) if entry.owner is None]
        self.versions = tuple(_list_versions(ordered))
        """All versions; the index is the version id."""
        self._for_all = [
            (version.from_lsn, version_id)
            for version_id, version in enumerate(self.versions)
            if version.owner == FOR_ALL
        ]

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """Owner (0: all) and first position of each version, for decoding."""
        return tuple((version.owner.value, version.from_lsn.value) for version in self.versions)

    def at(self, lsn: Lsn) -> PublisherCatalog:
        """The catalog at `lsn` for transactions without DDL of their own; before the first one, the first.

        Raises:
            ChangeLogDamaged: if there is no version, or it cannot be read.
        """
        return next(iter(self.within(Window(lsn, lsn)).values()))

    def within(self, window: Window) -> Mapping[int, PublisherCatalog]:
        """The catalogs, by version id, of changes from `window.after` to `window.upto`, in order.

        Versions of an owner are included if its commit is in the window.

        Raises:
            ChangeLogDamaged: if there is no version, or a required one cannot be read.
        """
        return self.catalogs_of(self._ids_within(window))

    def each_within(self, window: Window) -> Iterator[PublisherCatalog]:
        """The catalogs of `within`, of which only the last one is kept: thousands may be gigabytes.

        Raises:
            ChangeLogDamaged: as `within`.
        """
        return (catalog for _, catalog in self._build(self._ids_within(window)))

    def is_full_catalog(self, version_id: int) -> bool:
        """Whether the version is a full catalog, which may have been read after it became valid."""
        version = self.versions[version_id]
        return version.owner == FOR_ALL and any(
            self._entries[index].from_lsn == version.from_lsn for index in self._full_indexes
        )

    def full_catalogs(self, before: int) -> Iterator[PublisherCatalog]:
        """The full catalogs from before version `before`, the last one first.

        Raises:
            ChangeLogDamaged: if one cannot be read.
        """
        version = self.versions[before]
        upto = version.from_lsn if version.owner == FOR_ALL else version.owner
        for index in reversed(self._full_indexes):
            if self._visible_from[index] < upto:
                yield catalog_from_json(self._entries[index].text)

    def _range_upto(self, lsn: Lsn) -> range:
        """The entries from the last full catalog at or before `lsn`, or the first, to the last DDL change."""
        stop = max(bisect.bisect_right(self._visible_from, lsn), self._full_indexes[0] + 1)
        full_index = self._full_indexes[bisect.bisect_left(self._full_indexes, stop) - 1]
        return range(full_index, stop)

    def _version_at(self, lsn: Lsn) -> int:
        if not self._full_indexes:
            raise ChangeLogDamaged(
                "the change log has no version of the publisher's catalog",
                hint="Run `cdc-replay capture` for the publisher.",
                rule="R9.10",
            )
        index = bisect.bisect_right(self._for_all, lsn, key=operator.itemgetter(0))
        return self._for_all[max(index - 1, 0)][1]

    def catalogs_of(self, version_ids: Iterable[int]) -> Mapping[int, PublisherCatalog]:
        """The catalogs of these versions by id, in order, each built from the previous one if possible.

        Raises:
            ChangeLogDamaged: if there is no version, or a required one cannot be read.
        """
        return dict(self._build(sorted(version_ids)))

    def _ids_within(self, window: Window) -> Sequence[int]:
        first = self._version_at(window.after)
        last = self._version_at(window.upto)
        return [
            version_id
            for version_id, version in enumerate(self.versions[: last + 1])
            if version.owner in window or (version.owner == FOR_ALL and version_id >= first)
        ]

    def _build(self, version_ids: Sequence[int]) -> Iterator[tuple[int, PublisherCatalog]]:
        own_changes = _changes_by_owner(
            self._entries, {self.versions[version_id].owner for version_id in version_ids}
        )
        base, replay = _GrowingCatalog(), _TransactionReplay(FOR_ALL)
        for version_id in version_ids:
            version = self.versions[version_id]
            catalog = base.after(self._entries, self._range_upto(version.from_lsn))
            if version.owner in own_changes:
                # The versions of an owner follow each other.
                if replay.owner != version.owner:
                    replay = _TransactionReplay(version.owner, own_changes[version.owner])
                catalog = replay.at(version.from_lsn, catalog)
            yield version_id, dataclasses.replace(catalog, lsn=version.from_lsn)


class _RecentCatalogs:
    """The catalogs that were built last, each with the texts of the entries that lead to it.

    Every window, and every pull, builds a catalog of the same entries and perhaps a few more: of thousands of
    tables this takes a second.
    """

    def __init__(self) -> None:
        self._built: tuple[tuple[tuple[str, ...], PublisherCatalog], ...] = ()

    def after(self, entries: Sequence[CatalogEntry]) -> PublisherCatalog:
        """The catalog after these entries: a full one and DDL changes in order."""
        texts = tuple(entry.text for entry in entries)
        starts = [built for built in self._built if texts[: len(built[0])] == built[0]]
        if starts:
            known, catalog = max(starts, key=lambda built: len(built[0]))
        else:
            known, catalog = texts[:1], catalog_from_json(texts[0])
        for entry in entries[len(known) :]:
            catalog = _apply_entry(catalog, entry)
        others = (built for built in self._built if built[0] != texts)
        # Threads may build the same one; the last one counts.
        self._built = ((texts, catalog), *others)[:_MOST_RECENT]
        return catalog


_recent_catalogs: Final = _RecentCatalogs()


@dataclass(slots=True)
class _GrowingCatalog:
    """Builds the catalogs that all transactions see, each from the one before if that is possible."""

    _catalog: PublisherCatalog | None = None
    _entries: range = range(0)

    def after(self, entries: Sequence[CatalogEntry], until: range) -> PublisherCatalog:
        """The catalog after the entries of this range: a full one and DDL changes in order."""
        is_longer = until.start == self._entries.start and until.stop >= self._entries.stop
        if self._catalog is None or not is_longer:
            self._catalog = _recent_catalogs.after(entries[until.start : until.stop])
        else:
            for entry in entries[self._entries.stop : until.stop]:
                self._catalog = _apply_entry(self._catalog, entry)
        self._entries = until
        return self._catalog


@dataclass(slots=True)
class _TransactionReplay:
    """Builds the catalogs that one transaction sees, in order of position."""

    owner: Lsn
    changes: Sequence[CatalogEntry] = ()
    """In order of position."""
    _base: PublisherCatalog | None = None
    _catalog: PublisherCatalog | None = None
    _next_index: int = 0

    def at(self, lsn: Lsn, base: PublisherCatalog) -> PublisherCatalog:
        """The transaction's catalog at `lsn`; `base` is that of all others."""
        if self._catalog is None or base is not self._base:
            self._base = self._catalog = base
            self._next_index = 0
        while self._next_index < len(self.changes) and self.changes[self._next_index].from_lsn <= lsn:
            self._catalog = _apply_entry(self._catalog, self.changes[self._next_index])
            self._next_index += 1
        return self._catalog


def _list_versions(ordered: Sequence[CatalogEntry]) -> Iterator[CatalogVersion]:
    commit_positions: list[Lsn] = []
    for position, group in itertools.groupby(ordered, key=_visible_from):
        own_positions = sorted(entry.from_lsn for entry in group if entry.owner is not None)
        if own_positions:
            # Until its commit the owner also sees what other transactions commit (R9.10).
            others = commit_positions[bisect.bisect_right(commit_positions, own_positions[0]) :]
            for from_lsn in sorted({*own_positions, *others}):
                yield CatalogVersion(position, from_lsn)
        commit_positions.append(position)
        yield CatalogVersion(FOR_ALL, position)


def _changes_by_owner(
    entries: Iterable[CatalogEntry], owners: Set[Lsn]
) -> Mapping[Lsn, Sequence[CatalogEntry]]:
    changes: dict[Lsn, list[CatalogEntry]] = {}
    for entry in entries:
        if entry.owner is not None and entry.owner in owners:
            changes.setdefault(entry.owner, []).append(entry)
    return changes


def _visible_from(entry: CatalogEntry) -> Lsn:
    return entry.from_lsn if entry.owner is None else entry.owner


def _apply_entry(catalog: PublisherCatalog, entry: CatalogEntry) -> PublisherCatalog:
    try:
        return apply_ddl_change(catalog, parse_ddl_change(entry.text))
    except InvalidMessage as error:
        raise ChangeLogDamaged(
            f"the DDL change at {entry.from_lsn} cannot be read from the change log",
            detail=error.detail or error.message,
            rule="R9.11",
        ) from error
