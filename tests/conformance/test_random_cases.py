"""Random schemas, publications and workloads: the product's subscribers hold what native ones hold.

A world of a seed has up to four cases (`random_cases.world`). `CDC_REPLAY_CASE_SEED=N` runs world N alone.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import psycopg
import pytest

from cdc_replay.errors import CdcReplayError
from cdc_replay.postgres.connection import connect
from conformance.product_side import Product
from conformance.random_cases import report
from conformance.random_cases.native import caught_up
from conformance.random_cases.run import COMPARED, Outcome, Ran, run_world
from conformance.random_cases.shrink import shrunk
from conformance.random_cases.world import World, only, without, world
from conformance.run import Servers
from conformance.scenario import Subscription
from embedded.postgres import Cluster
from fixtures.native import NativeStandsStill, NativeSubscription
from fixtures.postgres import Database

CI_SEED, CI_CASES = 20261162, 12
SHUFFLED_SEED, SHUFFLED_CASES = 20261500, 6
REDEFINED_SEED, REDEFINED_CASES = 20263000, 12
SLOW_SEED, SLOW_CASES = 20262000, 300
SLOW_REDEFINED_SEED = 20264000

DAMAGED_SEED = 20261164

SHARE_LEFT_OUT = 0.3
"""At most so many cases may end without a comparison of their last rows."""

SHRINKING_TRIES = 60


@pytest.fixture(scope="module")
def servers(publisher_cluster: Cluster, make_cluster: Callable[..., Cluster]) -> Servers:
    """A subscriber of its own: four native subscriptions need more replication origins than are preset."""
    with connect(publisher_cluster.dsn(), purpose="test") as admin:
        needs_setting = admin.info.server_version >= 180000
    settings = {"max_active_replication_origins": "100"} if needs_setting else {}
    return Servers(publisher_cluster, make_cluster("random_cases", **settings))


@pytest.fixture
def run(servers: Servers, tmp_path: Path) -> Callable[[World], Ran]:
    def product(publisher: Database, databases: Mapping[str, Database], slot: str) -> Product:
        folder = tmp_path / slot
        folder.mkdir()
        return Product(publisher, databases, folder, slot)

    return lambda world: run_world(world, servers, product)


@pytest.fixture
def version(servers: Servers) -> int:
    with connect(servers.publisher.dsn(), purpose="test") as admin:
        return admin.info.server_version


@pytest.fixture
def tell(
    capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> Callable[[str], None]:
    """Say something of a test that passes, on the terminal and in its report."""

    def tell(line: str) -> None:
        record_property("ran", line)
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")

    return tell


Draw: TypeAlias = Callable[[int], World]
"""Gives the world of a seed."""


@pytest.fixture
def draw(version: int) -> Draw:
    """Worlds whose definitions stay."""
    return partial(world, version=version)


@pytest.fixture
def draw_redefined(version: int) -> Draw:
    """Worlds whose definitions change."""
    return partial(world, version=version, redefined=True)


def seeds(first: int, cases: int, draw: Draw) -> Iterator[int]:
    """Seeds of worlds that have so many cases together."""
    found = 0
    for seed in itertools.count(first):
        if found >= cases:
            return
        found += len(draw(seed).subscriptions)
        yield seed


def check(chosen: Sequence[int], draw: Draw, run: Callable[[World], Ran]) -> str:
    """Run the worlds and say what ran; fail for all cases that differ, the first of them made small."""
    ran = {seed: _ran(seed, draw, run) for seed in chosen}
    line = report.summary(chosen[0], ran)
    wrong = [
        (seed, name, result)
        for seed, each in ran.items()
        for name, result in each.results.items()
        if result.outcome is Outcome.DIFFERENT
    ]
    if wrong:
        described = [report.described(draw(seed), name, result.text) for seed, name, result in wrong]
        seed, name, _ = wrong[0]
        pytest.fail("\n\n".join([line, *described, _smallest(draw(seed), name, run)]))
    if len(ran) == 1:
        return line
    found = report.counts(ran.values())
    left_out = sum(count for outcome, count in found.items() if outcome not in COMPARED)
    assert left_out <= SHARE_LEFT_OUT * found.total(), line
    assert found[Outcome.EQUAL] >= found.total() / 2, line
    return line


def _ran(seed: int, draw: Draw, run: Callable[[World], Ran]) -> Ran:
    try:
        return run(draw(seed))
    except Exception as error:
        error.add_note(f"random case of seed {seed}")
        raise


def _smallest(failing: World, name: str, run: Callable[[World], Ran]) -> str:
    """The case as a scenario, made smaller while the product still fails in it."""

    def fails(candidate: World) -> bool:
        try:
            return run(candidate).results[name].outcome is Outcome.DIFFERENT
        except (psycopg.Error, CdcReplayError, NativeStandsStill):
            return False  # it lacks something that the rest needs

    alone = only(failing, name)
    if not fails(alone):
        return (
            f"case {name} of seed {failing.seed} does not fail without the other subscriptions of its world"
        )
    small = shrunk(alone, fails, SHRINKING_TRIES)
    return report.script(without(small, run(small).refused))


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_random_cases_equal_native(
    draw: Draw, run: Callable[[World], Ran], tell: Callable[[str], None]
) -> None:
    """Sections 2 to 8, whatever the publications say of whatever tables: 12 cases, or those of one seed."""
    tell(check(_chosen_or(CI_SEED, CI_CASES, draw), draw, run))


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_random_cases_equal_native_while_definitions_change(
    draw_redefined: Draw, run: Callable[[World], Ran], tell: Callable[[str], None]
) -> None:
    """Publications, replica identities, partitions and columns change between changes of rows."""
    chosen = _chosen_or(REDEFINED_SEED, REDEFINED_CASES, draw_redefined)
    tell(check(chosen, draw_redefined, run))


def _chosen_or(first: int, cases: int, draw: Draw) -> list[int]:
    chosen = os.environ.get(report.SEED_VARIABLE)
    return [int(chosen)] if chosen else list(seeds(first, cases, draw))


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_random_cases_equal_native_if_their_windows_are_shuffled(
    draw: Draw, run: Callable[[World], Ran], tell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the changes of large windows are."""
    monkeypatch.setattr("cdc_replay.replay.window_size.SMALL_WINDOW_ROWS", 0)
    tell(check(list(seeds(SHUFFLED_SEED, SHUFFLED_CASES, draw)), draw, run))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_three_hundred_random_cases_equal_native(
    draw: Draw, run: Callable[[World], Ran], tell: Callable[[str], None]
) -> None:
    tell(check(list(seeds(SLOW_SEED, SLOW_CASES, draw)), draw, run))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_three_hundred_random_cases_equal_native_while_definitions_change(
    draw_redefined: Draw, run: Callable[[World], Ran], tell: Callable[[str], None]
) -> None:
    tell(check(list(seeds(SLOW_REDEFINED_SEED, SLOW_CASES, draw_redefined)), draw_redefined, run))


