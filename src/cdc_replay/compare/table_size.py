"""The size of a table on disk: what a server reads to compare it once."""

from __future__ import annotations

from typing import Final

from cdc_replay.model.publication import Table
from cdc_replay.postgres.connection import Connection, translated_errors

_SIZE: Final = """
    select coalesce(pg_catalog.sum(pg_catalog.pg_table_size(oid)), 0)::bigint
    from (
        select %(table)s::oid as oid
        union
        select relid::oid from pg_catalog.pg_partition_tree(%(table)s::oid::regclass)
    ) as tables
"""
"""0 for a table that was dropped since the snapshot."""


def read_table_size(connection: Connection, table: Table) -> int:
    """Bytes of the table, or of all its partitions, with TOAST and without indexes.

    Raises:
        ServerUnavailable: if the server is lost.
    """
    with translated_errors(f'cannot read the size of table "{table.name}"'):
        ((size,),) = connection.execute(_SIZE, {"table": table.id})
    return int(size)
