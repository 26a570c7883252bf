"""A native subscription on a throw-away server: created, followed, stopped where it is, and resumed.

What native has applied when it is stopped (R8.17, R1.29):

    confirmed  the slot's confirmed position, read before: everything committed up to it is applied
    progress   the end of the last applied transaction, read after: nothing committed after it is applied
    stopped at the later one of both

The publisher's connection string reaches the server in one statement, through its Unix socket, and is kept
in `pg_subscription` in its private folder. No statement is logged there.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_replay.certify.publisher_slots import SYNC_WORKERS
from cdc_replay.errors import InvalidConfiguration, NativeSubscriptionFailed
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.subscription import OriginPolicy, Subscription
from cdc_replay.postgres.connection import Connection, translated_errors

NAME: Final = "cdc_replay_certify"
"""Of the subscription, and of a publication on the throw-away server that lists its tables."""

SERVER_SETTINGS: Final[Mapping[str, str]] = {
    "max_worker_processes": "12",
    "max_logical_replication_workers": str(2 + SYNC_WORKERS),
    "max_sync_workers_per_subscription": str(SYNC_WORKERS),
    "wal_retrieve_retry_interval": "500ms",
    # A worker reports what it has flushed; asynchronous commits would delay that.
    "synchronous_commit": "on",
}

STANDSTILL_SECONDS: Final = 120.0
"""Native gives up if it makes no progress for so long."""

ORIGIN_SINCE: Final = 160000

MOST_COPY_ERRORS: Final = 30
"""Failed copies after which native gives up, unless a table was copied in between."""

_ERROR_LINE: Final = re.compile(r"(?:ERROR|PANIC):(.*)")
"""FATAL is also how each connection ends that somebody ends."""

_POLL_SECONDS: Final = 0.1
_LOGGED_BYTES: Final = 20_000

_PARAMETERS: Final = frozenset(
    {"host", "hostaddr", "port", "dbname", "user", "options", "connect_timeout", "target_session_attrs"}
    | {"keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout"}
    | {"sslmode", "sslcert", "sslkey", "sslpassword", "sslrootcert", "sslcrl", "sslcrldir", "sslsni"}
    | {"ssl_min_protocol_version", "ssl_max_protocol_version", "channel_binding", "requirepeer"}
    | {"gssencmode", "krbsrvname", "gsslib"}
)
"""Connection parameters that libpq has in every version; service and password files are resolved."""

_PARAMETERS_SINCE: Final[Mapping[str, int]] = {
    "require_auth": 160000,
    "sslcertmode": 160000,
    "load_balance_hosts": 160000,
    "gssdelegation": 170000,
    "sslnegotiation": 170000,
    "min_protocol_version": 180000,
    "max_protocol_version": 180000,
}

_CONFIRMED: Final = """
    select confirmed_flush_lsn::text from pg_catalog.pg_replication_slots where slot_name = %s
"""

# Transactional, so that its commit is flushed: at the end of an open transaction's WAL, the flush position
# can lie inside a record that no walsender can send yet.
_PRESENT_POSITION: Final = "select pg_catalog.pg_logical_emit_message(true, 'cdc_replay_certify', '')::text"

_COPIED: Final = """
    select count(*) filter (where srsubstate = 'r'), count(*) from pg_catalog.pg_subscription_rel
"""

_COPY_ERRORS: Final = "select sum(sync_error_count)::int from pg_catalog.pg_stat_subscription_stats"

# Of initdb; ours are newer.
_LISTED_CATALOGS: Final = """
    select srrelid::pg_catalog.regclass::text from pg_catalog.pg_subscription_rel where srrelid < 16384
"""

_WORKERS: Final = "select count(*) from pg_catalog.pg_stat_subscription where pid is not null"

_PROGRESS: Final = """
    select pg_catalog.pg_replication_origin_progress('pg_' || oid, true)::text
    from pg_catalog.pg_subscription where subname = %s
