"""TRUNCATEs of partitioned tables are merged into their log row, or inserted in LSN order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_replay.capture.change_origins import LocalChanges
from cdc_replay.capture.truncate_rows import (
    RootTruncate,
    RootTruncateMerger,
    parse_truncates,
    truncate_message,
    truncated_relations,
    union_truncates,
)
from cdc_replay.changelog.segment import LOG_SCHEMA
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import RelationId
from cdc_replay.pgoutput.messages import Truncate, TruncateFlag
from cdc_replay.pgoutput.reader import decode

NONE = TruncateFlag(0)


class Statement(NamedTuple):
    """What one WAL record says: an INSERT, or a TRUNCATE of leaves (below 100) and roots (from 100 on)."""

    commit_lsn: int
    lsn: int
    relations: tuple[int, ...] = ()

    @property
    def is_seen_in_leaf_identity(self) -> bool:
        return not self.relations or self.relations[0] < 100

    @property
    def leaves(self) -> tuple[RelationId, ...]:
        return tuple(RelationId(relation) for relation in self.relations if relation < 100)

    @property
    def roots(self) -> tuple[RelationId, ...]:
        return tuple(RelationId(relation) for relation in self.relations if relation >= 100)

    def root_truncates(self) -> list[RootTruncate]:
        """One for each root, as the peeks of several depths give them."""
        return [
            RootTruncate(self.commit_lsn, 7, 9, None, self.lsn, NONE, (relation,)) for relation in self.roots
        ]


Log = list[tuple[int, int, int, str, tuple[int, ...]]]


def row(statement: Statement, seq: int, relations: tuple[RelationId, ...]) -> dict[str, Any]:
    is_truncate = bool(statement.relations)
    return {
        "commit_lsn": statement.commit_lsn,
        "commit_time": 7,
        "xid": 9,
        "seq": seq,
        "lsn": statement.lsn,
        "kind": "T" if is_truncate else "I",
        "message": truncate_message(NONE, relations) if is_truncate else b"I",
    }


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=LOG_SCHEMA)


def log_rows(batches: list[pa.RecordBatch]) -> Log:
    result: Log = []
    for row in (row for rows in batches for row in rows.to_pylist()):
        message = decode(row["message"]) if row["kind"] == "T" else None
        relations = tuple(message.relations) if isinstance(message, Truncate) else ()
        result.append((row["commit_lsn"], row["seq"], row["lsn"], row["kind"], relations))
    return result


RELATIONS = st.sampled_from([(), (1,), (1, 2), (1, 100), (2, 1, 100, 101), (100,), (101, 100)])


@st.composite
def histories(draw: st.DrawFn) -> list[Statement]:
    """Transactions in commit order, which may have begun in any order; records have distinct positions."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=6))
    positions = iter(draw(st.permutations(range(1, sum(sizes) + 1))))
    return [
        Statement(1000 + number, lsn, draw(RELATIONS))
        for number, size in enumerate(sizes)
        for lsn in sorted(next(positions) for _ in range(size))
    ]


@given(histories(), st.integers(1, 6))
@settings(deadline=None, max_examples=300)
def test_merged_rows_equal_those_of_a_single_peek_of_all_relations(
    history: list[Statement], size: int
) -> None:
    """R2.13, R2.14: rows in order, numbered without gaps, wherever row groups end."""
    expected: Log = []
    first: list[dict[str, Any]] = []
    for statement in history:
        seq = sum(commit_lsn == statement.commit_lsn for commit_lsn, *_ in expected)
        kind = "T" if statement.relations else "I"
        expected.append((statement.commit_lsn, seq, statement.lsn, kind, statement.relations))
        if statement.is_seen_in_leaf_identity:
            seq_in_leaf_peek = sum(other["commit_lsn"] == statement.commit_lsn for other in first)
            first.append(row(statement, seq_in_leaf_peek, statement.leaves))
    roots = union_truncates(truncate for statement in history for truncate in statement.root_truncates())
    batches = [batch(first[start : start + size]) for start in range(0, len(first), size)]

    merger = RootTruncateMerger(batches, roots)
    result = log_rows(list(merger))

    assert [(*key, set(relations)) for *key, relations in result] == [
        (*key, set(relations)) for *key, relations in expected
    ]
    assert merger.messages == len(expected) - len(first)
    assert merger.transactions == len(
        {commit_lsn for commit_lsn, *_ in expected} - {other["commit_lsn"] for other in first}
    )


def test_union_truncates_has_one_entry_per_statement() -> None:
    statement = Statement(50, 10, (101, 100))
    later = Statement(50, 20, (100,))
    truncates = [*later.root_truncates(), *statement.root_truncates(), *statement.root_truncates()]
    assert [(truncate.lsn, truncate.relations) for truncate in union_truncates(truncates)] == [
        (10, (101, 100)),
        (20, (100,)),
    ]


def test_inserted_row_has_all_fields_of_the_root_truncate() -> None:
    """R1.1: the message is as pgoutput writes it, with the statement's options."""
    [truncate] = Statement(50, 10, (100,)).root_truncates()
    truncate = replace(truncate, origin="o", flags=TruncateFlag.CASCADE | TruncateFlag.RESTART_IDENTITY)

    [rows] = RootTruncateMerger([], [truncate])

    assert list(parse_truncates(rows)) == [truncate]
    assert truncated_relations(rows) == {100}
    assert decode(rows["message"][0].as_py()) == Truncate(None, TruncateFlag(3), (RelationId(100),))
    assert rows.schema == LOG_SCHEMA


def test_change_gets_unnamed_origin_if_origin_none_does_not_send_it() -> None:
    """R8.20: its own origin stays; a message of pg_logical_emit_message is left alone."""
    rows = batch(
        [
            {"lsn": 10, "kind": "I"},
            {"lsn": 10, "kind": "I"},
            {"lsn": 20, "kind": "U"},
            {"lsn": 30, "kind": "T", "origin": "named"},
            {"lsn": 40, "kind": "M"},
            {"lsn": 50, "kind": "D"},
        ]
    )
    local = LocalChanges(np.array([10, 50]), np.array([60]), Lsn(100))

    assert local.mark_origins(rows)["origin"].to_pylist() == [None, None, "", "named", None, None]
    assert local.mark_origins(rows.slice(0, 2)) is not None
    assert (local.has_commit(Lsn(60)), local.has_commit(Lsn(10))) == (True, False)
    nothing = LocalChanges(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), Lsn(100))
    assert nothing.mark_origins(rows)["origin"].to_pylist() == ["", "", "", "named", None, ""]
