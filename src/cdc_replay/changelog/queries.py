"""Queries over windows of the change log; all raise ChangeLogDamaged as `read_columns` does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.version_index import CatalogVersions, Int64s
from cdc_replay.changelog.segment import RowGroup, read_columns
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import RelationId
from cdc_replay.pgoutput.messages import LogicalMessage, MessageType, Truncate
from cdc_replay.pgoutput.reader import decode

_COUNTED: Final = ("commit_lsn", "commit_time", "seq", "kind")
"""The columns of a summary."""


@dataclass(frozen=True, slots=True)
class LogSummary:
    """How much a window of the log holds; messages of `pg_logical_emit_message` are within `logical`.

    `oldest_commit_time` is in microseconds since 1970-01-01 UTC; None if there is no transaction.
    """

    messages: int
    transactions: int
    logical: Window | None = None
    oldest_commit_time: int | None = None


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """The content of a transactional logical message, and its transaction's commit LSN (R9.13)."""

    commit_lsn: Lsn
    content: bytes


@dataclass(frozen=True, slots=True)
class CommittedTransaction:
    """A transaction of the log; `commit_time` is microseconds since 1970-01-01 UTC (R9.14)."""

    commit_lsn: Lsn
    commit_time: int
    xid: int


@dataclass(frozen=True, slots=True)
class LoggedDefinitions:
    """The definitions that the messages of a window refer to, and how much it holds.

    `changes` are pairs of relation version and catalog index, of its row changes; `truncates` are pairs of
    relation and catalog index, of its TRUNCATEs.
    """

    summary: LogSummary
    changes: frozenset[tuple[int, int]]
    truncates: frozenset[tuple[RelationId, int]]

    @property
    def all(self) -> Iterator[tuple[int, int]]:
        """Both kinds of pairs."""
        yield from self.changes
        yield from self.truncates


def logged_commits(groups: Iterable[RowGroup], window: Window) -> Iterator[CommittedTransaction]:
    """The transactions of `window` in these row groups, in order."""
    for group in groups:
        table = read_columns(group, ("commit_lsn", "commit_time", "xid", "seq"), window)
        for row in table.filter(first_messages(table)).to_pylist():
            yield CommittedTransaction(Lsn(row["commit_lsn"]), row["commit_time"], row["xid"])


def log_summary(groups: Iterable[RowGroup], window: Window) -> LogSummary:
    """Counts of the messages of `window` in these row groups."""
    count = _Count()
    for group in groups:
        count.add(read_columns(group, _COUNTED, window))
    return count.summary()


@dataclass(slots=True)
class _Count:
    messages: int = 0
    transactions: int = 0
    logical: list[tuple[int, int]] = field(default_factory=list)
    """The least and the greatest commit LSN of each row group."""
    commit_times: list[int] = field(default_factory=list)
    """The oldest of each row group."""

    def add(self, table: pa.Table) -> None:
        """Count the rows of one row group."""
        self.messages += table.num_rows
        self.transactions += pc.sum(first_messages(table)).as_py() or 0
        if (oldest := pc.min(table["commit_time"]).as_py()) is not None:
            self.commit_times.append(oldest)
        are_logical = _are_logical(table)
        if pc.any(are_logical).as_py():
            bounds = pc.min_max(table["commit_lsn"].filter(are_logical)).as_py()
            self.logical.append((bounds["min"], bounds["max"]))

    def summary(self) -> LogSummary:
        """The counts of all row groups."""
        oldest = min(self.commit_times, default=None)
        if not self.logical:
            return LogSummary(self.messages, self.transactions, oldest_commit_time=oldest)
        first, last = zip(*self.logical, strict=True)
        within = Window(Lsn(min(first) - 1), Lsn(max(last)))
        return LogSummary(self.messages, self.transactions, within, oldest)


