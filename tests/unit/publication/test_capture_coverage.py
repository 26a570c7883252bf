"""Which changes do not reach a subscription, and what to do about it."""

from __future__ import annotations

import pytest

from cdc_replay.model.publication import PublishAction, PublisherCatalog, Table
from cdc_replay.model.subscription import Subscription
from cdc_replay.publication import capture_coverage
from cdc_replay.publication.capture_coverage import capture_warnings
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from fixtures.catalogs import catalog, listed, publication, table

INSERTS = CAPTURE_PUBLICATIONS[PublishAction.INSERT]


def test_a_publication_that_does_not_exist_is_named_with_the_remedy() -> None:
    """R1.19."""
    (warning,) = capture_warnings(catalog(), Subscription("nsw", "shop", ("gone",)), ())

    assert 'publication "gone" does not exist' in warning
    assert "create it on the publisher, or correct `publications` of subscription nsw" in warning


def test_a_leaf_that_is_not_captured_is_named_where_its_root_is_subscribed() -> None:
    root = table(1, "s.root", is_partitioned=True)
    leaves = [table(2, "s.leaf", parent=1), table(3, "s.other", parent=1)]
    published = publication("p", listed(1), via_root=True, publish="insert")
    capture = publication(INSERTS, listed(3), publish="insert")

    (warning,) = capture_warnings(
        catalog(root, *leaves, publications=[published, capture]),
        Subscription("nsw", "shop", ("p",)),
        {root.name},
    )

    assert "changes of s.leaf (insert) are not captured" in warning


@pytest.mark.parametrize("size", [2, 9])
def test_tables_of_other_subscriptions_are_not_looked_at(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """With as many tables as subscriptions that would be quadratic."""
    looked_at = list[str]()

    def record(_catalog: PublisherCatalog, table: Table, _action: PublishAction) -> bool:
        looked_at.append(table.name.name)
        return True

    monkeypatch.setattr(capture_coverage, "is_captured", record)
    tables = [table(oid, f"s.t{oid}") for oid in range(size)]
    everything = publication("p", all_tables=True)

    warnings = capture_warnings(
        catalog(*tables, publications=[everything]), Subscription("nsw", "shop", ("p",)), {tables[1].name}
    )

    assert list(warnings) == []
    assert looked_at == ["t1"] * len(PublishAction)
