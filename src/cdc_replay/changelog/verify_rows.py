"""Check that the rows of a row group are well-formed messages, and follow the previous ones.

Messages are in the order of (commit LSN, seq), and seq counts from 0 in each transaction, so a missing,
duplicate or misplaced row is detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.changelog.queries import first_messages
from cdc_replay.changelog.segment import EVERYTHING, RESTORE, RowGroup, read_row_group
from cdc_replay.errors import ChangeLogDamaged, InvalidMessage
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import Relation
from cdc_replay.pgoutput.columnar import ChangeDecoder
from cdc_replay.pgoutput.messages import LogicalMessage, MessageType
from cdc_replay.pgoutput.reader import decode

if TYPE_CHECKING:
    from numpy.typing import NDArray

_REQUIRED: Final = ("commit_lsn", "xid", "seq", "lsn", "kind", "message")
_BEFORE_ALL: Final = (0, -1)
"""The position before the first message."""


@dataclass(frozen=True, slots=True)
class RowGroupSummary:
    """The content of a row group, as far as order and counts need it; bytes are those of the messages."""

    group: RowGroup
    commit_lsns: NDArray[np.int64]
    seqs: NDArray[np.int32]
    transactions: int
    """How many begin here; non-transactional messages do not count (R9.13)."""
    bytes: int


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads and decodes row groups; thread-safe."""

    decoder: ChangeDecoder

    @classmethod
    def from_relations(cls, relations: Mapping[int, Relation]) -> RowReader:
        """A reader with these relations by version."""
        return cls(ChangeDecoder.from_relations(EVERYTHING, relations, [(0, 0)]))

    def read(self, group: RowGroup) -> RowGroupSummary:
        """Decode every message of the row group, and summarize it.

        Raises:
            ChangeLogDamaged: naming segment, row group and, if the fault is in a row, the row.
        """
        batch = read_row_group(group)
        for name in _REQUIRED:
            if batch[name].null_count:
                row = pc.index(pc.is_null(batch[name]), value=True).as_py()
                raise row_fault(group, row, f"It has no {name}.")
        try:
            self.decoder.decode(batch)
            _decode_logical(batch)
        except InvalidMessage as error:
            raise ChangeLogDamaged(
                f'segment "{group.uri}" of the change log contains a message that cannot be decoded',
                detail=" ".join(filter(None, (f"Row group {group.index}: {error.message}.", error.detail))),
                hint=RESTORE,
                rule=error.rule,
            ) from error
        return RowGroupSummary(
            group,
            batch["commit_lsn"].to_numpy(),
            batch["seq"].to_numpy(),
            first_messages(batch).true_count,
            pc.sum(pc.binary_length(batch["message"])).as_py() or 0,
        )


def _decode_logical(batch: pa.RecordBatch) -> None:
    """Decode the logical messages, which the columnar decoder leaves out."""
    for row in np.flatnonzero(_flags(pc.equal(batch["kind"], MessageType.MESSAGE.value))):
        try:
            message = decode(batch["message"][int(row)].as_py())
        except InvalidMessage as error:
            raise InvalidMessage(f"{error.message}, row {row}", rule=error.rule) from error
        if not isinstance(message, LogicalMessage):
            raise InvalidMessage(f"message type differs from the log's column kind, row {row}", rule="R1.2")


def _flags(values: pa.BooleanArray) -> NDArray[np.bool_]:
    flags: NDArray[np.bool_] = values.to_numpy(zero_copy_only=False)
    return flags


@dataclass(slots=True)
class RowOrder:
    """The commit LSN and seq of the last message."""

    last: tuple[int, int] = _BEFORE_ALL

    def check(self, segment: Iterable[RowGroupSummary]) -> None:
        """Check that the rows of a segment continue the order.

        Raises:
            ChangeLogDamaged: naming the first that does not.
        """
        for summary in segment:
            self._check_next(summary)

    def _check_next(self, summary: RowGroupSummary) -> None:
        lsns = np.concatenate(([self.last[0]], summary.commit_lsns))
        seqs = np.concatenate(([self.last[1]], summary.seqs))
        is_same = lsns[1:] == lsns[:-1]
        is_next = np.where(is_same, seqs[1:] == seqs[:-1] + 1, (lsns[1:] > lsns[:-1]) & (seqs[1:] == 0))
        if not is_next.all():
            row = int(np.flatnonzero(~is_next)[0])
            current, previous = ((int(lsns[at]), int(seqs[at])) for at in (row + 1, row))
            raise row_fault(summary.group, row, f"It is {_name(current)}, after {_name(previous)}.")
        self.last = int(lsns[-1]), int(seqs[-1])


def _name(position: tuple[int, int]) -> str:
    commit_lsn, seq = position
    if position == _BEFORE_ALL:
        return "nothing"
    return f"message {seq} of the transaction that commits at {Lsn(commit_lsn)}"


def row_fault(group: RowGroup, row: int, problem: str) -> ChangeLogDamaged:
    """The error for an unexpected row."""
    return ChangeLogDamaged(
        f'segment "{group.uri}" of the change log differs from what was captured',
        detail=f"Row group {group.index}, row {row}: {problem}",
        hint=RESTORE,
    )
