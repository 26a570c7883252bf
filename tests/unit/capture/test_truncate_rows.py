"""TRUNCATEs of partitioned tables find their row of the log, or their place between the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_replay.capture.change_origins import LocalChanges
from cdc_replay.capture.truncate_rows import (
    RootsAdded,
    RootTruncate,
    truncate_message,
    truncated_in,
    truncates_in,
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
        return tuple(RelationId(each) for each in self.relations if each < 100)

    @property
    def roots(self) -> tuple[RelationId, ...]:
        return tuple(RelationId(each) for each in self.relations if each >= 100)

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


def found(batches: list[pa.RecordBatch]) -> Log:
    result: Log = []
    for each in (one for part in batches for one in part.to_pylist()):
        message = decode(each["message"]) if each["kind"] == "T" else None
        relations = tuple(message.relations) if isinstance(message, Truncate) else ()
        result.append((each["commit_lsn"], each["seq"], each["lsn"], each["kind"], relations))
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
def test_the_log_is_as_if_one_peek_had_shown_every_relation(history: list[Statement], size: int) -> None:
    """R2.13, R2.14: rows in order, numbered without gaps, wherever row groups end."""
    expected: Log = []
    first: list[dict[str, Any]] = []
    for statement in history:
        seq = sum(one[0] == statement.commit_lsn for one in expected)
        kind = "T" if statement.relations else "I"
        expected.append((statement.commit_lsn, seq, statement.lsn, kind, statement.relations))
        if statement.is_seen_in_leaf_identity:
            seen = sum(one["commit_lsn"] == statement.commit_lsn for one in first)
            first.append(row(statement, seen, statement.leaves))
    roots = union_truncates(one for statement in history for one in statement.root_truncates())
    batches = [batch(first[start : start + size]) for start in range(0, len(first), size)]

    added = RootsAdded(batches, roots)
    result = found(list(added))

    assert [(*one[:4], set(one[4])) for one in result] == [(*one[:4], set(one[4])) for one in expected]
    assert added.messages == len(expected) - len(first)
    assert added.transactions == len({one[0] for one in expected} - {one["commit_lsn"] for one in first})


def test_what_the_peeks_of_several_depths_say_of_one_statement_is_one() -> None:
    statement = Statement(50, 10, (101, 100))
    later = Statement(50, 20, (100,))
    truncates = [*later.root_truncates(), *statement.root_truncates(), *statement.root_truncates()]
    assert [(one.lsn, one.relations) for one in union_truncates(truncates)] == [
        (10, (101, 100)),
        (20, (100,)),
    ]


def test_a_row_of_its_own_says_all_that_the_second_peek_said() -> None:
    """R1.1: the message is as pgoutput writes it, with the statement's options."""
    [one] = Statement(50, 10, (100,)).root_truncates()
    one = replace(one, origin="o", flags=TruncateFlag.CASCADE | TruncateFlag.RESTART_IDENTITY)

    [rows] = RootsAdded([], [one])

    assert list(truncates_in(rows)) == [one]
    assert truncated_in(rows) == {100}
    assert decode(rows["message"][0].as_py()) == Truncate(None, TruncateFlag(3), (RelationId(100),))
    assert rows.schema == LOG_SCHEMA


def test_a_change_is_marked_if_origin_none_does_not_send_it() -> None:
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

    assert local.marked(rows)["origin"].to_pylist() == [None, None, "", "named", None, None]
    assert local.marked(rows.slice(0, 2)) is not None
    assert (local.has_commit(Lsn(60)), local.has_commit(Lsn(10))) == (True, False)
    nothing = LocalChanges(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), Lsn(100))
    assert nothing.marked(rows)["origin"].to_pylist() == ["", "", "", "named", None, ""]
