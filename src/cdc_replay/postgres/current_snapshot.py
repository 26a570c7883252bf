"""A snapshot of the database as it is now, without waiting; known by transaction IDs, not by an LSN.

A slot's snapshot (`exported_snapshot`) is exact at one LSN, but waits until all open transactions have ended
(R1.35). This one is available at once. Its transaction IDs are compared with those in the change log.

A transaction becomes visible a moment after its commit record is written, or long after if it waits for a
synchronous standby. It keeps its locks until then: transactions that change the same row, or reuse its key,
become visible later. So the visible transactions of a row are the first ones in commit order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cdc_replay.model.pg_snapshot import PgSnapshot
from cdc_replay.postgres.connection import open_snapshot, translated_errors
from cdc_replay.postgres.exported_snapshot import SharedSnapshot

_EXPORT: Final = "select pg_export_snapshot(), pg_current_snapshot()::text"


@dataclass(frozen=True, slots=True, repr=False)
class CurrentSnapshot(SharedSnapshot):
    """What another connection needs to import the snapshot, and the transactions visible in it."""

    transactions: PgSnapshot


@contextlib.contextmanager
def export_current_snapshot(dsn: str) -> Iterator[CurrentSnapshot]:
    """Export a snapshot of the database as it is now, for as long as the context is open.

    Raises:
        ServerUnavailable, MissingPrivilege: if the server does not answer, or rejects the role.
    """
    with open_snapshot(dsn, purpose="current snapshot") as connection:
        with translated_errors("cannot export a snapshot"):
            ((name, transactions),) = connection.execute(_EXPORT).fetchall()
        yield CurrentSnapshot(dsn, name, PgSnapshot.parse(transactions))
