"""From the message of a DDL command to the catalog after it (R9.10, R9.11)."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest

from cdc_replay.catalog.ddl_change import apply_ddl_change, parse_ddl_change, parse_rewrite
from cdc_replay.catalog.schema import MAX_MESSAGE_BYTES
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import Generated, PublishAction, PublisherCatalog, Table
from cdc_replay.model.relation import QualifiedName, ReplicaIdentity
from fixtures.catalogs import catalog, listed, publication, table

ROOT, LEAF, OTHER_LEAF, PLAIN, UNLOGGED = 1, 2, 3, 4, 5


def known() -> PublisherCatalog:
    """A partition tree, a plain table, and two publications with the oids 91 and 92."""
    p = publication("p", listed(PLAIN, "a > 1", "id a"), listed(ROOT))
    q = publication("q", listed(PLAIN), schemas=["s"])
    return catalog(
        table(ROOT, "s.root", is_partitioned=True),
        table(LEAF, "s.leaf", parent=ROOT),
        table(OTHER_LEAF, "s.other_leaf", parent=ROOT),
        table(PLAIN, "s.plain"),
        dataclasses.replace(table(UNLOGGED, "s.unlogged", parent=ROOT), is_publishable=False),
        publications=[dataclasses.replace(p, oid=91), dataclasses.replace(q, oid=92)],
    )


def message(**content: Any) -> str:
    empty = dict.fromkeys(("tables", "columns", "publications", "memberships"), ())
    touched: dict[str, Any] = {"touched_tables": [], "touched_publications": []}
    return json.dumps({"format": 1, **touched, **empty, **content})


def table_row(oid: int, name: str, parent: int | None = None, kind: str = "r") -> list[Any]:
    return [oid, "s", name, kind == "p", True, parent, "d", [1], [1], 3]


def column_rows(oid: int, names: str = "id a b") -> list[list[Any]]:
    return [
        [oid, number, name, 23, -1, "integer", None, "", None, None]
        for number, name in enumerate(names.split(), start=1)
    ]


def publication_row(oid: int, name: str, publish: str = "iudt", schemas: tuple[str, ...] = ()) -> list[Any]:
    return [oid, name, False, False, *(letter in publish for letter in "iudt"), list(schemas), False]


def after(**content: Any) -> PublisherCatalog:
    return apply_ddl_change(known(), parse_ddl_change(message(**content)))


def tables_after(**content: Any) -> dict[int, Table]:
    return {int(oid): new_table for oid, new_table in after(**content).tables.items()}


def test_message_rows_parse_like_reader_rows() -> None:
    row = [7, "S x", "Größe", False, True, None, "i", [2], [1], 4]
    columns = [
        [7, 1, "id", 23, -1, "integer", None, "", None, None],
        [7, 2, "k", 25, -1, "text", 'pg_catalog."C"', "s", "lower(x)", None],
    ]
    changed = after(touched_tables=[7], tables=[row], columns=columns).tables
    new = changed[next(oid for oid in changed if oid == 7)]

    assert new.name == QualifiedName("S x", "Größe")
    assert (new.replica_identity, new.key_columns, new.primary_key) == (
        ReplicaIdentity.INDEX,
        ("k",),
        ("id",),
    )
    assert (new.dropped_columns, new.is_publishable, new.parent) == (2, True, None)
    column = new.column("k")
    assert (column.generated, column.generation_sql) == (Generated.STORED, "lower(x)")
    assert column.collation_sql == 'pg_catalog."C"'


def test_empty_change_keeps_catalog() -> None:
    assert after() == known()


def test_touched_table_is_replaced_completely() -> None:
    changed = after(
        touched_tables=[PLAIN],
        tables=[table_row(PLAIN, "renamed")],
        columns=column_rows(PLAIN, "id n b"),
        memberships=[[91, PLAIN, "{n > 1}", "n > 1", [1, 2], False]],
    )

    members = changed.publication("p").memberships
    assert str(changed.tables[listed(PLAIN).relation].name) == "s.renamed"
    assert members[listed(PLAIN).relation] == listed(PLAIN, "n > 1", "id n")
    assert members[listed(ROOT).relation] == listed(ROOT)
    # The other publication's membership of the touched table is removed, as it has no row.
    assert not changed.publication("q").memberships


def test_touched_table_without_row_is_removed_with_memberships() -> None:
    changed = after(touched_tables=[PLAIN])

    assert PLAIN not in changed.tables
    assert list(changed.publication("p").memberships) == [ROOT]


def test_child_missing_from_partitions_was_detached() -> None:
    """An unlogged one is known as a partition only (R2.1)."""
    changed = tables_after(
        touched_tables=[ROOT],
        partitions=[LEAF],
        tables=[table_row(ROOT, "root", kind="p")],
        columns=column_rows(ROOT),
    )

    assert changed[LEAF].parent == ROOT
    assert changed[OTHER_LEAF].parent is None
    assert UNLOGGED not in changed


def test_child_of_dropped_table_has_no_parent() -> None:
    assert tables_after(touched_tables=[ROOT])[LEAF].parent is None


def test_attached_table_has_its_parent() -> None:
    changed = tables_after(
        touched_tables=[ROOT, PLAIN],
        partitions=[LEAF, OTHER_LEAF, UNLOGGED],
        tables=[table_row(ROOT, "root", kind="p"), table_row(PLAIN, "plain", parent=ROOT)],
        columns=[*column_rows(ROOT), *column_rows(PLAIN)],
    )

    assert [changed[oid].parent for oid in (LEAF, OTHER_LEAF, PLAIN, UNLOGGED)] == [ROOT] * 4


def test_renamed_publication_keeps_its_memberships() -> None:
    """Its oid identifies it; its lists are reported separately."""
    changed = after(
        touched_publications=[91],
        publications=[publication_row(91, "renamed", "i", schemas=("not its own",))],
        memberships=[[91, LEAF, None, None, [1, 3], False]],
        removed_memberships=[[91, PLAIN], [92, ROOT]],
    )

    assert set(changed.publications) == {"renamed", "q"}
    renamed = changed.publication("renamed")
    assert (renamed.oid, renamed.actions) == (91, frozenset({PublishAction.INSERT}))
    assert not renamed.schemas
    assert renamed.memberships == {
        listed(ROOT).relation: listed(ROOT),
        listed(LEAF).relation: listed(LEAF, None, "id b"),
    }


def test_two_publications_can_exchange_names() -> None:
    changed = after(
        touched_publications=[91, 92],
        publications=[publication_row(91, "q"), publication_row(92, "p")],
    )

    assert {name: published.oid for name, published in changed.publications.items()} == {"p": 92, "q": 91}


def test_touched_publication_without_row_is_removed() -> None:
    assert set(after(touched_publications=[91]).publications) == {"q"}


def test_new_publication_has_its_members_and_schemas() -> None:
    changed = after(
        touched_publications=[93],
        publications=[publication_row(93, "new", schemas=("s",))],
        memberships=[[93, PLAIN, None, None, None, False]],
    )

    new = changed.publication("new")
    assert new.schemas == {"s"}
    assert list(new.memberships) == [PLAIN]


def test_schema_changes_keep_rest_of_publication() -> None:
    changed = after(schemas_of=[92], publications=[publication_row(92, "was this once", "i", schemas=("t",))])

    assert changed.publication("q") == dataclasses.replace(known().publication("q"), schemas=frozenset("t"))
    assert after(removed_schemas=[[92, "s"], [91, "x"]]).publication("q").schemas == frozenset()
    assert after(added_schemas=[[92, "u"], [91, "x"]]).publication("q").schemas == {"s", "u"}


def test_members_of_unknown_publication_are_ignored() -> None:
    """Another transaction has dropped it, and has committed first."""
    changed = after(
        schemas_of=[93],
        publications=[publication_row(93, "gone", schemas=("s",))],
        memberships=[[93, PLAIN, None, None, None, False]],
        removed_memberships=[[93, PLAIN]],
    )

    assert changed == known()


def test_unwritten_column_keeps_its_type_text() -> None:
    """Another transaction may have renamed its type, and have committed first."""
    columns = [
        [*table_column[:5], "was this once", *table_column[6:]]
        for table_column in column_rows(PLAIN, "id a b new")
    ]
    columns[2][3] = 25
    changed = tables_after(
        touched_tables=[PLAIN],
        written_columns=[[PLAIN, 2]],
        tables=[[*table_row(PLAIN, "plain")[:-1], 4]],
        columns=columns,
    )

    assert [column.type_sql for column in changed[PLAIN].columns] == ["integer", *["was this once"] * 3]


def test_described_table_gets_expressions_and_keeps_its_membership() -> None:
    columns = column_rows(PLAIN)
    columns[1][7:] = ["", "the text", "the tree"]
    actual = after(
        described_tables=[PLAIN],
        tables=[table_row(PLAIN, "plain")],
        columns=columns,
        memberships=[[92, PLAIN, "{b}", "b", None, False]],
    )

    column = actual.tables[listed(PLAIN).relation].columns[1]
    assert (column.generation_sql, column.generation_tree) == ("the text", "the tree")
    assert listed(PLAIN).relation in actual.publication("q").memberships


def test_respelled_table_gets_new_schema_and_type_names() -> None:
    """Concurrent changes are kept; only the text of the same filter is replaced."""
    columns = column_rows(PLAIN)
    columns[1][5] = "renamed.type"
    columns[2][1:6] = [3, "b", 25, -1, "another type by then"]
    actual = after(
        respelled_tables=[PLAIN, 777],
        tables=[[PLAIN, "schema", *table_row(PLAIN, "plain")[2:]], table_row(777, "dropped")],
        columns=[*columns, *column_rows(777)],
        memberships=[
            [91, PLAIN, "{a > 1}", "a OPERATOR(s.>) 1", [1], False],
            [92, PLAIN, "{b}", "b", None, False],
        ],
    )

    respelled = actual.tables[listed(PLAIN).relation]
    assert respelled.name == QualifiedName("schema", "plain")
    assert [column.type_sql for column in respelled.columns] == ["integer", "renamed.type", "integer"]
    membership = actual.publication("p").memberships[listed(PLAIN).relation]
    assert membership.row_filter is not None
    assert membership.row_filter.sql == "a OPERATOR(s.>) 1"
    assert membership.columns == frozenset({"id", "a"})
    assert actual.publication("q") == known().publication("q")
    assert actual.tables.keys() == known().tables.keys()


def test_rekeyed_table_gets_new_keys_under_the_names_that_its_columns_have() -> None:
    """Another transaction has meanwhile renamed a column and set the identity of one of the two tables."""
    root, plain = (
        dataclasses.replace(each, key_columns=(), primary_key=())
        for each in (table(ROOT, "s.root", "key a b", is_partitioned=True), table(PLAIN, "s.plain"))
    )
    plain = dataclasses.replace(plain, replica_identity=ReplicaIdentity.FULL)
    before = dataclasses.replace(known(), tables={**known().tables, root.id: root, plain.id: plain})
    change = parse_ddl_change(
        message(
            rekeyed_tables=[ROOT, PLAIN],
            tables=[table_row(ROOT, "root", kind="p"), table_row(PLAIN, "plain")],
            columns=[*column_rows(ROOT), *column_rows(PLAIN)],
        )
    )

    changed = apply_ddl_change(before, change)

    rekeyed = {
        root.id: dataclasses.replace(root, key_columns=("key",), primary_key=("key",)),
        plain.id: dataclasses.replace(plain, primary_key=("id",)),
    }
    assert changed == dataclasses.replace(before, tables={**before.tables, **rekeyed})


def test_full_catalog_removes_other_objects() -> None:
    changed = after(
        whole=True,
        tables=[table_row(PLAIN, "plain")],
        columns=column_rows(PLAIN),
        publications=[publication_row(93, "r", schemas=("s",))],
        memberships=[[93, PLAIN, None, None, None, False]],
    )

    assert list(changed.tables) == [PLAIN]
    assert set(changed.publications) == {"r"}
    assert changed.publication("r").memberships == {listed(PLAIN).relation: listed(PLAIN)}


def test_membership_of_unknown_table_is_skipped() -> None:
    assert after(memberships=[[91, 777, "{a}", "a", [1], False]]) == known()


def test_changes_of_different_objects_commute() -> None:
    """R9.11: two transactions with open DDL do not undo each other."""
    changes = [
        parse_ddl_change(text)
        for text in (
            message(touched_tables=[PLAIN], tables=[table_row(PLAIN, "x")], columns=column_rows(PLAIN)),
            message(touched_tables=[LEAF]),
            message(touched_publications=[91], publications=[publication_row(91, "x")]),
            message(touched_publications=[94], publications=[publication_row(94, "new")]),
            message(memberships=[[92, ROOT, None, None, None, False]], removed_memberships=[[92, PLAIN]]),
            message(removed_schemas=[[92, "s"]]),
        )
    ]

    def applied(order: tuple[int, ...]) -> PublisherCatalog:
        changed = known()
        for number in order:
            changed = apply_ddl_change(changed, changes[number])
        return changed

    results = [applied(order) for order in itertools.permutations(range(6))]
    assert all(state == results[0] for state in results)


def test_change_keeps_position_version_and_previous_catalog() -> None:
    before = dataclasses.replace(known(), lsn=Lsn(5), server_version=150018)

    changed = apply_ddl_change(before, parse_ddl_change(message(touched_tables=[PLAIN])))

    assert (changed.lsn, changed.server_version) == (Lsn(5), 150018)
    assert before == dataclasses.replace(known(), lsn=Lsn(5), server_version=150018)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"7",
        b'{"format": 2}',
        b'{"format": 1}',
        message(tables=[[1, 2]]),
        message(tables=7),
        message(columns=[[]], tables=[table_row(1, "t")]),
        message(touched_tables=["x"]),
        message(touched_publications=None),
        message(respelled_tables=7),
        message(removed_memberships=[[1]]),
        message(removed_schemas=[["x", "y"]]),
        message(publications=[publication_row(1, "p")[:-1]]),
        message(tables=[[*table_row(1, "t")[:6], "?", *table_row(1, "t")[7:]]], columns=column_rows(1)),
        message(tables=[table_row(1, "t")]),
        message(memberships=[[1, 2]]),
        message(
            tables=[table_row(1, "t")], columns=column_rows(1), memberships=[[1, 1, None, None, 7, False]]
        ),
        message(tables=[table_row(1, "t")], columns=column_rows(1, "id a b more")),
        message(tables=[table_row(1, "")], columns=column_rows(1)),
        message(tables=[table_row(1, "t\0")], columns=column_rows(1)),
        message(tables=[table_row(1, "ö" * 32)], columns=column_rows(1)),
        message(tables=[table_row(0, "t")], columns=column_rows(0)),
        message(tables=[table_row(2**32, "t")], columns=column_rows(2**32)),
        message(tables=[table_row(1, "t")], columns=[[1, 0, *column_rows(1)[0][2:]]]),
        message(tables=[table_row(1, "t")], columns=[[1, 1601, *column_rows(1)[0][2:]]]),
        message(tables=[table_row(1, "t")], columns=[[*column_rows(1)[0][:5], "x" * 1001, None, "", None]]),
        message(touched_tables=[True]),
        message(touched_tables=[1.0]),
        message(touched_tables=["1"]),
        message(touched_tables=[float("inf")]),
        message(touched_tables=[float("nan")]),
        message(touched_tables={"1": 1}),
        message(whole="yes"),
        message(whole=1),
        message(added_schemas=[[1, "\ud800"]]),
        message(unknown=[]),
        '{"format": 1, "tables": [], "columns": [], "publications": [], "memberships": [], "x": '
        + "[" * 100_000
        + "]" * 100_000
        + "}",
        b"[" * 100_000,
        b'{"format": 1, "format": true}',
        "\ud800",
        " " * MAX_MESSAGE_BYTES + message(),
    ],
)
def test_invalid_message_is_rejected(content: bytes | str) -> None:
    """Anybody may write a message with our prefix."""
    with pytest.raises(InvalidMessage, match="publisher's event triggers"):
        parse_ddl_change(content)


def test_rewrite_message_names_relations() -> None:
    """R11.9."""
    assert parse_rewrite(b'{"format": 1, "relations": [16385, 4294967295]}') == (16385, 4294967295)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"format": 1}',
        b'{"format": 1, "relations": ["x"]}',
        b'{"format": 1, "relations": [0]}',
        b'{"format": 1, "relations": [true]}',
        b'{"format": 1, "relations": [16385.0]}',
        b'{"format": 1, "relations": [Infinity]}',
        b'{"format": 1, "relations": [1], "more": 1}',
        b'{"format": 1, "relations": ' + b"[" * 100_000,
    ],
)
def test_invalid_rewrite_message_is_rejected(content: bytes) -> None:
    with pytest.raises(InvalidMessage):
        parse_rewrite(content)
