"""Changes that are shuffled as packed pieces give the same net changes as changes folded one by one."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_replay.arrow.key_hash import hash_keys
from cdc_replay.model.frames import ROUTED, ChangeKind, NetKind, Truncation
from cdc_replay.model.key_links import linked
from cdc_replay.model.subscription import ConflictPolicy
from cdc_replay.replay.compact import chunk_facts as chunk_facts_module
from cdc_replay.replay.compact import shuffle as pieces
from cdc_replay.replay.compact.chunk_facts import ChunkFacts, chunk_facts
from cdc_replay.replay.compact.fold_frames import FoldRules
from cdc_replay.replay.compact.fold_reference import RoutedChange
from cdc_replay.replay.compact.shuffle import (
    PartitionAssignment,
    ShuffleWriter,
    facts_row,
    fold_deferred,
    read_partitions,
)
from cdc_replay.replay.route.router import ROUTED_SCHEMA
from unit.replay.compact.test_fold import (
    by_reference,
    canonical,
    delete,
    in_python,
    insert,
    make_changes,
    steps,
    update,
)

Placed = list[tuple[int, RoutedChange]]


def routed(changes: Placed, first: int = 0) -> pa.RecordBatch:
    """Changes of targets as ROUTED; `seq` counts from `first`."""
    rows = [
        dict.fromkeys(ROUTED.names)
        | {
            "target": target,
            "commit_lsn": change.commit_lsn,
            "seq": seq,
            "kind": change.kind.value,
            "transformed": False,
            "search_key": change.search_key,
            "new_key": change.new_key,
            "values": change.values,
            "kinds": change.kinds,
        }
        for seq, (target, change) in enumerate(changes, first)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=ROUTED_SCHEMA)


def lineages(changes: Placed) -> list[int]:
    """The lineage of each change: keys linked by moves are one."""
    slots = [
        (
            (target, change.search_key or change.new_key or ()),
            (target, change.new_key or change.search_key or ()),
        )
        for target, change in changes
    ]
    numbers = {(target, key): index for target, key, index in linked(slots)}
    return [numbers[slot] for slot, _ in slots]


def truncate(lsn: int = 1) -> RoutedChange:
    return RoutedChange(ChangeKind.TRUNCATE, lsn, None, None, None, None)


def with_truncates(changes: Placed, places: dict[int, int]) -> Placed:
    """TRUNCATEs of targets before the changes with these indexes, in the preceding transaction."""
    found: Placed = []
    for index, placed in enumerate(changes):
        if index in places:
            found.append((places[index], truncate(found[-1][1].commit_lsn if found else 0)))
        found.append(placed)
    return found


def that_count(changes: Placed) -> list[bool]:
    """Whether each is a row change after the last TRUNCATE of its target."""
    last = {
        target: index for index, (target, change) in enumerate(changes) if change.kind is ChangeKind.TRUNCATE
    }
    return [index > last.get(target, -1) for index, (target, _) in enumerate(changes)]


def chunks_of(changes: Placed, cuts: list[int]) -> list[pa.RecordBatch]:
    borders = [0, *sorted(cut % (len(changes) + 1) for cut in cuts), len(changes)]
    return [routed(changes[start:end], start) for start, end in itertools.pairwise(borders)]


def canonical_ordinals(made: list[Any]) -> list[str]:
    """As `canonical`; ordinals count from 0, as each way to fold a window numbers changes differently."""
    known = sorted({change.insert_ordinal for _, change, _, _ in made if change.insert_ordinal is not None})
    ranks: dict[int | None, int | None] = {None: None} | {
        insert_ordinal: rank for rank, insert_ordinal in enumerate(known)
    }
    return canonical(
        [
            (target, replace(change, insert_ordinal=ranks[change.insert_ordinal]), *rest)
            for target, change, *rest in made
        ]
    )


def through_pieces(changes: Placed, cuts: list[int], rules: FoldRules, parts: int) -> list[Any]:
    """The net changes, with the facts of a first round, as in replay."""
    chunks = chunks_of(changes, cuts)
    notes = ChunkFacts()
    for index, chunk in enumerate(chunks):
        notes.add(chunk_facts(chunk, index, Counter()))
    rules = rules.with_truncated(notes.last_truncates)
    packer = ShuffleWriter(
        rules, notes.window_facts(), 0, PartitionAssignment.from_weights(parts, {0: 3, 1: 1})
    )
    packed = [packer.write_partitions(chunk, index, ChunkFacts()) for index, chunk in enumerate(chunks)]
    packed.reverse()  # a shuffle brings them in any order
    return [
        in_python(row)
        for part in read_partitions(packed).values()
        for net in part.net(rules)
        for row in net.to_pylist()
    ]


def in_one_round(
    changes: Placed, cuts: list[int], rules: FoldRules, parts: int
) -> tuple[list[Any], list[Any], ChunkFacts]:
    """The net changes of the parts, those of deferred changes, and the facts; one task per chunk."""
    packer = ShuffleWriter(
        rules, ChunkFacts().window_facts(), 0, PartitionAssignment.from_weights(parts, {0: 3, 1: 1})
    )
    packed = []
    for index, chunk in enumerate(chunks_of(changes, cuts)):
        notes = chunk_facts(chunk, index, Counter({"filtered_out": 1}))
        if not packer.is_void(notes):
            packed.append(packer.write_partitions(chunk, index, notes))
        packed += packer.write_facts(notes)
    packed.reverse()
    found = read_partitions(packed).values()
    folded = [in_python(row) for part in found for net in part.net(rules) for row in net.to_pylist()]
    notes = ChunkFacts.merge_dumps(part.notes.dump() for part in found)
    survey = notes.window_facts()
    waiting = [
        in_python(row)
        for share in range(2 if notes.deferred else 0)
        for net in fold_deferred(notes, survey, rules, share=share, shares=2)
        for row in net.to_pylist()
    ]
    return folded, waiting, notes


@given(
    st.lists(st.tuples(st.integers(0, 1), steps), max_size=40),
    st.lists(st.integers(0, 60), max_size=4),
    st.sampled_from(ConflictPolicy),
    st.dictionaries(st.integers(0, 39), st.integers(0, 1), max_size=4),
    st.booleans(),
    st.integers(1, 3),
)
@settings(max_examples=600, deadline=None)
def test_any_chunks_and_parts_fold_like_the_reference(
    chosen: list[tuple[int, Any]],
    cuts: list[int],
    policy: ConflictPolicy,
    truncates: dict[int, int],
    moves: bool,
    parts: int,
) -> None:
    """Target 0 has a key, target 1 has none; three keys, so that chunks have several changes of one."""
    rules = FoldRules(policy, keyless=frozenset({1}), truncated=frozenset())
    made = make_changes([step for _, step in chosen], moves=moves)
    changes = [(target, change) for (target, _), change in zip(chosen, made, strict=True)]
    changes = with_truncates(changes, truncates)
    rows = [
        (target, lineage, change)
        for (target, change), lineage, counts in zip(
            changes, lineages(changes), that_count(changes), strict=True
        )
        if counts
    ]
    truncated = {target for target, change in changes if change.kind is ChangeKind.TRUNCATE}
    expected = canonical_ordinals(by_reference(rows, rules.with_truncated(truncated)))
    assert canonical_ordinals(through_pieces(changes, cuts, rules, parts)) == expected
    folded, deferred, notes = in_one_round(changes, cuts, rules, parts)
    assert canonical_ordinals(folded + deferred) == expected
    assert not notes.is_void
    # If keys move only before a TRUNCATE, nothing need be deferred.
    assert notes.moves if notes.deferred else notes.truncations or not notes.moves
    assert notes.counts == {"filtered_out": len(cuts) + 1}


def test_pieces_do_not_leak_memory() -> None:
    """A worker packs chunk after chunk. `pa.array` keeps Python buffers that it copies."""
    changes = routed([(0, insert(f"{index}", "x" * 100, lsn=index)) for index in range(2000)])
    rules = FoldRules(ConflictPolicy.ERROR, frozenset(), frozenset())
    packer = ShuffleWriter(rules, ChunkFacts().window_facts(), 0, PartitionAssignment.from_weights(2, {0: 1}))
    before = pa.total_allocated_bytes()
    for chunk in range(10):
        packer.write_partitions(changes, chunk, ChunkFacts())
    assert pa.total_allocated_bytes() == before


def test_only_changes_of_moved_keys_are_deferred() -> None:
    """The chunk that moves a key and those that only change it, before and after; a move back and forth."""
    rules = FoldRules(ConflictPolicy.ERROR, frozenset(), frozenset())
    first = [update("k", "k", "1", lsn=1), update("a", "a", "1", lsn=1), update("b", "b", "1", lsn=2)]
    second = [update("k", "l", "2", lsn=3), update("a", "a", "2", lsn=3), update("l", "k", "2", lsn=4)]
    third = [update("k", "k", "3", lsn=5), update("c", "c", "3", lsn=5)]
    changes = [(0, change) for change in (*first, *second, *third)]
    folded, deferred, notes = in_one_round(changes, [3, 6], rules, 2)
    assert sorted(change.base_key for _, change, _, _ in folded) == [("a",), ("b",), ("c",)]
    assert [(change.base_key, change.values, change.update_missing) for _, change, _, _ in deferred] == [
        (("l",), None, 0),
        (("k",), ("k", "3"), 4),
    ]
    assert sorted((changes.chunk, changes.rows) for changes in notes.deferred) == [(0, 1), (1, 2), (2, 1)]
    assert not notes.is_void


@pytest.mark.parametrize(
    ("limit", "bound"), [("_MAX_DEFERRED_ROWS", 2), ("_MAX_DEFERRED_BYTES", 1000)], ids=["rows", "bytes"]
)
@pytest.mark.parametrize("chunks", [1, 4], ids=["in a task", "in a part"])
def test_round_is_void_above_the_defer_limit(
    monkeypatch: pytest.MonkeyPatch, limit: str, bound: int, chunks: int
) -> None:
    """Then nothing is deferred, and the moves are known for the next round."""
    monkeypatch.setattr(chunk_facts_module, limit, bound)
    rules = FoldRules(ConflictPolicy.ERROR, frozenset(), frozenset())
    changes = [(0, update("k", "l", "x", lsn=1))]
    changes += [(0, update("l", "l", str(index), lsn=index)) for index in range(2, 9)]
    folded, deferred, notes = in_one_round(changes, [1, 3, 5][: chunks - 1], rules, 1)
    assert (folded, deferred, notes.deferred, notes.is_void) == ([], [], [], True)
    assert len(notes.window_facts().lineages) == 2


@pytest.mark.parametrize("limit", ["_MAX_CONCAT_BYTES", "_BYTES_PER_FOLD"])
def test_wide_rows_are_folded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Also if the pieces of a part are too large for one array."""
    changes = [(0, insert(str(index % 7), lsn=index)) for index in range(7)]
    changes += [(0, update(str(index % 7), str(index % 7), "x", lsn=index)) for index in range(7, 50)]
    rules = FoldRules(ConflictPolicy.ERROR, frozenset(), frozenset())
    expected = through_pieces(changes, [10, 20, 30], rules, 1)
    monkeypatch.setattr(pieces, limit, 0)
    assert canonical(through_pieces(changes, [10, 20, 30], rules, 1)) == canonical(expected)
    assert len(expected) == 7


