"""What replay must know beside the messages: relation shapes and the publisher's catalog over time.

Both are small Delta tables of their own. Their rows are written *before* the commit that makes the messages
visible that need them, and they are idempotent: a relation's version is a hash of its content, what a command
changed has the position of its message, and of two catalogs for the same position the one that was read later
counts. So a crash between the two commits costs a row that the next pull writes again or supersedes, and a
reader that sees a message always finds its shape.
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
"""One row per reading of the publisher's catalog that said something new, and one per message of its event
triggers."""


@dataclass(frozen=True, slots=True)
class CatalogRow:
    """What is known of the publisher's definitions from a position on (R9.10).

    Without `owner` the text is a whole catalog, in force from `from_lsn` on; `read_lsn` is the publisher's
    WAL position when it was read. With `owner` it is what one command has changed, in force from its message
    at `from_lsn` on for the transaction whose commit ends at `owner`, and from there on for all others;
    `read_lsn` is that position too.
    """

    from_lsn: Lsn
    read_lsn: Lsn
    text: str
    owner: Lsn | None = None

    @property
    def known_from(self) -> Lsn:
        """Where it begins to be in force for all transactions."""
        return self.from_lsn if self.owner is None else self.owner


_VERIFY: Final = "`cdc-replay verify-log` for the publisher tells what else is missing. "


class KnownRelations(dict[int, Relation]):
    """The relations of the log at `uri` by version; where one that is asked for is missing, it is damaged."""

    def __init__(self, uri: str, relations: Mapping[int, Relation]) -> None:
        super().__init__(relations)
        self._uri = uri

    def __missing__(self, version: int) -> Relation:
        # The last commits of a table can be missing without a gap; only what builds on them tells.
        raise ChangeLogDamaged(
            f'table "{self._uri}/relations" of the change log lacks what was written to it',
            detail=f"Changes of the log have the relation version {version}, which is not there.",
            hint=_VERIFY + RESTORE,
        )


def check_first_catalog(uri: str, first: Lsn | None, start: Lsn) -> None:
    """The first catalog of the log at `uri`, in force from `first` on, is there from its `start` on.

    Raises:
        ChangeLogDamaged: if it is not, or there is none.
    """
    if first is None or first > start:
        found = "There is none." if first is None else f"The first is in force from {first} on."
        raise ChangeLogDamaged(
            f'table "{uri}/catalogs" of the change log lacks the catalog with which the log begins',
            detail=found,
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
                {"name": one.name, "type_oid": one.type_oid, "typmod": one.typmod, "is_key": one.is_key}
                for one in relation.columns
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
            "from_lsn": one.from_lsn.value,
            "read_lsn": one.read_lsn.value,
            "catalog": one.text,
            "owner": None if one.owner is None else one.owner.value,
        }
        for one in versions
    ]


def parse_catalogs(rows: Iterable[Mapping[str, Any]]) -> tuple[CatalogRow, ...]:
    """The catalogs of such rows in the order in which all transactions see them.

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
    return tuple(sorted(versions, key=lambda one: (one.known_from, one.owner is None, one.from_lsn)))


def append_rows(table: DurableTable, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a side table, durably; nothing if there are none."""
    if rows:
        table.commit([write_rows(table, schema, rows)])


def write_rows(table: DurableTable, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> Segment:
    """Write rows of a side table to a durable file that nothing names yet."""
    name = f"rows-{uuid.uuid4().hex}.parquet"
    sink = io.BytesIO()
    content = pa.Table.from_pylist(list(rows), schema=schema)
    pq.write_table(content, sink, compression="zstd", write_page_checksum=True)
    replace(table.location / name, sink.getvalue())
    return Segment(name, len(sink.getvalue()), len(rows), 0, 0)


def read_rows(table: DurableTable, schema: pa.Schema) -> list[dict[str, Any]]:
    """All rows of a side table of that schema.

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
                f'file "{file.uri}" of the change log does not hold what was written to it',
                detail=f"It has {content.num_rows} rows of {content.schema.names}, expected were"
                f" {segment.rows} of {schema.names}.",
                hint=RESTORE,
            )
        rows.extend(content.to_pylist())
    return rows
