"""Every scenario: the product's subscribers hold what native subscribers hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.product_side import Product, slot_name
from conformance.run import Servers, placed, run_scenario
from conformance.scenario import Scenario, load_scenarios
from conformance.suites import SLOW, WITH_LEAST_PRIVILEGE


@pytest.mark.corpus
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            scenario,
            id=scenario.name,
            marks=pytest.mark.slow if scenario.name.startswith((SLOW, *WITH_LEAST_PRIVILEGE)) else (),
        )
        for scenario in load_scenarios()
    ],
)
def test_product_does_what_native_does(runnable: Scenario, servers: Servers, tmp_path: Path) -> None:
    with placed(runnable, servers) as place:
        product = Product(place.publisher, place.product, tmp_path, slot_name(runnable.name))
        run_scenario(runnable, servers, place, product)
        if runnable.subscriptions:
            product.tear_down()
