"""Changes as the subscriber must see them: filters, the UPDATE transformation, mapping, origins, TRUNCATE.

One publisher serves all tests:

| table | key     | published as                                        | filter |
|-------|---------|-----------------------------------------------------|--------|
| s.t1  | id      | itself                                              | id > 10|
| s.t2  | (full)  | itself                                              | a > 10 |
| s.t3  | id      | itself, updates only                                | id > 10|
| s.t4  | id      | itself, inserts only                                |        |
| s.t5  | id      | root of s.t6, via root, with column list (id, a, b) | a > 10 |
| s.t6  | id a    | s.t5; its columns are in another order              |        |
| s.t7  | id      | itself, column b read by nobody, not in the list    |        |
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName, ReplicaIdentity
from cdc_replay.model.subscription import OriginPolicy
from cdc_replay.replay.route.filter_evaluation import FilterEvaluator
from cdc_replay.replay.route.group_router import GroupRouter
from cdc_replay.replay.route.route_index import DecodedChanges, RouteIndex
from cdc_replay.replay.route.routes import Routes, Target, VersionedRelation, plan_routes
from fixtures.catalogs import catalog, listed, publication, table
from unit.replay.route.changes import UNSENT, Changes, by_seq, filtered, greater, relation

if TYPE_CHECKING:
    import pyarrow as pa

FULL = ReplicaIdentity.FULL
T1, T3, T4 = table(1, "s.t1"), table(3, "s.t3"), table(4, "s.t4")
T2 = dataclasses.replace(table(2, "s.t2"), replica_identity=FULL, key_columns=())
T5 = table(5, "s.t5", "id a b c", is_partitioned=True)
T6 = table(6, "s.t6", "c b a id", parent=5)
T7 = table(7, "s.t7")
PUBLICATIONS = [
    publication("all", filtered(T1, greater(T1, "id", 10)), filtered(T2, greater(T2, "a", 10))),
    publication("updates", filtered(T3, greater(T3, "id", 10)), publish="update"),
    publication("inserts", listed(4), publish="insert"),
    publication("root", filtered(T5, greater(T5, "a", 10), "id a b"), via_root=True),
    publication("narrow", listed(7, columns="id a")),
]
CATALOG = catalog(T1, T2, T3, T4, T5, T6, T7, publications=PUBLICATIONS)
R1, R3, R4, R7 = (relation(oid, "id a b") for oid in (1, 3, 4, 7))
R2 = relation(2, "id a b", identity=FULL)
R5 = relation(5, "id a b c")
"""The root: of it the log holds TRUNCATEs only."""
R6_OLD = relation(6, "c a id", key="id a", version=60)
"""The leaf before column b was added."""
R6 = relation(6, "c b a id", key="id a", version=61)
Expected = dict[int, tuple[object, ...]]
ROW_FORM = ("kind", "transformed", "search_key", "new_key", "values", "kinds")


def planned(**keys: str) -> Routes:
    identities = {f"t{oid}": "id" for oid in (1, 2, 3, 4, 5, 7)} | keys
    targets = {
        QualifiedName("s", name): Target(tuple(key.split()), Lsn(100)) for name, key in identities.items()
    }
    names = [published.name for published in PUBLICATIONS]
    return plan_routes(
        [VersionedRelation(each, 0, CATALOG) for each in (R1, R2, R3, R4, R5, R6_OLD, R6, R7)], names, targets
    )


def routed(
    changes: Changes, routes: Routes | None = None, origin: OriginPolicy = OriginPolicy.ANY
) -> tuple[pa.RecordBatch, Counter[str]]:
    """What the subscriber must see (ROUTED), and the counts."""
    routes = routes or planned()
    index = RouteIndex.from_routes(routes.routes)
    router = GroupRouter.from_routes(routes, origin, index)
    # Every filter here is one that Arrow answers: no server is asked.
    return router.route(DecodedChanges.from_batch(changes.batch(), index), None)


def seen(changes: Changes, **arguments: Any) -> dict[int, tuple[object, ...]]:
    """What the subscriber must see, by `seq`."""
    rows, _ = routed(changes, **arguments)
    return by_seq(rows.to_pylist(), *ROW_FORM)


def key(value: str) -> list[str | None]:
    """A K tuple: the key only (R1.5)."""
    return [value, None, None]


def test_update_becomes_what_its_old_and_new_rows_say() -> None:
    """R4.2-R4.4, R4.7: the filter is id > 10, and id is the key: 5 and 6 do not pass, 20 and 30 do."""
    changes, expected = Changes(), Expected()
    changes.update(R1, ["6", "1", "x"], old=key("5"))
    seq = changes.update(R1, ["20", "1", "x"], old=key("5"))
    expected[seq] = ("I", True, None, ["20"], ["20", "1", "x"], "ttt")
    seq = changes.update(R1, ["5", "1", "x"], old=key("20"))
    expected[seq] = ("D", True, ["20"], None, None, None)
    seq = changes.update(R1, ["30", "1", "x"], old=key("20"))
    expected[seq] = ("U", False, ["20"], ["30"], ["30", "1", "x"], "ttt")
    # R4.3: without an old tuple the new row answers for both.
    changes.update(R1, ["5", "2", "x"])
    seq = changes.update(R1, ["20", None, UNSENT])
    expected[seq] = ("U", False, ["20"], ["20"], ["20", None, None], "tnu")

    rows, counts = routed(changes)
    assert by_seq(rows.to_pylist(), *ROW_FORM) == expected
    assert counts == {"filtered_out": 2, "updates_to_insert": 1, "updates_to_delete": 1}


def test_unsent_value_comes_from_the_old_row_if_it_has_one() -> None:
    """R4.4, R4.6, R1.6; s.t2 has REPLICA IDENTITY FULL and the filter a > 10."""
    changes, expected = Changes(), Expected()
    seq = changes.update(R2, ["1", "20", UNSENT], old=["1", "1", "big"])
    expected[seq] = ("I", True, None, ["1"], ["1", "20", "big"], "ttt")
    # What stays an UPDATE goes out as it was sent.
    seq = changes.update(R2, ["1", "30", UNSENT], old=["1", "20", "big"])
    expected[seq] = ("U", False, ["1"], ["1"], ["1", "30", None], "ttu")
    # R4.6: a key says nothing of the other columns, so the value stays unsent.
    seq = changes.update(R1, ["20", "1", UNSENT], old=key("5"))
    expected[seq] = ("I", True, None, ["20"], ["20", "1", None], "ttu")
    # R1.6: a key that is stored out of line is in the old tuple always, and unsent in the new row.
    seq = changes.update(R1, [UNSENT, "2", "x"], old=key("20"))
    expected[seq] = ("U", False, ["20"], ["20"], [None, "2", "x"], "utt")

    assert seen(changes) == expected


def test_row_for_which_the_filter_is_null_does_not_pass() -> None:
    """R3.1, on both sides of an UPDATE."""
    changes, expected = Changes(), Expected()
    seq = changes.update(R2, ["1", "20", None], old=["1", None, None])
    expected[seq] = ("I", True, None, ["1"], ["1", "20", None], "ttn")
    seq = changes.update(R2, ["1", None, None], old=["1", "20", None])
    expected[seq] = ("D", True, ["1"], None, None, None)
    changes.update(R2, ["1", None, None], old=["1", None, "x"])

    assert seen(changes) == expected


def test_update_is_sent_if_updates_are_published_whatever_it_becomes() -> None:
    """R4.1: s.t3 is published with publish = 'update', s.t4 with publish = 'insert'."""
    changes, expected = Changes(), Expected()
    seq = changes.update(R3, ["20", "1", "x"], old=key("2"))
    expected[seq] = ("I", True, None, ["20"], ["20", "1", "x"], "ttt")
    seq = changes.update(R3, ["3", "1", "x"], old=key("21"))
    expected[seq] = ("D", True, ["21"], None, None, None)
    changes.insert(R3, ["40", "1", "x"])
    changes.delete(R3, key("40"))
    changes.update(R4, ["20", "1", "x"])

    assert seen(changes) == expected


def test_inserts_and_deletes_are_filtered_and_mapped() -> None:
    """R3.9, R3.10, R2.12, R6.3: the filter reads the published relation's columns, whatever their order."""
    changes, expected = Changes(), Expected()
    seq = changes.insert(R1, ["11", None, "x"])
    expected[seq] = ("I", False, None, ["11"], ["11", None, "x"], "tnt")
    changes.insert(R1, ["10", None, "x"])
    seq = changes.delete(R1, ["11", None, None])
    expected[seq] = ("D", False, ["11"], None, None, None)
    changes.delete(R1, ["10", None, None])
    changes.delete(R1, None)
    # The leaf's (c, b, a, id) are the root's (id, a, b): a is 20, then 10.
    columns = next(target.columns for target in planned().tables if target.name.name == "t5")

    def by_name(**values: str | None) -> list[str | None]:
        return [values[name] for name in columns]

    seq = changes.insert(R6, ["c", "b", "20", "1"])
    expected[seq] = ("I", False, None, ["1"], by_name(id="1", a="20", b="b"), "ttt")
    changes.insert(R6, ["c", "b", "10", "1"])
    seq = changes.delete(R6, [None, None, "20", "1"])
    expected[seq] = ("D", False, ["1"], None, None, None)
    # A version of the leaf that has no column b: `-`, which is neither NULL nor unsent.
    seq = changes.insert(R6_OLD, ["c", "20", "2"])
    kinds = "".join(filter(None, by_name(id="t", a="t", b="-")))
    expected[seq] = ("I", False, None, ["2"], by_name(id="2", a="20", b=None), kinds)
    # A column that is not in the list is not sent.
    seq = changes.insert(R7, ["1", "2", "3"])
    expected[seq] = ("I", False, None, ["1"], ["1", "2"], "tt")

    assert seen(changes) == expected


