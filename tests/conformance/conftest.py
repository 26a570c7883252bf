"""The servers that a scenario runs on. A test that asks for them has the parameter `scenario`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from conformance.run import Servers, missing_requirement, server_settings
from conformance.scenario import Scenario
from embedded.postgres import Cluster


@pytest.fixture
def servers(
    scenario: Scenario,
    publisher_cluster: Cluster,
    subscriber_cluster: Cluster,
    make_cluster: Callable[..., Cluster],
) -> Iterator[Servers]:
    """The shared servers, or own ones where the scenario restarts them or changes their settings."""
    shared = Servers(publisher_cluster, subscriber_cluster)
    settings = server_settings(scenario, shared)
    if not settings and not scenario.restarts:
        yield shared
        return
    with contextlib.ExitStack() as stack:
        own = []
        for role in ("publisher", "subscriber"):
            own.append(make_cluster(f"{scenario.name}_{role}", **settings))
            stack.callback(own[-1].stop, "immediate")
        yield Servers(*own)


@pytest.fixture
def runnable(scenario: Scenario, servers: Servers) -> Scenario:
    """The scenario, skipped with the reason where the servers cannot run it."""
    if reason := missing_requirement(scenario, servers):
        pytest.skip(reason)
    return scenario