@dataclass
class Second:
    """A second native subscription in the place of the product; `damage` is done after every sync."""

    publisher: Database
    databases: Mapping[str, Database]
    slot: str
    damage: str = "select"

    def subscribe(self, subscription: Subscription) -> None:
        try:
            self._native(subscription).create(subscription.publications, subscription.options)
        except psycopg.Error as error:
            raise CdcReplayError(str(error)) from error

    def tear_down(self) -> None:
        """Its databases are dropped."""

    def subscribe_together(self, subscriptions: Sequence[Subscription]) -> Mapping[str, CdcReplayError]:
        for each in subscriptions:
            self.subscribe(each)
        return {}

    def sync_together(self, subscriptions: Sequence[Subscription]) -> Mapping[str, CdcReplayError]:
        stopped = [each.name for each in subscriptions if not caught_up(self._native(each))]
        for each in subscriptions:
            self.databases[each.name].run(self.damage)
        return {name: CdcReplayError("a worker failed") for name in stopped}

    def beside(self) -> Second:
        return self

    def _native(self, subscription: Subscription) -> NativeSubscription:
        return NativeSubscription(
            self.publisher, self.databases[subscription.name], f"{subscription.name}_{self.slot}"
        )


def test_a_second_native_subscription_passes_and_a_damaged_one_does_not(draw: Draw, servers: Servers) -> None:
    """Worlds are drawn until one has rows at its end: what a seed gives differs between versions."""
    for seed in itertools.count(DAMAGED_SEED):
        drawn = draw(seed)
        leaves = [leaf.sql for family in drawn.families for leaf in family.leaves]
        last = "delete from only {0} where ctid = (select max(ctid) from only {0})"
        damage = "; ".join(last.format(leaf) for leaf in leaves)

        right = run_world(drawn, servers, Second).results
        assert {result.outcome for result in right.values()} == {Outcome.EQUAL}

        wrong = run_world(drawn, servers, partial(Second, damage=damage)).results
        found = [result.text for result in wrong.values() if result.outcome is Outcome.DIFFERENT]
        assert all("missing" in text and any(leaf in text for leaf in leaves) for text in found)
        if found:
            return
