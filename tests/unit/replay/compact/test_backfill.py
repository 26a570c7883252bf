"""Net changes of a backfill: what it inserts, and which rows a repair concerns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa

from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import ConflictPolicy, SubscribedTable
from cdc_replay.replay.compact import NO_FACTS, Repair, Revision, Upsert
from cdc_replay.replay.compact.chunk_facts import ChunkFacts, chunk_facts
from cdc_replay.replay.compact.fold_frames import FoldRules
from cdc_replay.replay.compact.fold_reference import RoutedChange
from cdc_replay.replay.compact.shuffle import (
    PartitionAssignment,
    ShuffleWriter,
    fold_deferred,
    read_partitions,
)
from unit.replay.compact.test_fold import delete, insert, update
from unit.replay.compact.test_shuffle import Placed, routed, truncate

Effects = set[tuple[str, str | None, tuple[str | None, ...] | None]]

TABLE = SubscribedTable(0, QualifiedName("s", "t"), ("id", "a"), ("id",), is_keyed=True, applied_lsn=ZERO)
NO_KEY = SubscribedTable(
    1, QualifiedName("s", "u"), ("id", "a"), ("id", "a"), is_keyed=False, applied_lsn=ZERO
)


def revised(
    changes: list[RoutedChange] | Placed, revision: Revision, chunks: int = 1
) -> list[dict[str, Any]]:
    """The net changes of a window of so many row groups, by one job as in replay."""
    placed: Placed = [change if isinstance(change, tuple) else (0, change) for change in changes]
    rules = FoldRules(ConflictPolicy.OVERWRITE, frozenset({1}), frozenset(), revision=revision)
    writer = ShuffleWriter(rules, NO_FACTS, 0, PartitionAssignment.from_weights(2, {0: 1, 1: 1}))
    size, pieces, task = -(-len(placed) // chunks), list[pa.RecordBatch](), ChunkFacts()
    for chunk, start in enumerate(range(0, len(placed), size)):
        batch = routed(placed[start : start + size], start)
        facts = chunk_facts(batch, chunk, Counter())
        pieces.append(writer.write_partitions(batch, chunk, facts))
        task.add(facts)
    parts = read_partitions([*pieces, *writer.write_facts(task)]).values()
    net = [batch for part in parts for batch in part.net(rules)]
    facts = ChunkFacts.merge_dumps(part.notes.dump() for part in parts)
    if facts.deferred:
        net += fold_deferred(facts, facts.window_facts(), rules)
    return [row for batch in net for row in batch.to_pylist()]


def effects(rows: list[dict[str, Any]]) -> Effects:
    """Kind, key and values of net changes."""
    return {
        (row["kind"], row["base_key"][0], None if row["values"] is None else tuple(row["values"]))
        for row in rows
    }


def repaired(changes: list[RoutedChange], upto: int, *, whole: bool = True, chunks: int = 1) -> Effects:
    revision = Repair(Lsn(upto), {0: TABLE}, frozenset({0} if whole else ()))
    return effects(revised(changes, revision, chunks))


def test_whole_update_is_inserted_and_a_partial_one_stays() -> None:
    changes = [
        update("a", "a", "1"),
        update("b", "c", "2"),
        update("d", "d", None, kinds="tu"),
        update("e", "e", None, kinds="t-"),
        insert("f", "3"),
        delete("g"),
    ]
    rows = revised(changes, Upsert({0: TABLE}))
    assert {
        ("I", "a", ("a", "1")),
        ("D", "b", None),
        ("I", "c", ("c", "2")),
        ("U", "d", ("d", None)),
        ("U", "e", ("e", None)),
        ("I", "f", ("f", "3")),
        ("D", "g", None),
    } == effects(rows) - {("P", "c", None)}
    assert {row["base_key"][0]: row["update_missing"] for row in rows} == {
        **dict.fromkeys("abcfg", 0),
        **dict.fromkeys("de", 1),
    }


def test_table_without_a_key_or_proof_of_its_rows_is_not_upserted() -> None:
    whole_row = RoutedChange(update("a", "a").kind, 1, ("a", "1"), ("a", "2"), ("a", "2"), "tt")
    rows = revised([(1, whole_row)], Upsert({1: NO_KEY}))
    assert effects(rows) == {("U", "a", ("a", "2"))}
    assert effects(revised([update("a", "a", "1")], Upsert({}))) == {("U", "a", ("a", "1"))}


def test_repair_ends_rows_of_the_range_as_of_the_window_and_leaves_others() -> None:
    """The range ends at 2: later changes of its rows count, those of other rows do not."""
    changes = [
        insert("a", "1", lsn=1),
        update("b", "b", "1", lsn=2),
        insert("c", "1", lsn=2),
        update("a", "a", "3", lsn=3),
        insert("d", "3", lsn=3),
        delete("c", lsn=4),
        update("e", "e", "4", lsn=4),
    ]
    for chunks in (1, 2, 7):
        assert repaired(changes, 2, chunks=chunks) == {
            ("I", "a", ("a", "3")),
            ("I", "b", ("b", "1")),
            ("D", "c", None),
        }


def test_repair_follows_rows_to_their_other_keys_which_end_empty() -> None:
    """A row of the range moves later, another one had moved to its key before; each key passed is emptied."""
    changes = [
        update("a", "a", "1", lsn=1),
        update("a", "b", "2", lsn=3),
        update("b", "c", "3", lsn=4),
        insert("a", "4", lsn=5),
        update("x", "y", "5", lsn=5),
    ]
    for chunks in (1, 2, 5):
        assert repaired(changes, 1, chunks=chunks) == {
            ("I", "c", ("c", "3")),
            ("I", "a", ("a", "4")),
            ("D", "b", None),
        }


def test_repair_of_a_row_that_nothing_proves_updates_it() -> None:
    changes = [update("a", "a", "1", lsn=1), update("b", "b", None, lsn=1, kinds="tu")]
    assert repaired(changes, 1, whole=False) == {("U", "a", ("a", "1")), ("U", "b", ("b", None))}
    assert repaired(changes, 1) == {("I", "a", ("a", "1")), ("U", "b", ("b", None))}


def test_repair_of_a_truncated_table_has_all_later_rows() -> None:
    """The TRUNCATE runs again, so that rows outside of the range come back; in it or after it."""
    for at in (1, 3):
        changes = [
            insert("a", "1", lsn=1),
            truncate(lsn=at),
            insert("b", "4", lsn=4),
            update("b", "b", "5", lsn=5),
        ]
        for chunks in (1, 2, 4):
            assert repaired(changes, 2, chunks=chunks) == {("I", "b", ("b", "5"))}
