"""The publisher's catalog as it is read, and which transactions it was read with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from psycopg.errors import LockNotAvailable

from cdc_replay.capture.publications import OUR_PUBLICATIONS
from cdc_replay.capture.slot_continuity import WAL_POSITIONS
from cdc_replay.catalog.reader import one_snapshot, read_catalog
from cdc_replay.errors import PublicationMissing
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.pg_snapshot import PgSnapshot
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.postgres.connection import Connection

_SNAPSHOT: Final = "select pg_current_snapshot()::text"

_PATIENCE: Final = "set local lock_timeout = '1s'"


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """The publisher's catalog; its position is behind every commit that its snapshot sees."""

    catalog: PublisherCatalog
    snapshot: PgSnapshot

    @classmethod
    def of(cls, connection: Connection) -> Self:
        """Read it now.

        Raises:
            PublicationMissing: if a capture publication was dropped.
            MissingPrivilege, ServerUnavailable: if the catalogs cannot be read.
        """
        with one_snapshot(connection):
            return cls._in_snapshot(connection)

    @classmethod
    def unless_locked(cls, connection: Connection) -> Self | None:
        """Read it now, or not at all while somebody alters a table that has a row filter, say.

        Raises:
            As `of`.
        """
        try:
            with one_snapshot(connection):
                connection.execute(_PATIENCE)
                return cls._in_snapshot(connection)
        except LockNotAvailable:
            return None

    @classmethod
    def _in_snapshot(cls, connection: Connection) -> Self:
        ((snapshot,),) = connection.execute(_SNAPSHOT).fetchall()
        # Not what is flushed: a commit can be visible before it is (synchronous_commit = off).
        ((ended, *_),) = connection.execute(WAL_POSITIONS).fetchall()
        catalog = read_catalog(connection, Lsn.parse(ended))
        _check_publications(catalog)
        return cls(catalog, PgSnapshot.parse(snapshot))


def _check_publications(catalog: PublisherCatalog) -> None:
    missing = [name for name in OUR_PUBLICATIONS if name not in catalog.publications]
    if missing:
        raise PublicationMissing(
            f"capture publications are missing: {', '.join(missing)}",
            detail="Changes that were made since they were dropped are not captured.",
            hint="Run `cdc-replay setup` for the publisher.",
            rule="R1.19",
        )
