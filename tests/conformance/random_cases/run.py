"""Run a world: every subscription natively and by the product, and compare all tables at every sync.

| outcome       | native                  | product                                                       |
|---------------|-------------------------|---------------------------------------------------------------|
| EQUAL         | goes on                 | the same rows at every sync                                   |
| BOTH_REFUSE   | refuses the set         | too                                                           |
| BOTH_STOP     | a worker fails          | sync fails                                                    |
| ONLY_NATIVE   | a worker fails          | goes on: where its net change has no conflict (R8.5)          |
| EARLIER       | goes on                 | refuses at once what would fail at a later change (R6.4)      |
| UNKNOWN_VALUE | stores NULL             | parks, for nobody has the value (R4.6)                        |
| DIFFERENT     | goes on                 | other rows, or sync fails                                     |

DIFFERENT is a defect. BOTH_STOP ends the comparison at that sync; ONLY_NATIVE, EARLIER and UNKNOWN_VALUE say
nothing more about a case: they are counted, and a test bounds their share.

Where native has NULL instead of a value that was not sent (R4.6), the product must have the publisher's.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import psycopg
from psycopg import sql

from cdc_replay.errors import CdcReplayError
from cdc_replay.postgres.connection import Connection, connect
from conformance.native_side import Native
from conformance.random_cases.native import caught_up
from conformance.random_cases.tables import Family, Identity
from conformance.random_cases.workload import Statement, Transaction
from conformance.random_cases.world import World
from conformance.run import Servers, described_difference
from conformance.scenario import Databases, Row, Subscription
from conformance.script import text_rows
from fixtures.native import NativeSubscription
from fixtures.postgres import Database, drop_database

_numbers = itertools.count(1)


class Outcome(enum.Enum):
    """What became of a case; see the module."""

    EQUAL = "equal"
    BOTH_REFUSE = "both refuse"
    BOTH_STOP = "both stop"
    ONLY_NATIVE = "only native stops"
    EARLIER = "refused earlier"
    UNKNOWN_VALUE = "a value that nobody has"
    DIFFERENT = "different"


COMPARED: Final = frozenset({Outcome.EQUAL, Outcome.BOTH_REFUSE, Outcome.DIFFERENT})


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a case, what there is to say about it, and how many rows it compared."""

    outcome: Outcome
    text: str = ""
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Ran:
    """A world that was run: results by subscription, and what the publisher made of the statements."""

    results: Mapping[str, Result]
    accepted: int
    refused: tuple[Statement, ...]


class Tested(Protocol):
    """What is compared with native: the product, or in its place what a test knows to be wrong."""

    databases: Mapping[str, Database]

    def subscribe(self, subscription: Subscription) -> None:
        """Create it and bring it to the present, or raise what is wrong with it."""

    def tear_down(self) -> None:
        """Remove what is on the servers."""

    def subscribe_together(self, subscriptions: Sequence[Subscription]) -> Mapping[str, CdcReplayError]:
        """Create them; the errors by subscription."""

    def sync_together(self, subscriptions: Sequence[Subscription]) -> Mapping[str, CdcReplayError]:
        """Bring them to the present; the errors by subscription."""

    def beside(self) -> Tested:
        """Another one on the same databases."""


def run_world(
    world: World,
    servers: Servers,
    make: Callable[[Database, Mapping[str, Database], str], Tested],
) -> Ran:
    """Run it on databases of its own, which are dropped at the end.

    `make` gets the publisher, the subscribers by subscription, and a name for a slot.
    """
    with contextlib.ExitStack() as stack:
        number = next(_numbers)

        def database(role: str, statements: Sequence[str]) -> Database:
            cluster = servers.publisher if role == "publisher" else servers.subscriber
            name = f"random_{number}_{role}"
            with connect(cluster.dsn(), purpose="test") as admin:
                admin.execute(f"create database {name} {Databases().publisher}".encode())
            made = Database(cluster, name)
            stack.callback(drop_database, made)
            with made.connect() as connection, connection.transaction():
                for statement in statements:
                    connection.execute(statement.encode())
            return made

        publisher = database("publisher", world.publisher_script())
        sides = [
            {
                each.name: database(f"{side}_{each.name}", world.subscriber_script(each))
                for each in world.subscriptions
            }
            for side in ("native", "ours")
        ]
        product = make(publisher, sides[1], f"random_{number}")
        run = _Run(world, publisher, Native(publisher, sides[0], suffix=f"_{number}"), product)
        return run.to_the_end()


