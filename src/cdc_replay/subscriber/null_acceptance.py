"""Up to which commit replay may store NULL for unchanged TOAST values of rows that enter a table (R4.6)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from psycopg import sql

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection

_NULL_ACCEPTED: Final = """
    select namespace.nspname, class.relname,
        greatest(subscription.null_accepted_at, known.null_accepted_at)::text
    from cdc_replay.subscription_table as known
    join cdc_replay.subscription on name = known.subscription
    join pg_catalog.pg_class as class on class.oid = known.relation
    join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
    where name = %s and coalesce(subscription.null_accepted_at, known.null_accepted_at) is not null
"""


_ACCEPT_NULL: Final = """
    update cdc_replay.subscription_table set null_accepted_at = %s where subscription = %s
        and relation = pg_catalog.to_regclass(pg_catalog.format('%%I.%%I', %s::text, %s::text))
"""


def accept_null(
    connection: Connection, subscription: str, upto: Lsn, tables: Iterable[QualifiedName] = ()
) -> None:
    """Let replay store NULL for unchanged TOAST values of rows that enter up to a commit (R4.6).

    Without `tables`, for all tables of the subscription.
    """
    names = list(tables)
    if not names:
        connection.execute(
            "update cdc_replay.subscription set null_accepted_at = %s where name = %s",
            (str(upto), subscription),
        )
    for name in names:
        connection.execute(_ACCEPT_NULL, (str(upto), subscription, name.schema, name.name))


def read_null_acceptance(connection: Connection, subscription: str) -> dict[QualifiedName, Lsn]:
    """The commit LSN up to which NULL is accepted, by table."""
    rows = connection.execute(_NULL_ACCEPTED, (subscription,))
    return {QualifiedName(schema, name): Lsn.parse(upto) for schema, name, upto in rows}


def clear_null_acceptance(connection: Connection, subscription: str, applied_lsn: Lsn) -> None:
    """Delete what was accepted up to the applied LSN."""
    for table, column in (("subscription", "name"), ("subscription_table", "subscription")):
        connection.execute(
            sql.SQL(
                "update cdc_replay.{} set null_accepted_at = null where {} = %s and null_accepted_at <= %s"
            ).format(sql.Identifier(table), sql.Identifier(column)),
            (subscription, str(applied_lsn)),
        )
