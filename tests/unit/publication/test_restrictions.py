"""Sets of publications that are refused, and sets with warnings."""

from __future__ import annotations

import pytest

from cdc_replay.errors import PublicationMissing, PublicationRefused
from cdc_replay.model.publication import Publication, PublisherCatalog
from cdc_replay.publication.restrictions import check_publications, missing_publications, warnings_for
from fixtures.catalogs import catalog, listed, publication, table

ROOT, LEAF, PLAIN = 1, 2, 3
TREE = (
    table(ROOT, "s.root", is_partitioned=True),
    table(LEAF, "s.leaf", parent=ROOT),
    table(4, "s.second_leaf", parent=ROOT),
    table(PLAIN, "s.plain"),
)


def published(*publications: Publication, server_version: int = 180006) -> PublisherCatalog:
    return catalog(*TREE, publications=publications, server_version=server_version)


def warned(*publications: Publication) -> list[str]:
    return list(warnings_for(published(*publications), [publication.name for publication in publications]))


def test_missing_publications_are_named_in_the_order_given() -> None:
    with_publications = published(publication("p"))

    assert missing_publications(with_publications, ["z", "p", "a"]) == ("z", "a")
    with pytest.raises(PublicationMissing, match='publication "z" does not exist'):
        with_publications.publication("z")


def test_error_names_all_tables_that_disagree() -> None:
    """R6.4."""
    with_publications = published(
        publication("p", listed(PLAIN, columns="id"), listed(ROOT, columns="id"), via_root=True),
        publication("q", all_tables=True, via_root=True),
    )
    with pytest.raises(PublicationRefused) as caught:
        check_publications(with_publications, ["p", "q"])

    assert str(caught.value).splitlines() == [
        'cannot use different column lists for table "s.root" in different publications [R6.4]',
        'DETAIL: publication "p" lists (id); publication "q" has all columns.',
        (
            '    Also: cannot use different column lists for table "s.plain" in different publications. '
            'publication "p" lists (id); publication "q" has all columns.'
        ),
        "HINT: Make the publications agree on the columns of this table, or subscribe to them separately.",
    ]


def test_set_that_only_a_new_subscription_refuses_is_refused() -> None:
    """R6.4, R6.7: TRUNCATE-only lists disagree for the initial copy, not for the stream."""
    with_publications = published(
        publication("p", listed(PLAIN, columns="id"), publish="truncate"),
        publication("q", listed(PLAIN), publish="truncate"),
    )
    with pytest.raises(PublicationRefused):
        check_publications(with_publications, ["p", "q"])


def test_agreeing_and_missing_publications_are_accepted() -> None:
    with_publications = published(
        publication("p", listed(PLAIN, columns="id")), publication("q", listed(ROOT))
    )

    check_publications(with_publications, ["p", "q", "missing"])


def test_ordinary_set_has_no_warnings() -> None:
    assert (
        warned(
            publication("p", listed(PLAIN, "a > 1"), listed(ROOT, "a > 1"), via_root=True),
            publication("q", listed(PLAIN, "a > 2")),
        )
        == []
    )


def test_leak_through_partitions_causes_a_warning() -> None:
    """R2.8."""
    assert warned(
        publication("pub1", listed(ROOT, "id > 50"), via_root=True, publish="insert"),
        publication("pub2", listed(LEAF, "id > 90"), publish="update, delete"),
    ) == [
        (
            'table "s.root": update, delete published only through partitions, by "pub2",'
            " and so sent without any row filter [R2.8]"
        ),
        (
            'table "s.leaf": the row filter of publication "pub2" is not used,'
            ' because changes are sent as those of table "s.root" [R2.6]'
        ),
    ]


def test_all_tables_that_does_not_unfilter_causes_one_warning() -> None:
    """R2.9: once, although both leaves are concerned."""
    assert warned(
        publication("everything", all_tables=True, publish="insert, update, delete"),
        publication("rooted", listed(ROOT, "id > 50"), via_root=True),
    ) == [
        (
            'table "s.root": publication "everything" publishes insert, update, delete without a row filter,'
            ' but only through partitions: the row filter of "rooted" still applies [R2.9]'
        )
    ]


def test_lost_truncate_causes_a_warning() -> None:
    """R2.10."""
    assert warned(
        publication("everything", all_tables=True),
        publication("rooted", listed(ROOT), via_root=True, publish="insert, update, delete"),
    ) == [
        (
            'table "s.root": truncate is published only through partitions, by "everything",'
            " and so never sent [R2.10]"
        )
    ]


def test_updates_without_insert_or_delete_cause_warnings() -> None:
    """R4.1, R2.15, R7.3."""
    assert warned(publication("p", listed(PLAIN, "a > 1"), listed(LEAF), publish="update")) == [
        (
            'table "s.leaf": insert, delete not published, so an update that moves a row to another'
            " partition loses that part [R2.15]"
        ),
        (
            'table "s.plain": insert, delete not published, but an update that moves a row into or out of'
            " the row filter is still sent as insert or delete [R4.1]"
        ),
        'table "s.leaf": insert is not published, but the initial copy includes existing rows [R7.3]',
        'table "s.plain": insert is not published, but the initial copy includes existing rows [R7.3]',
    ]


def test_inserts_and_updates_without_deletes_cause_one_warning_per_tree() -> None:
    """R11.5: R4.1 and R2.15 through the root; the initial copy adds no other rows."""
    assert warned(publication("p", listed(ROOT, "a > 1"), via_root=True, publish="insert, update")) == [
        (
            'table "s.root": delete not published, but an update that moves a row into or out of the'
            " row filter is still sent as insert or delete [R4.1]"
        ),
        (
            'table "s.root": delete not published, so an update that moves a row to another partition'
            " loses that part [R2.15]"
        ),
    ]


@pytest.mark.parametrize(
    ("server_version", "consequence"),
    [(170011, "a native subscriber stops at the first change"), (180006, "the publisher ignores it")],
)
def test_missing_publication_causes_a_warning(server_version: int, consequence: str) -> None:
    """R1.19."""
    with_publications = published(publication("p", listed(PLAIN)), server_version=server_version)

    assert warnings_for(with_publications, ["p", "gone"]) == (
        f'publication "gone" does not exist: {consequence} [R1.19]',
    )