@dataclass
class _Run:
    world: World
    publisher: Database
    native: Native
    product: Tested
    results: dict[str, Result] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    refused: list[Statement] = field(default_factory=list)

    def to_the_end(self) -> Ran:
        before, *later = self.world.phases
        self._publish(before)
        alive = self._subscribed()
        for number, phase in enumerate([(), *later]):
            self._publish(phase)
            alive = self._synced(alive, number)
        for each in alive:
            self.results[each.name] = Result(Outcome.EQUAL, rows=self.rows[each.name])
        return Ran(self.results, self.accepted, tuple(self.refused))

    # ---- the publisher

    def _publish(self, phase: Sequence[Transaction]) -> None:
        with self.publisher.connect() as connection:
            for transaction in phase:
                connection.execute("begin")
                for part in transaction.parts:
                    connection.execute("savepoint part")
                    for statement in part.statements:
                        self._execute(connection, statement)
                    connection.execute("release part" if part.kept else "rollback to part")
                connection.execute("commit" if transaction.commits else "rollback")

    def _execute(self, connection: Connection, statement: Statement) -> None:
        connection.execute("savepoint statement")
        try:
            connection.execute(statement.sql.encode())
        except psycopg.Error:
            self.refused.append(statement)
            connection.execute("rollback to statement")
        else:
            self.accepted += 1
        connection.execute("release statement")

    # ---- the subscriptions

    def _subscribed(self) -> list[Subscription]:
        """Those that native accepts, created on both sides."""
        alive = []
        for each in self.world.subscriptions:
            options = {} if each.copy_data else {"copy_data": False}
            subscription = Subscription(name=each.name, publications=each.publications, options=options)
            try:
                self._twin(subscription).create(subscription.publications, options)
            except psycopg.Error as error:
                self.results[each.name] = self._refused(subscription, str(error))
            else:
                alive.append(subscription)
        failures = self._by_the_product(alive, self.product.subscribe_together)
        return [each for each in alive if not self._ended(each, failures, "setup")]

    def _refused(self, subscription: Subscription, reason: str) -> Result:
        """What the product says to publications that native refuses."""
        alone = self.product.beside()
        try:
            alone.subscribe(subscription)
        except CdcReplayError:
            return Result(Outcome.BOTH_REFUSE, reason)
        finally:
            # The publisher is set up by then, and is captured by one slot at a time.
            with contextlib.suppress(CdcReplayError):
                alone.tear_down()
        return Result(Outcome.DIFFERENT, f"native refuses the subscription, the product does not: {reason}")

    def _synced(self, alive: Sequence[Subscription], number: int) -> list[Subscription]:
        """Bring both sides to the present and compare; those that can go on."""
        stopped = {each.name for each in alive if not caught_up(self._twin(each))}
        failures = self._by_the_product(alive, self.product.sync_together)
        going = []
        for each in alive:
            if each.name in stopped:
                error = failures.get(each.name)
                outcome = Outcome.ONLY_NATIVE if error is None else Outcome.BOTH_STOP
                self.results[each.name] = Result(
                    outcome, f"native: {self.native.complaints()}\nproduct: {error}"
                )
            elif not self._ended(each, failures, f"sync {number}"):
                if wrong := list(self._differences(each)):
                    text = "\n".join([f"after sync {number}:", *wrong])
                    self.results[each.name] = Result(Outcome.DIFFERENT, text)
                else:
                    going.append(each)
        return going

    def _by_the_product(
        self,
        alive: Sequence[Subscription],
        action: Callable[[Sequence[Subscription]], Mapping[str, CdcReplayError]],
    ) -> Mapping[str, CdcReplayError]:
        """All at once; one by one if that fails as a whole. The errors by subscription."""
        try:
            return action(alive) if alive else {}
        except CdcReplayError:
            failures: dict[str, CdcReplayError] = {}
            for each in alive:
                try:
                    failures |= action([each])
                except CdcReplayError as error:
                    failures[each.name] = error
            return failures

    def _ended(self, each: Subscription, failures: Mapping[str, CdcReplayError], when: str) -> bool:
        error = failures.get(each.name)
        if error is None:
            return False
        text = str(error)
        if "[R6." in text:
            outcome = Outcome.EARLIER
        elif "[R4.6]" in text:
            outcome = Outcome.UNKNOWN_VALUE
        else:
            outcome = Outcome.DIFFERENT
        self.results[each.name] = Result(outcome, f"{when} of the product fails, native goes on: {text}")
        return True

    def _twin(self, each: Subscription) -> NativeSubscription:
        return NativeSubscription(
            self.publisher, self.native.databases[each.name], each.name + self.native.suffix
        )

    # ---- comparison

    def _differences(self, each: Subscription) -> Iterator[str]:
        native, ours = self.native.databases[each.name], self.product.databases[each.name]
        with native.connect() as true, ours.connect() as tested, self.publisher.connect() as source:
            for family, table in self.world.tables():
                columns = self.world.columns(family)
                want, have = (_content(at, table, columns) for at in (true, tested))
                self.rows[each.name] += want.total()
                if want == have or _only_lost_values_differ(
                    family, want, have, _content(source, table, columns[: len(family.columns)])
                ):
                    continue
                yield f"table {table}, columns {columns}{described_difference(want, have)}"


def _content(connection: Connection, table: str, columns: Sequence[str]) -> Counter[Row]:
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    return Counter(text_rows(connection, sql.SQL("select {} from {}").format(names, sql.SQL(table))))


def _only_lost_values_differ(
    family: Family, native: Counter[Row], ours: Counter[Row], publisher: Counter[Row]
) -> bool:
    """R4.6: native has NULL for a value that was not sent, and we what the publisher has in that row."""
    if family.big is None or all(leaf.identity is Identity.FULL for leaf in family.leaves):
        return False
    big = family.columns.index(family.big)
    key = [at for at, column in enumerate(family.columns) if column.name in family.key]
    at_publisher = {tuple(row[at] for at in key): row[big] for row in publisher}
    lost = {_without(row, big): row for row in native - ours if row[big] is None}
    surplus = ours - native
    return surplus.total() == (native - ours).total() and all(
        _without(row, big) in lost and at_publisher.get(tuple(row[at] for at in key), row[big]) == row[big]
        for row in surplus
    )


def _without(row: Row, at: int) -> Row:
    return (*row[:at], *row[at + 1 :])
