"""Tracks the publisher's catalog during capture: which catalog applies from which position (R9.10, R9.11).

| event triggers   | source of changes          | the catalog that a capture reads                |
|------------------|----------------------------|-------------------------------------------------|
| installed        | their messages             | audits the messages once per run                |
| not installed    | the catalog, at each pull  | applies from the end of the previous pull       |
| removed recently | the messages of the pull   | applies from the end of the pull                |

The first catalog of a log applies from its beginning; messages are applied to it.

The audit happens when the stream reaches the position at which the catalog was read; if that differs from
the first catalog, the run reads at least up to there. The catalog was read under a snapshot, and is compared
with the messages of the transactions that this snapshot sees. If they differ, the triggers were dropped or
disabled, or failed (with a WARNING in that session), and the catalog applies from where it was read. Rows of
a table without any message cannot wait for the audit: the catalog is read again and applies to the whole
pull. A text that cannot be read is that of the same tree before; a text that comes late is a new catalog.

Messages are stored as they are. When their size exceeds that of the last full catalog, a full one is added,
which bounds the work of readers. All of it is written before the commit of its pull, idempotently.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, Self

from cdc_replay.capture.ddl.catalog_snapshot import CatalogSnapshot
from cdc_replay.capture.ddl.messages import CatalogMessage
from cdc_replay.catalog.ddl_change import DdlChange, apply_ddl_change, parse_ddl_change
from cdc_replay.catalog.diff import differences
from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.catalog.json_form import catalog_to_json, same_definitions
from cdc_replay.catalog.known_texts import with_known_texts
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.metadata_tables import CatalogRow
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import RelationId
from cdc_replay.postgres.connection import Connection

logger = logging.getLogger(__name__)

MAX_DDL_CHANGES: Final = 500
"""A full catalog is written after this many DDL changes, however small they are."""

_MAX_NAMES: Final = 5
"""A warning names at most this many objects."""


@dataclass(frozen=True, slots=True)
class _DdlMessage:
    xid: int
    row: CatalogRow
    change: DdlChange


@dataclass(frozen=True, slots=True)
class PullCatalogs:
    """The catalog rows that a pull adds to the log, and the catalogs `before` it, if known, and after it.

    `between` builds the catalogs of the pull's range, one after the other. `is_exact`: event triggers have
    reported each of them; one that they missed may have been read from the server.
    """

    added: tuple[CatalogRow, ...]
    before: PublisherCatalog | None
    now: PublisherCatalog
    between: Callable[[], Iterable[PublisherCatalog]]
    is_exact: bool
    messages: tuple[_DdlMessage, ...]
    is_audited: bool


@dataclass(frozen=True, slots=True)
class _TriggerAudit:
    """Checks that a run's messages lead from its first catalog to the one that was read from the server."""

    start: PublisherCatalog
    current: CatalogSnapshot

    @classmethod
    def start_from(cls, connection: Connection, start: PublisherCatalog) -> Self:
        """Read the current catalog."""
        return cls(start, CatalogSnapshot.read(connection))

    @property
    def lsn(self) -> Lsn:
        """The position up to which the stream must have been read."""
        return self.current.catalog.lsn

    @property
    def is_unchanged(self) -> bool:
        """Whether the catalog has not changed, so that no message is needed."""
        return same_definitions(self.start, with_known_texts(self.current.catalog, self.start))

    def missed_changes(self, messages: Sequence[_DdlMessage]) -> Iterator[CatalogRow]:
        """The current catalog, if it differs from what the messages of the same transactions lead to."""
        snapshot = self.current.snapshot
        expected = _apply(self.start, [message for message in messages if snapshot.sees(message.xid)])
        catalog = with_known_texts(self.current.catalog, expected)
        if same_definitions(expected, catalog):
            return
        if names := differences(expected, catalog):
            logger.warning(
                "the event triggers did not report all changes: %s; using the catalog that was read at %s"
                " from there on",
                _first_names(names), catalog.lsn,
            )  # fmt: skip
        # Transactions that were in the stream, but not visible yet, are applied too.
        later = [message for message in messages if not snapshot.sees(message.xid)]
        yield _full_row(catalog.lsn, _apply(catalog, later))


