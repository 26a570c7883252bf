"""The capture publications hold what the subscribed ones publish, and nothing more."""

from __future__ import annotations

from cdc_replay.model.publication import Publication, PublishAction
from cdc_replay.model.relation import QualifiedName
from cdc_replay.publication.capture_set import CaptureMembers, capture_set
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


def test_a_table_is_a_member_for_the_published_actions_only() -> None:
    """R2.17: a table without replica identity that is published insert-only stays writable."""
    found = captured(
        publication("p", listed(3), publish="insert"), publication("q", listed(2), publish="insert, delete")
    )

    assert found == {
        "insert": tables(PLAIN, LEAF),
        "update": NOTHING,
        "delete": tables(LEAF),
        "truncate": NOTHING,
    }


def test_a_partitioned_table_is_captured_as_itself() -> None:
    """R2.3: it covers its leaves, those attached later too."""
    found = captured(publication("p", listed(1, "a > 1"), via_root=True, publish="update"))

    assert found["update"] == tables(ROOT)


def test_schemas_and_all_tables_are_captured_as_such() -> None:
    found = captured(
        publication("p", listed(3), schemas=["b", "c"], publish="insert, update"),
        publication("q", all_tables=True, publish="insert"),
    )

    assert found["insert"] == CaptureMembers(all_tables=True, schemas=frozenset(), tables=())
    assert found["update"] == CaptureMembers(all_tables=False, schemas=frozenset({"b", "c"}), tables=(PLAIN,))


def test_only_the_subscribed_publications_count() -> None:
    found = captured(
        publication("p", listed(3)), publication("q", all_tables=True), names=["p", "p", "does_not_exist"]
    )

    assert found["insert"] == tables(PLAIN)
