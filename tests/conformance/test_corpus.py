"""The scenarios themselves: PostgreSQL does what they say, and the comparison finds what is wrong.

A second native subscription in the place of the product must pass; the same one, damaged, must not.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from conformance.native_side import Native
from conformance.run import Servers, placed, run_scenario
from conformance.scenario import FOLDER, Scenario, Stalled, Subscription, load_scenario, load_scenarios
from conformance.sides import Mismatch


def chosen(*names: str) -> list[object]:
    files = [next(FOLDER.rglob(f"{name}.yaml")) for name in names]
    return [pytest.param(load_scenario(file), id=file.stem) for file in files]


@dataclass
class Damaged(Native):
    """A native subscription that is wrong after every sync."""

    suffix: str = "_damaged"
    damage: str = ""

    def sync(self, subscription: Subscription) -> None:
        super().sync(subscription)
        self.databases[subscription.name].run(self.damage)


@dataclass
class Silent(Native):
    """A native subscription that does not say that it cannot go on."""

    suffix: str = "_silent"

    def stall(self, subscription: Subscription, what: Stalled) -> None:
        raise Mismatch(f"sync of {subscription.name} succeeds, native says {what.message}")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [pytest.param(each, id=each.name) for each in load_scenarios()])
def test_native_does_what_the_scenario_says(runnable: Scenario, servers: Servers) -> None:
    with placed(runnable, servers) as place:
        run_scenario(runnable, servers, place, product=None)


@pytest.mark.parametrize(
    "scenario",
    chosen(
        "seed_p1_t1_worked_example",
        "rf_via_root_two_ancestors",
        "basic_missing_column_at_subscriber",
        "basic_encoding_differs",
        "cl_different_lists_refused",
    ),
)
def test_second_native_subscription_passes(runnable: Scenario, servers: Servers) -> None:
    with placed(runnable, servers) as place:
        second = Native(place.publisher, place.product, suffix="_second")
        run_scenario(runnable, servers, place, second)


@pytest.mark.parametrize("scenario", chosen("seed_p1_t1_worked_example"))
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("delete from t1 where ctid = (select max(ctid) from t1)", id="lost row"),
        pytest.param(
            "alter table t1 drop constraint if exists t1_pkey;"
            "insert into t1 select * from t1 where ctid = (select max(ctid) from t1)",
            id="doubled row",
        ),
        pytest.param("update t1 set c = c || ' '", id="added blank"),
        pytest.param("update t1 set c = ''", id="emptied value"),
        pytest.param("update t1 set b = null", id="lost value"),
    ],
)
def test_damage_is_found(runnable: Scenario, servers: Servers, damage: str) -> None:
    with placed(runnable, servers) as place:
        damaged = Damaged(place.publisher, place.product, damage=damage)
        with pytest.raises(Mismatch):
            run_scenario(runnable, servers, place, damaged)


@pytest.mark.parametrize("scenario", chosen("basic_missing_column_at_subscriber"))
def test_silence_is_found(runnable: Scenario, servers: Servers) -> None:
    with placed(runnable, servers) as place, pytest.raises(Mismatch):
        run_scenario(runnable, servers, place, Silent(place.publisher, place.product))
