"""Connections to PostgreSQL: pinned session settings, and its errors as ours.

The text of a value depends on the session that reads it (R1.11). Every connection is pinned to the settings
of a native walreceiver, and to UTC and UTF8, so that a value has the same text in every session; sessions
that write to a subscriber restore the database's formats (`subscriber.apply_connection`). The owner of a
database, who chooses its settings, neither gives us a search path nor a role. Timeouts are those of the
configuration (`postgres.timeouts`), not of the role or database, because a long copy is not a hanging
session. Keepalive packets detect a dead server. The server detects a dead client while it runs a statement,
so that a killed command holds its locks for seconds, not until the statement ends.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict

from cdc_replay.errors import (
    CdcReplayError,
    InvalidConfiguration,
    MissingPrivilege,
    ServerUnavailable,
    SlotActive,
    SlotMissing,
)
from cdc_replay.postgres.timeouts import DEFAULT
from cdc_replay.termination import cancel_on_termination

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

CREATED_MEANWHILE: Final = (pg.DuplicateSchema, pg.DuplicateTable, pg.DuplicateObject, pg.UniqueViolation)
"""The server's errors for an object that another session creates at the same time, also with `if not exists`.

A table is refused as a table, by its row type, or by an index of the catalog: that depends on the moment."""

DROPPED_MEANWHILE: Final = (pg.UndefinedTable, pg.InvalidSchemaName)
"""The server's errors for a table that another session drops, with its schema, before ours has locked it."""

PINNED_SETTINGS: Final[dict[str, str]] = {
    "client_encoding": "UTF8",
    "datestyle": "ISO, MDY",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "xmloption": "content",
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    "search_path": "",
    "client_min_messages": "notice",
    "default_transaction_isolation": "read committed",
    "lock_timeout": "0",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
}
"""The first settings of every session, except for timeouts that its DSN sets.

A walsender ignores the timeouts: a new slot waits for all open transactions. What is looked up after a lock
must be newer than the lock, which needs `read committed`. Only a warning shows that a peek lacks changes."""

# By default a server does not check for a dead client during a statement; it can on these systems.
_CHECK_CLIENT: Final = psycopg.sql.SQL(
    "select pg_catalog.set_config('client_connection_check_interval', '5s', false)"
    " where pg_catalog.version() ~ 'linux|darwin|bsd'"
)

# Else tables of that role would be our own, and their code could return to the role that has connected.
_LEAVE_ROLE_OF_DATABASE: Final = psycopg.sql.SQL(
    "select pg_catalog.set_config('role', 'none', false)"
    " from pg_catalog.pg_db_role_setting join pg_catalog.pg_database on pg_database.oid = setdatabase"
    " where datname = pg_catalog.current_database() and setrole = 0"
    " and 'role=' || current_user::text = any (setconfig)"
)

TRANSACTION_TIMEOUT_SINCE: Final = 170000

KEEPALIVES: Final[dict[str, int]] = {
    "keepalives_idle": 60,
    "keepalives_interval": 15,
    "keepalives_count": 4,
}
"""A dead connection is an error after two minutes, unless the DSN differs; Linux's default is two hours."""

READ_ONLY_REMEDY: Final = (
    "The subscriber is read-only: it is a standby, or default_transaction_read_only is on for the server, the"
    " database or the role. Give the address of the primary, or allow writes, then run the command again."
)

CUT_FACTOR: Final = 3
"""`connect_with_deadline` cuts the connection after this multiple of `seconds`: enough for a few queries."""

_limit: Final = contextvars.ContextVar[tuple[contextlib.ExitStack, float] | None]("limit", default=None)
"""Of the connections of `connections_end_after`: what ends their watch, and when they are cut."""

_registering: Final = threading.Lock()
_connections: Final[weakref.WeakSet[Connection]] = weakref.WeakSet()

_SCHEMES: Final = ("postgresql", "postgres")

_SUPERUSER: Final = "select rolname::text from pg_catalog.pg_roles where rolname = current_user and rolsuper"


