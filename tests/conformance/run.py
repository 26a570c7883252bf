"""Run one scenario: the same workload for PostgreSQL's own subscription and for the product, then compare.

The publisher has a database, and every subscription one per side. At each `sync` all tables of `compare`
must hold the same bag of rows on both sides, each value as its type prints it; at each `expect` a query
must return rows that are known in advance. What PostgreSQL itself does otherwise than the scenario says is
a `CorpusError`, what the product does otherwise is a `Mismatch` or the product's own error.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, assert_never

import psycopg
from psycopg import sql

from cdc_replay.errors import CdcReplayError
from cdc_replay.postgres.connection import Connection, connect
from conformance import scenario as model
from conformance.native_side import Native
from conformance.scenario import Compare, Row, Scenario, Subscription
from conformance.script import run_script, text_rows
from conformance.sides import CorpusError, Mismatch, Refused, Side
from embedded.postgres import Cluster
from fixtures.postgres import Database, drop_database

Settings: TypeAlias = Mapping[str, str | int]

_numbers = itertools.count(1)

ICU_COLLATION = "create collation pg_temp.probe (provider = icu, locale = 'und')"

DATABASE_SETTINGS = """
    select name from pg_settings where name = any (%s) and context in ('user', 'superuser', 'backend')
"""

COLUMNS = sql.SQL("""
    select attname from pg_attribute
     where attrelid = {}::regclass and attnum > 0 and not attisdropped order by attnum
""")

PARTITIONS = sql.SQL("""
    select relid::regclass from pg_partition_tree({}) where level > 0 order by 1
""")


@dataclass(frozen=True)
class Servers:
    """Where a scenario runs; both sides' subscribers are databases of one cluster."""

    publisher: Cluster
    subscriber: Cluster


@dataclass(frozen=True)
class Place:
    """The databases of one run, subscribers by subscription."""

    publisher: Database
    native: Mapping[str, Database]
    product: Mapping[str, Database]


def missing_requirement(scenario: Scenario, servers: Servers) -> str | None:
    """Why these servers cannot run the scenario, None if they can."""
    wanted = scenario.requires
    with connect(servers.publisher.dsn(), purpose="test") as admin:
        version = admin.info.server_version
        if not max(wanted.server, wanted.native) <= version <= wanted.max_server:
            return f"needs a server from {max(wanted.server, wanted.native)} to {wanted.max_server}"
        known = {name for (name,) in admin.execute("select name from pg_available_extensions").fetchall()}
        if unknown := set(wanted.extensions) - known:
            return f"needs the extensions {', '.join(sorted(unknown))}"
        if wanted.icu and not _works(
            admin, "create collation pg_temp.probe (provider = icu, locale = 'und')"
        ):
            return "needs a server with ICU"
        if wanted.libxml and not _works(admin, "select xmlparse(content '<probe/>')"):
            return "needs a server with libxml"
    return None


def _works(connection: Connection, statement: str) -> bool:
    try:
        connection.execute(statement.encode())
    except psycopg.errors.FeatureNotSupported:
        return False
    return True


def server_settings(scenario: Scenario, servers: Servers) -> Mapping[str, str]:
    """Those of the scenario's settings that a database cannot have: they need a cluster of their own."""
    wanted = scenario.publisher_conf | scenario.subscriber_conf
    with connect(servers.publisher.dsn(), purpose="test") as admin:
        rows = admin.execute(DATABASE_SETTINGS, [list(wanted)]).fetchall()
    return {name: str(value) for name, value in wanted.items() if (name,) not in rows}


@contextlib.contextmanager
def placed(scenario: Scenario, servers: Servers) -> Iterator[Place]:
    """Databases for one run, dropped at the end with everything in them."""
    number = next(_numbers)
    names = [subscription.name for subscription in scenario.subscriptions] or ["s"]
    with contextlib.ExitStack() as stack:

        def database(
            cluster: Cluster, name: str, options: str, settings: Mapping[str, str | int]
        ) -> Database:
            created = _create(cluster, f"conformance_{number}_{name}", options, settings)
            stack.callback(drop_database, created)
            return created

        def subscribers(side: str) -> Mapping[str, Database]:
            options = (scenario.databases.subscriber, scenario.subscriber_conf)
            return {
                name: database(servers.subscriber, f"{side}_{index}", *options)
                for index, name in enumerate(names)
            }

        stack.callback(_clean_up, scenario, servers)
        options = (scenario.databases.publisher, scenario.publisher_conf)
        publisher = database(servers.publisher, "publisher", *options)
        yield Place(publisher, subscribers("native"), subscribers("ours"))


