"""R8.4: a change whose row the subscriber lacks is skipped; changes of its new key are for the row there.

A native worker applies change by change: an UPDATE that matches no row does nothing, whatever its new key.
Here a window is folded, so that a row that moves takes later changes of its new key along.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Final

import pytest

from fixtures.native import wait_for
from fixtures.twin import Twin
from integration.replay.apply.lacking_rows import FILTER_ABOVE, SHAPES, Case
from integration.replay.test_parking_by_kind import COUNTED, counts

pytestmark = pytest.mark.spark

KINDS: Final = ("update_missing", "delete_missing", "insert_exists", "update_exists")
CASES: Final = 8
"""Tables of each shape."""
POLICIES: Final = ("error", "overwrite", "skip")


def cases(seed: int) -> Iterator[Case]:
    for shape, number in itertools.product(SHAPES, range(CASES)):
        name = f"{shape}_{number}"
        yield Case(name, SHAPES[shape], random.Random(f"{seed} {name}"))


def subscribe(twin: Twin, drawn: list[Case]) -> None:
    for case in drawn:
        twin.publisher.run(case.shape.publisher.format(case.name))
        twin.publisher.run(case.start())
    members = [
        f"{case.name} where (id <= {FILTER_ABOVE})" if case.shape.is_filtered else case.name for case in drawn
    ]
    twin.publisher.run(
        f"create publication p for table {', '.join(members)} with (publish_via_partition_root = true)"
    )
    tables = "; ".join(case.shape.subscriber.format(case.name) for case in drawn)
    for policy in POLICIES:
        twin.subscribe(policy, "p", tables=tables, native=policy == "error", on_conflict=policy)


def rows(twin: Twin, name: str, table: str, *, native: bool = False) -> list[tuple[object, ...]]:
    pair = twin.pairs[name]
    database = pair.native if native else pair.ours
    return database.rows(f"select id, r, v, j::text, tableoid::regclass::text from {table} order by 1, 2, 3")


def counts_are(twin: Twin, expected: tuple[int, ...]) -> bool:
    return counts(twin, "error", KINDS) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_changes_of_few_keys_equal_native(twin: Twin, seed: int) -> None:
    """Moves there and back, exchanges, reused keys; the conflict counts are native's too."""
    drawn = list(cases(seed))
    subscribe(twin, drawn)
    twin.sync_ours()
    twin.native("error").wait()
    for case in drawn:
        for statement in case.damage():
            for database in (*(pair.ours for pair in twin.pairs.values()), twin.pairs["error"].native):
                database.run(statement)
    counted = dict.fromkeys(POLICIES, (0, 0))
    for _ in range(2):
        for case in drawn:
            twin.publish(";\n".join(case.changes(12)))

        results = {result.subscription: result.replay for result in twin.sync_ours()}

        twin.native("error").wait()
        for policy in POLICIES:
            assert results[policy].error is None, (policy, results[policy].error)
            conflicts = results[policy].conflicts
            assert set(conflicts) <= {"update_missing", "delete_missing"}, (policy, conflicts)
            before = counted[policy]
            counted[policy] = (
                before[0] + conflicts.get("update_missing", 0),
                before[1] + conflicts.get("delete_missing", 0),
            )
        wrong = [
            (policy, case.name, rows(twin, policy, case.name), rows(twin, "error", case.name, native=True))
            for policy in POLICIES
            for case in drawn
            if rows(twin, policy, case.name) != rows(twin, "error", case.name, native=True)
        ]
        assert not wrong, "\n".join(map(str, wrong))
        expected = tuple(sum(case.missing[kind] for case in drawn) for kind in KINDS[:2])
        assert counted == dict.fromkeys(POLICIES, expected)
        if twin.pairs["error"].native.rows(COUNTED) == [(True,)]:
            has_counted = functools.partial(counts_are, twin, (*expected, 0, 0))
            wait_for(has_counted, "native to report what it has counted")