class CatalogTracker:
    """Tracks the catalog of one publisher during a run; create it before the run's target is chosen."""

    def __init__(self, connection: Connection, log: ChangeLog, *, is_exact: bool) -> None:
        self.is_exact = is_exact
        """Whether the event triggers are installed."""
        self._connection = connection
        self._log = log
        self._versions = log.drop_uncommitted_catalogs()
        self._read_upto = max((row.read_lsn for row in self._versions), default=ZERO)
        self._now = CatalogHistory(self._versions).at(log.end_lsn) if self._versions else None
        self._unaudited: tuple[_DdlMessage, ...] = ()
        self._audit: _TriggerAudit | None = None
        self._snapshot: CatalogSnapshot | None = None
        """The catalog to use if there are no messages; without the event triggers each pull reads its own."""
        if is_exact and self._now is not None:
            self._audit = _TriggerAudit.start_from(connection, self._now)
        elif is_exact:
            self._snapshot = CatalogSnapshot.read(connection)

    def target(self, to_lsn: Lsn | None) -> Lsn | None:
        """The position to read up to: `to_lsn` (None: the end of WAL), or that of the audit's catalog."""
        if to_lsn is None or self._audit is None or self._audit.is_unchanged:
            return to_lsn
        return max(to_lsn, self._audit.lsn)

    def refresh(self) -> None:
        """Read the catalog for the next pull, if the event triggers are not installed.

        Raises:
            PublicationMissing: if a capture publication was dropped.
        """
        if not self.is_exact:
            self._snapshot = CatalogSnapshot.read(self._connection)

    def catalogs_for_pull(
        self, pull: Window, messages: Iterable[CatalogMessage], described: Set[RelationId]
    ) -> PullCatalogs:
        """The catalogs of a pull with these messages; `described` are the relations with rows in it."""
        parsed = tuple(_parse_messages(messages))
        added = [message.row for message in parsed]
        added += self._read_catalogs(pull, parsed, described)
        audit = self._audit if self._audit and self._audit.lsn <= pull.upto else None
        if audit:
            added += audit.missed_changes((*self._unaudited, *parsed))
        before = self._before(pull.after)
        if self._now is not None and not added:
            return PullCatalogs((), before, self._now, tuple, self.is_exact, (), bool(audit))
        is_exact = self.is_exact and len(added) == len(parsed)
        if parsed:
            added += _checkpoint([*self._versions, *added])
        history = CatalogHistory([*self._versions, *added])

        def between() -> Iterable[PublisherCatalog]:
            return history.each_within(pull) if parsed else ()

        now = history.at(pull.upto)
        return PullCatalogs(tuple(added), before, now, between, is_exact, parsed, bool(audit))

    def commit_pull(self, pull: PullCatalogs) -> None:
        """Update the state after the pull was committed."""
        self._versions = (*self._versions, *pull.added)
        self._read_upto = max(self._read_upto, *(row.read_lsn for row in pull.added), ZERO)
        self._now = pull.now
        self._snapshot = None if self.is_exact else self._snapshot
        self._audit = None if pull.is_audited else self._audit
        self._unaudited = (*self._unaudited, *pull.messages) if self._audit else ()

    def _read_catalogs(
        self, pull: Window, messages: Sequence[_DdlMessage], described: Set[RelationId]
    ) -> Iterator[CatalogRow]:
        """The full catalogs that the messages do not replace: the first; every new one without triggers."""
        if self._snapshot is None:
            yield from self._catalog_of_unreported_tables(pull, messages, described)
            return
        if self._now is None:
            yield _full_row(ZERO, self._snapshot.catalog)
            return
        expected = _apply(self._now, messages)
        catalog = with_known_texts(self._snapshot.catalog, expected)
        if not same_definitions(expected, catalog):
            yield _full_row(pull.upto if messages else pull.after, catalog)

    def _catalog_of_unreported_tables(
        self, pull: Window, messages: Sequence[_DdlMessage], described: Set[RelationId]
    ) -> Iterator[CatalogRow]:
        """The current catalog, if it has tables for which no message was received."""
        unreported = described - (self._now.tables.keys() if self._now else set())
        unreported -= frozenset(itertools.chain.from_iterable(message.change.tables for message in messages))
        if not unreported:
            return
        catalog = CatalogSnapshot.read(self._connection).catalog
        catalog = catalog if self._now is None else with_known_texts(catalog, self._now)
        names = sorted(str(catalog.tables[oid].name) for oid in unreported if oid in catalog.tables)
        if names:
            logger.warning(
                "no DDL message was received for %s; using the current catalog from %s on",
                _first_names(names), pull.after,
            )  # fmt: skip
            yield _full_row(pull.after, catalog)

    def _before(self, lsn: Lsn) -> PublisherCatalog | None:
        """The catalog at the end of the previous pull; None if none was read by then."""
        if self._read_upto <= lsn:
            return self._now
        known = [row for row in self._versions if row.read_lsn <= lsn]
        if not any(row.owner is None for row in known):
            return None
        return CatalogHistory(known).at(lsn)


def _parse_messages(messages: Iterable[CatalogMessage]) -> Iterator[_DdlMessage]:
    for message in messages:
        try:
            change = parse_ddl_change(message.content)
        except InvalidMessage as error:
            logger.warning("%s: it was written at %s; %s", error.message, message.lsn, error.detail)
            continue
        text = message.content.decode()
        row = CatalogRow(message.lsn, message.commit_lsn, text, message.commit_lsn)
        yield _DdlMessage(message.xid, row, change)


def _apply(catalog: PublisherCatalog, messages: Iterable[_DdlMessage]) -> PublisherCatalog:
    for message in messages:
        catalog = apply_ddl_change(catalog, message.change)
    return catalog


def _full_row(from_lsn: Lsn, catalog: PublisherCatalog) -> CatalogRow:
    return CatalogRow(from_lsn, catalog.lsn, catalog_to_json(replace(catalog, lsn=from_lsn)))


def _checkpoint(versions: Sequence[CatalogRow]) -> Iterator[CatalogRow]:
    """A full catalog at the last version, if many DDL changes follow the last full one."""
    ordered = sorted(versions, key=lambda row: (row.known_from, row.owner is None))
    last_full = max(index for index, row in enumerate(ordered) if row.owner is None)
    changes = ordered[last_full + 1 :]
    size = sum(len(row.text) for row in changes)
    if len(changes) > MAX_DDL_CHANGES or size > len(ordered[last_full].text):
        end = changes[-1].known_from
        yield _full_row(end, CatalogHistory(ordered).at(end))


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