def connect(
    dsn: str,
    *,
    purpose: str,
    autocommit: bool = True,
    replication: bool = False,
    answer_seconds: float | None = None,
) -> Connection:
    """A connection with pinned settings; `purpose` shows in pg_stat_activity as `cdc_replay <purpose>`.

    `replication` opens a walsender for the database, which accepts replication commands. With
    `answer_seconds` no host, statement or lock is waited for longer than that (see `connect_with_deadline`).

    Raises:
        InvalidConfiguration: if libpq cannot parse the DSN, or parses part of the password as another field.
        ServerUnavailable: if the server does not answer.
        MissingPrivilege: if it rejects the role.
    """
    options: dict[str, Any] = {"replication": "database"} if replication else {}
    parts = _parts(dsn, purpose)
    defaults = {**KEEPALIVES, **DEFAULT.connection_options()}
    options |= {name: value for name, value in defaults.items() if name not in parts}
    if answer_seconds is not None:
        options |= {
            "connect_timeout": math.ceil(answer_seconds),
            "tcp_user_timeout": math.ceil(answer_seconds * 1000),
        }
    with translated_errors(f"cannot connect for {purpose}"):
        connection = psycopg.connect(
            dsn,
            autocommit=True,
            application_name=f"cdc_replay {purpose}",
            client_encoding="UTF8",
            **options,
        )
        pinned = _pinned(
            connection.info.server_version, answer_seconds, "" if replication else str(parts.get("options"))
        )
        try:
            _cut_at_limit(connection)
            with cut_after(connection, answer_seconds):
                connection.execute(_first_statements(pinned))
            connection.autocommit = autocommit
            connection.prepare_threshold = None
        except BaseException:
            connection.close()
            raise
    with _registering:
        _connections.add(connection)
    return connection


@contextlib.contextmanager
def connect_with_deadline(dsn: str, *, purpose: str, seconds: float) -> Iterator[Connection]:
    """A connection that waits at most `seconds` for the server, a statement or a lock.

    It is cut after `CUT_FACTOR` times as long.

    Raises:
        CdcReplayError: as `connect`.
    """
    with (
        connect(dsn, purpose=purpose, answer_seconds=seconds) as connection,
        cut_after(connection, CUT_FACTOR * seconds),
    ):
        yield connection


