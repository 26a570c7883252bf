"""The publisher's catalog over time: which version is in force for which change (R9.10, R9.11).

What is known are *definitions*: whole catalogs, and what single DDL commands changed (`delta`).

| definition      | at                        | is in force for                                              |
|-----------------|---------------------------|--------------------------------------------------------------|
| a whole catalog | `from_lsn`                | all changes from there on                                    |
| a delta         | `from_lsn`: its message;  | the later changes of its own transaction;                    |
|                 | `owner`: its transaction  | the changes of others from the end of its commit on          |

So the catalog of a change at `lsn`, in the transaction whose commit ends at `commit_lsn`, is

    the last whole catalog at or before `lsn`,
    then the deltas of the transactions that committed behind it, up to `lsn`, in the order of their commits,
    then the deltas of its own transaction up to `lsn`.

Two transactions with open DDL do not undo each other, because deltas replace single objects. A prepared
transaction is no special case: its changes have their own positions, its commit is the COMMIT PREPARED.

A *version* is a stretch of positions with one catalog, for all transactions or for a single one (its owner):

    T1    BEGIN   ALTER at 20               change at 50      COMMIT, ends at 60
    T2                          ALTER, COMMIT, ends at 40
    for all from 0 | for T1 from 20 | for all from 40 | for T1 from 40 | for all from 60

Versions are numbered in the order in which they became known, that of commits: what is captured later only
adds numbers behind those that are there. Catalogs are put together when they are asked for.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from cdc_replay.catalog.ddl_change import apply_delta, parse_delta
from cdc_replay.catalog.json_form import catalog_from_json
from cdc_replay.errors import ChangeLogDamaged, InvalidMessage
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.publication import PublisherCatalog

FOR_ALL: Final = ZERO
"""The owner of a version that is in force for every transaction: no commit ends there."""


class CatalogEntry(Protocol):
    """A whole catalog as JSON, or, with an owner, what one command of that transaction changed."""

    @property
    def from_lsn(self) -> Lsn:
        """Where it begins to be in force, for all transactions or for its owner."""

    @property
    def text(self) -> str:
        """The JSON form of the catalog, or the content of the message."""

    @property
    def owner(self) -> Lsn | None:
        """The end of the commit of its transaction, None for a whole catalog."""


class CatalogVersion(NamedTuple):
    """From where a catalog is in force, and for whom: the end of a transaction's commit, or `FOR_ALL`."""

    owner: Lsn
    from_lsn: Lsn


class CatalogHistory:
    """All versions of the publisher's catalog that are known."""

    def __init__(self, definitions: Iterable[CatalogEntry]) -> None:
        ordered = sorted(definitions, key=lambda each: (_known_from(each), each.owner is None, each.from_lsn))
        self._definitions = ordered
        self._known_from = [_known_from(each) for each in ordered]
        self._wholes = [place for place, each in enumerate(ordered) if each.owner is None]
        self.versions = tuple(_versions(ordered))
        """All versions; the place in it is the number of a version."""
        self._for_all = [
            (version.from_lsn, number)
            for number, version in enumerate(self.versions)
            if version.owner == FOR_ALL
        ]

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """Owner, 0 for all, and first position of each version: what decoding has to know."""
        return tuple((version.owner.value, version.from_lsn.value) for version in self.versions)

    def at(self, lsn: Lsn) -> PublisherCatalog:
        """What is in force at `lsn` for transactions without DDL of their own; before all, the first.

        Raises:
            ChangeLogDamaged: if there is no version at all, or it cannot be read.
        """
        return next(iter(self.within(Window(lsn, lsn)).values()))

    def within(self, window: Window) -> Mapping[int, PublisherCatalog]:
        """The versions, by number, of changes from `window.after` to `window.upto`; in order.

        Those of one owner are there if its commit is in the window.

        Raises:
            ChangeLogDamaged: if there is no version at all, or one that is needed cannot be read.
        """
        first = self._number_at(window.after)
        last = self._number_at(window.upto)
        numbers = [
            number
            for number, version in enumerate(self.versions[: last + 1])
            if version.owner in window or (version.owner == FOR_ALL and number >= first)
        ]
        return self.numbered(numbers)

    def is_whole(self, number: int) -> bool:
        """Whether the version of that number was read as a whole, perhaps later than it came into force."""
        version = self.versions[number]
        return version.owner == FOR_ALL and any(
            self._definitions[place].from_lsn == version.from_lsn for place in self._wholes
        )

    def whole_catalogs(self, before: int) -> Iterator[PublisherCatalog]:
        """The whole catalogs that were known before the version of that number, the last one first.

        Raises:
            ChangeLogDamaged: if one cannot be read.
        """
        version = self.versions[before]
        upto = version.from_lsn if version.owner == FOR_ALL else version.owner
        for place in reversed(self._wholes):
            if self._known_from[place] < upto:
                yield _whole(self._definitions[place])

    def _number_at(self, lsn: Lsn) -> int:
        if not self._wholes:
            raise ChangeLogDamaged(
                "the change log holds no version of the publisher's catalog",
                hint="Run `cdc-replay capture` for the publisher.",
                rule="R9.10",
            )
        place = bisect.bisect_right(self._for_all, lsn, key=operator.itemgetter(0))
        return self._for_all[max(place - 1, 0)][1]

    def numbered(self, numbers: Iterable[int]) -> Mapping[int, PublisherCatalog]:
        """These versions, in order; deltas are applied to what is there already where that is possible.

        Raises:
            ChangeLogDamaged: if there is no version at all, or one that is needed cannot be read.
        """
        ordered = sorted(numbers)
        wanted = [self.versions[number] for number in ordered]
        bases = _GlobalReplay(self._definitions, self._known_from, self._wholes)
        base_of = {lsn: bases.up_to(lsn) for lsn in sorted({version.from_lsn for version in wanted})}
        own = _by_owner(self._definitions, {version.owner for version in wanted})
        found: dict[int, PublisherCatalog] = {}
        for number, version in zip(ordered, wanted, strict=True):
            catalog = base_of[version.from_lsn]
            if version.owner in own:
                catalog = own[version.owner].at(version.from_lsn, catalog)
            found[number] = dataclasses.replace(catalog, lsn=version.from_lsn)
        return found