def test_chunk_of_one_key_becomes_a_handful_of_changes() -> None:
    changes = [(0, update("a", "a", str(index), lsn=index)) for index in range(1000)]
    rules = FoldRules(ConflictPolicy.ERROR, frozenset(), frozenset())
    packer = ShuffleWriter(
        rules, ChunkFacts().window_facts(), 0, PartitionAssignment.from_weights(1, {0: 1, 1: 1})
    )
    packed = packer.write_partitions(routed(changes), 0, ChunkFacts())
    (net,) = [row for batch in read_partitions([packed])[0].net(rules) for row in batch.to_pylist()]
    assert net["update_missing"] == 1000
    assert packed["piece"][0].as_buffer().size < 2500


@pytest.mark.parametrize("cuts", [[], [2], [3], [1, 2, 3, 4, 5]], ids=str)
def test_changes_before_a_truncate_are_dropped(cuts: list[int]) -> None:
    """Earlier changes, of its table only, in its chunk and in others; also if keys have moved."""
    rules = FoldRules(ConflictPolicy.ERROR, frozenset(), frozenset())
    changes = [
        (0, update("a", "b", "old", lsn=1)),
        (1, insert("a", lsn=1)),
        (0, truncate(lsn=2)),
        (0, update("b", "b", "gone", lsn=3)),
        (0, insert("b", "new", lsn=3)),
        (0, insert("c", "new", lsn=4)),
    ]
    folded, deferred, notes = in_one_round(changes, cuts, rules, 2)
    left = {
        (target, change.kind, change.values): conflicts for target, change, _, conflicts in folded + deferred
    }
    assert left == {
        (1, NetKind.INSERT, ("a",)): None,
        (0, NetKind.INSERT, ("b", "new")): [("update_missing", 1)],
        (0, NetKind.INSERT, ("c", "new")): None,
    }
    assert notes.window_facts().truncations == (Truncation(0, 2, 2, restart_identity=False),)
    assert not notes.is_void


