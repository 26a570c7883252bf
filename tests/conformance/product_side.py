"""The product: its library's commands, over one configuration file per scenario."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.setup import setup
from cdc_replay.commands.sync import sync
from cdc_replay.commands.teardown import teardown
from cdc_replay.config import Config, load_config
from cdc_replay.errors import CdcReplayError
from conformance.scenario import Refreshed, Stalled, Subscription
from conformance.sides import Mismatch
from fixtures.postgres import Database

PUBLISHER = "pub"

LEFT_ON_PUBLISHER = """
    select slot_name::text from pg_replication_slots where database = current_database() and slot_name = %s
    union all
    select pubname::text from pg_publication where starts_with(pubname::text, 'cdc_replay_')
"""

LEFT_ON_SUBSCRIBER = "select nspname::text from pg_namespace where nspname = 'cdc_replay'"


@dataclass
class Product:
    """The product's subscriptions; their configuration and the change log are in `folder`."""

    publisher: Database
    databases: Mapping[str, Database]
    folder: Path
    slot: str
    _subscriptions: dict[str, dict[str, object]] = field(default_factory=dict)
    _options: dict[str, bool] = field(default_factory=lambda: {"streaming": False, "two_phase": False})

    def subscribe(self, subscription: Subscription) -> None:
        config = self._configured(subscription)
        setup(config, PUBLISHER)
        _sync(config, subscription)

    def sync(self, subscription: Subscription) -> None:
        _sync(self._configured(subscription), subscription)

    def subscribe_together(self, subscriptions: Sequence[Subscription]) -> Mapping[str, CdcReplayError]:
        """Set up the publisher for all of them; nothing is copied yet, so none fails by itself."""
        for subscription in subscriptions:
            self._configured(subscription)
        setup(self._write(), PUBLISHER)
        return {}

    def sync_together(self, subscriptions: Sequence[Subscription]) -> Mapping[str, CdcReplayError]:
        """One sync of all of them, over one capture and one decode; the errors by subscription."""
        keys = {_key(subscription): subscription.name for subscription in subscriptions}
        results = sync(self._write(), list(keys))
        return {
            keys[each.subscription]: CdcReplayError(each.replay.error)
            for each in results
            if each.replay.error is not None
        }

    def beside(self) -> Product:
        """Another one on the same databases, with a slot and a change log of its own."""
        folder = self.folder / f"beside_{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return Product(self.publisher, self.databases, folder, f"{self.slot}_{folder.name}")

    def refresh(self, subscription: Subscription, what: Refreshed) -> None:
        options = subscription.options | {"copy_data": what.copy_data}
        config = self._configured(subscription.model_copy(update={"options": options}))
        refresh(config, _key(subscription))
        _sync(config, subscription)

    def stall(self, subscription: Subscription, what: Stalled) -> None:
        texts = (*what.message, *what.words)
        try:
            self.sync(subscription)
        except CdcReplayError as error:
            if not any(text.lower() in str(error).lower() for text in texts):
                raise Mismatch(f"sync fails, but says none of {texts}: {error}") from error
        else:
            raise Mismatch(f"sync succeeds, native stands still with one of {texts}")

    def pause(self, subscription: Subscription) -> None:
        """Nothing to do: it works when it is called."""

    def resume(self, subscription: Subscription) -> None:
        """Nothing to do."""

    def tear_down(self) -> None:
        """Remove the subscriptions and the publisher; nothing of them must stay on the servers."""
        config = self._write()
        for name in self._subscriptions:
            teardown(config, name)
        teardown(config, PUBLISHER)
        with self.publisher.connect() as connection:
            left = connection.execute(LEFT_ON_PUBLISHER, [self.slot]).fetchall()
        for database in self.databases.values():
            left += database.rows(LEFT_ON_SUBSCRIBER)
        if left:
            raise Mismatch(f"teardown leaves {', '.join(name for (name,) in left)}")

    def subscriber_options(self, name: str) -> dict[str, object]:
        """Where the subscription's subscriber is, and with which rights it is written to."""
        return {"dsn": self.databases[name].dsn}

    def publisher_dsn(self) -> str:
        """Where the publisher is."""
        return self.publisher.dsn

    def _configured(self, subscription: Subscription) -> Config:
        """The configuration with this subscription as it is now, beside the earlier ones."""
        options = subscription.options
        for name in self._options:
            self._options[name] |= _is_on(options.get(name, False))
        self._subscriptions[_key(subscription)] = {
            "publisher": PUBLISHER,
            "publications": list(subscription.publications),
            **self.subscriber_options(subscription.name),
            "copy_data": _is_on(options.get("copy_data", True)),
            "origin": options.get("origin", "any"),
        }
        return self._write()

    def _write(self) -> Config:
        publisher = {
            "dsn": self.publisher_dsn(),
            "slot": self.slot,
            "change_log": str(self.folder / "change_log"),
        }
        content = {
            "publishers": {PUBLISHER: publisher | self._options},
            "subscriptions": self._subscriptions,
        }
        file = self.folder / "cdc_replay.yaml"
        file.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
        return load_config(file)


def slot_name(scenario: str) -> str:
    """A slot of the scenario's own."""
    return "replay_" + re.sub(r"[^a-z0-9]+", "_", scenario.lower())[:50]


def _sync(config: Config, subscription: Subscription) -> None:
    for result in sync(config, [_key(subscription)]):
        if result.replay.error is not None:
            raise CdcReplayError(result.replay.error)


def _key(subscription: Subscription) -> str:
    """The name in the configuration: the subscription's own may hold anything that SQL allows."""
    return re.sub(r"[^a-z0-9]+", "_", subscription.name.lower()).strip("_") or "subscription"


def _is_on(value: object) -> bool:
    return str(value).lower() not in {"false", "off", "no", "0", "none", ""}