def logged_messages(groups: Iterable[RowGroup], window: Window, prefix: str) -> Iterator[LoggedMessage]:
    """The transactional logical messages with this prefix in these row groups, in order."""
    for group in groups:
        # Read the messages, most of the log's bytes, only if some of them are logical.
        if not pc.any(_are_logical(read_columns(group, ("kind",), window))).as_py():
            continue
        table = read_columns(group, ("commit_lsn", "kind", "message"), window)
        for row in table.filter(_are_logical(table)).to_pylist():
            message = decode(row["message"])
            if isinstance(message, LogicalMessage) and message.is_transactional and message.prefix == prefix:
                yield LoggedMessage(Lsn(row["commit_lsn"]), message.content)


def _are_logical(table: pa.Table) -> pa.ChunkedArray:
    return pc.equal(table["kind"], MessageType.MESSAGE.value)


def last_lsn_without(groups: Iterable[RowGroup], window: Window, versions: Set[int]) -> Lsn:
    """The LSN up to which `window` has no change of these relation versions.

    That is the end of the transaction before the first one with such a change; `window.after` if there is
    none before it, `window.upto` if there is no such change.
    """
    version_set = pa.array(sorted(versions), pa.int64())

    def find(_: RowGroup, table: pa.Table) -> list[int]:
        matches = table.filter(pc.is_in(table["relation_version"], value_set=version_set))["commit_lsn"]
        return [pc.min(matches).as_py()] if len(matches) else []

    return _last_lsn_before(groups, window, ("commit_lsn", "relation_version"), find)


def _last_lsn_before(
    groups: Iterable[RowGroup],
    window: Window,
    columns: tuple[str, ...],
    find: Callable[[RowGroup, pa.Table], Collection[int]],
) -> Lsn:
    """The end of the transaction before the first commit LSN that `find` returns for a row group."""
    last: list[int] = []
    for group in groups:
        table = read_columns(group, columns, window)
        commits = {*last, *pc.unique(table["commit_lsn"]).to_pylist()}
        if matches := find(group, table):
            first = min(matches)
            return Lsn(max((commit for commit in commits if commit < first), default=window.after.value))
        # The last transaction may continue in the next row group.
        last = sorted(commits)[-2:]
    return window.upto


@dataclass(frozen=True, slots=True)
class SentChanges:
    """Changes to look for in the log.

    `kinds` are (relation version, catalog index, kind) of row changes, `truncated` are pairs of relation and
    catalog index.
    """

    kinds: frozenset[tuple[int, int, str]] = frozenset()
    truncated: frozenset[tuple[RelationId, int]] = frozenset()


def end_before(
    groups: Iterable[RowGroup], window: Window, sent: SentChanges, catalogs: CatalogVersions
) -> Lsn:
    """As `last_lsn_without`, for these changes."""

    def find(group: RowGroup, table: pa.Table) -> list[int]:
        return [*_sent_rows(table, sent, catalogs), *_sent_truncates(group, window, sent, catalogs)]

    return _last_lsn_before(groups, window, ("commit_lsn", "lsn", "kind", "relation_version"), find)


def _sent_rows(table: pa.Table, sent: SentChanges, catalogs: CatalogVersions) -> Iterator[int]:
    """The commit LSNs of matching row changes."""
    versions = pa.array(sorted({version for version, _, _ in sent.kinds}), pa.int64())
    rows = table.filter(pc.is_in(table["relation_version"], value_set=versions))
    if not len(rows):
        return
    indexes = catalogs.indexes(rows["commit_lsn"].to_numpy(), rows["lsn"].to_numpy()).tolist()
    columns = (rows[name].to_pylist() for name in ("commit_lsn", "relation_version", "kind"))
    for commit_lsn, version, kind, index in zip(*columns, indexes, strict=True):
        if (version, index, kind) in sent.kinds:
            yield commit_lsn


