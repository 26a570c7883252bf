"""What a part of the change log holds, in numbers and names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.changelog.segment import RowGroup, read_columns
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import RelationId
from cdc_replay.pgoutput.messages import MessageType, Truncate
from cdc_replay.pgoutput.reader import decode


@dataclass(frozen=True, slots=True)
class LogSummary:
    """How much a window of the log holds."""

    messages: int
    transactions: int


@dataclass(frozen=True, slots=True)
class LoggedCommit:
    """A transaction of the log; `commit_time` is microseconds since 1970-01-01 UTC (R9.14)."""

    commit_lsn: Lsn
    commit_time: int
    xid: int


@dataclass(frozen=True, slots=True)
class LoggedRelations:
    """What the messages of a window are about.

    `versions` are the relation versions of its row changes, `truncated` the relations that its TRUNCATEs
    name, `first_lsn` the lowest position of a message: a transaction may have begun before the window.
    """

    versions: frozenset[int]
    truncated: frozenset[RelationId]
    first_lsn: Lsn | None


def logged_commits(groups: Iterable[RowGroup], window: Window) -> Iterator[LoggedCommit]:
    """The transactions of `window` in these row groups, in their order.

    Raises:
        ChangeLogDamaged: as for `read_columns`.
    """
    for group in groups:
        table = read_columns(group, ("commit_lsn", "commit_time", "xid", "seq"), window)
        for row in table.filter(_first_messages(table)).to_pylist():
            yield LoggedCommit(Lsn(row["commit_lsn"]), row["commit_time"], row["xid"])


def log_summary(groups: Iterable[RowGroup], window: Window) -> LogSummary:
    """Counts of what these row groups hold of `window`.

    Raises:
        ChangeLogDamaged: as for `read_columns`.
    """
    messages = transactions = 0
    for group in groups:
        table = read_columns(group, ("commit_time", "seq"), window)
        messages += table.num_rows
        transactions += pc.sum(_first_messages(table)).as_py() or 0
    return LogSummary(messages, transactions)


def _first_messages(table: pa.Table) -> pa.ChunkedArray:
    """Which rows begin a transaction; a message outside of any has no commit time (R9.13)."""
    return pc.and_(pc.equal(table["seq"], 0), pc.is_valid(table["commit_time"]))


def logged_relations(groups: Iterable[RowGroup], window: Window) -> LoggedRelations:
    """What the messages of `window` in these row groups are about.

    Raises:
        ChangeLogDamaged: as for `read_columns`.
    """
    versions: set[int] = set()
    truncated: set[RelationId] = set()
    first: int | None = None
    for group in groups:
        table = read_columns(group, ("lsn", "kind", "relation_version"), window)
        versions.update(pc.unique(table["relation_version"]).drop_null().to_pylist())
        lowest = pc.min(table["lsn"]).as_py()
        first = lowest if first is None else min(first, lowest or first)
        if pc.any(pc.equal(table["kind"], MessageType.TRUNCATE.value)).as_py():
            truncated.update(_truncated(group, window))
    return LoggedRelations(frozenset(versions), frozenset(truncated), None if first is None else Lsn(first))


def _truncated(group: RowGroup, window: Window) -> Iterator[RelationId]:
    table = read_columns(group, ("kind", "message"), window)
    for data in table.filter(pc.equal(table["kind"], MessageType.TRUNCATE.value))["message"].to_pylist():
        message = decode(data)
        if isinstance(message, Truncate):
            yield from message.relations
