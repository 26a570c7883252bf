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
    """What to do with a change that the subscriber's rows do not allow. Conflicts are always counted."""

    ERROR = "error"
    """Apply nothing of the transaction, and park (`FailurePolicy`), as a native worker stops."""
    OVERWRITE = "overwrite"
    """The publisher's row wins."""
    SKIP = "skip"
    """The subscriber's row stays."""


class FailurePolicy(enum.Enum):
    """What stands still when the subscriber refuses a change for good (R8.5)."""

    SUBSCRIPTION = "subscription"
    """Everything from the change's transaction on, as with a native worker: tables stay at one position."""
    TABLE = "table"
    """The table alone; the others go on, past the transaction that has the change."""


class UnchangedToast(enum.Enum):
    """What is stored for a value that was not sent and that nobody has, where its row enters (R4.6)."""

    EXACT = "exact"
    """Nothing: what lacks it parks (`FailurePolicy`), unless row or value cannot matter any more."""
    NATIVE = "native"
    """NULL, as a native worker stores it. Always counted."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """An ordered list of publications of one publisher, and how their changes are applied.

    `lock_timeout` is how many seconds a window waits for one lock of the subscriber; 0: for ever.
    `run_as_owner` is native's option: code in the tables runs with the rights of our role, which stands for
    the owner of the subscription, and not with those of the tables' owners (R8.21).
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
    """A table of a subscription as the stages of one window see it.

    `index` is the value of `target` in the frames. `columns` gives the order of their `values`: the published
    columns, by name. `identity` are the columns by which a row is found on the subscriber (R8.6): its replica
    identity index or primary key where `is_keyed`, all published columns otherwise.

    Where `is_per_leaf`, `identity` is the key of the publisher's leaves instead, which need not tell apart
    the rows of two of them: keys in frames have the leaf's oid as one element more (R8.11, R8.12).

    Where `is_by_leaf`, the target has no key, but partitions that have: which row a change is for depends on
    the partition that its old row leads to, and only the server knows that.
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
        """An index of the target's own tells its rows apart by `identity`."""
        return self.is_keyed and not self.is_per_leaf