class _GlobalReplay:
    """The catalogs for all transactions, asked for in the order of their positions."""

    def __init__(
        self, definitions: Sequence[CatalogEntry], known_from: Sequence[Lsn], wholes: Sequence[int]
    ) -> None:
        self._definitions = definitions
        self._known_from = known_from
        self._wholes = wholes
        self._done = 0
        self._catalog: PublisherCatalog | None = None

    def up_to(self, lsn: Lsn) -> PublisherCatalog:
        """The last whole catalog at or before `lsn`, or the first, with the deltas behind it."""
        stop = max(bisect.bisect_right(self._known_from, lsn), self._wholes[0] + 1)
        whole = self._wholes[bisect.bisect_left(self._wholes, stop) - 1]
        if self._catalog is None or whole >= self._done:
            self._catalog, self._done = _whole(self._definitions[whole]), whole + 1
        for definition in self._definitions[self._done : stop]:
            self._catalog = _changed(self._catalog, definition)
        self._done = max(stop, self._done)
        return self._catalog


@dataclass(slots=True)
class _TransactionReplay:
    """What one transaction sees of its own deltas, asked for in the order of positions."""

    deltas: list[CatalogEntry] = field(default_factory=list)
    """In the order of their positions."""
    _base: PublisherCatalog | None = None
    _catalog: PublisherCatalog | None = None
    _done: int = 0

    def at(self, lsn: Lsn, base: PublisherCatalog) -> PublisherCatalog:
        """What is in force for the transaction at `lsn`, where `base` is for all others."""
        if self._catalog is None or base is not self._base:
            self._base = self._catalog = base
            self._done = 0
        while self._done < len(self.deltas) and self.deltas[self._done].from_lsn <= lsn:
            self._catalog = _changed(self._catalog, self.deltas[self._done])
            self._done += 1
        return self._catalog


def _versions(ordered: Sequence[CatalogEntry]) -> Iterator[CatalogVersion]:
    """All versions in the order of their numbers; `ordered` by the position from which all are concerned."""
    known: list[Lsn] = []
    for position, together in itertools.groupby(ordered, key=_known_from):
        own = sorted(each.from_lsn for each in together if each.owner is not None)
        if own:
            # Until its commit the owner's changes also see what others commit (R9.10).
            others = known[bisect.bisect_right(known, own[0]) :]
            for from_lsn in sorted({*own, *others}):
                yield CatalogVersion(position, from_lsn)
        known.append(position)
        yield CatalogVersion(FOR_ALL, position)


def _by_owner(definitions: Iterable[CatalogEntry], owners: Set[Lsn]) -> dict[Lsn, _TransactionReplay]:
    """The deltas of these owners."""
    found: dict[Lsn, _TransactionReplay] = {}
    for each in definitions:
        if each.owner is not None and each.owner in owners:
            found.setdefault(each.owner, _TransactionReplay()).deltas.append(each)
    return found


def _known_from(definition: CatalogEntry) -> Lsn:
    """Where it begins to be in force for all transactions."""
    return definition.from_lsn if definition.owner is None else definition.owner


def _whole(definition: CatalogEntry) -> PublisherCatalog:
    return catalog_from_json(definition.text)


def _changed(catalog: PublisherCatalog, definition: CatalogEntry) -> PublisherCatalog:
    try:
        return apply_delta(catalog, parse_delta(definition.text))
    except InvalidMessage as error:
        raise ChangeLogDamaged(
            f"what a command changed at {definition.from_lsn} cannot be read from the change log",
            detail=error.detail or error.message,
            rule="R9.11",
        ) from error
