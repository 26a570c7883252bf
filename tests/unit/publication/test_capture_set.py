"""The capture publications contain what the subscribed ones publish, and nothing more."""

from __future__ import annotations

from cdc_replay.model.publication import Publication, PublishAction
from cdc_replay.model.relation import QualifiedName
from cdc_replay.publication.capture_set import (
    ROOT_DEPTHS,
    CaptureMembers,
    capture_set,
    root_set,
    roots_too_deep,
)
from fixtures.catalogs import catalog, listed, publication, table

TABLES = (
    table(1, "a.root", is_partitioned=True),
    table(2, "b.leaf", parent=1),
    table(3, "a.plain"),
    table(4, "c.other"),
)
ROOT, LEAF, PLAIN = QualifiedName("a", "root"), QualifiedName("b", "leaf"), QualifiedName("a", "plain")
NOTHING = CaptureMembers(all_tables=False, schemas=frozenset(), tables=())


def captured(*publications: Publication, names: list[str] | None = None) -> dict[str, CaptureMembers]:
    wanted = [publication.name for publication in publications] if names is None else names
    members = capture_set(catalog(*TABLES, publications=publications), wanted)
    return {action.value: members[action] for action in PublishAction}


def tables(*names: QualifiedName) -> CaptureMembers:
    return CaptureMembers(all_tables=False, schemas=frozenset(), tables=names)


def test_table_is_a_member_for_the_published_actions_only() -> None:
    """R2.17: a table without replica identity that is published insert-only stays writable."""
    members = captured(
        publication("p", listed(3), publish="insert"), publication("q", listed(2), publish="insert, delete")
    )

    assert members == {
        "insert": tables(PLAIN, LEAF),
        "update": NOTHING,
        "delete": tables(LEAF),
        "truncate": NOTHING,
    }


def test_partitioned_table_is_captured_as_itself() -> None:
    """R2.3: it covers its leaves, those attached later too."""
    members = captured(publication("p", listed(1, "a > 1"), via_root=True, publish="update"))

    assert members["update"] == tables(ROOT)


def test_tables_published_for_updates_are_captured_for_inserts_too() -> None:
    """R4.6: a row with a reused key is distinguished from the old one; INSERT needs no identity (R2.17)."""
    members = captured(publication("p", listed(3), publish="update"))

    assert members == {
        "insert": tables(PLAIN),
        "update": tables(PLAIN),
        "delete": NOTHING,
        "truncate": NOTHING,
    }


def test_schemas_and_all_tables_are_captured_as_such() -> None:
    members = captured(
        publication("p", listed(3), schemas=["b", "c"], publish="insert, update"),
        publication("q", all_tables=True, publish="insert"),
    )

    assert members["insert"] == CaptureMembers(all_tables=True, schemas=frozenset(), tables=())
    assert members["update"] == CaptureMembers(
        all_tables=False, schemas=frozenset({"b", "c"}), tables=(PLAIN,)
    )


def test_only_the_subscribed_publications_count() -> None:
    members = captured(
        publication("p", listed(3)), publication("q", all_tables=True), names=["p", "p", "does_not_exist"]
    )

    assert members["insert"] == tables(PLAIN)


# 11 above 12 above 13, all in schema d but 12, which is in e; 14 is a leaf. 21 is alone in f.
DEEP = (
    table(11, "d.top", is_partitioned=True),
    table(12, "e.middle", is_partitioned=True, parent=11),
    table(13, "d.low", is_partitioned=True, parent=12),
    table(14, "d.leaf", parent=13),
    table(21, "f.root", is_partitioned=True),
    table(22, "f.plain"),
)
TOP, MIDDLE, LOW = (QualifiedName("d", "top"), QualifiedName("e", "middle"), QualifiedName("d", "low"))
OTHER = QualifiedName("f", "root")


def roots(*publications: Publication) -> list[CaptureMembers]:
    names = [publication.name for publication in publications]
    members = root_set(catalog(*DEEP, publications=publications), names)
    assert len(members) == ROOT_DEPTHS
    return list(members)


def at_depths(*names: tuple[QualifiedName, ...]) -> list[CaptureMembers]:
    return [tables(*oids) for oids in (*names, *[()] * (ROOT_DEPTHS - len(names)))]


def test_published_roots_are_in_the_root_publication_of_their_depth() -> None:
    """R2.4, R2.14: a partitioned table below another one of the same publication is published as that one."""
    assert roots(
        publication("p", listed(11), listed(12), listed(21), listed(22), via_root=True)
    ) == at_depths((TOP, OTHER))
    both = (
        publication("p", listed(11), via_root=True),
        publication("q", listed(13), listed(14), via_root=True),
    )
    assert roots(*both) == at_depths((TOP,), (), (LOW,))


def test_table_not_published_via_root_or_for_truncate_is_no_published_root() -> None:
    """R2.10, R2.11: publications that are not via root publish no TRUNCATE of a partitioned table."""
    without = publication("p", listed(11), via_root=True, publish="insert, update, delete")
    assert roots(without) == at_depths()
    assert roots(without, publication("q", all_tables=True)) == at_depths()
    # R2.7: but another one via root does, also for what is below it.
    assert roots(without, publication("q", listed(11), via_root=True)) == at_depths((TOP,))
    low = publication("r", listed(13), via_root=True, publish="insert")
    assert roots(low, publication("q", listed(12), via_root=True)) == at_depths((), (MIDDLE,), (LOW,))


def test_all_tables_and_schemas_via_root_include_future_roots() -> None:
    """R2.2: the own schema counts; e.middle is the topmost table of schema e."""
    everything = publication("p", all_tables=True, via_root=True)
    low = publication("q", listed(13), via_root=True)
    all_tables = CaptureMembers(all_tables=True, schemas=frozenset(), tables=())
    assert roots(everything, low) == [all_tables, *at_depths((), (), (LOW,))[1:]]
    in_schemas = publication("p", schemas=["e", "f"], via_root=True)
    top = publication("q", listed(11), via_root=True)
    first = CaptureMembers(all_tables=False, schemas=frozenset({"e", "f"}), tables=(TOP,))
    assert roots(in_schemas, top) == [first, *at_depths((), (MIDDLE,))[1:]]


def test_too_deep_published_roots_are_named() -> None:
    chain = [
        table(number, f"s.t{number}", is_partitioned=True, parent=number - 1 if number > 31 else None)
        for number in range(31, 31 + ROOT_DEPTHS + 1)
    ]
    last = chain[-1]
    publications = [
        publication("p", listed(last.id), via_root=True),
        publication("q", listed(31), via_root=True),
    ]
    members = catalog(*chain, publications=publications)
    assert roots_too_deep(members, ["p", "q"]) == (last.name,)
    assert roots_too_deep(members, ["q"]) == ()
