"""Which version of the publisher's catalog is in force for a change: for many changes at once (R9.10).

What versions are, and why there are some for single transactions, is said in `catalog.history`. Here they
are two numbers each, and so is a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CatalogVersions:
    """Which version of the publisher's catalog is in force for a change (R9.10).

    Versions for all transactions are looked up by `lsn` in `for_all`. Those that are for single transactions
    are looked up by two numbers made one: which of `owners` the change's commit is, and how many of the
    positions in `own_lsns` are not above the change's.

        versions    of 60: from 20, from 40; of 90: from 70
        owners      60, 90          own_lsns   20, 40, 70
        own_keys    0*4+1, 0*4+2, 1*4+3
        a change    of 60 at 50: 0*4+2, the second; of 90 at 30: 1*4+1, none
    """

    for_all: Int64s
    for_all_numbers: Int64s
    owners: Int64s
    own_lsns: Int64s
    own_keys: Int64s
    own_numbers: Int64s

    @classmethod
    def of(cls, versions: Sequence[tuple[int, int]]) -> CatalogVersions:
        """Of (owner, from LSN) of each version, whose place is its number.

        The owner is the end of a transaction's commit, or 0 for all transactions.
        """
        found = np.array(versions, dtype=np.int64).reshape(-1, 2)
        owner, from_lsn = found[:, 0], found[:, 1]
        for_all, own = np.flatnonzero(owner == 0), np.flatnonzero(owner)
        for_all = for_all[np.argsort(from_lsn[for_all], kind="stable")]
        owners, own_lsns = np.unique(owner[own]), np.unique(from_lsn[own])
        keys = _own_keys(owners, own_lsns, owner[own], from_lsn[own])
        order = np.argsort(keys)
        return cls(from_lsn[for_all], for_all, owners, own_lsns, keys[order], own[order])

    def numbers(self, commit_lsns: Int64s, lsns: Int64s) -> Int64s:
        """The versions of changes: the last whose LSN is not above the change's, else the first."""
        places = np.searchsorted(self.for_all, lsns, side="right") - 1
        numbers: Int64s = self.for_all_numbers[np.maximum(places, 0)]
        if not len(self.owners):
            return numbers
        rows = np.flatnonzero(np.isin(commit_lsns, self.owners))
        keys = _own_keys(self.owners, self.own_lsns, commit_lsns[rows], lsns[rows])
        places = np.searchsorted(self.own_keys, keys, side="right") - 1
        width = len(self.own_lsns) + 1
        has_own = (places >= 0) & (self.own_keys[places] // width == keys // width)
        numbers[rows[has_own]] = self.own_numbers[places[has_own]]
        return numbers


def _own_keys(owners: Int64s, own_lsns: Int64s, owner: Int64s, lsns: Int64s) -> Int64s:
    keys: Int64s = np.searchsorted(owners, owner) * (len(own_lsns) + 1)
    return keys + np.searchsorted(own_lsns, lsns, side="right")
