"""What a failing case prints: how to see it again, and a script that needs no generator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml

from conformance.random_cases.run import Outcome, Ran
from conformance.random_cases.world import World, as_scenario

SEED_VARIABLE: Final = "CDC_REPLAY_CASE_SEED"
TEST: Final = "tests/conformance/test_random_cases.py::test_random_cases_equal_native"
REDEFINED_TEST: Final = f"{TEST}_while_definitions_change"


def counts(results: Iterable[Ran]) -> Counter[Outcome]:
    """How many cases have each outcome."""
    return Counter(result.outcome for ran in results for result in ran.results.values())


def summary(seed: int, results: Mapping[int, Ran]) -> str:
    """One line for a run of cases."""
    found = counts(results.values())
    accepted = sum(ran.accepted for ran in results.values())
    refused = sum(len(ran.refused) for ran in results.values())
    rows = sum(result.rows for ran in results.values() for result in ran.results.values())
    outcomes = ", ".join(f"{count} {outcome.value}" for outcome, count in sorted(found.items(), key=str))
    return (
        f"random cases from seed {seed}: {found.total()} in {len(results)} worlds ({outcomes});"
        f" {rows} rows compared, {accepted} statements run, {refused} refused by the publisher"
    )


def described(world: World, name: str, text: str) -> str:
    """A failure: what differs, and how to see it again."""
    command = f"{SEED_VARIABLE}={world.seed} pytest {REDEFINED_TEST if world.redefined else TEST}"
    return f"case {name} of seed {world.seed}: {text}\nagain: {command}"


def script(world: World) -> str:
    """The world, which has one subscription, as a file for `tests/conformance/scenarios`."""
    scenario: dict[str, Any] = as_scenario(world).model_dump(mode="json", exclude_defaults=True)
    return (
        f"save as tests/conformance/scenarios/{scenario['name']}.yaml and run"
        f" pytest tests/conformance/test_conformance.py -k {scenario['name']}:\n\n"
        + yaml.dump(scenario, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=100)
    )


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
