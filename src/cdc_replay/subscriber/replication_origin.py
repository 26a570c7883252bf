"""The replication origin under which copied and replayed rows are committed (R8.18).

A native worker commits under an origin of its own. Whoever publishes the subscriber's tables onward can
then leave out what came in by replication: a subscription with `origin = none` does not get it, which keeps
two servers that publish to each other from sending every row round and round (R8.19). With `origin = any` it
gets everything. So every transaction of ours that changes rows runs under an origin, too:

    session   pg_replication_origin_create, …_session_setup     one session each; another one is refused
    begin     pg_replication_origin_xact_setup                  the commit record carries the position
      …rows…                                                    their WAL records carry the origin
    commit
    session   pg_replication_origin_session_reset, …_drop

A server can have `max_active_replication_origins` of them, 10 by default, and native subscriptions need
theirs: so an origin is there while a window is merged, and no longer. Readers of a snapshot, of which several
write at a time, have one each, with the number of their session in its name. Whoever decodes the rows later
finds in them that they have an origin, which is what `origin = none` asks, if not which one. Progress is not
read from it either: `subscriber.state` has that per table. After a crash of the process the session ends, and
with it the hold on the origin; the next window takes it over, the next snapshot and `teardown` remove it.

The functions are a superuser's unless EXECUTE on them is granted. A role without it applies rows without an
origin, with a warning that names the grants, once per process: nothing is lost by that unless somebody
publishes them onward. Where the subscriber's WAL cannot be decoded (`wal_level` below logical) nobody can,
and no origin is made.
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
_OF_SUBSCRIPTION: Final = """
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
"""What a role needs EXECUTE on that is not a superuser."""

_warned: set[str] = set()


def origin_name(connection: Connection, subscription: str) -> str:
    """The origin's name; origins belong to the whole cluster, so it has the database's oid."""
    ((oid,),) = connection.execute(
        "select oid::text from pg_database where datname = current_database()"
    ).fetchall()
    return f"cdc_replay_{oid}_{subscription}"


@contextlib.contextmanager
def replication_origin(
    connection: Connection, subscription: str, upto: Lsn, *, per_session: bool = False
) -> Iterator[None]:
    """One transaction whose rows carry the subscription's origin, and whose commit carries `upto`.

    The connection is in no transaction. With `per_session` the origin is this session's own, else one
    session at most is here for the subscription.

    Raises:
        SubscriberLocked: if another session holds the origin, such as one whose process was just killed.
        psycopg.Error: as from the statements inside, and from COMMIT.
    """
    name = _set_up(connection, subscription, per_session=per_session)
    try:
        with connection.transaction():
            if name is not None:
                # A native worker gives the publisher's commit time, of one transaction; here are many.
                connection.execute(
                    "select pg_replication_origin_xact_setup(%s, clock_timestamp())", (str(upto),)
                )
            yield
    finally:
        if name is not None and not connection.closed:
            # What stays then is found by its name.
            with contextlib.suppress(pg.Error):
                connection.execute("select pg_replication_origin_session_reset()")
                connection.execute(_DROP, {"name": name})


def drop_origins(connection: Connection, subscription: str) -> None:
    """Remove what the subscription has of origins; outside of a transaction that changes rows.

    A role that may not do so leaves them, with a warning.
    """
    name = origin_name(connection, subscription)
    for (each,) in connection.execute(_OF_SUBSCRIPTION, {"name": name}).fetchall():
        try:
            with connection.transaction():
                connection.execute(_DROP, {"name": each})
        except (pg.InsufficientPrivilege, pg.ObjectInUse) as error:
            logger.warning(
                'subscription %s: replication origin "%s" stays: %s', subscription, each, _said(error)
            )


def _set_up(connection: Connection, subscription: str, *, per_session: bool) -> str | None:
    """Make the session's commits those of an origin; its name, None where none is needed or possible."""
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
            f'replication origin "{name}" of subscription "{subscription}" is in use: {_said(error)}',
            hint="It is released when the session ends that has it. Run it again then.",
            rule="R8.18",
        ) from error
    except (pg.InsufficientPrivilege, pg.ConfigurationLimitExceeded) as error:
        _warn(subscription, error)
        return None
    return name


def _is_decoded(connection: Connection) -> bool:
    ((found,),) = connection.execute(_IS_DECODED).fetchall()
    return bool(found)


def _warn(subscription: str, error: pg.Error) -> None:
    if subscription in _warned:
        return
    _warned.add(subscription)
    remedy = "raise max_active_replication_origins (before version 18: max_replication_slots)"
    if isinstance(error, pg.InsufficientPrivilege):
        remedy = f"grant the role EXECUTE on {', '.join(FUNCTIONS)}"
    logger.warning(
        "subscription %s: rows are applied without a replication origin: %s. Who subscribes to this"
        " subscriber with origin = none gets them as if they had been written here; %s (R8.18)",
        subscription,
        _said(error),
        remedy,
    )


def _said(error: pg.Error) -> str:
    return error.diag.message_primary or str(error).strip()
