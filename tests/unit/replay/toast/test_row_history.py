"""Rows tracked through the changes of a leaf: the known values of an entry, and the missing ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from cdc_replay.model.publication import Table, TableColumn
from cdc_replay.model.relation import QualifiedName, Relation, RelationColumn, RelationId, ReplicaIdentity
from cdc_replay.replay.toast.row_history import TRACKED, track
from cdc_replay.replay.toast.tracked_leaf import RESOLVED_SCHEMA, TrackedLeaf, TupleColumn, tuple_columns

LEAF = RelationId(7)


def relation(version: int, *columns: str, key: str = "id", type_oid: int = 25) -> Relation:
    return Relation(
        LEAF,
        version,
        QualifiedName("public", "t"),
        ReplicaIdentity.DEFAULT,
        tuple(RelationColumn(name, type_oid, -1, name == key) for name in columns),
    )


ONE = relation(1, "id", "body", "note")


@dataclass
class Stream:
    """Changes of one lineage in order; a value `...` is not sent."""

    versions: tuple[Relation, ...] = (ONE,)
    wanted: frozenset[str] = frozenset({"id", "body", "note"})
    rows: list[dict[str, Any]] = field(default_factory=list)
    truncated: dict[int, tuple[int, int]] = field(default_factory=dict)
    attnums: dict[int, tuple[int | None, ...]] = field(default_factory=dict)
    """Those of a version's columns, if they are not as their names are in `ONE`; None: not certain."""
    rewrites: tuple[int, ...] = ()

    def insert(self, *values: Any, version: int = 1) -> None:
        self._add("I", None, values, version)

    def update(self, key: str, *values: Any, version: int = 1, enters: bool = False) -> None:
        self._add("U", key, values, version, is_entry=enters)

    def delete(self, key: str) -> None:
        self._add("D", key, None, 1)

    def truncate(self) -> None:
        self.truncated[int(LEAF)] = (len(self.rows), 0)

    def resolved_rows(self) -> list[tuple[list[str | None], str, list[int], list[str] | None, int]]:
        """Of each entry: values, kinds, what is missing at which key, how many are lost."""
        leaf = TrackedLeaf.from_versions(self.versions, self.columns(), self.wanted)
        leaf = dataclasses.replace(leaf, rewrites=self.rewrites)
        assert leaf.key
        types = {
            name: pa.list_(pa.string()) if name in {"old", "new", "key_before", "key_after"} else None
            for name in TRACKED
        }
        columns = {name: pa.array([row[name] for row in self.rows], types[name]) for name in TRACKED}
        batch = pa.RecordBatch.from_pydict(columns)
        batches = list(track([batch.slice(0, 1), batch.slice(1)], {int(LEAF): leaf}, self.truncated))
        assert all(batch.schema == RESOLVED_SCHEMA for batch in batches)
        return [
            (row["new"], row["new_kinds"], row["missing"], row["key"], row["lost"])
            for batch in batches
            for row in batch.to_pylist()
        ]

    def columns(self) -> dict[tuple[int, int], tuple[TupleColumn | None, ...]]:
        return {
            (version.version, 0): tuple(
                None if attnum is None else TupleColumn(attnum, column.type_oid, column.typmod)
                for attnum, column in zip(self._attnums(version), version.columns, strict=True)
            )
            for version in self.versions
        }

    def _attnums(self, version: Relation) -> tuple[int | None, ...]:
        attnums = {name: attnum for attnum, name in enumerate(ONE.column_names, start=1)}
        return self.attnums.get(version.version) or tuple(attnums[name] for name in version.column_names)

    def _add(
        self, kind: str, key: str | None, values: tuple[Any, ...] | None, version: int, is_entry: bool = False
    ) -> None:
        position = len(self.rows)
        shape = next(
            version_relation for version_relation in self.versions if version_relation.version == version
        )
        row = dict.fromkeys(TRACKED)
        row |= {"commit_lsn": position, "seq": 0, "lineage": 1, "kind": kind, "is_entry": is_entry}
        row |= {"relation_id": int(LEAF), "relation_version": version, "catalog_version": 0}
        row["key_before"] = key and [key]
        if values is not None:
            row["new"] = [None if value is ... else value for value in values]
            row["new_kinds"] = "".join(
                "u" if value is ... else "n" if value is None else "t" for value in values
            )
            row["key_after"] = [values[shape.column_names.index("id")]]
        self.rows.append(row)


