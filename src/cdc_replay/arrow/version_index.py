"""Which version of the publisher's catalog is in force for a change, for many changes at once (R9.10).

`catalog.history` defines versions, and why some are for single transactions. Here a version and a change are
two numbers each.
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
    """Index of catalog versions by position (R9.10).

    Versions for all transactions are looked up by `lsn` in `global_lsns`. Versions for single transactions
    are looked up by one combined number: the index of the change's commit in `owners`, and the number of
    `transaction_lsns` that are not above the change's LSN.

        versions    of 60: from 20, from 40; of 90: from 70
        owners      60, 90          own_lsns   20, 40, 70
        own_keys    0*4+1, 0*4+2, 1*4+3
        a change    of 60 at 50: 0*4+2, the second; of 90 at 30: 1*4+1, none
    """

    global_lsns: Int64s
    global_indexes: Int64s
    owners: Int64s
    transaction_lsns: Int64s
    transaction_keys: Int64s
    transaction_indexes: Int64s

    @classmethod
    def from_positions(cls, versions: Sequence[tuple[int, int]]) -> CatalogVersions:
        """Build the index from (owner, from LSN) of each version, in the order of their indexes.

        The owner is a transaction's commit LSN, or 0 for all transactions.
        """
        pairs = np.array(versions, dtype=np.int64).reshape(-1, 2)
        owner, from_lsn = pairs[:, 0], pairs[:, 1]
        global_lsns, in_transaction = np.flatnonzero(owner == 0), np.flatnonzero(owner)
        global_lsns = global_lsns[np.argsort(from_lsn[global_lsns], kind="stable")]
        owners, transaction_lsns = np.unique(owner[in_transaction]), np.unique(from_lsn[in_transaction])
        keys = _transaction_keys(owners, transaction_lsns, owner[in_transaction], from_lsn[in_transaction])
        order = np.argsort(keys)
        return cls(
            from_lsn[global_lsns], global_lsns, owners, transaction_lsns, keys[order], in_transaction[order]
        )

    def indexes(self, commit_lsns: Int64s, lsns: Int64s) -> Int64s:
        """The version index of each change: the last whose LSN is not above the change's, else the first."""
        positions = np.searchsorted(self.global_lsns, lsns, side="right") - 1
        indexes: Int64s = self.global_indexes[np.maximum(positions, 0)]
        if not len(self.owners):
            return indexes
        rows = np.flatnonzero(np.isin(commit_lsns, self.owners))
        keys = _transaction_keys(self.owners, self.transaction_lsns, commit_lsns[rows], lsns[rows])
        positions = np.searchsorted(self.transaction_keys, keys, side="right") - 1
        width = len(self.transaction_lsns) + 1
        has_version = (positions >= 0) & (self.transaction_keys[positions] // width == keys // width)
        indexes[rows[has_version]] = self.transaction_indexes[positions[has_version]]
        return indexes


def _transaction_keys(owners: Int64s, transaction_lsns: Int64s, owner: Int64s, lsns: Int64s) -> Int64s:
    keys: Int64s = np.searchsorted(owners, owner) * (len(transaction_lsns) + 1)
    return keys + np.searchsorted(transaction_lsns, lsns, side="right")
