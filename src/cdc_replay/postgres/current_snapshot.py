"""A snapshot of the database as it is now, which waits for nobody: known by transactions, not by a position.

A slot's snapshot (`exported_snapshot`) is exact at one LSN, and is there once all transactions that are open
have ended (R1.35). This one is there at once. What it holds is told by transaction ids, which the change log
has too.

A transaction is visible a moment after its commit record is written; while a synchronous standby keeps it
waiting, that moment is long. Its locks are held until then: whoever changes the same row, or reuses its key,
is visible later still. So the visible transactions of a row are the first ones in its order of commits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psycopg

from cdc_replay.model.pg_snapshot import PgSnapshot
from cdc_replay.postgres.connection import connect, translated_errors
from cdc_replay.postgres.exported_snapshot import SharedSnapshot

_EXPORT: Final = "select pg_export_snapshot(), pg_current_snapshot()::text"


@dataclass(frozen=True, slots=True, repr=False)
class CurrentSnapshot(SharedSnapshot):
    """What another connection needs to read the database as it was a moment ago, and what it sees then."""

    transactions: PgSnapshot


@contextlib.contextmanager
def export_current_snapshot(dsn: str) -> Iterator[CurrentSnapshot]:
    """Export a snapshot of the database as it is now, for as long as the context is open.

    Raises:
        ServerUnavailable, MissingPrivilege: if the server does not answer, or refuses the role.
    """
    with contextlib.closing(connect(dsn, purpose="present snapshot")) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        connection.autocommit = False
        with translated_errors("cannot export a snapshot"):
            ((name, transactions),) = connection.execute(_EXPORT).fetchall()
        yield CurrentSnapshot(dsn, name, PgSnapshot.parse(transactions))