def test_facts_have_moves_and_are_shuffled_with_the_pieces() -> None:
    chunk = routed([(0, update("a", "b", lsn=1)), (0, update("c", "c", lsn=2)), (0, delete("d", lsn=3))])
    notes = chunk_facts(chunk, 0, Counter({"filtered_out": 2}))
    assert notes.moves == {((0, ("a",)), (0, ("b",)))}
    arrived = read_partitions([facts_row(notes, 3), facts_row(notes, 3)])[3].notes
    assert arrived.moves == notes.moves
    assert arrived.counts == {"filtered_out": 4}


def test_void_round_folds_nothing() -> None:
    """All parts learn what one task knows; the next round folds what all tasks send."""
    news = ChunkFacts(unsent={(0, 5, 1)})
    rules = FoldRules(ConflictPolicy.ERROR, frozenset(), frozenset())
    changes = routed([(0, insert(str(index), lsn=6)) for index in range(20)])
    first, second = (
        ShuffleWriter(rules, survey, 4, PartitionAssignment.from_weights(3, {0: 1}))
        for survey in (ChunkFacts().window_facts(), news.window_facts())
    )
    for packer, rows in ((first, 0), (second, 20)):
        assert packer.is_void(news) == (rows == 0)
        assert not packer.is_void(ChunkFacts())
        parts = read_partitions(
            [
                packer.write_partitions(changes, 0, ChunkFacts()),
                *packer.write_facts(news),
                *packer.write_facts(ChunkFacts()),
            ]
        )
        assert sum(net.num_rows for part in parts.values() for net in part.net(rules)) == rows
        assert sorted(parts) == [4, 5, 6]
        assert parts[4].notes.window_facts() == news.window_facts()


