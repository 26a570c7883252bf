"""Advisory locks that a session holds until it releases them, or ends.

Any role may take any advisory lock whose key it knows, and `pg_locks` shows the keys of all that are held. So
a `KeyedLock` has a random key, in a table that only our roles may write:

| the key is locked by                                    | effect                                           |
|---------------------------------------------------------|--------------------------------------------------|
| nobody                                                  | it is locked                                     |
| a session of a role that may write the table            | the lock is busy                                 |
| only others: another role, or a prepared transaction    | a new key replaces it, and is locked; a warning  |

All of that happens under a lock on the table which conflicts with itself, so no other process of ours can
take the key meanwhile. The transaction lasts milliseconds, and has an xid only if it stores a key. A stranger
who waits for a key gets a lock that the next holder ignores. The table is unlogged, so that no publication
has it: a crash empties it, and ends all sessions.

A `FixedLock` has a key that everybody knows: where there is no such table.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, LiteralString, Protocol

import psycopg
from psycopg import errors as pg
from psycopg import sql

from cdc_replay.postgres.connection import Connection

logger = logging.getLogger(__name__)

LOCK_KEY_TABLE: Final = "lock_key"
"""The name of a table of keys, in a schema of ours."""

CREATE_LOCK_KEY_TABLE: Final[LiteralString] = (
    "create unlogged table if not exists {table} (name text primary key, key bigint not null)"
)

_KEY_BITS: Final = 63

_TURN_SECONDS: Final = 1
"""After this long a waiting session looks whether it waits for one of ours."""

# A membership that is not inherited counts: the session may have used SET ROLE.
_HOLDERS: Final = """
    select pg_locks.pid, activity.application_name, activity.usename,
        exists (
            select from pg_catalog.pg_roles as role
            where pg_catalog.pg_has_role(activity.usesysid, role.oid, 'member')
                and (role.rolsuper or case when %(table)s::text is null then role.rolreplication
                    else pg_catalog.has_table_privilege(
                        role.oid, pg_catalog.to_regclass(%(table)s), 'update') end)
        )
    from pg_catalog.pg_locks
    left join pg_catalog.pg_stat_activity as activity using (pid)
    where locktype = 'advisory' and granted and objsubid = %(key_count)s
        and pg_locks.database = (
            select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())
        and classid::bigint = %(first)s::bigint & 4294967295
        and objid::bigint = %(second)s::bigint & 4294967295
    order by 4 desc, 1
"""

# In one statement with the others; a lock in a repeatable read transaction would come after its snapshot.
_LOCK_TABLE: Final = """
    set transaction isolation level read committed, read write;
    set local lock_timeout = '10s';
    lock table {table} in share update exclusive mode
"""

_TRY_KEY: Final = "select key, pg_catalog.pg_try_advisory_lock(key) from {table} where name = {name}"

_NEW_KEY: Final = """
    insert into {table} (name, key) values ({name}, {key})
    on conflict (name) do update set key = excluded.key
"""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds an advisory lock; without a process it is a prepared transaction."""

    pid: int | None
    application: str | None
    role: str | None
    is_ours: bool
    """Its role may write the table of keys; where there is none, it has REPLICATION. Superusers are."""

    def __str__(self) -> str:
        if self.pid is None:
            return "It is a prepared transaction."
        return f'It is server process {self.pid} ("{self.application or "unknown"}") of role "{self.role}".'