"""


@dataclass(frozen=True, slots=True)
class NativeSubscriber:
    """The throw-away server's subscription; `publisher` is a connection of ours, `slot` its slot there."""

    server: Connection
    publisher: Connection
    slot: str
    folder: Path = field(repr=False)
    """Of the throw-away server."""

    def await_copies(self, between: Callable[[], bool]) -> None:
        """Wait until all tables are copied and followed; `between` is called meanwhile, until it is False.

        Raises:
            NativeSubscriptionFailed: if it makes no progress.
        """
        errors_at: dict[int, int] = {}  # by number of copied tables: the errors when it was reached

        def copied() -> tuple[bool, object]:
            goes_on = between()
            ((ready, total),) = self.server.execute(_COPIED).fetchall()
            ((errors,),) = self.server.execute(_COPY_ERRORS).fetchall()
            # A copy that fails again and again lets the table grow, too.
            if (errors or 0) - errors_at.setdefault(ready, errors or 0) > MOST_COPY_ERRORS:
                raise self._failure("cannot copy its tables")
            return ready == total or not goes_on, (ready, self._progress(), self.size())

        self._await(copied, "did not copy its tables")

    def size(self) -> int:
        """Bytes of its database: grows while a large table is copied."""
        return int(self.server.execute("select pg_catalog.pg_database_size('postgres')").fetchall()[0][0])

    def present_position(self) -> Lsn:
        """A position of the publisher that native will reach."""
        return Lsn.parse(self.publisher.execute(_PRESENT_POSITION).fetchall()[0][0])

    def confirmed(self) -> Lsn:
        """The position up to which everything is applied."""
        rows = self.publisher.execute(_CONFIRMED, (self.slot,)).fetchall()
        return Lsn.parse(rows[0][0]) if rows and rows[0][0] is not None else ZERO

    def await_position(self, lsn: Lsn) -> None:
        """Wait until everything committed up to `lsn` is applied.

        Raises:
            NativeSubscriptionFailed: if it makes no progress.
        """

        def reached() -> tuple[bool, object]:
            confirmed = self.confirmed()
            return confirmed >= lsn, (confirmed, self._progress())

        self._await(reached, f"did not reach {lsn}")

    def stop(self) -> Lsn:
        """Let it apply nothing more; the position of what it has applied."""
        confirmed = self.confirmed()
        self.server.execute(sql.SQL("alter subscription {} disable").format(sql.Identifier(NAME)))

        def ended() -> tuple[bool, object]:
            ((workers,),) = self.server.execute(_WORKERS).fetchall()
            return workers == 0, self._progress()

        self._await(ended, "did not stop")
        return max(confirmed, self._progress())

    def resume(self) -> None:
        """Let it apply again."""
        self.server.execute(sql.SQL("alter subscription {} enable").format(sql.Identifier(NAME)))

    def _progress(self) -> Lsn:
        rows = self.server.execute(_PROGRESS, (NAME,)).fetchall()
        return Lsn.parse(rows[0][0]) if rows and rows[0][0] is not None else ZERO

    def _await(self, poll: Callable[[], tuple[bool, object]], failure: str) -> None:
        """Poll until it is true; the deadline moves whenever the second value changes."""
        seen: object = None
        deadline = 0.0
        while True:
            done, state = poll()
            if done:
                return
            if state != seen:
                seen, deadline = state, time.monotonic() + STANDSTILL_SECONDS
            if time.monotonic() > deadline:
                raise self._failure(f"{failure}: no progress for {STANDSTILL_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _failure(self, failure: str) -> NativeSubscriptionFailed:
        return NativeSubscriptionFailed(
            f"the native subscription {failure}",
            detail=f"Its server says: {last_error(self.folder) or 'nothing'}",
            hint="A native subscription to these publications fails, too: correct what it says, then run the"
            " command again.",
        )


def last_error(folder: Path) -> str | None:
    """The last error in the log of the server in `folder`, without details, which have values of rows."""
    log = folder / "server" / "log"
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOGGED_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        errors = [match[1].strip() for line in lines if (match := _ERROR_LINE.search(line)) is not None]
        return errors[-1] if errors else None
    return None


@contextlib.contextmanager
def native_subscription(
    server: Connection, publisher: Connection, slot: str, subscription: Subscription, folder: Path
) -> Iterator[NativeSubscriber]:
    """CREATE SUBSCRIPTION to the same publications, with a copy of the rows; its tables must exist.

    At the end it is disabled, so that its workers release its slots.

    Raises:
        InvalidConfiguration: if a publisher of version 15 cannot filter by origin.
        NativeSubscriptionFailed: if PostgreSQL refuses the subscription, or the publisher lists catalogs.
    """
    _create(server, publisher, slot, subscription)
    native = NativeSubscriber(server, publisher, slot, folder)
    try:
        _check_no_catalogs(server)
        native.resume()
        yield native
    finally:
        # The server may be gone, or the statement cancelled: the slot's reader is ended then, too.
        with contextlib.suppress(psycopg.Error):
            server.execute(sql.SQL("alter subscription {} disable").format(sql.Identifier(NAME)))


def _create(server: Connection, publisher: Connection, slot: str, subscription: Subscription) -> None:
    statement = sql.SQL("create subscription {} connection {} publication {} with ({})").format(
        sql.Identifier(NAME),
        sql.Literal(
            connection_string(
                publisher, f"cdc_replay certify {subscription.name}", server.info.server_version
            )
        ),
        sql.SQL(", ").join(map(sql.Identifier, subscription.publications)),
        sql.SQL(", ").join(_options(server, slot, subscription)),
    )
    try:
        with translated_errors("cannot create a native subscription"):
            server.execute(statement)
    except psycopg.Error as error:
        # `from None`: the statement, which has the connection string, must not be in a traceback.
        raise NativeSubscriptionFailed(
            f"PostgreSQL refuses a native subscription to {', '.join(subscription.publications)}:"
            f" {error.diag.message_primary}",
            detail=error.diag.message_detail,
        ) from None


def _check_no_catalogs(server: Connection) -> None:
    """Refuse a publisher that lists tables of which PostgreSQL takes the names for those of its catalogs.

    A worker would write their rows into these, as a superuser, who can run programs.
    """
    if names := [name for (name,) in server.execute(_LISTED_CATALOGS).fetchall()]:
        raise NativeSubscriptionFailed(
            f"the publisher lists tables with the names of catalogs: {', '.join(names)}",
            hint="Remove them from the publication.",
        )


def _options(server: Connection, slot: str, subscription: Subscription) -> Sequence[sql.Composed]:
    # Enabled once the list of its tables is checked.
    options = {"slot_name": slot, "copy_data": "true", "streaming": "off", "enabled": "false"}
    if subscription.origin is not OriginPolicy.ANY:
        if server.info.server_version < ORIGIN_SINCE:
            raise InvalidConfiguration(
                f'subscription "{subscription.name}" has the option origin, which a native subscription of'
                " PostgreSQL 15 does not have",
                hint="It can be certified with a publisher of version 16 or later.",
                rule="R8.20",
            )
        options["origin"] = subscription.origin.value
    return [
        sql.SQL("{} = {}").format(sql.Identifier(name), sql.Literal(text)) for name, text in options.items()
    ]


def connection_string(connection: Connection, application_name: str, server_version: int) -> str:
    """What a server of this version needs to connect as `connection` has, with its password.

    Also if the parts came from a service file, a password file or the environment, which the server does not
    have. Its libpq may be older than ours, and refuses parameters that it does not know.
    """
    parts: dict[str, str] = {}
    for option in connection.pgconn.info:
        name = option.keyword.decode()
        is_known = name in _PARAMETERS or server_version >= _PARAMETERS_SINCE.get(name, server_version + 1)
        if is_known and option.val and option.val != option.compiled:
            parts[name] = option.val.decode()
    if connection.info.password:
        parts["password"] = connection.info.password
    return make_conninfo(**parts, application_name=application_name)
