"""Which changes do not reach a subscription, and what to do about it."""

from __future__ import annotations

from cdc_replay.model.subscription import Subscription
from cdc_replay.publication.capture_coverage import capture_warnings
from fixtures.catalogs import catalog


def test_a_publication_that_does_not_exist_is_named_with_the_remedy() -> None:
    """R1.19."""
    (warning,) = capture_warnings(catalog(), Subscription("nsw", "shop", ("gone",)), ())

    assert 'publication "gone" does not exist' in warning
    assert "create it on the publisher, or correct `publications` of subscription nsw" in warning
