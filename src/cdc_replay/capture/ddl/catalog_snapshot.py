"""The publisher's catalog together with the snapshot that it was read under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from cdc_replay.capture.publications import OUR_PUBLICATIONS
from cdc_replay.capture.slot_continuity import WAL_POSITIONS
from cdc_replay.catalog.reader import read_catalog, single_snapshot
from cdc_replay.errors import PublicationMissing
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.pg_snapshot import PgSnapshot
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.postgres.connection import Connection

_SNAPSHOT: Final = "select pg_current_snapshot()::text"


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """The publisher's catalog; its position is after every commit that `snapshot` sees."""

    catalog: PublisherCatalog
    snapshot: PgSnapshot

    @classmethod
    def read(cls, connection: Connection) -> Self:
        """Read the current catalog.

        Raises:
            PublicationMissing: if a capture publication was dropped.
            MissingPrivilege, ServerUnavailable: if the catalogs cannot be read.
        """
        with single_snapshot(connection):
            return cls._read_in_transaction(connection)

    @classmethod
    def _read_in_transaction(cls, connection: Connection) -> Self:
        ((snapshot,),) = connection.execute(_SNAPSHOT).fetchall()
        # Not the flush position: a commit can be visible before it is flushed (synchronous_commit = off).
        ((last_record_end, *_),) = connection.execute(WAL_POSITIONS).fetchall()
        catalog = read_catalog(connection, Lsn.parse(last_record_end))
        _check_publications(catalog)
        return cls(catalog, PgSnapshot.parse(snapshot))


def _check_publications(catalog: PublisherCatalog) -> None:
    missing = [name for name in OUR_PUBLICATIONS if name not in catalog.publications]
    if missing:
        raise PublicationMissing(
            f"capture publications are missing: {', '.join(missing)}",
            detail="Changes since they were dropped are not captured.",
            hint="Run `cdc-replay setup` for the publisher.",
            rule="R1.19",
        )