class SessionLock(Protocol):
    """An advisory lock of one connection, which must be outside of a transaction."""

    def try_acquire(self) -> bool:
        """Take the lock unless another session of ours holds it."""

    def wait(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Wait in line for the present holder; inside of the context no later one comes first."""

    def release(self) -> None:
        """Release the lock, which is held."""

    def holder(self) -> str | None:
        """A sentence that names who holds it; None if it is free."""


def acquire(lock: SessionLock, patience_seconds: float) -> bool:
    """Take the lock, and wait for it that long at most. Sessions that wait get it in their order."""
    deadline = time.monotonic() + patience_seconds
    while not lock.try_acquire():
        if (remaining := deadline - time.monotonic()) <= 0:
            return False
        with lock.wait(min(remaining, _TURN_SECONDS)):
            if lock.try_acquire():
                return True
    return True


class FixedLock:
    """A lock with one key of 64 bits, or two of 32."""

    def __init__(self, connection: Connection, *keys: int) -> None:
        self._connection = connection
        self.keys = keys

    def try_acquire(self) -> bool:
        """As `SessionLock`; anybody's lock counts."""
        return bool(self._call("pg_try_advisory_lock"))

    def wait(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """As `SessionLock`."""
        return _turn(self._connection, self.keys, seconds)

    def release(self) -> None:
        """As `SessionLock`."""
        self._call("pg_advisory_unlock")

    def holder(self) -> str | None:
        """As `SessionLock`."""
        return next((str(holder) for holder in holders(self._connection, self.keys)), None)

    def _call(self, function: str) -> object:
        return _call(self._connection, function, self.keys)


class KeyedLock:
    """The lock `name` of a table of keys, which exists and whose owner is trusted."""

    def __init__(self, connection: Connection, schema: str, name: str) -> None:
        self._connection = connection
        self._name = name
        self._parts = {"table": sql.Identifier(schema, LOCK_KEY_TABLE), "name": sql.Literal(name)}
        self._key = 0

    def try_acquire(self) -> bool:
        """As `SessionLock`; a stranger's lock does not count."""
        with self._connection.transaction():
            self._execute(_LOCK_TABLE)
            row = self._execute(_TRY_KEY).fetchone()
            if row is not None and row[1]:
                self._key = row[0]
                return True
            if row is not None and not self._are_strangers(holders(self._connection, (row[0],), self._table)):
                return False
            key = secrets.randbits(_KEY_BITS)
            self._execute(_NEW_KEY, key=sql.Literal(key))
            # Before the commit shows it to anybody.
            _call(self._connection, "pg_advisory_lock", (key,))
        self._key = key
        return True

    def _are_strangers(self, present: list[Holder]) -> bool:
        """Whether none of the holders is ours; says who they are."""
        if any(holder.is_ours for holder in present):
            return False
        for holder in present:
            logger.warning(
                'a role that may not work with lock "%s" holds its key, which is replaced. %s',
                self._name, holder,
            )  # fmt: skip
        return True

    def wait(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """As `SessionLock`."""
        return _turn(self._connection, self._present_keys(), seconds)

    def release(self) -> None:
        """As `SessionLock`."""
        _call(self._connection, "pg_advisory_unlock", (self._key,))

    def holder(self) -> str | None:
        """As `SessionLock`."""
        keys = self._present_keys()
        present = holders(self._connection, keys, self._table) if keys else []
        return next((str(holder) for holder in present if holder.is_ours), None)

    def _present_keys(self) -> tuple[int, ...]:
        return tuple(key for (key,) in self._execute("select key from {table} where name = {name}"))

    @property
    def _table(self) -> str:
        return self._parts["table"].as_string(self._connection)

    def _execute(self, statement: LiteralString, **parts: sql.Composable) -> psycopg.Cursor[Any]:
        return self._connection.execute(sql.SQL(statement).format(**self._parts, **parts))


def holders(connection: Connection, keys: tuple[int, ...], table: str | None = None) -> list[Holder]:
    """The sessions and prepared transactions with a lock of these keys, ours first.

    `table` is the table of keys, if there is one: it tells who is ours.
    """
    first, second = (keys[0] >> 32, keys[0]) if len(keys) == 1 else keys
    values = {"first": first, "second": second, "key_count": len(keys), "table": table}
    return [Holder(*row) for row in connection.execute(_HOLDERS, values)]


def advisory_key(purpose: str, name: str) -> int:
    """The key of a `FixedLock` for `purpose` and `name`; the same in every process and release."""
    digest = hashlib.sha256(f"cdc_replay {purpose} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


@contextlib.contextmanager
def _turn(connection: Connection, keys: tuple[int, ...], seconds: float) -> Iterator[None]:
    """Hold the lock inside, if the session gets it within that time."""
    has_lock = bool(keys) and _wait(connection, keys, seconds)
    try:
        yield
    finally:
        if has_lock:
            _call(connection, "pg_advisory_unlock", keys)


def _wait(connection: Connection, keys: tuple[int, ...], seconds: float) -> bool:
    with connection.transaction(), contextlib.suppress(pg.LockNotAvailable, pg.DeadlockDetected):
        milliseconds = math.ceil(seconds * 1000)
        connection.execute("select set_config('lock_timeout', %s, true)", (f"{milliseconds}ms",))
        with connection.transaction():
            _call(connection, "pg_advisory_lock", keys)
            return True
    return False


def _call(connection: Connection, function: str, keys: tuple[int, ...]) -> object:
    call = sql.SQL("select pg_catalog.{}({})").format(
        sql.Identifier(function), sql.SQL(", ").join(map(sql.Literal, keys))
    )
    return connection.execute(call).fetchall()[0][0]
