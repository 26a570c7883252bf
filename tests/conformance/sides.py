"""What the two sides of a comparison have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from conformance.scenario import Refreshed, Stalled, Subscription
from fixtures.postgres import Database


class Mismatch(AssertionError):
    """The product does not do what PostgreSQL does."""


class CorpusError(Exception):
    """PostgreSQL itself does not do what the scenario says: the scenario or the runner is wrong."""


class Refused(Exception):
    """PostgreSQL refuses a subscription; the text is its reason."""


class Side(Protocol):
    """A way to feed subscribers; `databases` holds one per subscription."""

    @property
    def databases(self) -> Mapping[str, Database]: ...

    def subscribe(self, subscription: Subscription) -> None:
        """Create the subscription and bring it to the publisher's present."""

    def sync(self, subscription: Subscription) -> None:
        """Catch up with the publisher's present."""

    def refresh(self, subscription: Subscription, what: Refreshed) -> None:
        """Read the publications again; `subscription` has the new list."""

    def stall(self, subscription: Subscription, what: Stalled) -> None:
        """Expect that it cannot go on."""

    def pause(self, subscription: Subscription) -> None:
        """Stop applying, if it does so by itself."""

    def resume(self, subscription: Subscription) -> None:
        """Apply again."""
