"""Which columns are published, and where PostgreSQL refuses, case by case of section 6."""

from __future__ import annotations

import pytest

from cdc_replay.errors import PublicationRefused
from cdc_replay.model.publication import Publication, Table
from cdc_replay.model.relation import RelationId
from cdc_replay.publication.column_list import published_columns
from cdc_replay.publication.resolve import resolve
from fixtures.catalogs import catalog, listed, publication, table

V15, V17, V18 = 150018, 170011, 180006
PLAIN = table(1, "s.t", "id a b")
STORED = table(1, "s.t", "id a g*")
VIRTUAL = table(1, "s.t", "id a v~")
DROPPED = table(1, "s.t", "id a b", dropped_columns=1)


def p(columns: str | None = None, *, stored: bool = False, publish: str = "insert") -> Publication:
    return publication("p", listed(1, columns=columns), publish_generated=stored, publish=publish)


ALL = publication("all", all_tables=True)
SCHEMA = publication("schema", schemas=["s"])
REFUSED = "refused"

CASES: list[tuple[str, int, Table, list[Publication], str]] = [
    ("R6.3 no list", V18, PLAIN, [p()], "id a b"),
    ("R6.1 a list, in attribute order", V18, PLAIN, [p("b id")], "id b"),
    ("R6.4 equal lists", V18, PLAIN, [p("b id"), p("id b")], "id b"),
    ("R6.4 different lists", V18, PLAIN, [p("id a"), p("id b")], REFUSED),
    ("R6.4 list and no list, on 15", V15, PLAIN, [p("id a"), p()], REFUSED),
    ("R6.4 list and no list", V18, PLAIN, [p("id a"), p()], REFUSED),
    ("R6.4 whatever they publish", V18, PLAIN, [p("id a"), p(publish="delete")], REFUSED),
    ("R6.3 list and all tables", V17, PLAIN, [p("id a"), ALL], REFUSED),
    ("R6.3 list and schema", V17, PLAIN, [p("id a"), SCHEMA], REFUSED),
    ("R6.5 full list and no list", V15, PLAIN, [p("id a b"), ALL], "id a b"),
    ("R6.5 full list and no list", V17, PLAIN, [p("id a b"), SCHEMA], "id a b"),
    ("R6.5 full list and no list", V18, PLAIN, [p("id a b"), ALL], "id a b"),
    ("R6.5 15 counts generated columns", V15, STORED, [p("id a"), ALL], REFUSED),
    ("R6.5 16 does not", V17, STORED, [p("id a"), ALL], "id a"),
    ("R6.5 15 counts dropped columns", V15, DROPPED, [p("id a b"), ALL], REFUSED),
    ("R6.5 16 does not", V17, DROPPED, [p("id a b"), ALL], "id a b"),
    ("R6.5 two full lists are equal anyway", V15, DROPPED, [p("id a b"), p("b a id")], "id a b"),
    ("R6.9 never before 18", V17, STORED, [p()], "id a"),
    ("R6.9 not by default", V18, STORED, [p()], "id a"),
    ("R6.9 on demand", V18, STORED, [p(stored=True)], "id a g"),
    ("R6.9 if listed", V18, STORED, [p("id g")], "id g"),
    ("R6.9 a list beats the setting", V18, STORED, [p("id", stored=True)], "id"),
    ("R6.9 virtual never", V18, VIRTUAL, [p(stored=True)], "id a"),
    ("R6.9 settings must agree", V18, STORED, [p(), p(stored=True)], REFUSED),
    ("R6.9 even where nothing is stored", V18, VIRTUAL, [p(), p(stored=True)], REFUSED),
    ("R6.9 not without generated columns", V18, PLAIN, [p(), p(stored=True)], "id a b"),
    ("R6.9 list equal to the published set", V18, STORED, [p("id a g"), p(stored=True)], "id a g"),
    ("R6.9 list unlike the published set", V18, STORED, [p("id a"), p(stored=True)], REFUSED),
    ("R6.9 list equal without generated", V18, STORED, [p("id a"), p()], "id a"),
]


@pytest.mark.parametrize(
    ("server_version", "relation", "publications", "expected"),
    [case[1:] for case in CASES],
    ids=[f"{case[0]} ({case[1] // 10000})" for case in CASES],
)
def test_publications_must_publish_the_same_columns(
    server_version: int, relation: Table, publications: list[Publication], expected: str
) -> None:
    if expected is REFUSED:
        with pytest.raises(PublicationRefused):
            published_columns(publications, relation, server_version)
    else:
        assert published_columns(publications, relation, server_version) == tuple(expected.split())


def test_error_has_postgresqls_words_and_names_the_columns_of_each_publication() -> None:
    with pytest.raises(PublicationRefused) as caught:
        published_columns([publication("x", listed(1, columns="b id")), ALL], PLAIN, V18)

    assert str(caught.value).splitlines()[:2] == [
        'cannot use different column lists for table "s.t" in different publications [R6.4]',
        'DETAIL: publication "x" lists (id, b); publication "all" has all columns.',
    ]


def test_generated_columns_are_refused_in_postgresqls_words() -> None:
    with pytest.raises(PublicationRefused) as caught:
        published_columns([p(), p(stored=True)], STORED, V18)

    assert caught.value.message == (
        'cannot use different values of publish_generated_columns for table "s.t" in different publications'
    )
    assert caught.value.rule == "R6.9"


def test_only_effective_publications_count() -> None:
    """R2.6, R6.3: the list of a lower level, and a leaf's own list, are not looked at."""
    tree = (table(1, "s.root", "id a b", is_partitioned=True), table(2, "s.leaf", "b a id", parent=1))
    publications = [
        publication("p", listed(1, columns="a id"), listed(2, columns="b"), via_root=True),
        publication("q", listed(2)),
    ]
    published = resolve(catalog(*tree, publications=publications), ["p", "q"], RelationId(2))

    assert published is not None
    assert published.table.id == 1
    assert published.columns == ("id", "a")


def test_column_lists_of_a_set_that_publishes_no_rows_are_ignored() -> None:
    """R6.7."""
    publications = [
        publication("p", listed(1, columns="id"), publish="truncate"),
        publication("q", listed(1, columns="a"), publish="truncate", publish_generated=True),
    ]
    published = resolve(catalog(STORED, publications=publications), ["p", "q"], RelationId(1))

    assert published is not None
    assert published.columns == ("id", "a")
