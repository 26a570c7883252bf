"""The definition with which each table was last copied or reconciled, as of which LSN.

A changed row filter sends no rows (R9.12): rows copied under the old one stay, and rows that only the new one
admits are missing. To detect this, the filters and columns in force are compared with those recorded here, in
`cdc_replay.brought`.

The definition is recorded before an initial copy, when the table has no rows yet, and after a copy that
replaces rows or with a reconciliation. After a crash the record can be older than the rows, never younger: a
difference may be reported where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.state_schema import is_installed

_RECORD: Final = """
    insert into cdc_replay.brought (subscription, schema_name, table_name, lsn, filters, columns, relation)
    select subscription, %(schema)s, %(table)s, %(lsn)s, %(filters)s, %(columns)s, relation
    from cdc_replay.subscription_table
    where subscription = %(subscription)s
        and relation::oid = pg_catalog.to_regclass(
            pg_catalog.format('%%I.%%I', %(schema)s::text, %(table)s::text))::oid
    on conflict (subscription, relation)
    do update set schema_name = excluded.schema_name, table_name = excluded.table_name, lsn = excluded.lsn,
        filters = excluded.filters, columns = excluded.columns
"""

_READ: Final = """
    select namespace.nspname, class.relname, brought.lsn::text, brought.filters, brought.columns
    from cdc_replay.brought
    join pg_catalog.pg_class as class on class.oid = brought.relation
    join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
    where brought.subscription = %s
    order by namespace.nspname, class.relname
"""


@dataclass(frozen=True, slots=True)
class Definition:
    """What decides which rows and columns of a table a subscriber has.

    `filters` are SQL row filters combined with OR; None if every row passes.
    """

    filters: frozenset[str] | None
    columns: frozenset[str]


@dataclass(frozen=True, slots=True)
class CopyDefinition:
    """The definition with which a table was copied as of `lsn`."""

    lsn: Lsn
    definition: Definition


def record_copy_definition(
    connection: Connection, subscription: str, name: QualifiedName, lsn: Lsn, definition: Definition
) -> None:
    """Store the definition for the subscription's table that has this name now."""
    values = {
        "subscription": subscription,
        "schema": name.schema,
        "table": name.name,
        "lsn": str(lsn),
        "filters": None if definition.filters is None else sorted(definition.filters),
        "columns": sorted(definition.columns),
    }
    connection.execute(_RECORD, values)


def read_copy_definitions(connection: Connection, subscription: str) -> dict[QualifiedName, CopyDefinition]:
    """The recorded definitions by table; a table that was never copied may be missing."""
    if not is_installed(connection):
        return {}
    return {
        QualifiedName(schema, table): CopyDefinition(
            Lsn.parse(lsn),
            Definition(None if filters is None else frozenset(filters), frozenset(columns)),
        )
        for schema, table, lsn, filters, columns in connection.execute(_READ, (subscription,))
    }
