"""Rows followed through the changes of a leaf: what is known of an entry, and what has to be asked for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from cdc_replay.fill.follow import FOLLOWED, follow
from cdc_replay.fill.leaves import FOUND_SCHEMA, FollowedLeaf
from cdc_replay.model.relation import QualifiedName, Relation, RelationColumn, RelationId, ReplicaIdentity

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
    renamed: frozenset[str] = frozenset()

    def insert(self, *values: Any, version: int = 1) -> None:
        self._add("I", None, values, version)

    def update(self, key: str, *values: Any, version: int = 1, enters: bool = False) -> None:
        self._add("U", key, values, version, is_entry=enters)

    def delete(self, key: str) -> None:
        self._add("D", key, None, 1)

    def truncate(self) -> None:
        self.truncated[int(LEAF)] = (len(self.rows), 0)

    def found(self) -> list[tuple[list[str | None], str, list[int], list[str] | None, int]]:
        """Of each entry: values, kinds, what is missing at which key, how many are lost."""
        leaf = FollowedLeaf.of(self.versions, self.wanted)
        assert leaf is not None
        leaf = dataclasses.replace(leaf, renamed=self.renamed)
        types = {
            name: pa.list_(pa.string()) if name in {"old", "new", "key_before", "key_after"} else None
            for name in FOLLOWED
        }
        columns = {name: pa.array([row[name] for row in self.rows], types[name]) for name in FOLLOWED}
        batch = pa.RecordBatch.from_pydict(columns)
        batches = list(follow([batch.slice(0, 1), batch.slice(1)], {int(LEAF): leaf}, self.truncated))
        assert all(each.schema == FOUND_SCHEMA for each in batches)
        return [
            (row["new"], row["new_kinds"], row["missing"], row["key"], row["lost"])
            for each in batches
            for row in each.to_pylist()
        ]

    def _add(
        self, kind: str, key: str | None, values: tuple[Any, ...] | None, version: int, is_entry: bool = False
    ) -> None:
        position = len(self.rows)
        shape = next(each for each in self.versions if each.version == version)
        row = dict.fromkeys(FOLLOWED)
        row |= {"commit_lsn": position, "seq": 0, "lineage": 1, "kind": kind, "is_entry": is_entry}
        row |= {"relation_id": int(LEAF), "relation_version": version, "key_before": key and [key]}
        if values is not None:
            row["new"] = [None if value is ... else value for value in values]
            row["new_kinds"] = "".join(
                "u" if value is ... else "n" if value is None else "t" for value in values
            )
            row["key_after"] = [values[shape.column_names.index("id")]]
        self.rows.append(row)


def test_an_earlier_change_of_the_row_has_the_value_whatever_its_key_was() -> None:
    stream = Stream()
    stream.insert("1", "x", "n")
    stream.update("1", "2", ..., None)
    stream.update("2", "20", ..., None, enters=True)
    assert stream.found() == [(["20", "x", None], "ttn", [], None, 0)]


def test_a_row_of_before_is_asked_for_under_the_key_that_it_has_in_the_end() -> None:
    stream = Stream()
    stream.update("1", "20", ..., "n", enters=True)
    stream.update("20", "30", ..., "m")
    assert stream.found() == [(["20", None, "n"], "tut", [1], ["30"], 0)]


def test_a_value_that_is_sent_later_is_lost_and_another_one_is_not() -> None:
    stream = Stream()
    stream.update("1", "20", ..., ..., enters=True)
    stream.update("20", "20", "y", ...)
    assert stream.found() == [(["20", None, None], "tuu", [2], ["20"], 1)]


def test_a_value_under_a_name_that_was_another_columns_is_lost() -> None:
    """R9.10: what was sent as `body` before the columns exchanged their names is in `note` now."""
    stream = Stream(renamed=frozenset({"body", "note"}))
    stream.insert("1", "x", "n")
    stream.update("1", "20", ..., "m", enters=True)
    assert stream.found() == [(["20", None, "m"], "tut", [], None, 1)]


def test_a_row_that_is_gone_is_not_the_next_one_with_its_key() -> None:
    for gone in ("delete", "nothing"):
        stream = Stream()
        stream.update("1", "20", ..., "n", enters=True)
        if gone == "delete":
            stream.delete("20")
        stream.insert("20", "other", "n")
        assert stream.found() == [(["20", None, "n"], "tut", [], None, 1)], gone


def test_what_an_earlier_row_with_the_key_had_says_nothing() -> None:
    stream = Stream()
    stream.insert("1", "x", "n")
    stream.delete("1")
    stream.update("1", "20", ..., "n", enters=True)  # its INSERT is not in the history
    assert stream.found() == [(["20", None, "n"], "tut", [1], ["20"], 0)]


def test_rows_may_exchange_their_keys() -> None:
    stream = Stream()
    stream.insert("1", "x", "n")
    stream.insert("2", "y", "n")
    stream.update("1", "3", ..., "n")
    stream.update("2", "1", ..., "n")
    stream.update("3", "2", ..., "n")
    stream.update("1", "21", ..., "n", enters=True)
    stream.update("2", "22", ..., "n", enters=True)
    assert [values for values, *_ in stream.found()] == [["21", "y", "n"], ["22", "x", "n"]]


def test_a_row_may_enter_more_than_once() -> None:
    stream = Stream()
    stream.update("1", "20", ..., "n", enters=True)
    stream.update("20", "1", ..., "n")
    stream.update("1", "21", ..., "n", enters=True)
    stream.update("21", "21", "x", "n")
    stream.update("21", "1", ..., "n")
    stream.update("1", "22", ..., "n", enters=True)
    assert [(kinds, missing, lost) for _, kinds, missing, _, lost in stream.found()] == [
        ("tut", [], 1),
        ("tut", [], 1),
        ("ttt", [], 0),
    ]


def test_a_truncate_takes_the_rows_before_it() -> None:
    stream = Stream()
    stream.update("1", "20", ..., "n", enters=True)
    stream.truncate()
    assert stream.found() == [(["20", None, "n"], "tut", [], None, 1)]


def test_a_value_of_another_type_says_nothing() -> None:
    """R9.10: the column was altered between the two versions."""
    stream = Stream(versions=(ONE, relation(2, "note", "id", "body", type_oid=17)))
    stream.insert("1", "x", "n")
    stream.update("1", "n", "20", ..., version=2, enters=True)
    assert stream.found() == [(["n", "20", None], "ttu", [2], ["20"], 0)]


def test_columns_are_the_same_by_name_wherever_they_are() -> None:
    stream = Stream(versions=(ONE, relation(2, "note", "id", "body")))
    stream.insert("1", "x", "n")
    stream.update("1", "n", "20", ..., version=2, enters=True)
    assert stream.found() == [(["n", "20", "x"], "ttt", [], None, 0)]


def test_what_the_subscription_does_not_have_is_not_looked_for() -> None:
    stream = Stream(wanted=frozenset({"id", "note"}))
    stream.update("1", "20", ..., ..., enters=True)
    assert stream.found() == [(["20", None, None], "tuu", [2], ["20"], 0)]


def test_a_leaf_is_followed_under_one_key_only() -> None:
    """R1.6, R9.10: under another identity old tuples have other columns."""
    other = relation(2, "id", "body", "note", key="note")
    assert FollowedLeaf.of([ONE, other], frozenset()) is None
    assert FollowedLeaf.of([relation(3, "id", key="none")], frozenset()) is None