def test_earlier_change_of_the_row_has_the_value_under_any_key() -> None:
    stream = Stream()
    stream.insert("1", "x", "n")
    stream.update("1", "2", ..., None)
    stream.update("2", "20", ..., None, enters=True)
    assert stream.resolved_rows() == [(["20", "x", None], "ttn", [], None, 0)]


def test_older_row_is_read_under_its_last_key() -> None:
    stream = Stream()
    stream.update("1", "20", ..., "n", enters=True)
    stream.update("20", "30", ..., "m")
    assert stream.resolved_rows() == [(["20", None, "n"], "tut", [1], ["30"], 0)]


def test_value_that_is_sent_later_is_lost_and_others_are_not() -> None:
    stream = Stream()
    stream.update("1", "20", ..., ..., enters=True)
    stream.update("20", "20", "y", ...)
    assert stream.resolved_rows() == [(["20", None, None], "txu", [2], ["20"], 1)]


def test_renamed_column_is_the_same() -> None:
    """R9.10: a value sent as `body` before the columns exchanged their names is in `note` now."""
    exchanged = relation(2, "id", "note", "body")
    stream = Stream(versions=(ONE, exchanged), attnums={2: (1, 2, 3)})
    stream.insert("1", "x", "n")
    stream.update("1", "20", ..., ..., version=2, enters=True)
    assert stream.resolved_rows() == [(["20", "x", "n"], "ttt", [], None, 0)]


def test_new_column_with_an_old_name_is_another_one() -> None:
    stream = Stream(versions=(ONE, relation(2, "id", "note", "body")), attnums={2: (1, 3, 4)})
    stream.insert("1", "x", "n")
    stream.update("1", "20", ..., ..., version=2, enters=True)
    assert stream.resolved_rows() == [(["20", "n", None], "ttu", [2], ["20"], 0)]


def test_ambiguous_column_loses_all_values_of_the_row() -> None:
    """A catalog that was read later does not tell under which name a column was sent."""
    stream = Stream(versions=(ONE, relation(2, "id", "body", "note")), attnums={2: (1, None, 3)})
    stream.insert("1", "x", "n")
    stream.update("1", "1", "y", ..., version=2)
    stream.update("1", "20", ..., "m", enters=True)
    stream.update("20", "20", "z", ..., version=2)
    stream.update("20", "20", ..., ..., version=2, enters=True)
    assert [(kinds, missing, lost) for _, kinds, missing, _, lost in stream.resolved_rows()] == [
        ("tut", [], 1),
        ("tuu", [2], 1),
    ]


def test_deleted_row_is_not_the_next_one_with_its_key() -> None:
    for ending in ("delete", "nothing"):
        stream = Stream()
        stream.update("1", "20", ..., "n", enters=True)
        if ending == "delete":
            stream.delete("20")
        stream.insert("20", "other", "n")
        assert stream.resolved_rows() == [(["20", None, "n"], "txt", [], None, 1)], ending


def test_earlier_row_with_the_same_key_proves_nothing() -> None:
    stream = Stream()
    stream.insert("1", "x", "n")
    stream.delete("1")
    stream.update("1", "20", ..., "n", enters=True)  # its INSERT is not in the history
    assert stream.resolved_rows() == [(["20", None, "n"], "tut", [1], ["20"], 0)]


def test_rows_may_exchange_their_keys() -> None:
    stream = Stream()
    stream.insert("1", "x", "n")
    stream.insert("2", "y", "n")
    stream.update("1", "3", ..., "n")
    stream.update("2", "1", ..., "n")
    stream.update("3", "2", ..., "n")
    stream.update("1", "21", ..., "n", enters=True)
    stream.update("2", "22", ..., "n", enters=True)
    assert [values for values, *_ in stream.resolved_rows()] == [["21", "y", "n"], ["22", "x", "n"]]


def test_row_may_enter_more_than_once() -> None:
    stream = Stream()
    stream.update("1", "20", ..., "n", enters=True)
    stream.update("20", "1", ..., "n")
    stream.update("1", "21", ..., "n", enters=True)
    stream.update("21", "21", "x", "n")
    stream.update("21", "1", ..., "n")
    stream.update("1", "22", ..., "n", enters=True)
    assert [(kinds, missing, lost) for _, kinds, missing, _, lost in stream.resolved_rows()] == [
        ("txt", [], 1),
        ("txt", [], 1),
        ("ttt", [], 0),
    ]


