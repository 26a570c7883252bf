"""Every scenario once more, with roles that own nothing and are no superusers.

An administrator runs the scripts that `setup --dry-run` prints before each command, because scenarios change
publications and tables; the roles do everything else. The tables belong to superusers, so the subscriptions
have `run_as_owner: true` and the grants of the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

from cdc_replay.commands.setup import setup, subscriber_script
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError
from cdc_replay.terminal.setup_view import to_script
from conformance.product_side import PUBLISHER, Product, slot_name
from conformance.run import Servers, placed, run_scenario
from conformance.scenario import Refreshed, Scenario, Subscription, load_scenarios
from conformance.suites import WITH_LEAST_PRIVILEGE
from fixtures.postgres import Database, run_as_administrator
from security.stranger import Stranger

NEEDS_THE_OWNER = "must be owner of sequence"
"""RESTART IDENTITY, which PostgreSQL leaves to the owner of the sequence, natively too."""

REFUSED = {
    "h_truncate_between_ddl": NEEDS_THE_OWNER,
    "trunc_plain_and_restart_identity": NEEDS_THE_OWNER,
    "win_truncate_combinations": NEEDS_THE_OWNER,
    # a trigger that writes a table which is not subscribed to, so that no script grants it
    "h_trigger_writes_other_subscribed_table": "permission denied for table l",
    # a table that left the publication is not captured any more, unless the role captures all tables
    "toast_unsent_values_that_cannot_matter": "nothing proves that the publisher still has the same row",
}
"""What these roles may not do or cannot know, by scenario: the subscription stops and says so."""


@dataclass
class LeastPrivileged(Product):
    """The product with a role of its own on each database."""

    roles: dict[Database, Stranger] = field(default_factory=dict)
    is_ended: bool = False
    """The administrator takes the publisher's objects away, as he has made them."""

    def subscribe(self, subscription: Subscription) -> None:
        if subscription.error is not None:  # the administrator is told it, and has no script to run
            self._run_scripts(self._configured(subscription))
        self._prepare(self._configured(subscription))
        super().subscribe(subscription)

    def sync(self, subscription: Subscription) -> None:
        self._prepare(self._configured(subscription))
        super().sync(subscription)

    def sync_together(self, subscriptions: Sequence[Subscription]) -> Mapping[str, CdcReplayError]:
        self._prepare(self._write())
        return super().sync_together(subscriptions)

    def refresh(self, subscription: Subscription, what: Refreshed) -> None:
        self._prepare(self._configured(subscription))
        super().refresh(subscription, what)

    def subscriber_options(self, name: str) -> dict[str, object]:
        return {"dsn": self._role(self.databases[name]).dsn, "run_as_owner": True}

    def publisher_dsn(self) -> str:
        return self.publisher.dsn if self.is_ended else self._role(self.publisher).dsn

    def tear_down(self) -> None:
        self.is_ended = True
        super().tear_down()
        for role in self.roles.values():
            assert not role.is_superuser()
            role.leave()

    def _role(self, database: Database) -> Stranger:
        if database not in self.roles:
            self.roles[database] = Stranger(database, f"least_{database.name}")
            self.roles[database].enter()
        return self.roles[database]

    def _prepare(self, config: Config) -> None:
        """What an administrator does; what cannot be prepared is told by the command that follows."""
        with suppress(CdcReplayError, psycopg.Error):
            self._run_scripts(config)

    def _run_scripts(self, config: Config) -> None:
        run_as_administrator(self.publisher, to_script(setup(config, PUBLISHER, dry_run=True)))
        for name, subscription in config.subscriptions.items():
            (database,) = (
                database
                for database in self.databases.values()
                if self._role(database).dsn == subscription.dsn_text
            )
            run_as_administrator(database, to_script(subscriber_script(config, PUBLISHER, name)))


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            scenario,
            id=scenario.name,
            marks=() if scenario.name.startswith(WITH_LEAST_PRIVILEGE) else pytest.mark.slow,
        )
        for scenario in load_scenarios()
    ],
)
def test_scenario_holds_with_roles_that_own_nothing(
    runnable: Scenario, servers: Servers, tmp_path: Path
) -> None:
    with placed(runnable, servers) as place:
        product = LeastPrivileged(place.publisher, place.product, tmp_path, slot_name(runnable.name))
        reason = REFUSED.get(runnable.name)
        with pytest.raises(CdcReplayError, match=reason) if reason else nullcontext():
            run_scenario(runnable, servers, place, product)
        if runnable.subscriptions:
            product.tear_down()
