"""Proofs of buckets, tables and subscriptions: what a run has not compared never becomes proven."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection

import pytest

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proof import (
    BUCKETS,
    Evidence,
    TableProof,
    buckets_of_share,
    runs_for_all,
    subscription_proof,
)

START = dt.datetime(2026, 11, 1, tzinfo=dt.UTC)


def run(
    proof: TableProof,
    hour: int,
    compared: Collection[int],
    *,
    differing: Collection[int] = (),
    definition: str = "d",
    turn: int | None = None,
) -> TableProof:
    """The proof after a run at that hour, whose fence is at the same number."""
    return proof.add(
        Evidence(
            definition,
            proof.next_turn if turn is None else turn,
            Lsn(hour),
            START + dt.timedelta(hours=hour),
            frozenset(compared),
            frozenset(differing),
        )
    )


def proven(proof: TableProof) -> int | None:
    point = proof.summary.proven
    return None if point is None else point.lsn.value


ALL = range(BUCKETS)


def test_a_table_is_proven_when_all_its_buckets_are() -> None:
    nothing = TableProof.nothing()
    assert (proven(nothing), nothing.summary.describe()) == (None, "never validated")
    part = run(nothing, 1, range(BUCKETS - 1))
    assert proven(part) is None
    assert "1 of 256 buckets were never compared" in part.summary.describe()
    whole = run(part, 2, [BUCKETS - 1])
    assert proven(whole) == 1  # the oldest part
    assert proven(run(whole, 3, range(BUCKETS - 1))) == 2


def test_a_difference_ends_the_proof_until_that_bucket_is_equal_again() -> None:
    proof = run(run(TableProof.nothing(), 1, ALL), 2, [7, 8], differing=[7])
    assert proven(proof) is None
    assert "1 of 256 buckets differ" in proof.summary.describe()
    # Runs that look elsewhere do not make up for it.
    assert proven(run(proof, 3, [index for index in ALL if index != 7])) is None
    assert proven(run(proof, 3, [7])) == 1


def test_another_definition_begins_anew() -> None:
    proof = run(run(TableProof.nothing(), 1, ALL), 2, range(10), definition="other")
    assert proven(proof) is None
    assert proof.summary.never_compared == BUCKETS - 10


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 0.05, 0.001])
def test_all_buckets_are_chosen_within_the_promised_runs_from_any_state(share: float) -> None:
    proof = run(run(TableProof.nothing(), 1, [3, 200]), 2, [5, 3])
    count, seen = buckets_of_share(share), set[int]()
    for hour in range(runs_for_all(share)):
        chosen = proof.choose(count)
        assert len(chosen) == count
        seen |= set(chosen)
        proof = run(proof, 3 + hour, chosen)
    assert seen == set(ALL)


def test_differing_buckets_do_not_keep_others_from_their_turn() -> None:
    proof, seen = TableProof.nothing(), set[int]()
    for hour in range(runs_for_all(0.25)):
        chosen = proof.choose(buckets_of_share(0.25))
        seen |= set(chosen)
        proof = run(proof, hour + 1, chosen, differing=chosen)
    assert seen == set(ALL)


def test_shares_become_buckets() -> None:
    assert [buckets_of_share(share) for share in (1.0, 0.5, 0.05, 0.0001)] == [256, 128, 13, 1]
    assert [runs_for_all(share) for share in (1.0, 0.5, 0.05, 0.0001)] == [1, 2, 20, 256]


def test_of_two_runs_side_by_side_the_later_position_counts() -> None:
    """Both began with the same turn; the one whose fence is earlier ends last."""
    proof = TableProof.nothing()
    late = run(proof, 9, ALL, turn=1)
    assert proven(run(late, 5, ALL, differing=[1], turn=1)) == 9
    assert proven(run(run(proof, 5, ALL, turn=1), 9, [1], turn=1)) == 5


def test_the_proof_of_a_subscription_is_the_oldest_of_its_tables() -> None:
    early, late = (run(TableProof.nothing(), hour, ALL).summary for hour in (4, 8))
    point = subscription_proof([late, early])
    assert point is not None
    assert (point.lsn, point.at) == (Lsn(4), START + dt.timedelta(hours=4))
    assert subscription_proof([late, early, TableProof.nothing().summary]) is None
    assert subscription_proof([]) is None
