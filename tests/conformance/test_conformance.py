"""Every scenario: the product's subscribers hold what native subscribers hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cdc_replay.errors import CdcReplayError
from conformance.expected_failures import XFAIL
from conformance.product_side import Product, slot_name
from conformance.run import Servers, placed, run_scenario
from conformance.scenario import Scenario, load_scenarios
from conformance.sides import Mismatch

SCENARIOS = list(load_scenarios())

FAILURES = (Mismatch, CdcReplayError, psycopg.Error)
"""How the product fails; what is wrong with native or with the runner is never expected."""


def parameters() -> Iterator[object]:
    for scenario in SCENARIOS:
        marks = []
        if scenario.name in XFAIL:
            rule, reason = XFAIL[scenario.name]
            marks.append(pytest.mark.xfail(strict=True, raises=FAILURES, reason=f"{rule}: {reason}"))
        yield pytest.param(scenario, id=scenario.name, marks=marks)


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("scenario", list(parameters()))
def test_product_does_what_native_does(runnable: Scenario, servers: Servers, tmp_path: Path) -> None:
    with placed(runnable, servers) as place:
        product = Product(place.publisher, place.product, tmp_path, slot_name(runnable.name))
        run_scenario(runnable, servers, place, product)
        if runnable.subscriptions:
            product.tear_down()


def test_every_expected_failure_is_a_scenario() -> None:
    assert set(XFAIL) <= {scenario.name for scenario in SCENARIOS}
