"""Connections to PostgreSQL: pinned session settings, and its errors as ours.

Text values depend on the session that reads them (R1.11). Every connection of this package is pinned to the
settings that a native walreceiver uses, and to UTC and UTF8, so that a value has one text whoever reads it
and wherever; sessions that write to a subscriber go back to its own formats (`subscriber.apply_connection`).
Timeouts are those of the configuration (`postgres.timeouts`), not of the role or the database: a long copy is
not a hanging session. A server that is gone without a word is noticed by the packets that its host does not
answer; a client that is gone, by the server while it runs a statement for it, so that a killed command holds
locks for seconds, not to the statement's end.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import threading
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

PINNED_SETTINGS: Final[dict[str, str]] = {
    "client_encoding": "UTF8",
    "datestyle": "ISO, MDY",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "xmloption": "content",
    "standard_conforming_strings": "on",
    "search_path": "",
    "lock_timeout": "0",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
}
"""What every session sets before anything else, but for the timeouts that its DSN has.

A walsender heeds none: a new slot waits for all transactions that are open."""

# A server that runs a statement does not look after the client that asked for it, unless it is told to; it
# can where it runs on these systems.
_LOOK_AFTER_CLIENT: Final = psycopg.sql.SQL(
    ", case when pg_catalog.version() ~ 'linux|darwin|bsd'"
    " then pg_catalog.set_config('client_connection_check_interval', '5s', false) end"
)

TRANSACTION_TIMEOUT_SINCE: Final = 170000

KEEPALIVES: Final[dict[str, int]] = {
    "keepalives_idle": 60,
    "keepalives_interval": 15,
    "keepalives_count": 4,
}
"""Two minutes until a dead line is an error, unless the DSN says otherwise; Linux would take two hours."""

READ_ONLY_REMEDY: Final = (
    "The subscriber is read-only: it is a standby, or default_transaction_read_only is on for the server, the"
    " database or the role. Give the address of the primary, or let it take writes, then run it again."
)

CUT_FACTOR: Final = 3
"""A connection that is to answer soon may take so many times as long: a few queries, each in time."""

_registering: Final = threading.Lock()
_connections: Final[weakref.WeakSet[Connection]] = weakref.WeakSet()

_SCHEMES: Final = ("postgresql", "postgres")


def connect(
    dsn: str,
    *,
    purpose: str,
    autocommit: bool = True,
    replication: bool = False,
    answer_seconds: float | None = None,
) -> Connection:
    """A connection with pinned settings; `purpose` shows in pg_stat_activity as `cdc_replay <purpose>`.

    `replication` opens a walsender for the database, which understands the replication commands. With
    `answer_seconds` neither a host, whatever the DSN says, nor a statement or lock is waited for longer than
    that (see `connect_with_deadline`).

    Raises:
        InvalidConfiguration: if libpq cannot read the DSN, or takes a part of its password for another one.
        ServerUnavailable: if the server does not answer.
        MissingPrivilege: if it refuses the role.
    """
    options: dict[str, Any] = {"replication": "database"} if replication else {}
    given = _parts(dsn, purpose)
    defaults = {**KEEPALIVES, **DEFAULT.connection_options()}
    options |= {name: value for name, value in defaults.items() if name not in given}
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
            connection.info.server_version, answer_seconds, "" if replication else str(given.get("options"))
        )
        try:
            with _cut_after(connection, answer_seconds):
                connection.execute(setting_statement(pinned) + _LOOK_AFTER_CLIENT)
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
    """A connection that waits no longer than that for the server, a statement or a lock.

    It lasts `CUT_FACTOR` times as long at most, for a few statements.

    Raises:
        CdcReplayError: as `connect`.
    """
    with (
        connect(dsn, purpose=purpose, answer_seconds=seconds) as connection,
        _cut_after(connection, CUT_FACTOR * seconds),
    ):
        yield connection


@contextlib.contextmanager
def _cut_after(connection: Connection, seconds: float | None) -> Iterator[None]:
    """End the connection unless the block ends before: a stopped server heeds no timeout of its own."""
    if seconds is None:
        yield
        return
    with socket.socket(fileno=os.dup(connection.fileno())) as line:  # ours: its number is nobody else's

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


def _cancel_all() -> None:
    """Cancel what the servers do for any thread of this process."""
    with _registering:
        present = tuple(_connections)
    for connection in present:
        with contextlib.suppress(psycopg.Error):
            if connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                connection.cancel_safe(timeout=1)


cancel_on_termination(_cancel_all)


def _parts(dsn: str, purpose: str) -> dict[str, Any]:
    # What libpq says repeats the part that it cannot read or use, which may be the password.
    with contextlib.suppress(psycopg.ProgrammingError):
        parts = conninfo_to_dict(dsn)
        if not _is_cut_within_password(dsn, parts):
            return parts
    raise InvalidConfiguration(
        f"cannot connect for {purpose}: the DSN is not readable",
        hint="Give a libpq URI, or keywords and values; in a URI, percent-encode the password and names.",
    )


def _is_cut_within_password(dsn: str, parts: Mapping[str, Any]) -> bool:
    """Whether host, port or database may have a part of the password.

    libpq ends the password at the first `@` of a URI, and takes what is before a `/` for the port.
    """
    hosts = str(parts.get("host") or "").split(",")
    if any("@" in host and not host.startswith("/") for host in hosts):  # a socket's folder may have one
        return True
    if re.fullmatch(r"[0-9,\s]*", str(parts.get("port") or "")) is None:
        return True
    scheme, _, location = dsn.partition("?")[0].partition("://")
    server, _, database = location.partition("/")
    return scheme in _SCHEMES and (server.count("@") > 1 or "@" in database)


def _pinned(server_version: int, answer_seconds: float | None, options: str) -> dict[str, str]:
    """What the session sets first; `options` of the DSN may say how long it waits."""
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


def is_read_only(connection: Connection) -> bool:
    """Whether transactions of this session cannot write, unless they ask to."""
    ((answer,),) = connection.execute("select pg_catalog.current_setting('transaction_read_only')::bool")
    return bool(answer)


def setting_statement(settings: Mapping[str, str]) -> psycopg.sql.Composed:
    """One statement that gives the session all of them; literals, because a walsender takes no parameters."""
    calls = [
        psycopg.sql.SQL("pg_catalog.set_config({}, {}, false)").format(name, value)
        for name, value in settings.items()
    ]
    return psycopg.sql.SQL("select {}").format(psycopg.sql.SQL(", ").join(calls))


@contextlib.contextmanager
def translated_errors(what: str, *, grant: str | None = None) -> Iterator[None]:
    """Raise PostgreSQL's errors as ours, `what` being the attempt that failed (`cannot …`).

    `grant` is the hint where the role lacks a privilege. Errors that have no class of our own pass unchanged.

    Raises:
        ServerUnavailable, MissingPrivilege, SlotActive, SlotMissing: by SQLSTATE.
    """
    try:
        yield
    except psycopg.Error as error:
        if (ours := _translate(what, error, grant)) is None:
            raise
        raise ours from error


def _translate(what: str, error: psycopg.Error, grant: str | None) -> CdcReplayError | None:
    # The server's own words only: a libpq connection failure may repeat parts of the DSN, never the password.
    said = error.diag.message_primary or str(error).strip()
    match error:
        case pg.InsufficientPrivilege() | pg.InvalidAuthorizationSpecification() | pg.InvalidPassword():
            hint = grant if isinstance(error, pg.InsufficientPrivilege) else None
            return MissingPrivilege(f"{what}: {said}", detail=error.diag.message_detail, hint=hint)
        case pg.ObjectInUse() if "slot" in said:
            return SlotActive(
                f"{what}: {said}",
                hint="Stop the other process that reads this slot, then run the command again.",
            )
        case pg.UndefinedObject() if "replication slot" in said:
            return SlotMissing(f"{what}: {said}", hint="Run `cdc-replay setup` for the publisher.")
        case pg.AdminShutdown() | pg.CrashShutdown() | pg.CannotConnectNow() | pg.TooManyConnections():
            return ServerUnavailable(f"{what}: {said}", hint="Run the command again once the server answers.")
        case psycopg.OperationalError() if error.sqlstate is None:
            return ServerUnavailable(
                f"{what}: {said}",
                hint="Check that the server runs, and the host, port and database of the DSN.",
            )
        case _:
            return None
