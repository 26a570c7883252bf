"""NULL for values that were not sent and are not found, where that is accepted (R4.6)."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from cdc_replay.model.frames import GIVEN_UP
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.subscription import ConflictPolicy
from cdc_replay.replay.compact import EnteredRow, MissingValues, NullRule, WindowFacts
from cdc_replay.replay.compact.chunk_facts import ChunkFacts
from cdc_replay.replay.compact.fold_frames import FoldRules
from cdc_replay.replay.compact.shuffle import PartitionAssignment, ShuffleWriter, read_partitions
from unit.replay.compact.test_fold import delete, insert, update
from unit.replay.compact.test_shuffle import Placed, routed

WINDOW = Window(Lsn(100), Lsn(200))
TARGETS = frozenset({0, 1})
UNSENT = WindowFacts((), (), ((0, 110, 0),))


def staged(changes: Placed, rule: NullRule) -> tuple[dict[tuple[int, str], str | None], MissingValues]:
    """The kinds of net changes by target and key, and the values that are missing; facts are known."""
    rules = FoldRules(ConflictPolicy.OVERWRITE, frozenset(), frozenset(), nulls=rule)
    writer = ShuffleWriter(rules, UNSENT, 0, PartitionAssignment.from_weights(2, {0: 1, 1: 1}))
    pieces = [
        writer.write_partitions(routed([change], seq), seq, ChunkFacts())
        for seq, change in enumerate(changes)
    ]
    parts = read_partitions(pieces).values()
    rows = [row for part in parts for batch in part.net(rules) for row in batch.to_pylist()]
    missing = ChunkFacts.merge_dumps(part.notes.dump() for part in parts).missing
    return {(row["target"], row["base_key"][0]): row["kinds"] for row in rows}, missing


def test_given_up_value_is_null_in_an_insert_and_unsent_in_an_update() -> None:
    changes: Placed = [
        (0, insert("a", None, None, lsn=110, kinds=f"t{GIVEN_UP}n")),
        (0, update("b", "b", None, None, lsn=110, kinds=f"t{GIVEN_UP}t")),
        (0, insert("c", None, None, lsn=110, kinds=f"t{GIVEN_UP}{GIVEN_UP}")),
        (0, update("c", "c", "1", None, lsn=120, kinds="ttu")),
    ]
    kinds, missing = staged(changes, NullRule(WINDOW, TARGETS, {}))
    assert kinds == {(0, "a"): "tnn", (0, "b"): "tut", (0, "c"): "ttn"}
    assert (missing.rows, missing.unknown, missing.nulls) == (2, 0, Counter({0: 2}))
    assert [(row.key, row.commit_lsn) for row in missing.first[0]] == [(("a",), Lsn(110)), (("c",), Lsn(110))]


def test_unsent_value_is_null_up_to_the_accepted_commit_of_its_table() -> None:
    """What counts is the commit by which the row entered, not that of its last change."""
    changes: Placed = [
        (0, insert("a", None, lsn=110, kinds="tu")),
        (0, insert("b", None, lsn=120, kinds="tu")),
        (1, insert("c", None, lsn=110, kinds="tu")),
        (0, update("a", "a", None, lsn=150, kinds="tu")),
    ]
    kinds, missing = staged(changes, NullRule(WINDOW, TARGETS, {0: Lsn(110)}))
    assert kinds == {(0, "a"): "tn", (0, "b"): "tu", (1, "c"): "tu"}
    assert (missing.rows, missing.unknown, +missing.nulls) == (3, 2, Counter({0: 1}))
    assert missing.first_unknown == [EnteredRow(1, Lsn(110), ("c",), "tu")]


def test_row_that_leaves_or_gets_the_value_lacks_nothing() -> None:
    changes: Placed = [
        (0, insert("a", None, lsn=110, kinds="tu")),
        (0, insert("b", None, lsn=110, kinds="tu")),
        (0, delete("a", lsn=120)),
        (0, update("b", "b", "1", lsn=120)),
    ]
    kinds, missing = staged(changes, NullRule(WINDOW, TARGETS, {}))
    assert kinds == {(0, "a"): None, (0, "b"): "tt"}
    assert missing == MissingValues()


def test_backfill_stores_no_null() -> None:
    changes: Placed = [(0, insert("a", None, None, lsn=110, kinds=f"t{GIVEN_UP}u"))]
    kinds, missing = staged(changes, NullRule(WINDOW, TARGETS))
    assert kinds == {(0, "a"): "tuu"}
    assert (missing.rows, +missing.nulls) == (1, Counter())


def test_first_rows_of_a_table_are_shown_in_commit_order() -> None:
    changes: Placed = [
        (0, insert(str(9 - n), None, lsn=110 + n // 2, kinds=f"t{GIVEN_UP}")) for n in range(9)
    ]
    _, missing = staged(changes, NullRule(WINDOW, TARGETS, {}))
    assert missing.nulls == Counter({0: 9})
    assert [row.key for row in missing.first[0]] == [("8",), ("9",), ("6",), ("7",), ("4",)]


def test_ordinals_are_in_log_order_and_tell_the_commit() -> None:
    """Also in a window so long that few bits remain for the position in a transaction."""
    for upto in (200, 2**45):
        rule = NullRule(Window(Lsn(100), Lsn(upto)), TARGETS, {})
        lsns, seqs = [101, 101, 120, upto], [0, 7, 3, 2**31 - 1]
        changes = pa.record_batch([pa.array(lsns), pa.array(seqs, pa.int32())], ["commit_lsn", "seq"])
        ordinals = rule.ordinals(changes).tolist()
        assert ordinals == sorted(set(ordinals))
        assert ordinals[-1] < 2**63