def test_truncate_removes_earlier_rows() -> None:
    stream = Stream()
    stream.update("1", "20", ..., "n", enters=True)
    stream.truncate()
    assert stream.resolved_rows() == [(["20", None, "n"], "txt", [], None, 1)]


def test_known_values_end_at_a_table_rewrite() -> None:
    """R11.9: keys and values may be others then. Earlier values serve for earlier entries."""
    stream = Stream(rewrites=(3,))
    stream.insert("1", "x", "n")
    stream.update("1", "20", ..., ..., enters=True)
    stream.update("2", "22", ..., "n", enters=True)
    stream.insert("9", "this transaction", "rewrites the table")
    stream.update("20", "1", ..., ...)
    stream.update("1", "20", ..., ..., enters=True)
    assert stream.resolved_rows() == [
        (["20", "x", "n"], "ttt", [], None, 0),
        (["22", None, "n"], "txt", [], None, 1),
        (["20", None, None], "tuu", [1, 2], ["20"], 0),
    ]


def test_value_of_another_type_proves_nothing() -> None:
    """R9.10: the column was altered between the two versions."""
    stream = Stream(versions=(ONE, relation(2, "note", "id", "body", type_oid=17)))
    stream.insert("1", "x", "n")
    stream.update("1", "n", "20", ..., version=2, enters=True)
    assert stream.resolved_rows() == [(["n", "20", None], "ttu", [2], ["20"], 0)]


def test_columns_are_the_same_at_any_position() -> None:
    stream = Stream(versions=(ONE, relation(2, "note", "id", "body")))
    stream.insert("1", "x", "n")
    stream.update("1", "n", "20", ..., version=2, enters=True)
    assert stream.resolved_rows() == [(["n", "20", "x"], "ttt", [], None, 0)]


def test_columns_outside_the_subscription_are_not_looked_up() -> None:
    stream = Stream(wanted=frozenset({"id", "note"}))
    stream.update("1", "20", ..., ..., enters=True)
    assert stream.resolved_rows() == [(["20", None, None], "tuu", [2], ["20"], 0)]


def test_leaf_is_tracked_under_one_key_only() -> None:
    """R1.6, R9.10: under another identity old tuples have other columns; its name may change."""

    def key(*versions: Relation, attnums: dict[int, tuple[int | None, ...]] | None = None) -> tuple[int, ...]:
        stream = Stream(versions=versions, attnums=attnums or {})
        return TrackedLeaf.from_versions(versions, stream.columns(), frozenset()).key

    other = relation(2, "id", "body", "note", key="note")
    assert key(ONE) == (1,)
    assert key(ONE, other) == ()
    assert key(relation(3, "id", key="none")) == ()
    assert key(ONE, relation(4, "n", "body", "note", key="n"), attnums={4: (1, 2, 3)}) == (1,)
    assert key(ONE, relation(4, "n", "body", "note", key="n"), attnums={4: (None, 2, 3)}) == ()


def table(*columns: tuple[int, str]) -> Table:
    found = tuple(TableColumn(attnum, name, 25, -1, "text", None) for attnum, name in columns)
    name = QualifiedName("public", "t")
    return Table(LEAF, name, False, None, ReplicaIdentity.DEFAULT, ("id",), ("id",), found)


def test_tuple_columns_are_in_order_of_attribute_number() -> None:
    """R9.10: a catalog that does not fit was read later than the tuple was in force."""
    columns = (TupleColumn(1, 25, -1), TupleColumn(2, 25, -1), TupleColumn(4, 25, -1))
    assert tuple_columns(ONE, table((1, "id"), (2, "body"), (4, "note"))) == columns
    assert tuple_columns(ONE, table((1, "id"), (3, "note"), (4, "body"))) == (None,) * 3
    assert tuple_columns(ONE, table((1, "id"), (2, "content"), (4, "note"))) == (columns[0], None, columns[2])
    assert tuple_columns(ONE, None) == (None,) * 3
    uncertain = tuple_columns(ONE, table((1, "id"), (2, "body"), (4, "note")), frozenset({"body"}))
    assert uncertain == (columns[0], None, columns[2])
