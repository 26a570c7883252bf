"""A random case: tables, publications, subscriptions and a workload, all from one seed.

`world(seed, version)` is a pure function. Several subscriptions share the publisher, its traffic and our
change log, as they do in use; each of them, with its publications, is one case.

| drawn          | what                                                                                   |
|----------------|----------------------------------------------------------------------------------------|
| tables         | 1 to 3 families in 1 to 3 schemas (`tables`), with types and values of `values`         |
| publications   | 2 to 5 (`publications`)                                                                |
| subscriptions  | up to 4, each to 1 to 3 publications, its tables laid out in one of three ways          |
| phases         | before the subscriptions (mostly), then 1 to 3, each followed by a sync (`workload`)    |
| definitions    | if the world is redefined, they change between changes of rows (`definitions`)          |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from conformance.random_cases.definitions import LATER, Definitions, with_later_column
from conformance.random_cases.publications import (
    Publication,
    Subscribed,
    random_publication,
    random_style,
    random_subscription,
)
from conformance.random_cases.tables import SCHEMAS, Family, created, random_family, schemas_of
from conformance.random_cases.values import TYPES, quoted
from conformance.random_cases.workload import Statement, Transaction, Workload
from conformance.scenario import Compare, Publish, Scenario, Step, Subscription, Sync

POSTGRES_16: Final = 160000

Item = TypeVar("Item")

SUBSCRIPTIONS: Final = 4
"""So many cases has a world, at most."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything that is run; the first phase comes before the subscriptions.

    If it is `redefined`, definitions change between changes of rows (`definitions`).
    """

    seed: int
    families: tuple[Family, ...]
    publications: tuple[Publication, ...]
    subscriptions: tuple[Subscribed, ...]
    phases: tuple[tuple[Transaction, ...], ...]
    redefined: bool = False

    @property
    def publishes_generated(self) -> bool:
        return any(publication.publish_generated for publication in self.publications)

    def tables(self) -> Iterator[tuple[Family, str]]:
        """All tables, each with its family."""
        for family in self.families:
            for table in family.tables:
                yield family, table.sql

    def publisher_script(self) -> list[str]:
        """The statements that make the publisher, without rows."""
        return [*self._prelude(), *self._created(), *(each.sql for each in self.publications)]

    def subscriber_script(self, subscription: Subscribed) -> list[str]:
        """The statements that make a subscriber."""
        statements = self._prelude()
        for family in self.families:
            statements += created(family, subscription.layout, generated=not self.publishes_generated)
            if self.redefined:
                statements += with_later_column(family, subscription.layout)
        return statements

    def columns(self, family: Family) -> list[str]:
        """The columns of subscribers' tables, those that the publisher always has first."""
        return [*(column.name for column in family.columns), *((LATER,) if self.redefined else ())]

    def _prelude(self) -> list[str]:
        return [
            *TYPES.strip().split(";\n"),
            *(f"create schema {quoted(s)}" for s in schemas_of(self.families)),
        ]

    def _created(self) -> Iterator[str]:
        for family in self.families:
            yield from created(family)


def world(seed: int, version: int, *, redefined: bool = False) -> World:
    """The world of a seed for publishers of a version (`server_version_num`)."""
    choose = random.Random(seed)
    schemas = choose.sample(SCHEMAS, choose.randint(1, 3))
    families = tuple(
        random_family(choose, number, choose.sample(schemas, len(schemas)), version)
        for number in range(choose.choices((1, 2, 3), (65, 30, 5))[0])
    )
    style = random_style(choose, families, version)
    publications = tuple(
        random_publication(choose, name, families, style)
        for name in choose.sample(("p1", "p2", "P 3", "päb", "all"), choose.randint(2, 5))
    )
    subscriptions = tuple(
        _copied_once(random_subscription(choose, number, publications), families, version)
        for number in range(1, SUBSCRIPTIONS + 1)
    )
    workload = Workload(
        choose,
        families,
        reuses_keys=style.steady and choose.random() < 0.6,
        definitions=Definitions(choose, families, publications, style) if redefined else None,
    )
    before = tuple(workload.filling()) if choose.random() < 0.8 else ()
    syncs = choose.choices((1, 2, 3), (30, 60, 10))[0]
    later = tuple(tuple(workload.transactions(choose.randint(4, 10))) for _ in range(syncs))
    return World(seed, families, publications, subscriptions, (before, *later), redefined)


def _copied_once(subscription: Subscribed, families: Sequence[Family], version: int) -> Subscribed:
    """Not copied on 15, if publications of several levels of a tree may list the same rows twice (R7.2)."""
    has_levels = any(family.top.is_partitioned for family in families)
    if version < POSTGRES_16 and has_levels and len(subscription.publications) > 1:
        return replace(subscription, copy_data=False)
    return subscription


# ---- smaller ones


def only(world: World, name: str) -> World:
    """The world with one subscription."""
    chosen = tuple(each for each in world.subscriptions if each.name == name)
    return replace(world, subscriptions=chosen)


