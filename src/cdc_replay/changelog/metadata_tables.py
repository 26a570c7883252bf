"""The metadata of the change log: relation shapes, and the publisher's catalog over time.

Both are small Delta tables. Their rows are written *before* the commit that makes the messages visible that
need them, and writing them is idempotent: a relation's version is a hash of its content, a DDL change has the
position of its message, and of two catalogs for the same position the one that was read later counts. So a
crash between the two commits leaves a row that the next pull writes again or supersedes, and a reader that
sees a message always finds its shape.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from cdc_replay.changelog.delta.table import DurableTable
from cdc_replay.changelog.segment import RESTORE, Segment, segment_error
from cdc_replay.changelog.storage import replace
from cdc_replay.errors import ChangeLogDamaged
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import (
    QualifiedName,
    Relation,
    RelationColumn,
    RelationId,
    ReplicaIdentity,
)

_COLUMN: Final = pa.struct(
    [("name", pa.string()), ("type_oid", pa.int64()), ("typmod", pa.int32()), ("is_key", pa.bool_())]
)

RELATION_SCHEMA: Final = pa.schema(
    [
        ("relation_version", pa.int64()),
        ("relation_id", pa.int64()),
        ("schema", pa.string()),
        ("name", pa.string()),
        ("replica_identity", pa.string()),
        ("columns", pa.list_(_COLUMN)),
    ]
)
"""One row per shape that a relation has had."""

CATALOG_SCHEMA: Final = pa.schema(
    [("from_lsn", pa.int64()), ("read_lsn", pa.int64()), ("catalog", pa.string()), ("owner", pa.int64())]
)
"""One row per changed reading of the publisher's catalog, and one per message of its event triggers."""


@dataclass(frozen=True, slots=True)
class CatalogRow:
    """The publisher's definitions from a position on (R9.10).

    Without `owner`, `text` is a whole catalog, in force from `from_lsn` on; `read_lsn` is the publisher's WAL
    position when it was read. With `owner`, it is one DDL change: in force from its message at `from_lsn` for
    the transaction whose commit ends at `owner`, and from `owner` on for all others; `read_lsn` equals
    `from_lsn`.
    """

    from_lsn: Lsn
    read_lsn: Lsn
    text: str
    owner: Lsn | None = None

    @property
    def known_from(self) -> Lsn:
        """From where on it is in force for all transactions."""
        return self.from_lsn if self.owner is None else self.owner


_VERIFY: Final = "Run `cdc-replay verify-log` for the publisher to find out what else is missing. "


class KnownRelations(dict[int, Relation]):
    """The relations of the log at `uri` by version; a missing version means that the log is damaged."""

    def __init__(self, uri: str, relations: Mapping[int, Relation]) -> None:
        super().__init__(relations)
        self._uri = uri

    def __missing__(self, version: int) -> Relation:
        # If a table's last commits are missing, there is no gap: only references to their rows show it.
        raise ChangeLogDamaged(
            f'table "{self._uri}/relations" of the change log is missing rows that were committed to it',
            detail=f"Changes of the log refer to relation version {version}, which does not exist.",
            hint=_VERIFY + RESTORE,
        )


def check_first_catalog(uri: str, first: Lsn | None, start: Lsn) -> None:
    """Check that the first catalog of the log at `uri` is in force from the log's `start` on.

    Raises:
        ChangeLogDamaged: if it is not, or there is none.
    """
    if first is None or first > start:
        detail = "There is none." if first is None else f"The first is in force from {first} on."
        raise ChangeLogDamaged(
            f'table "{uri}/catalogs" of the change log is missing the catalog of the log\'s start',
            detail=detail,
            hint=_VERIFY + RESTORE,
            rule="R9.10",
        )


def relation_rows(relations: Iterable[Relation]) -> list[dict[str, Any]]:
    """Rows of `RELATION_SCHEMA`."""
    return [
        {
            "relation_version": relation.version,
            "relation_id": relation.id,
            "schema": relation.name.schema,
            "name": relation.name.name,
            "replica_identity": relation.replica_identity.value,
            "columns": [
                {
                    "name": column.name,
                    "type_oid": column.type_oid,
                    "typmod": column.typmod,
                    "is_key": column.is_key,
                }
                for column in relation.columns
            ],
        }
        for relation in relations
    ]


def parse_relations(rows: Iterable[Mapping[str, Any]]) -> dict[int, Relation]:
    """The relations of such rows by version."""
    return {
        row["relation_version"]: Relation(
            RelationId(row["relation_id"]),
            row["relation_version"],
            QualifiedName(row["schema"], row["name"]),
            ReplicaIdentity(row["replica_identity"]),
            tuple(RelationColumn(**column) for column in row["columns"]),
        )
        for row in rows
    }


def catalog_rows(versions: Iterable[CatalogRow]) -> list[dict[str, Any]]:
    """Rows of `CATALOG_SCHEMA`."""
    return [
        {
            "from_lsn": version.from_lsn.value,
            "read_lsn": version.read_lsn.value,
            "catalog": version.text,
            "owner": None if version.owner is None else version.owner.value,
        }
        for version in versions
    ]


def parse_catalogs(rows: Iterable[Mapping[str, Any]]) -> tuple[CatalogRow, ...]:
    """The catalogs in the order in which they take effect for all transactions.

    One per owner and `from_lsn`: the one that was read last.
    """
    last = {(row["owner"], row["from_lsn"]): row for row in sorted(rows, key=lambda row: row["read_lsn"])}
    versions = (
        CatalogRow(
            Lsn(row["from_lsn"]),
            Lsn(row["read_lsn"]),
            row["catalog"],
            None if row["owner"] is None else Lsn(row["owner"]),
        )
        for row in last.values()
    )
    return tuple(sorted(versions, key=lambda row: (row.known_from, row.owner is None, row.from_lsn)))


def append_rows(table: DurableTable, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a metadata table, durably."""
    if rows:
        table.commit([write_rows(table, schema, rows)])


def write_rows(table: DurableTable, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> Segment:
    """Write rows of a metadata table to a durable file that no commit names yet."""
    name = f"rows-{uuid.uuid4().hex}.parquet"
    sink = io.BytesIO()
    content = pa.Table.from_pylist(list(rows), schema=schema)
    pq.write_table(content, sink, compression="zstd", write_page_checksum=True)
    replace(table.location / name, sink.getvalue())
    return Segment(name, len(sink.getvalue()), len(rows), 0, 0)


def read_rows(table: DurableTable, schema: pa.Schema) -> list[dict[str, Any]]:
    """All rows of a metadata table.

    Raises:
        ChangeLogDamaged: if a file is missing or does not match its checksums.
        ChangeLogUnavailable: if the store does not answer.
    """
    rows: list[dict[str, Any]] = []
    for segment in table.segments():
        file = table.location / segment.name
        try:
            with file.filesystem.open_input_file(file.path) as source:
                content = pq.ParquetFile(source, page_checksum_verification=True).read(use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise segment_error(file, None, error) from error
        if content.num_rows != segment.rows or not content.schema.equals(schema):
            raise ChangeLogDamaged(
                f'file "{file.uri}" of the change log differs from what was written',
                detail=f"It has {content.num_rows} rows of {content.schema.names}, expected"
                f" {segment.rows} of {schema.names}.",
                hint=RESTORE,
            )
        rows.extend(content.to_pylist())
    return rows
