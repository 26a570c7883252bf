"""The columnar decoder equals the reference reader, and never reads past the end of a message."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import Relation, RelationId
from cdc_replay.pgoutput import messages as m
from cdc_replay.pgoutput.columnar import CHANGES_SCHEMA, ChangeDecoder
from unit.pgoutput.wire import (
    encode,
    log_batch,
    log_row,
    reference_changes,
    relation,
    row_changes,
    tuples,
)

EVERYTHING = Window(Lsn(0), Lsn(2**63 - 1))

ROW = m.TupleData(
    (m.TupleKind.TEXT, m.TupleKind.NULL, m.TupleKind.UNCHANGED, m.TupleKind.TEXT), (b"42", None, None, b"")
)
TABLE = relation(len(ROW.kinds))
INSERT = m.Insert(None, TABLE.id, ROW)
UPDATE = m.Update(None, TABLE.id, m.OldTuple.FULL, ROW, ROW)
DELETE = m.Delete(None, TABLE.id, m.OldTuple.KEY, ROW)


def decoder(
    *relations: Relation, window: Window = EVERYTHING, catalogs: tuple[tuple[int, int], ...] = ((0, 0),)
) -> ChangeDecoder:
    return ChangeDecoder.from_relations(
        window, {known.version: known for known in relations or (TABLE,)}, catalogs
    )


def refusal(row: dict[str, object], *relations: Relation) -> InvalidMessage:
    """Of the second of two rows, the first being good."""
    good = log_row(encode(INSERT)) if not relations else row
    with pytest.raises(InvalidMessage) as refused:
        decoder(*relations).decode(log_batch([good, row]))
    return refused.value


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[dict[str, object]], dict[int, Relation]]:
    """LOG rows of relations with 0 to 5 columns, TRUNCATEs and logical messages, in a few transactions."""
    tables = [relation(columns, 16384 + columns, version=10 - columns) for columns in range(6)]
    rows: list[dict[str, object]] = []
    for seq in range(draw(st.integers(0, 12))):
        table = draw(st.sampled_from(tables))
        row = tuples(len(table.columns), binary=False)
        several = st.lists(st.integers(1, 5).map(RelationId), max_size=3).map(tuple)
        message = draw(
            st.one_of(
                row_changes(st.none(), st.just(table.id), row),
                st.builds(m.Truncate, st.none(), st.integers(0, 3).map(m.TruncateFlag), several),
                st.builds(
                    m.LogicalMessage, st.none(), st.booleans(), st.just(Lsn(1)), st.just("p"), st.binary()
                ),
            )
        )
        is_row = isinstance(message, m.Insert | m.Update | m.Delete)
        rows.append(
            log_row(
                encode(message),
                commit_lsn=100 + seq // 3,
                seq=seq,
                lsn=draw(st.integers(0, 60)),
                origin=draw(st.sampled_from([None, "elsewhere"])),
                relation_id=table.id if is_row else None,
                relation_version=table.version if is_row else None,
            )
        )
    return rows, {table.version: table for table in tables}


VERSIONS = st.tuples(
    st.sets(st.tuples(st.just(0), st.integers(0, 60)), min_size=1),
    st.sets(st.tuples(st.integers(98, 106), st.integers(0, 60))),
)
"""For all transactions, and for single ones."""


@given(logs(), st.integers(99, 104), st.integers(99, 104), VERSIONS, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_changes_equal_those_of_reference_reader(
    log: tuple[list[dict[str, object]], dict[int, Relation]],
    after: int,
    upto: int,
    versions: tuple[set[tuple[int, int]], set[tuple[int, int]]],
    order: random.Random,
) -> None:
    """Of the window (after, upto], each with the last catalog version that is not above its LSN (R9.10).

    Versions for its own transaction go before those for all.
    """
    rows, relations = log
    window, catalogs = Window(Lsn(after), Lsn(upto)), sorted(set().union(*versions))
    order.shuffle(catalogs)
    batch = log_batch(rows)
    changes = ChangeDecoder.from_relations(window, relations, catalogs).decode(batch)
    changes.validate(full=True)
    assert changes.schema == CHANGES_SCHEMA
    assert changes.to_pylist() == reference_changes(batch, window, catalogs)


@given(logs(), st.data())
@settings(max_examples=100, deadline=None)
def test_slice_of_batch_decodes_to_slice_of_changes(
    log: tuple[list[dict[str, object]], dict[int, Relation]], data: st.DataObject
) -> None:
    """A slice shares the buffers of the whole."""
    rows, relations = log
    start = data.draw(st.integers(0, len(rows)))
    part = log_batch(rows).slice(start, data.draw(st.integers(0, len(rows))))
    changes = ChangeDecoder.from_relations(EVERYTHING, relations, [(0, 0)]).decode(part)
    assert changes.to_pylist() == reference_changes(part, EVERYTHING, [(0, 0)])


SIZES = (0, 1, 127, 128, 65_536, 3_000_000)
WIDTHS = (0, 1, 7, 64, 1600)


@st.composite
def wide_changes(draw: st.DrawFn, columns: int, table: RelationId) -> m.Insert | m.Update | m.Delete:
    """A change of a table as wide as they get; up to four of its values are large, the others small."""
    large = draw(st.lists(st.sampled_from(SIZES), max_size=4))
    randomness = draw(st.randoms(use_true_random=False))

    def row() -> m.TupleData:
        kinds = tuple(m.TupleKind(kind) for kind in randomness.choices("ntu", (1, 3, 1), k=columns))
        sizes = large + randomness.choices((0, 1, 9), k=columns)
        units = randomness.choices(("x", "é", "€", "😀"), k=columns)
        texts = (unit.encode() * size for unit, size in zip(units, sizes, strict=False))
        sent = m.TupleKind.TEXT
        return m.TupleData(
            kinds, tuple(text if kind is sent else None for kind, text in zip(kinds, texts, strict=True))
        )

    kind = draw(st.sampled_from(m.OldTuple))
    changes: list[m.Insert | m.Update | m.Delete] = [
        m.Insert(None, table, row()),
        m.Update(None, table, None, None, row()),
        m.Update(None, table, kind, row(), row()),
        m.Delete(None, table, kind, row()),
    ]
    return draw(st.sampled_from(changes))


@given(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=4), st.data())
@settings(max_examples=40, deadline=None)
def test_rows_of_any_width_and_size_equal_those_of_reference_reader(
    widths: list[int], data: st.DataObject
) -> None:
    """No columns, the 1600 that PostgreSQL allows; no bytes, megabytes."""
    tables = {columns: relation(columns, 16384 + columns, version=-columns) for columns in widths}
    rows = []
    for seq, columns in enumerate(widths):
        table = tables[columns]
        change = data.draw(wide_changes(columns, table.id))
        rows.append(log_row(encode(change), seq=seq, relation_id=table.id, relation_version=table.version))
    batch = log_batch(rows)
    changes = decoder(*tables.values()).decode(batch)
    changes.validate(full=True)
    assert changes.to_pylist() == reference_changes(batch, EVERYTHING, [(0, 0)])


def test_truncate_becomes_one_row_per_relation_in_order() -> None:
    """Several relations of one TRUNCATE share the position (commit_lsn, seq)."""
    truncate = m.Truncate(
        None, m.TruncateFlag.CASCADE | m.TruncateFlag.RESTART_IDENTITY, (RelationId(5), RelationId(6))
    )
    rows = [
        log_row(encode(INSERT), seq=0),
        log_row(encode(truncate), seq=1, relation_id=None, relation_version=None),
        log_row(encode(DELETE), seq=2),
    ]
    changes = decoder().decode(log_batch(rows)).to_pylist()
    assert [
        (row["seq"], row["kind"], row["relation_id"], row["relation_version"], row["truncate_flags"])
        for row in changes
    ] == [
        (0, "I", 16384, 7, None),
        (1, "T", 5, None, 3),
        (1, "T", 6, None, 3),
        (2, "D", 16384, 7, None),
    ]


@pytest.mark.parametrize("change", [INSERT, UPDATE, DELETE])
def test_truncated_message_is_rejected(change: m.Message) -> None:
    """R1.2: every proper prefix."""
    message = encode(change)
    for end in range(len(message)):
        error = refusal(log_row(message[:end], kind=change.type.value))
        actual = re.search(r"message ends too early at offset (\d+), row 1$", error.message)
        assert actual is not None
        assert int(actual[1]) <= end


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (log_row(b""), "message ends too early at offset 0, row 1"),
        (
            log_row(encode(INSERT), kind="U"),
            "message type differs from the log's column kind at offset 0, row 1",
        ),
        (log_row(encode(INSERT), kind="X"), 'unknown kind "X" in the log at offset 0, row 1'),
        (log_row(encode(INSERT), kind=None), 'unknown kind "None" in the log at offset 0, row 1'),
        (
            log_row(encode(INSERT), relation_version=8),
            "relation 16384 has no known version 8 at offset 0, row 1",
        ),
        (log_row(encode(INSERT), relation_id=1), "relation 1 has no known version 7 at offset 0, row 1"),
        (
            log_row(b"I" + struct.pack(">I", 9) + encode(INSERT)[5:]),
            "relation differs from the log's column relation_id at offset 1, row 1",
        ),
        (
            log_row(b"T" + struct.pack(">iB", -1, 0)),
            'invalid pgoutput message "T": negative count -1 at offset 1, row 1',
        ),
        (
            log_row(encode(INSERT), kind="T"),
            "message type differs from the log's column kind at offset 0, row 1",
        ),
    ],
)
def test_message_that_contradicts_its_row_is_rejected(row: dict[str, object], problem: str) -> None:
    error = refusal(row)
    assert problem in error.message
    assert error.detail is not None
    assert "message 0 of the transaction that commits at 0/64" in error.detail


@pytest.mark.parametrize("columns", [0, 3, 5])
def test_tuple_with_other_column_count_is_rejected(columns: int) -> None:
    """R1.4: n always equals the ncols of the latest R."""
    error = refusal(log_row(encode(INSERT)), relation(columns))
    assert "number of columns differs from the relation version's at offset 6, row 0" in error.message
    assert error.rule == "R1.4"


def test_binary_value_is_rejected() -> None:
    """R1.4: kind b comes only with the option `binary`; the frames hold text."""
    row = m.TupleData((m.TupleKind.TEXT, m.TupleKind.BINARY), (b"", b"\0"))
    error = refusal(log_row(encode(m.Insert(None, TABLE.id, row))), relation(2))
    assert "value in binary format" in error.message
    assert "at offset 13, row 0" in error.message


@pytest.mark.parametrize("bad", [b"\xff", b"caf\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
def test_value_that_is_not_utf8_is_rejected(bad: bytes) -> None:
    """R1.11: the capture session pins client_encoding; a cut, surrogate or overlong character is no text."""
    row = m.TupleData(ROW.kinds, ("é".encode(), None, None, bad))
    error = refusal(log_row(encode(m.Update(None, TABLE.id, m.OldTuple.FULL, ROW, row))))
    # 5 header, O and N tuples: 3 each and t 4+2, n, u, t 4+0; in the new one t 4+2, n, u, then t and length
    offset = 5 + (3 + 7 + 1 + 1 + 5) + (3 + 7 + 1 + 1 + 5)
    assert f"value is not UTF-8 at offset {offset}, row 1" in error.message


def test_truncated_machine_code_cache_is_recompiled(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", "import cdc_replay.pgoutput.kernels"]
    subprocess.run(command, env=environment, check=True)
    kept = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert kept
    for file in kept:
        file.write_bytes(b"")
    subprocess.run(command, env=environment, check=True)


def test_empty_batch_has_no_changes() -> None:
    changes = decoder().decode(log_batch([]))
    assert changes.num_rows == 0
    assert changes.schema == CHANGES_SCHEMA