def _sent_truncates(
    group: RowGroup, window: Window, sent: SentChanges, catalogs: CatalogVersions
) -> Iterator[int]:
    """The commit LSNs of matching TRUNCATEs."""
    truncates = list(_truncates(group, window)) if sent.truncated else []
    if not truncates:
        return
    positions, relations = zip(*truncates, strict=True)
    indexes = catalogs.indexes(*np.array(positions, dtype=np.int64).T).tolist()
    for (commit_lsn, _), relation, index in zip(positions, relations, indexes, strict=True):
        if (relation, index) in sent.truncated:
            yield commit_lsn


def first_messages(rows: pa.Table | pa.RecordBatch) -> pa.Array | pa.ChunkedArray:
    """Which rows of LOG begin a transaction; a non-transactional message has no commit time (R9.13)."""
    return pc.and_(pc.equal(rows["seq"], 0), pc.is_valid(rows["commit_time"]))


def relation_versions(groups: Iterable[RowGroup], window: Window) -> frozenset[int]:
    """The relation versions of the row changes of `window` in these row groups."""
    versions: set[int] = set()
    for group in groups:
        table = read_columns(group, ("relation_version",), window)
        versions.update(pc.unique(table["relation_version"]).drop_null().to_pylist())
    return frozenset(versions)


def _truncates(group: RowGroup, window: Window) -> Iterator[tuple[tuple[int, int], RelationId]]:
    """(commit LSN, LSN) and relation of the TRUNCATEs, for each of their relations."""
    table = read_columns(group, ("commit_lsn", "lsn", "kind", "message"), window)
    for row in table.filter(_are_truncates(table)).to_pylist():
        message = decode(row["message"])
        if isinstance(message, Truncate):
            for relation in message.relations:
                yield (row["commit_lsn"], row["lsn"]), relation


def _are_truncates(table: pa.Table) -> pa.ChunkedArray:
    return pc.equal(table["kind"], MessageType.TRUNCATE.value)


def truncate_commits(groups: Iterable[RowGroup], window: Window) -> list[Lsn]:
    """The transactions of `window` with a TRUNCATE in these row groups, in order."""
    commits: set[int] = set()
    for group in groups:
        table = read_columns(group, ("commit_lsn", "kind"), window)
        commits.update(table["commit_lsn"].filter(_are_truncates(table)).to_pylist())
    return [Lsn(commit) for commit in sorted(commits)]


def logged_definitions(
    groups: Iterable[RowGroup], window: Window, catalogs: CatalogVersions
) -> LoggedDefinitions:
    """The definitions that the messages of `window` in these row groups refer to."""
    changes: set[tuple[int, int]] = set()
    truncates: set[tuple[RelationId, int]] = set()
    count = _Count()
    for group in groups:
        table = read_columns(group, (*_COUNTED, "lsn", "relation_version"), window)
        count.add(table)
        if pc.any(_are_truncates(table)).as_py():
            positions, relations = zip(*_truncates(group, window), strict=True)
            indexes = catalogs.indexes(*np.array(positions, dtype=np.int64).T)
            truncates.update(zip(relations, indexes.tolist(), strict=True))
        rows = table.filter(pc.is_valid(table["relation_version"]))
        indexes = catalogs.indexes(rows["commit_lsn"].to_numpy(), rows["lsn"].to_numpy())
        changes.update(_pairs(rows["relation_version"], indexes))
    return LoggedDefinitions(count.summary(), frozenset(changes), frozenset(truncates))


def _pairs(versions: pa.ChunkedArray, indexes: Int64s) -> Iterator[tuple[int, int]]:
    """The distinct pairs; a relation version can be any 64-bit number."""
    encoded = versions.combine_chunks().dictionary_encode()
    width = int(indexes.max(initial=0)) + 1
    is_present = np.zeros(len(encoded.dictionary) * width, dtype=np.bool_)
    is_present[encoded.indices.to_numpy() * width + indexes] = True
    for pair in np.flatnonzero(is_present).tolist():
        yield encoded.dictionary[pair // width].as_py(), pair % width