def _with_fewer_publications(world: World) -> Iterator[World]:
    for gone in world.publications:
        subscriptions = tuple(
            replace(each, publications=tuple(name for name in each.publications if name != gone.name))
            for each in world.subscriptions
        )
        if all(each.publications for each in subscriptions):
            kept = tuple(each for each in world.publications if each is not gone)
            yield replace(world, publications=kept, subscriptions=subscriptions)


def _with_fewer_families(world: World) -> Iterator[World]:
    if len(world.families) > 1:
        for family in world.families:
            yield _without_family(world, family)


def _without_family(world: World, gone: Family) -> World:
    """The world without a family, and without what is about it."""
    publications = tuple(
        replace(each, members=tuple(member for member in each.members if member.family != gone.number))
        for each in world.publications
    )
    return replace(
        world,
        families=tuple(family for family in world.families if family is not gone),
        publications=publications,
        phases=_kept(world.phases, lambda statement: gone.number not in statement.families),
    )


def _with_fewer_syncs(world: World) -> Iterator[World]:
    if len(world.phases) > 2:
        for at in range(1, len(world.phases)):
            yield replace(world, phases=(*world.phases[:at], *world.phases[at + 1 :]))
        for at in range(1, len(world.phases) - 1):
            joined = (*world.phases[at], *world.phases[at + 1])
            yield replace(world, phases=(*world.phases[:at], joined, *world.phases[at + 2 :]))


def _with_fewer_transactions(world: World) -> Iterator[World]:
    every = [(at, transaction) for at, phase in enumerate(world.phases) for transaction in phase]
    for chunk in _chunks(every):
        gone = {(at, id(transaction)) for at, transaction in chunk}
        yield replace(
            world,
            phases=tuple(
                tuple(each for each in phase if (at, id(each)) not in gone)
                for at, phase in enumerate(world.phases)
            ),
        )


def _with_fewer_statements(world: World) -> Iterator[World]:
    every = [
        statement
        for phase in world.phases
        for transaction in phase
        for part in transaction.parts
        for statement in part.statements
    ]
    for chunk in _chunks(every):
        yield without(world, chunk)


REDUCTIONS: Final = (
    _with_fewer_publications,
    _with_fewer_families,
    _with_fewer_syncs,
    _with_fewer_transactions,
    _with_fewer_statements,
)
"""Ways to make a world smaller, each yielding worlds with something less, the largest pieces first."""


def without(world: World, statements: Sequence[Statement]) -> World:
    """The world without these statements (these objects, not all that are equal to them)."""
    gone = {id(statement) for statement in statements}
    return replace(world, phases=_kept(world.phases, lambda each: id(each) not in gone))


def _chunks(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Halves, quarters and so on, down to single items."""
    size = (len(items) + 1) // 2 if len(items) > 1 else len(items)
    while size:
        for start in range(0, len(items), size):
            yield items[start : start + size]
        size //= 2


def _kept(
    phases: Sequence[Sequence[Transaction]], keeps: Callable[[Statement], bool]
) -> tuple[tuple[Transaction, ...], ...]:
    """The phases with those statements only, without parts and transactions that have none left."""
    return tuple(
        tuple(kept for transaction in phase if (kept := _kept_of(transaction, keeps)).parts)
        for phase in phases
    )


def _kept_of(transaction: Transaction, keeps: Callable[[Statement], bool]) -> Transaction:
    parts = (
        replace(part, statements=tuple(each for each in part.statements if keeps(each)))
        for part in transaction.parts
    )
    return replace(transaction, parts=tuple(part for part in parts if part.statements))


# ---- as a scenario


def as_scenario(world: World) -> Scenario:
    """The world as a file of `scenarios`, which runs without a generator."""
    (subscription,) = world.subscriptions
    before, *later = world.phases
    steps: list[Step] = [Sync(sync=True)]
    for phase in later:
        steps += [Publish(publisher=_script(phase)), Sync(sync=True)]
    options = {} if subscription.copy_data else {"copy_data": False}
    return Scenario(
        name=f"random_{world.seed}",
        source=f"random case {world.seed}",
        visibility="public",
        tags=("random",),
        rules=("R8.1",),
        publisher=";\n".join([*world.publisher_script(), _script(before)]),
        subscriber=";\n".join(world.subscriber_script(subscription)),
        subscriptions=(
            Subscription(name=subscription.name, publications=subscription.publications, options=options),
        ),
        compare=tuple(Compare(table=table) for _, table in world.tables()),
        steps=tuple(steps),
    )


def _script(phase: Sequence[Transaction]) -> str:
    return "".join(f"{statement};\n" for transaction in phase for statement in _statements(transaction))


def _statements(transaction: Transaction) -> Iterator[str]:
    yield "begin"
    for part in transaction.parts:
        if not part.kept:
            yield "savepoint part"
        yield from (statement.sql for statement in part.statements)
        if not part.kept:
            yield "rollback to part"
    yield "commit" if transaction.commits else "rollback"