def test_applied_and_unrouted_changes_are_skipped() -> None:
    """R7.9: a change at or before the target's applied LSN (100) is in its copy already."""
    changes = Changes()
    changes.insert(R4, ["1", None, None], commit_lsn=100)
    after = changes.insert(R4, ["2", None, None], commit_lsn=101)
    changes.insert(R4, ["3", None, None], catalog_version=99)
    changes.insert(relation(9, "id"), ["4"])

    assert seen(changes).keys() == {after}


def test_truncate_reaches_a_relation_that_is_its_own_published_relation() -> None:
    """R2.13, R3.12: filters do not matter; s.t3 and s.t4 are published for other actions, s.t6 as s.t5."""
    changes = Changes()
    expected = [changes.truncate(each) for each in (R1, R2, R5, R7)]
    for each in (R3, R4, R6, relation(9, "id")):
        changes.truncate(each)

    assert seen(changes) == dict.fromkeys(expected, ("T", False, None, None, None, None))


def test_change_with_an_origin_is_skipped_under_origin_none() -> None:
    """R8.19: its transaction's, or its own, whose name is not known (R8.20)."""
    changes = Changes()
    local = changes.insert(R4, ["1", None, None])
    remote = [changes.insert(R4, ["2", None, None], origin=origin) for origin in ("other", "")]
    remote.append(changes.truncate(R1, origin=""))

    assert seen(changes, origin=OriginPolicy.NONE).keys() == {local}
    assert seen(changes, origin=OriginPolicy.ANY).keys() == {local, *remote}


