"""Our subscriptions and native ones side by side.

twin.subscribe("nsw", "p1", "p2")      # two new databases with the tables of `twin.tables`
twin.publisher.run("insert into t …")
twin.sync()                            # ours: one call for all; native: until it has caught up
assert twin.rows("nsw", "t") == […]    # fails first if the two differ
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cdc_replay.commands.setup import setup
from cdc_replay.commands.sync import sync
from cdc_replay.config import Config, load_config
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import ReplayResult, SyncResult
from cdc_replay.model.table_state import TableState
from cdc_replay.subscriber import state
from embedded.postgres import Cluster
from fixtures.native import NativeSubscription
from fixtures.postgres import Database, create_database, drop_database


@dataclass(frozen=True)
class Pair:
    """One subscription, twice."""

    ours: Database
    native: Database
    publications: tuple[str, ...]
    options: Mapping[str, object]


@dataclass
class Twin:
    """A publisher (`pub` in the configuration), its change log, and pairs of subscriptions."""

    publisher: Database
    cluster: Cluster
    folder: Path
    pairs: dict[str, Pair] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    """Further settings of the publisher in the configuration."""
    _databases: list[Database] = field(default_factory=list)

    def subscribe(
        self, name: str, *publications: str, tables: str, native: bool = True, **options: object
    ) -> None:
        """A new pair of databases with `tables`, subscribed to `publications`; setup is done for it."""
        self._subscribe(name, Pair(self.database(tables), self.database(tables), publications, options))
        if native:
            self._subscribe_natively(name)

    def subscribe_beside(self, other: str, name: str, *publications: str, **options: object) -> None:
        """The databases of the pair `other`, subscribed once more."""
        pair = self.pairs[other]
        self._subscribe(name, Pair(pair.ours, pair.native, publications, options))
        self._subscribe_natively(name)

    def _subscribe(self, name: str, pair: Pair) -> None:
        self.pairs[name] = pair
        setup(self.config, "pub")

    def _subscribe_natively(self, name: str) -> None:
        pair = self.pairs[name]
        copy = {key: value for key, value in pair.options.items() if key in {"copy_data", "origin"}}
        self.native(name).create(pair.publications, copy)

    def database(self, script: str = "") -> Database:
        """A further database of the subscriber's cluster."""
        database = create_database(self.cluster, "twin")
        self._databases.append(database)
        if script:
            database.run(script)
        return database

    def native(self, name: str) -> NativeSubscription:
        return NativeSubscription(self.publisher, self.pairs[name].native, f"{name}_{self.publisher.name}")

    @property
    def slot(self) -> str:
        return f"replay_{self.publisher.name}"

    @property
    def file(self) -> Path:
        """The configuration file as it is now."""
        file = self.folder / "cdc_replay.yaml"
        file.write_text(yaml.safe_dump(self._content()), encoding="utf-8")
        return file

    @property
    def config(self) -> Config:
        return load_config(self.file)

    @property
    def change_log(self) -> Path:
        return self.folder / "change_log"

    def change(self, name: str, *publications: str, **options: object) -> None:
        """Configure another list of publications or other options."""
        pair = self.pairs[name]
        self.pairs[name] = dataclasses.replace(
            pair, publications=publications or pair.publications, options={**pair.options, **options}
        )

    def publish(self, script: str) -> None:
        """Run the statements of a script one by one: each in its own transaction, or as it says."""
        with self.publisher.connect() as connection:
            for statement in script.split(";\n"):
                connection.execute(statement.encode())

    def sync(self, *names: str) -> dict[str, ReplayResult]:
        """Ours in one call, then native; the results of our replays."""
        chosen = names or tuple(self.pairs)
        results = {each.subscription: each for each in self.sync_ours(*chosen)}
        for name in chosen:
            assert results[name].replay.error is None, results[name].replay.error
            self.native(name).wait()
        return {name: result.replay for name, result in results.items()}

    def sync_ours(self, *names: str) -> tuple[SyncResult, ...]:
        return sync(self.config, names or tuple(self.pairs))

    def rows(self, name: str, table: str) -> list[tuple[Any, ...]]:
        """The table's rows in order of their text, after a check that native has the same."""
        pair = self.pairs[name]
        texts = f"select t::text from {table} as t order by 1"  # NaN is not equal to itself in Python
        ours, native = pair.ours.rows(texts), pair.native.rows(texts)
        assert ours == native, f"{name}, {table}: ours is {ours}, native {native}"
        return pair.ours.rows(f"select * from {table} as t order by t::text")

    def states(self, name: str) -> dict[str, TableState]:
        """The states of the subscription's tables by name without schema."""
        with self.pairs[name].ours.connect() as connection:
            return {table.name: found for table, found in state.table_states(connection, name).items()}

    def position(self) -> Lsn:
        """Behind everything that is committed now."""
        [(text,)] = self.publisher.rows("select pg_current_wal_insert_lsn()::text")
        return Lsn.parse(text)

    def drop(self) -> None:
        for database in self._databases:
            drop_database(database)

    def _content(self) -> dict[str, Any]:
        publisher: dict[str, object] = {
            "dsn": self.publisher.dsn,
            "slot": self.slot,
            "change_log": str(self.change_log),
        }
        publisher |= self.options
        subscriptions = {
            name: {"publisher": "pub", "publications": list(pair.publications), "dsn": pair.ours.dsn}
            | dict(pair.options)
            for name, pair in self.pairs.items()
        }
        return {"publishers": {"pub": publisher}, "subscriptions": subscriptions}
