"""The publisher's definitions, kept beside its changes: which catalog is in force from where (R9.10, R9.11).

| event triggers     | what decides                    | the catalog that a capture reads                  |
|--------------------|---------------------------------|---------------------------------------------------|
| installed          | their messages, by position     | checks once per run what the messages have said   |
| not installed      | the catalog, read at each pull  | is in force from the end of the pull before       |
| were, until lately | the messages of the pull        | is in force from the end of the pull              |

The first catalog of a log is in force from the beginning: the start state, to which messages are applied.

The check is made where the position is reached at which the catalog was read; if it says something new, a run
goes as far as that. It compares like with like: the catalog was read under a snapshot, and the messages must
say the same of the transactions that this snapshot sees, in whatever order their commits became visible.
Where they do not, the triggers were dropped or disabled for a while, or could not do their work, as they then
have told the session of that command; the catalog is in force from where it was read. Rows of a table of
which no message has told cannot wait for that: the catalog is read again, and is in force for the whole pull.
A check that would have to wait for somebody who alters a table is left to the next run.

Messages are kept as they are. Where they weigh as much as the last whole catalog, a whole one is added, so
that a reader need not go far back. All is written before the commit of its pull, and nothing of it is new
when it is written again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, Self

from cdc_replay.capture.ddl.catalog_snapshot import CatalogSnapshot
from cdc_replay.capture.ddl.messages import CatalogMessage
from cdc_replay.catalog.ddl_change import CatalogDelta, apply_delta, parse_delta
from cdc_replay.catalog.diff import differences
from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.catalog.json_form import catalog_to_json, same_definitions
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.metadata_tables import CatalogRow
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import RelationId
from cdc_replay.postgres.connection import Connection

logger = logging.getLogger(__name__)

MOST_DELTAS: Final = 500
"""Behind so many messages there is a whole catalog again, however small they are."""

_NAMED: Final = 5
"""How many differences a warning names."""


@dataclass(frozen=True, slots=True)
class _DdlMessage:
    """A message, as it is kept and as what it says."""

    xid: int
    version: CatalogRow
    delta: CatalogDelta


@dataclass(frozen=True, slots=True)
class PullCatalogs:
    """What a pull adds to the log, and the catalogs in force before it, where that is known, and after it.

    `between` puts together those that were in force in it.
    """

    added: tuple[CatalogRow, ...]
    before: PublisherCatalog | None
    now: PublisherCatalog
    between: Callable[[], tuple[PublisherCatalog, ...]]
    told: tuple[_DdlMessage, ...]
    is_checked: bool


@dataclass(frozen=True, slots=True)
class _TriggerAudit:
    """Whether the messages of a run tell what leads from its first catalog to the one that was read."""

    start: PublisherCatalog
    reading: CatalogSnapshot

    @classmethod
    def of(cls, connection: Connection, start: PublisherCatalog) -> Self | None:
        """None if it has to wait for a later run, as somebody is altering a table."""
        if (reading := CatalogSnapshot.unless_locked(connection)) is None:
            logger.info("a table is being altered: the next capture checks what the event triggers tell")
            return None
        return cls(start, reading)

    @property
    def lsn(self) -> Lsn:
        """Where the stream must have been read to."""
        return self.reading.catalog.lsn

    @property
    def finds_the_same(self) -> bool:
        """Nothing has changed, and no message is needed."""
        return same_definitions(self.start, self.reading.catalog)

    def found(self, run: Sequence[_DdlMessage]) -> Iterator[CatalogRow]:
        """The catalog that was read, if it does not say what the messages say of the same transactions."""
        read, snapshot = self.reading.catalog, self.reading.snapshot
        expected = _after(self.start, [one for one in run if snapshot.sees(one.xid)])
        if same_definitions(expected, read):
            return
        if named := differences(expected, read):
            logger.warning(
                "the event triggers have not told of all changes: %s; the definitions that were read at %s"
                " are in force from there on",
                _some(named), read.lsn,
            )  # fmt: skip
        # What was in the stream by then, but not visible yet, is in force as well.
        yield _whole(read.lsn, _after(read, [one for one in run if not snapshot.sees(one.xid)]))


class CatalogTracker:
    """The definitions of one publisher during a run; to be made before the run's target is chosen."""

    def __init__(self, connection: Connection, log: ChangeLog, *, is_exact: bool) -> None:
        self.is_exact = is_exact
        """The event triggers are installed."""
        self._connection = connection
        self._log = log
        self._versions = log.drop_uncommitted_catalogs()
        self._read_upto = max((each.read_lsn for each in self._versions), default=ZERO)
        self._now = CatalogHistory(self._versions).at(log.end_lsn) if self._versions else None
        self._told: tuple[_DdlMessage, ...] = ()
        self._check: _TriggerAudit | None = None
        self._reading: CatalogSnapshot | None = None
        """What decides, where messages do not tell."""
        if is_exact and self._now is not None:
            self._check = _TriggerAudit.of(connection, self._now)
        else:
            self._reading = CatalogSnapshot.of(connection)

    def target(self, to_lsn: Lsn | None) -> Lsn | None:
        """How far the run has to read to reach `to_lsn`, None being as far as there is something."""
        if to_lsn is None or self._check is None or self._check.finds_the_same:
            return to_lsn
        return max(to_lsn, self._check.lsn)

    def refresh(self) -> None:
        """Read the catalog for the next pull, if messages do not tell what changes.

        Raises:
            PublicationMissing: if a capture publication was dropped.
        """
        if not self.is_exact:
            self._reading = CatalogSnapshot.of(self._connection)

    def catalogs_for_pull(
        self, pull: Window, messages: Iterable[CatalogMessage], described: Set[RelationId]
    ) -> PullCatalogs:
        """What the messages of a pull, or the catalog, say; `described` are the relations with rows in it."""
        told = tuple(_readable(messages))
        added = [one.version for one in told]
        added += self._said_beside(pull, told, described)
        check = self._check if self._check and self._check.lsn <= pull.upto else None
        if check:
            added += check.found((*self._told, *told))
        before = self._before(pull.after)
        if self._now is not None and not added:
            return PullCatalogs((), before, self._now, tuple, (), bool(check))
        if told:
            added += _whole_again([*self._versions, *added])
        known = CatalogHistory([*self._versions, *added])

        def between() -> tuple[PublisherCatalog, ...]:
            return tuple(known.within(pull).values()) if told else ()

        return PullCatalogs(tuple(added), before, known.at(pull.upto), between, told, bool(check))

    def commit_pull(self, found: PullCatalogs) -> None:
        """Go on from a pull, once that is committed."""
        self._versions = (*self._versions, *found.added)
        self._read_upto = max(self._read_upto, *(each.read_lsn for each in found.added), ZERO)
        self._now = found.now
        self._reading = None if self.is_exact else self._reading
        self._check = None if found.is_checked else self._check
        self._told = (*self._told, *found.told) if self._check else ()

    def _said_beside(
        self, pull: Window, told: Sequence[_DdlMessage], described: Set[RelationId]
    ) -> Iterator[CatalogRow]:
        """What the messages do not say: the catalog at first, without event triggers always."""
        if self._reading is None:
            yield from self._of_untold_tables(pull, told, described)
        elif self._now is None:
            yield _whole(ZERO, self._reading.catalog)
        elif not same_definitions(_after(self._now, told), self._reading.catalog):
            yield _whole(pull.upto if told else pull.after, self._reading.catalog)

    def _of_untold_tables(
        self, pull: Window, told: Sequence[_DdlMessage], described: Set[RelationId]
    ) -> Iterator[CatalogRow]:
        """The catalog of now, if it knows tables of which no message has told."""
        untold = described - (self._now.tables.keys() if self._now else set())
        untold -= frozenset(itertools.chain.from_iterable(one.delta.tables for one in told))
        if not untold:
            return
        found = CatalogSnapshot.of(self._connection).catalog
        names = sorted(str(found.tables[relation].name) for relation in untold if relation in found.tables)
        if names:
            logger.warning(
                "the event triggers have not told of %s: the definitions of now are in force from %s on",
                _some(names), pull.after,
            )  # fmt: skip
            yield _whole(pull.after, found)

    def _before(self, lsn: Lsn) -> PublisherCatalog | None:
        """What was in force at the end of the pull before; None if nothing was read by then."""
        if self._read_upto <= lsn:
            return self._now
        known = [each for each in self._versions if each.read_lsn <= lsn]
        if not any(each.owner is None for each in known):
            return None
        return CatalogHistory(known).at(lsn)


