"""Make a failing world smaller as long as it fails in the same case."""

from __future__ import annotations

from collections.abc import Callable

from conformance.random_cases.world import REDUCTIONS, World


def shrunk(world: World, fails: Callable[[World], bool], tries: int) -> World:
    """The smallest world that was found with at most `tries` questions.

    Greedy: of each kind of reduction (publications, families, syncs, transactions, statements) the first that
    still fails is kept and the search goes on from there, until none of the kind does.
    """
    for reduction in REDUCTIONS:
        # A piece that was needed once is not tried again: it rarely can go after others have gone.
        candidates = iter(reduction(world))
        while tries and (candidate := next(candidates, None)) is not None:
            tries -= 1
            if fails(candidate):
                world = candidate
                candidates = iter(reduction(world))
    return world