def test_only_changes_that_must_find_a_row_are_refused() -> None:
    """R8.6, R8.7: the publisher sends the key (id), the target's key is (id, a): inserts do not mind."""
    routes = planned(t1="id a")
    changes = Changes()
    inserted = changes.insert(R1, ["20", "1", "x"])
    changes.update(R1, ["5", "1", "x"])  # does not pass: it finds no row, so none has to be found
    assert seen(changes, routes=routes).keys() == {inserted}

    changes.update(R1, ["20", "2", "x"])
    with pytest.raises(
        SubscriberNotReady, match=r'did not send replica identity column "a" of table "s\.t1"'
    ):
        seen(changes, routes=routes)


def test_update_without_an_old_row_is_not_refused_where_the_root_has_the_key_of_the_target() -> None:
    """R1.7, R8.3, R8.7: one leaf sends id of an old row, the other a; root and target have id."""
    root, leaves = (
        table(5, "s.t5", is_partitioned=True),
        [table(oid, f"s.t{oid}", parent=5) for oid in (8, 9)],
    )
    published = catalog(root, *leaves, publications=[publication("p", listed(5), via_root=True)])
    by_id, by_a = relation(8, "id a b"), relation(9, "id a b", key="a")
    versions = [VersionedRelation(each, 0, published) for each in (by_id, by_a)]
    routes = plan_routes(versions, ["p"], {QualifiedName("s", "t5"): Target(("id",), Lsn(100))})
    changes, expected = Changes(), Expected()
    seq = changes.update(by_id, ["2", "1", "x"], old=key("1"))
    expected[seq] = ("U", False, ["1"], ["2"], ["2", "1", "x"], "ttt")
    seq = changes.update(by_a, ["20", "1", "x"])
    expected[seq] = ("U", False, ["20"], ["20"], ["20", "1", "x"], "ttt")
    assert seen(changes, routes=routes) == expected

    changes.update(by_a, ["20", "2", "x"], old=[None, "1", None])
    with pytest.raises(SubscriberNotReady, match='did not send replica identity column "id"'):
        seen(changes, routes=routes)


def test_partitions_with_equal_columns_share_one_compiled_filter() -> None:
    """A hundred partitions cost one filter per column order, not a hundred."""
    root = table(5, "s.t5", is_partitioned=True)
    leaves = [table(oid, f"s.t{oid}", "id a b" if oid % 2 else "b a id", parent=5) for oid in range(100, 200)]
    published = publication("root", filtered(root, greater(root, "a", 10)), via_root=True)
    versions = [
        VersionedRelation(
            relation(leaf.id, "id a b" if leaf.id % 2 else "b a id"),
            0,
            catalog(root, *leaves, publications=[published]),
        )
        for leaf in leaves
    ]
    target = Target(("id",), Lsn(100))
    routes = plan_routes(versions, ["root"], {QualifiedName("s", "t5"): target}).routes

    evaluator = FilterEvaluator.from_routes(routes)

    assert len(routes) == 100
    assert (len(evaluator.arrow_checks), evaluator.server_checks) == (2, ())
