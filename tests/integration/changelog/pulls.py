"""A publisher of a few transactions, and captures that perform the steps of a real one, in the same order.

The publisher discards what the slot has confirmed, up to `Publisher.position`. So everything up to there must
always be in the log: a power loss must not affect it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import pyarrow as pa

from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.metadata_tables import CatalogRow
from cdc_replay.changelog.prepared_transactions import PreparedKey
from cdc_replay.changelog.segment import LOG_SCHEMA, read_row_group
from cdc_replay.model.database import Database
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.relation import (
    QualifiedName,
    Relation,
    RelationColumn,
    RelationId,
    ReplicaIdentity,
)

HEADER: Final = LogHeader("7000000000000000001", 1, "slot", Lsn(100), Database(5, "shop"))
EVERYTHING: Final = Window(ZERO, Lsn(2**62))

Row: TypeAlias = tuple[int, int, bytes]
"""Commit LSN, ordinal and message."""


@dataclass(frozen=True)
class Pull:
    """What one pull receives: transactions by commit LSN, and where it ends.

    `shape` is the relation version of its messages. `prepares` is stored with this pull, and its content is
    released by the pull that `decides` it.
    """

    end: int
    transactions: Sequence[int] = ()
    shape: int = 1
    prepares: PreparedKey | None = None
    decides: PreparedKey | None = None


PREPARED: Final = PreparedKey(77, Lsn(115))

PULLS: Final = (
    Pull(110, (105, 110)),
    Pull(120, (118,), prepares=PREPARED),
    Pull(130),
    Pull(140, (135,), shape=2),
    Pull(150, (145, 150), shape=2, decides=PREPARED),
    Pull(160, (155,), shape=3),
)


def insert(value: bytes) -> bytes:
    """An Insert into relation 1 of one column."""
    return struct.pack(">cicH", b"I", 1, b"N", 1) + struct.pack(">ci", b"t", len(value)) + value


def messages(commit_lsn: int, shape: int, count: int = 2) -> pa.RecordBatch:
    rows = [
        {
            "commit_lsn": commit_lsn, "commit_time": commit_lsn, "xid": 1, "origin": None, "seq": seq,
            "lsn": commit_lsn - 2, "kind": "I", "relation_id": 1, "relation_version": shape,
            "message": insert(f"{commit_lsn} {seq}".encode()),
        }
        for seq in range(count)
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(rows, schema=LOG_SCHEMA)


def relation(version: int) -> Relation:
    columns = (RelationColumn("id", 23, -1, is_key=True),)
    return Relation(RelationId(1), version, QualifiedName("s", "t"), ReplicaIdentity.DEFAULT, columns)


def read_log_rows(log: ChangeLog, upto: int | None = None) -> list[Row]:
    """The rows of the log; every message's shape must be known."""
    window = EVERYTHING if upto is None else Window(ZERO, Lsn(upto))
    relations = log.relations()
    rows = [row for group in log.segments(window) for row in read_row_group(group).to_pylist()]
    assert {row["relation_version"] for row in rows} <= relations.keys()
    return [(row["commit_lsn"], row["seq"], row["message"]) for row in rows]


def expected_rows(upto: int) -> list[Row]:
    """The rows of a log that ends there."""
    batches = [batch for pull in PULLS if pull.end <= upto for batch in message_batches(pull)]
    return [(row["commit_lsn"], row["seq"], row["message"]) for batch in batches for row in batch.to_pylist()]


def message_batches(pull: Pull) -> list[pa.RecordBatch]:
    batches = [messages(lsn, pull.shape) for lsn in pull.transactions]
    if pull.decides is not None:
        batches[0] = messages(pull.transactions[0], pull.shape, 4)
    return batches


@dataclass
class Publisher:
    """`position`: where the slot is. `promised`: a log was created, and creation returned."""

    position: int = HEADER.start_lsn.value
    promised: bool = False
    ends: Sequence[int] = field(default=tuple(pull.end for pull in PULLS))

    def copy(self) -> Publisher:
        return Publisher(self.position, self.promised)

    def set_up(self, uri: str) -> None:
        if not ChangeLog.exists(uri):
            ChangeLog.create(uri, HEADER)
        assert ChangeLog.open(uri).header == HEADER
        self.promised = True

    def capture(self, uri: str, upto: int = PULLS[-1].end) -> None:
        """Pull until the log ends there."""
        log = ChangeLog.open(uri)
        log.remove_dead_pulls()
        self.position = max(self.position, log.end_lsn.value)
        for pull in PULLS:
            if log.end_lsn.value < pull.end <= upto:
                assert self.position <= log.end_lsn.value, "the slot has given up what the log lacks"
                _pull(log, pull)
                self.position = pull.end


def _pull(log: ChangeLog, pull: Pull) -> None:
    batches = message_batches(pull)
    if pull.prepares is not None:
        log.prepared.store(pull.prepares, [messages(pull.prepares.end_lsn.value, pull.shape, 4)])
    if pull.decides is not None:
        assert pull.decides in log.prepared.list_keys()
        (stored,) = log.prepared.content(pull.decides)
        assert stored.num_rows == batches[0].num_rows
    segments = log.write(batches)
    log.add_relations({pull.shape: relation(pull.shape)} if batches else {})
    if pull.end in {PULLS[0].end, PULLS[3].end}:
        log.add_catalogs([CatalogRow(log.end_lsn, Lsn(pull.end), f"catalog before {pull.end}")])
    log.commit(segments, Lsn(pull.end))
    if pull.decides is not None:
        log.prepared.remove([pull.decides])
