"""Values on their way to the rows that enter without them: each gets its own, whatever the batches are."""

from __future__ import annotations

import itertools

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc_replay.pgoutput.columnar import CHANGES_SCHEMA
from cdc_replay.replay.entered_values import EnteredValues

# Spark names the elements of lists in its own way.
VALUES = pa.schema(
    [
        ("id", pa.int64()),
        ("commit_lsn", pa.int64()),
        ("seq", pa.int32()),
        ("new", pa.list_(pa.field("element", pa.string()))),
        ("new_kinds", pa.string()),
    ]
)
positions = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), unique=True, max_size=25).map(sorted)


def change(lsn: int, seq: int, *, sent: bool) -> dict[str, object]:
    new, kinds = (["k", f"{lsn}.{seq}"], "tt") if sent else (["k", None], "tu")
    return dict.fromkeys(CHANGES_SCHEMA.names) | {
        "commit_lsn": lsn, "seq": seq, "kind": "U", "new": new, "new_kinds": kinds
    }  # fmt: skip


def in_parts(rows: list[dict[str, object]], schema: pa.Schema, cuts: list[int]) -> list[pa.RecordBatch]:
    borders = [0, *sorted(cut % (len(rows) + 1) for cut in cuts), len(rows)]
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    return [batch.slice(start, end - start) for start, end in itertools.pairwise(borders)]


@given(positions, st.sets(st.integers(0, 24)), st.lists(st.integers(0, 30), max_size=4), st.data())
def test_each_row_gets_its_value(
    found: list[tuple[int, int]], entered: set[int], cuts: list[int], data: st.DataObject
) -> None:
    rows = [change(*position, sent=index not in entered) for index, position in enumerate(found)]
    values = [
        {"id": 3, "commit_lsn": lsn, "seq": seq, "new": ["k", f"{lsn}.{seq}"], "new_kinds": "tt"}
        for index, (lsn, seq) in enumerate(found)
        if index in entered
    ]
    batches = in_parts(
        [dict.fromkeys(VALUES.names) | {"id": 3}, *values],
        VALUES,
        data.draw(st.lists(st.integers(0, 30), max_size=4)),
    )
    task = EnteredValues.of_partition(batches)
    assert task is not None
    completed = [list(task[1].complete(group)) for group in in_parts(rows, CHANGES_SCHEMA, cuts)]

    assert task[0] == 3
    # Each row group has at least one part, so that its filters are evaluated and its facts collected.
    assert all(completed)
    made = [row for group in completed for part in group for row in part.to_pylist()]
    assert made == [change(*position, sent=True) for position in found]


def test_task_without_values_has_its_changes_as_they_are() -> None:
    batch = pa.RecordBatch.from_pylist([change(1, 0, sent=False)], schema=CHANGES_SCHEMA)
    task = EnteredValues.of_partition([pa.record_batch([pa.array([7])], ["id"])])
    assert task is not None
    assert (task[0], list(task[1].complete(batch))) == (7, [batch])
    assert EnteredValues.of_partition([]) is None
