"""A subscription: which publications, with which options."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName


class OriginPolicy(enum.Enum):
    """The subscription option `origin` (R8.19)."""

    ANY = "any"
    NONE = "none"


class ConflictPolicy(enum.Enum):
    """How to resolve a conflict. Conflicts are always counted."""

    ERROR = "error"
    """Apply nothing of the transaction and park (`FailurePolicy`), where a native worker stops."""
    OVERWRITE = "overwrite"
    """The publisher's row wins."""
    SKIP = "skip"
    """The subscriber's row stays."""


class FailurePolicy(enum.Enum):
    """What is parked after a permanent apply error (R8.5)."""

    SUBSCRIPTION = "subscription"
    """The subscription, as with a native worker: all tables stay at one position."""
    TABLE = "table"
    """The table alone; the others continue past the failing transaction."""


class UnchangedToast(enum.Enum):
    """What an INSERT stores for an unchanged TOAST value that is lost (R4.6)."""

    EXACT = "exact"
    """Nothing: park (`FailurePolicy`), unless the row or value no longer matters."""
    NATIVE = "native"
    """NULL, as a native worker stores it. Always counted."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """An ordered list of publications of one publisher, and how their changes are applied.

    `lock_timeout` is how many seconds a window waits for one lock of the subscriber; 0: without limit.
    `run_as_owner` is PostgreSQL's option: code in the tables runs with the rights of our role, the
    subscription's owner, instead of those of the tables' owners (R8.21).
    """

    name: str
    publisher: str
    publications: tuple[str, ...]
    copy_data: bool = True
    origin: OriginPolicy = OriginPolicy.ANY
    on_conflict: ConflictPolicy = ConflictPolicy.ERROR
    on_failure: FailurePolicy = FailurePolicy.SUBSCRIPTION
    unchanged_toast: UnchangedToast = UnchangedToast.EXACT
    lock_timeout: float = 10.0
    run_as_owner: bool = False


@dataclass(frozen=True, slots=True)
class SubscribedTable:
    """A table of a subscription in one window.

    `index` is the value of `target` in the frames. `columns` is the order of their `values`: the published
    columns, by name. `identity` are the columns that locate a row on the subscriber (R8.6): its replica
    identity index or primary key if `is_keyed`, else all published columns.

    If `is_per_leaf`, `identity` is the key of the publisher's leaves, which may be equal in two leaves: keys
    in frames have the leaf's oid as an additional element (R8.11, R8.12).

    If `is_by_leaf`, the target has no key, but its partitions do: the partition of the old row decides which
    row a change is for, and only the server knows it.
    """

    index: int
    name: QualifiedName
    columns: tuple[str, ...]
    identity: tuple[str, ...]
    is_keyed: bool
    applied_lsn: Lsn
    is_per_leaf: bool = False
    is_by_leaf: bool = False

    @property
    def has_own_key(self) -> bool:
        """Whether a unique index of the target is on `identity`."""
        return self.is_keyed and not self.is_per_leaf