def _create(cluster: Cluster, name: str, options: str, settings: Settings) -> Database:
    with connect(cluster.dsn(), purpose="test") as admin:
        admin.execute(f'create database "{name}" {options}'.encode())
        for setting, value in settings.items():
            with contextlib.suppress(psycopg.errors.CantChangeRuntimeParam):  # the cluster has it then
                admin.execute(f"alter database \"{name}\" set {setting} = '{value}'".encode())
    return Database(cluster, name)


def _clean_up(scenario: Scenario, servers: Servers) -> None:
    """Run `cleanup`, for what lives outside of the databases, where it finds something to remove."""
    for cluster in (servers.publisher, servers.subscriber):
        with connect(cluster.dsn(), purpose="test") as admin, contextlib.suppress(psycopg.Error):
            run_script(admin, scenario.cleanup)


def run_scenario(scenario: Scenario, servers: Servers, place: Place, product: Side | None) -> None:
    """Run all steps; without `product`, PostgreSQL alone against the expectations.

    Raises:
        CorpusError: if PostgreSQL itself does not do what the scenario says.
        Mismatch, CdcReplayError: if the product does not.
    """
    sides: list[Side] = [Native(place.publisher, place.native)]
    if product is not None:
        sides.append(product)
    with contextlib.closing(_Run(scenario, servers, place.publisher, sides)) as run:
        run.start()
        for number, step in enumerate(scenario.steps, start=1):
            try:
                run.step(step)
            except Exception as error:
                error.add_note(f"scenario {scenario.name}, step {number}: {step!r:.300}")
                raise


@dataclass
class _Run:
    scenario: Scenario
    servers: Servers
    publisher: Database
    sides: Sequence[Side]
    sessions: dict[str, Connection] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)

    def start(self) -> None:
        """Both scripts, then every subscription on both sides."""
        self._publish(model.Publish(publisher=self.scenario.publisher))
        self._subscribers(model.Subscribe(subscriber=self.scenario.subscriber))
        for subscription in self.scenario.subscriptions:
            self.subscriptions[subscription.name] = subscription
            for side in self.sides:
                with self._blamed(side):
                    _expecting(
                        partial(side.subscribe, subscription),
                        self._texts(side, subscription.error, subscription.words),
                    )

    def close(self) -> None:
        """Close the sessions."""
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()

    def step(self, step: model.Step) -> None:
        """Do one step."""
        match step:
            case model.Publish():
                self._publish(step)
            case model.Subscribe():
                self._subscribers(step)
            case model.Expect(expect=what):
                self._expect(what)
            case model.Refresh(refresh=what):
                self._refresh(what)
            case model.Restart():
                self._restart(step)
            case _:
                self._replicate(step)

    def _replicate(self, step: model.Sync | model.Pause | model.Resume | model.Stall) -> None:
        """What every subscription does on both sides."""
        match step:
            case model.Sync():
                self._each_live(lambda side, subscription: side.sync(subscription))
                self._compare()
            case model.Pause():
                self._each_live(lambda side, subscription: side.pause(subscription))
            case model.Resume():
                self._each_live(lambda side, subscription: side.resume(subscription))
            case model.Stall(stall=what):
                self._each_live(lambda side, subscription: side.stall(subscription, what))
                self._compare()
            case _:
                assert_never(step)

    def _is_native(self, side: Side) -> bool:
        return side is self.sides[0]

    def _label(self, side: Side) -> str:
        return "native" if self._is_native(side) else "candidate"

    def _texts(self, side: Side, error: str | None, words: Sequence[str] = ()) -> tuple[str, ...]:
        """What an error must say, of which one is enough; PostgreSQL's own words, or for us also others."""
        if error is None:
            return ()
        return (error,) if self._is_native(side) else (error, *words)

    @contextlib.contextmanager
    def _blamed(self, side: Side) -> Iterator[None]:
        """What native does wrong is the scenario's or the runner's fault."""
        try:
            yield
        except (AssertionError, Refused, psycopg.Error) as error:
            if not self._is_native(side):
                raise
            raise CorpusError(f"native: {error}") from error

    def _each_live(self, action: Callable[[Side, Subscription], None]) -> None:
        for side in self.sides:
            for subscription in self.subscriptions.values():
                if subscription.error is None:
                    with self._blamed(side):
                        action(side, subscription)

    def _publish(self, step: model.Publish) -> None:
        session = self.sessions.get(step.session)
        if session is None:
            # Not pinned: the settings of the scenario's database are part of the scenario.
            session = psycopg.connect(self.publisher.dsn, autocommit=True, client_encoding="UTF8")
            session.prepare_threshold = None
            self.sessions[step.session] = session
        with self._blamed(self.sides[0]):
            _expecting(partial(run_script, session, step.publisher), self._texts(self.sides[0], step.error))

    def _subscribers(self, step: model.Subscribe) -> None:
        for side in self.sides:
            if step.on not in {None, self._label(side)}:
                continue
            for name, database in side.databases.items():
                if step.subscription in {None, name}:
                    with self._blamed(self.sides[0]), database.connect() as connection:
                        _expecting(
                            partial(run_script, connection, step.subscriber),
                            self._texts(self.sides[0], step.error),
                        )

    def _refresh(self, what: model.Refreshed) -> None:
        for name, subscription in self.subscriptions.items():
            if what.subscription not in {None, name}:
                continue
            changed = subscription
            if what.publications is not None:
                changed = subscription.model_copy(update={"publications": what.publications})
            for side in self.sides:
                with self._blamed(side):
                    _expecting(partial(side.refresh, changed, what), self._texts(side, what.error))
            if what.error is None:
                self.subscriptions = self.subscriptions | {name: changed}

    def _restart(self, step: model.Restart) -> None:
        cluster = self.servers.publisher if step.restart == "publisher" else self.servers.subscriber
        self.close()
        cluster.stop(step.mode)
        cluster.start()

    def _expect(self, what: model.Expectation) -> None:
        if what.on == "publisher":
            with self._blamed(self.sides[0]):
                _check_rows(self.publisher, what.sql, [what.rows])
            return
        for side in self.sides:
            if what.only not in {None, self._label(side)}:
                continue
            right = [what.rows]
            if what.candidate_rows is not None and not self._is_native(side):
                right.append(what.candidate_rows)
            database = side.databases[what.subscription or next(iter(side.databases))]
            if what.min_server <= _version(database) <= what.max_server:
                with self._blamed(side):
                    _check_rows(database, what.sql, right)

    def _compare(self) -> None:
        """All tables of `compare` on both sides; a mismatch names every table that differs."""
        native, *others = (side.databases for side in self.sides)
        wrong = [
            difference
            for databases in others
            for compared in self.scenario.compare
            for name in ([compared.subscription] if compared.subscription else list(databases))
            for difference in _differences(compared, native[name], databases[name])
        ]
        if wrong:
            raise Mismatch("\n".join(wrong))