def _readable(messages: Iterable[CatalogMessage]) -> Iterator[_DdlMessage]:
    for message in messages:
        try:
            delta = parse_delta(message.content)
        except InvalidMessage as error:
            logger.warning("%s: it was written at %s; %s", error.message, message.lsn, error.detail)
            continue
        text = message.content.decode()
        version = CatalogRow(message.lsn, message.commit_lsn, text, message.commit_lsn)
        yield _DdlMessage(message.xid, version, delta)


def _after(catalog: PublisherCatalog, told: Iterable[_DdlMessage]) -> PublisherCatalog:
    for one in told:
        catalog = apply_delta(catalog, one.delta)
    return catalog


def _whole(from_lsn: Lsn, catalog: PublisherCatalog) -> CatalogRow:
    return CatalogRow(from_lsn, catalog.lsn, catalog_to_json(replace(catalog, lsn=from_lsn)))


def _whole_again(versions: Sequence[CatalogRow]) -> Iterator[CatalogRow]:
    """A whole catalog from the last of the versions on, if many deltas are behind the last whole one."""
    ordered = sorted(versions, key=lambda each: (each.known_from, each.owner is None))
    whole = max(place for place, each in enumerate(ordered) if each.owner is None)
    behind = ordered[whole + 1 :]
    if len(behind) > MOST_DELTAS or sum(len(each.text) for each in behind) > len(ordered[whole].text):
        end = behind[-1].known_from
        yield _whole(end, CatalogHistory(ordered).at(end))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