@contextlib.contextmanager
def open_snapshot(dsn: str, *, purpose: str, read_only: bool | None = True) -> Iterator[Connection]:
    """A repeatable-read transaction, which is rolled back at the end; its first query takes the snapshot.

    `read_only` None: as the server has it by default, so also on a standby.

    Raises:
        CdcReplayError: as `connect`.
    """
    with contextlib.closing(connect(dsn, purpose=purpose)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = read_only
        connection.autocommit = False
        # A policy must not hide rows: the server refuses such a read instead, as natively in a copy.
        connection.execute("set local row_security = off")
        yield connection


@contextlib.contextmanager
def cut_after(connection: Connection, seconds: float | None) -> Iterator[None]:
    """Shut the connection down unless the block ends first: a stopped server honors no timeout."""
    if seconds is None:
        yield
        return
    with socket.socket(fileno=os.dup(connection.fileno())) as line:  # a descriptor that nobody else closes

        def cut() -> None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@contextlib.contextmanager
def connections_end_after(seconds: float) -> Iterator[None]:
    """Cut what this thread connects to in the context, once that many seconds of it have passed.

    For work that keeps others waiting: a timeout of statements is the server's word.
    """
    with contextlib.ExitStack() as watched:
        token = _limit.set((watched, time.monotonic() + seconds))
        try:
            yield
        finally:
            _limit.reset(token)


def _cut_at_limit(connection: Connection) -> None:
    if (limit := _limit.get()) is not None:
        watched, ends_at = limit
        watched.enter_context(cut_after(connection, max(0.0, ends_at - time.monotonic())))


def cancel_statement(connection: Connection) -> None:
    """Cancel the statement that another thread runs, if there is one; wait at most a second."""
    with contextlib.suppress(psycopg.Error):
        if connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
            connection.cancel_safe(timeout=1)


def _cancel_all() -> None:
    """Cancel the running statements of all threads."""
    with _registering:
        present = tuple(_connections)
    for connection in present:
        cancel_statement(connection)


cancel_on_termination(_cancel_all)


def _parts(dsn: str, purpose: str) -> dict[str, Any]:
    # libpq's error message repeats the part that it cannot parse, which may be the password.
    with contextlib.suppress(psycopg.ProgrammingError):
        parts = conninfo_to_dict(dsn)
        if not _is_cut_within_password(dsn, parts):
            return parts
    raise InvalidConfiguration(
        f"cannot connect for {purpose}: the DSN is not readable",
        hint="Give a libpq URI, or keywords and values; in a URI, percent-encode the password and names.",
    )


def _is_cut_within_password(dsn: str, parts: Mapping[str, Any]) -> bool:
    """Whether host, port or database may contain a part of the password.

    libpq ends the password at a URI's first `@`, and takes the text before a `/` for the port.
    """
    hosts = str(parts.get("host") or "").split(",")
    if any("@" in host and not host.startswith("/") for host in hosts):  # allowed in a socket's directory
        return True
    if re.fullmatch(r"[0-9,\s]*", str(parts.get("port") or "")) is None:
        return True
    scheme, _, location = dsn.partition("?")[0].partition("://")
    server, _, database = location.partition("/")
    return scheme in _SCHEMES and (server.count("@") > 1 or "@" in database)


def _pinned(server_version: int, answer_seconds: float | None, options: str) -> dict[str, str]:
    """The session's first settings, except for timeouts that the DSN's `options` set."""
    settings = {
        name: value
        for name, value in PINNED_SETTINGS.items()
        if name not in DEFAULT.settings() or name not in options
    }
    if answer_seconds is not None:
        settings |= dict.fromkeys(DEFAULT.settings(), f"{math.ceil(answer_seconds * 1000)}ms")
    if server_version >= TRANSACTION_TIMEOUT_SINCE:
        settings["transaction_timeout"] = "0"
    return settings


def _first_statements(pinned: Mapping[str, str]) -> psycopg.sql.Composed:
    """What each session executes first, in one message.

    The database's owner chooses its search path, and there may be operators of theirs in it: only the first
    statement, which has no operator, is parsed before the path is ours.
    """
    return psycopg.sql.SQL("; ").join((setting_statement(pinned), _CHECK_CLIENT, _LEAVE_ROLE_OF_DATABASE))


def is_read_only(connection: Connection) -> bool:
    """Whether transactions of this session are read-only by default."""
    ((read_only,),) = connection.execute("select pg_catalog.current_setting('transaction_read_only')::bool")
    return bool(read_only)


def superuser(connection: Connection) -> str | None:
    """The session's role, if it is a superuser."""
    row = connection.execute(_SUPERUSER).fetchone()
    return None if row is None else str(row[0])


def superuser_warnings(connection: Connection, endpoint: str, script: str) -> Iterator[str]:
    """A warning if the session's role at `endpoint`, such as `publisher shop`, is a superuser.

    `script` is the command that prints what another role would lack.
    """
    if (role := superuser(connection)) is not None:
        yield (
            f'{endpoint}: role "{role}" is a superuser, which it need not be: use a role that may only log'
            f" in, and let an administrator run what `{script}` prints for it"
        )


def setting_statement(settings: Mapping[str, str]) -> psycopg.sql.Composed:
    """One statement that sets all of them; with literals, because a walsender accepts no parameters."""
    calls = [
        psycopg.sql.SQL("pg_catalog.set_config({}, {}, false)").format(name, value)
        for name, value in settings.items()
    ]
    return psycopg.sql.SQL("select {}").format(psycopg.sql.SQL(", ").join(calls))


@contextlib.contextmanager
def translated_errors(action: str, *, grant: str | None = None) -> Iterator[None]:
    """Raise PostgreSQL's errors as ours; `action` is the attempt that failed (`cannot …`).

    `grant` is the hint for a missing privilege. Errors without a class of ours pass unchanged.

    Raises:
        ServerUnavailable, MissingPrivilege, SlotActive, SlotMissing: by SQLSTATE.
    """
    try:
        yield
    except psycopg.Error as error:
        if (translated := _translate(action, error, grant)) is None:
            raise
        raise translated from error


def _is_about_slot(error: psycopg.Error) -> bool:
    """By the function of the server that raised it: its message is in any language, and may name a table."""
    return "slot" in (error.diag.source_function or "").lower()


_LIBPQ_QUESTION: Final = re.compile(r"\n\tIs the server running [^\n]*\?")
"""Of a connection that is refused, once per address; the hint says it."""


def _translate(action: str, error: psycopg.Error, grant: str | None) -> CdcReplayError | None:
    # The server's message; a libpq connection failure may repeat parts of the DSN, never the password.
    server_message = error.diag.message_primary or _LIBPQ_QUESTION.sub("", str(error)).strip()
    message = f"{action}: {server_message}"
    match error:
        case pg.InsufficientPrivilege() | pg.InvalidAuthorizationSpecification() | pg.InvalidPassword():
            hint = grant if isinstance(error, pg.InsufficientPrivilege) else None
            return MissingPrivilege(message, detail=error.diag.message_detail, hint=hint)
        case pg.ObjectInUse() if _is_about_slot(error):
            hint = "Stop the other process that reads this slot, then run the command again."
            return SlotActive(message, hint=hint)
        case pg.UndefinedObject() if _is_about_slot(error):
            return SlotMissing(message, hint="Run `cdc-replay setup` for the publisher.")
        case pg.AdminShutdown() | pg.CrashShutdown() | pg.CannotConnectNow() | pg.TooManyConnections():
            return ServerUnavailable(message, hint="Run the command again once the server answers.")
        case psycopg.OperationalError() if error.sqlstate is None:
            hint = "Check that the server runs, and the host, port, database and user of the DSN."
            return ServerUnavailable(message, hint=hint)
        case _:
            return None
