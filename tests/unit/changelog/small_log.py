"""A change log of a few well-formed messages, and tools to damage it.

log = SmallLog.create(tmp_path)
log.pull(20, transaction(110), transaction(120))     # a commit that ends at 120
log.verify()
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.metadata_tables import CatalogRow
from cdc_replay.changelog.prepared_transactions import PreparedKey
from cdc_replay.changelog.segment import LOG_SCHEMA, Segment, read_row_group
from cdc_replay.changelog.verify import VerifiedLog, verify_log
from cdc_replay.model.database import Database
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import (
    QualifiedName,
    Relation,
    RelationColumn,
    RelationId,
    ReplicaIdentity,
)

START = 100
EVERYTHING = Window(Lsn(START), Lsn(2**62))
TABLE = Relation(
    RelationId(5),
    -9,
    QualifiedName("s", "t"),
    ReplicaIdentity.DEFAULT,
    (RelationColumn("id", 23, -1, is_key=True), RelationColumn("a", 25, -1, is_key=False)),
)
TRUNCATE = b"T" + struct.pack(">iBI", 1, 0, TABLE.id)
LOGICAL = b"M" + struct.pack(">BQ", 1, 1) + b"prefix\0" + struct.pack(">I", 3) + b"abc"


def insert(key: int) -> bytes:
    text = str(key).encode()
    return b"I" + struct.pack(">IcHci", TABLE.id, b"N", 2, b"t", len(text)) + text + b"n"


def message_rows(commit_lsn: int, messages: Sequence[tuple[int, bytes]], **changed: Any) -> pa.RecordBatch:
    """A transaction of messages, each with its seq."""
    rows = []
    for seq, message in messages:
        kind = chr(message[0])
        relation_id, version = (TABLE.id, TABLE.version) if kind in "IUD" else (None, None)
        rows.append({
            "commit_lsn": commit_lsn, "commit_time": commit_lsn, "xid": 1, "origin": None, "seq": seq,
            "lsn": commit_lsn - 5, "kind": kind, "relation_id": relation_id, "relation_version": version,
            "message": message,
        } | changed)  # fmt: skip
    return pa.RecordBatch.from_pylist(rows, schema=LOG_SCHEMA)


def transaction(commit_lsn: int, messages: int = 2) -> pa.RecordBatch:
    return message_rows(commit_lsn, [(seq, insert(commit_lsn + seq)) for seq in range(messages)])


@dataclass
class SmallLog:
    """A log that starts at `START`."""

    uri: str
    log: ChangeLog

    @classmethod
    def create(cls, folder: Path, catalog: str = "{}") -> SmallLog:
        uri = str(folder / "log")
        log = ChangeLog.create(
            uri, LogHeader("7000000000000000001", 1, "slot", Lsn(START), Database(5, "shop"))
        )
        log.add_relations({TABLE.version: TABLE})
        log.add_catalogs([CatalogRow(Lsn(0), Lsn(90), catalog)])
        return cls(uri, log)

    def pull(self, end_lsn: int, *batches: pa.RecordBatch) -> tuple[Segment, ...]:
        segments = self.log.write(batches)
        self.log.commit(segments, Lsn(end_lsn))
        return segments

    def pulls(self, count: int, messages: int = 2) -> None:
        """That many pulls of one transaction each."""
        first = self.log.end_lsn.value + 10
        for end_lsn in range(first, first + 10 * count, 10):
            self.pull(end_lsn, transaction(end_lsn, messages))

    def prepare(self, end_lsn: int) -> Path:
        """Store a prepared transaction without outcome; its file."""
        key = PreparedKey(1, Lsn(end_lsn))
        self.log.prepared.store(key, [transaction(end_lsn)])
        return Path(self.uri, "prepared", key.file_name)

    def reopened(self) -> ChangeLog:
        return ChangeLog.open(self.uri)

    def verify(self) -> VerifiedLog:
        return verify_log(self.uri)

    def rows(self, window: Window = EVERYTHING) -> list[dict[str, Any]]:
        """The rows of the log as it is now, in read order."""
        groups = self.reopened().segments(window)
        rows = [row for group in groups for row in read_row_group(group).to_pylist()]
        return [row for row in rows if Lsn(row["commit_lsn"]) in window]

    def data_files(self) -> list[Path]:
        """In the order of their pulls."""
        return sorted(Path(self.uri, "changes").glob("*.parquet"), key=lambda file: file.name)

    def commit_file(self, version: int, table: str = "changes") -> Path:
        return Path(self.uri, table, "_delta_log", f"{version:020}.json")