def _expecting(action: Callable[[], None], texts: Sequence[str]) -> None:
    """Do it; with `texts`, it must fail and say one of them."""
    if not texts:
        action()
        return
    try:
        action()
    except (Refused, CdcReplayError, psycopg.Error) as error:
        if not any(text.lower() in str(error).lower() for text in texts):
            raise Mismatch(f"the error is not one of {texts}: {error}") from error
    else:
        raise Mismatch(f"there is no error, expected is one of {texts}")


def _version(database: Database) -> int:
    with database.connect() as connection:
        return connection.info.server_version


def _check_rows(database: Database, query: str, right: Sequence[Sequence[Row]]) -> None:
    with database.connect() as connection:
        rows = text_rows(connection, query)
    if rows not in [list(each) for each in right]:
        raise Mismatch(f"{' '.join(query.split())}{described_difference(Counter(right[0]), Counter(rows))}")


def _differences(compared: Compare, native: Database, ours: Database) -> Iterator[str]:
    with native.connect() as true, ours.connect() as tested:
        for table in _tables(true, compared):
            columns = compared.columns or [
                name
                for (name,) in true.execute(COLUMNS.format(table)).fetchall()
                if name not in compared.exclude
            ]
            want, have = (_content(connection, table, columns) for connection in (true, tested))
            if want != have:
                yield f"table {table} of {ours.name}, columns {columns}{described_difference(want, have)}"


def _tables(connection: Connection, compared: Compare) -> list[str]:
    if not compared.partitions:
        return [compared.table]
    found = connection.execute(PARTITIONS.format(compared.table)).fetchall()
    return [compared.table, *(str(name) for (name,) in found)]


def _content(connection: Connection, table: str, columns: Sequence[str]) -> Counter[Row]:
    """The bag of rows."""
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    return Counter(text_rows(connection, sql.SQL("select {} from {}").format(names, sql.SQL(table))))


def described_difference(want: Counter[Row], have: Counter[Row], limit: int = 6) -> str:
    """What is missing in `have`, and what is too many, for a message."""

    def shown(rows: Counter[Row]) -> str:
        listed = [f"{row!r:.200}" + (f" ({count} times)" if count > 1 else "") for row, count in rows.items()]
        return ", ".join(listed[:limit]) + (f", … {len(listed) - limit} more" if len(listed) > limit else "")

    parts = [("missing", want - have), ("too many", have - want)]
    return "".join(f"\n  {what}: {shown(rows)}" for what, rows in parts if rows) or "\n  in another order"