def test_target_gets_parts_by_its_share_of_changes() -> None:
    """So most tasks have one target, and none has much more than its share; all parts are used."""
    assignment = PartitionAssignment.from_weights(10, {0: 500, 2: 250, 3: 125, 7: 125})
    rng = np.random.default_rng(1)
    lineages = rng.integers(-(2**63), 2**63, 4000)
    found = {target: assignment.parts_of(np.full(4000, target), lineages) for target in (0, 2, 3, 7)}
    assert {target: sorted(set(parts.tolist())) for target, parts in found.items()} == {
        0: [0, 1, 2, 3, 4],
        2: [5, 6, 7],
        3: [7, 8],
        7: [8, 9],
    }
    assert np.bincount(found[0]).min() > 700
    assert assignment.parts_of(np.array([7]), np.array([-1]))[0] == 9


def test_equal_keys_have_equal_hashes_and_null_is_not_an_empty_text() -> None:
    keys: list[list[str | None] | None] = [
        ["a"],
        ["a"],
        [""],
        [None],
        ["a", None],
        None,
        ["ab", "c"],
        ["a", "bc"],
    ]
    array = pa.array(keys, pa.list_(pa.string()))
    numbers = hash_keys(pa.array([0] * len(keys)).to_numpy(), array)
    assert numbers[0] == numbers[1]
    assert len(set(numbers.tolist())) == len(keys) - 1
    assert hash_keys(pa.array([0, 0]).to_numpy(), array.slice(2, 2)).tolist() == numbers[2:4].tolist()
    assert hash_keys(pa.array([1]).to_numpy(), array.slice(0, 1))[0] != numbers[0]
