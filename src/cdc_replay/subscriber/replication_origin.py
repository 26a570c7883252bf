"""The replication origin under which copied and replayed rows are committed (R8.18).

A native worker commits under its own origin. If the subscriber's tables are published further, a subscription
with `origin = none` skips such rows, so that two servers that publish to each other do not exchange every row
forever (R8.19); `origin = any` gets all rows. So every transaction of ours that changes rows runs under an
origin:

    session   pg_replication_origin_create, …_session_setup     one session each; another one is refused
    begin     pg_replication_origin_xact_setup                  the commit record carries the position
      …rows…                                                    their WAL records carry the origin
    commit
    session   pg_replication_origin_session_reset, …_drop

A server has `max_active_replication_origins` of them, 10 by default, and native subscriptions need theirs. So
an origin exists only while a window is merged. Snapshot tasks, several of which write at a time, have one
each, with the session's process ID in its name. Origins show only that a row was replicated, not from where;
progress is stored per table (`subscription_tables`). After a crash the server releases the origin with the
session; the next window reuses it, the next snapshot and `teardown` drop it.

The functions require superuser unless EXECUTE is granted. Without it rows are applied without an origin, with
one warning per process that names the grants; this matters only if the rows are published further. If the
subscriber's WAL cannot be decoded (`wal_level` below logical), no origin is created.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

from psycopg import errors as pg

from cdc_replay.errors import SubscriberLocked
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import Connection

logger = logging.getLogger(__name__)

_IS_DECODED: Final = """
    select coalesce(current_setting('effective_wal_level', true), current_setting('wal_level')) = 'logical'
"""
_CREATE: Final = """
    select pg_replication_origin_create(%(name)s) where pg_replication_origin_oid(%(name)s) is null
"""
_DROP: Final = """
    select pg_replication_origin_drop(%(name)s) where pg_replication_origin_oid(%(name)s) is not null
"""
# No subscription has a colon in its name.
_SUBSCRIPTION_ORIGINS: Final = """
    select roname::text from pg_replication_origin
    where roname = %(name)s or starts_with(roname, %(name)s || ':') order by roname
"""
FUNCTIONS: Final = (
    "pg_replication_origin_oid(text)",
    "pg_replication_origin_create(text)",
    "pg_replication_origin_drop(text)",
    "pg_replication_origin_session_setup(text)",
    "pg_replication_origin_session_reset()",
    "pg_replication_origin_xact_setup(pg_lsn, timestamptz)",
)
"""Functions that a role without superuser needs EXECUTE on."""

_warned: set[str] = set()


def origin_name(connection: Connection, subscription: str) -> str:
    """The origin's name; it contains the database's oid, because origins belong to the cluster."""
    ((oid,),) = connection.execute(
        "select oid::text from pg_database where datname = current_database()"
    ).fetchall()
    return f"cdc_replay_{oid}_{subscription}"


@contextlib.contextmanager
def replication_origin(
    connection: Connection, subscription: str, upto: Lsn, *, per_session: bool = False
) -> Iterator[None]:
    """Run one transaction under the subscription's origin; its commit record carries `upto`.

    The connection must not be in a transaction. With `per_session` the origin belongs to this session;
    otherwise only one session of the subscription can use it.

    Raises:
        SubscriberLocked: if another session uses the origin, such as one of a killed process.
        psycopg.Error: as from the statements inside, and from COMMIT.
    """
    name = _set_up(connection, subscription, per_session=per_session)
    try:
        with connection.transaction():
            if name is not None:
                # A native worker sets the publisher's commit time; here many transactions share one commit.
                connection.execute(
                    "select pg_replication_origin_xact_setup(%s, clock_timestamp())", (str(upto),)
                )
            yield
    finally:
        if name is not None and not connection.closed:
            # After an error here, a leftover origin is found by its name.
            with contextlib.suppress(pg.Error):
                connection.execute("select pg_replication_origin_session_reset()")
                connection.execute(_DROP, {"name": name})


def drop_origins(connection: Connection, subscription: str) -> None:
    """Drop the subscription's origins, outside of a transaction that changes rows.

    If the role may not, they stay, with a warning.
    """
    name = origin_name(connection, subscription)
    for (origin,) in connection.execute(_SUBSCRIPTION_ORIGINS, {"name": name}).fetchall():
        try:
            with connection.transaction():
                connection.execute(_DROP, {"name": origin})
        except (pg.InsufficientPrivilege, pg.ObjectInUse) as error:
            logger.warning(
                'subscription %s: cannot drop replication origin "%s": %s',
                *(subscription, origin, _server_message(error)),
            )


def _set_up(connection: Connection, subscription: str, *, per_session: bool) -> str | None:
    """Set up the session's origin; its name, or None if none is needed or possible."""
    if not _is_decoded(connection):
        return None
    name = origin_name(connection, subscription)
    if per_session:
        name = f"{name}:{connection.info.backend_pid}"
    try:
        with connection.transaction():
            connection.execute(_CREATE, {"name": name})
        connection.execute("select pg_replication_origin_session_setup(%s)", (name,))
    except pg.ObjectInUse as error:
        raise SubscriberLocked(
            f'replication origin "{name}" of subscription "{subscription}" is in use:'
            f" {_server_message(error)}",
            hint="It is released when the session that uses it ends; then run the command again.",
            rule="R8.18",
        ) from error
    except (pg.InsufficientPrivilege, pg.ConfigurationLimitExceeded) as error:
        _warn(subscription, error)
        return None
    return name


def _is_decoded(connection: Connection) -> bool:
    ((is_decoded,),) = connection.execute(_IS_DECODED).fetchall()
    return bool(is_decoded)


def _warn(subscription: str, error: pg.Error) -> None:
    if subscription in _warned:
        return
    _warned.add(subscription)
    remedy = "raise max_active_replication_origins (before version 18: max_replication_slots)"
    if isinstance(error, pg.InsufficientPrivilege):
        remedy = f"grant the role EXECUTE on {', '.join(FUNCTIONS)}"
    logger.warning(
        "subscription %s: rows are applied without a replication origin: %s. Subscriptions to this subscriber"
        " with origin = none receive them as local changes; %s (R8.18)",
        subscription,
        _server_message(error),
        remedy,
    )


def _server_message(error: pg.Error) -> str:
    return error.diag.message_primary or str(error).strip()
