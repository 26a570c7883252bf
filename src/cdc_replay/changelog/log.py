"""The change log of one publisher: every committed change since the slot was created, in commit order.

    <uri>/changes      Delta table of messages (`model.change.LOG`); header and end LSN are in its commits
    <uri>/relations    Delta table: the shapes that relations have had, by version
    <uri>/catalogs     Delta table: the publisher's catalog, by the position from which it is in force
    <uri>/prepared     content of prepared transactions whose outcome is not known yet

A pull is `write` (the messages, in a file that nothing names yet), then `add_relations` and `add_catalog`,
then `commit`, which makes the messages visible and moves the end LSN in one atomic step. Readers open the
log and see it as of that moment; segments are never changed, so they need no lock. The log holds what is in
`(start, end]`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.changelog.prepared import PreparedTransactions
from cdc_replay.changelog.segment import (
    LOG_SCHEMA,
    RESTORE,
    RowGroup,
    Segment,
    SegmentWriter,
    plan_row_groups,
    read_columns,
)
from cdc_replay.changelog.side_tables import (
    CATALOG_SCHEMA,
    RELATION_SCHEMA,
    CatalogVersion,
    append_rows,
    catalog_rows,
    catalogs_of,
    read_rows,
    relation_rows,
    relations_of,
)
from cdc_replay.changelog.storage import Location
from cdc_replay.changelog.table import DurableTable, Position
from cdc_replay.errors import ChangeLogConflict, ChangeLogDamaged, ChangeLogMissing
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import Relation, RelationId
from cdc_replay.pgoutput.messages import MessageType, Truncate
from cdc_replay.pgoutput.reader import decode

FORMAT: Final = "1"
"""The version of this layout, written into the header."""

ROW_GROUP_ROWS: Final = 50_000
ROW_GROUP_BYTES: Final = 32 << 20

_PREFIX: Final = "cdc_replay."


@dataclass(frozen=True, slots=True)
class LogHeader:
    """Which changes the log holds: those of one slot of one history of one cluster, after `start_lsn`."""

    system_identifier: str
    timeline: int
    slot: str
    start_lsn: Lsn

    def to_configuration(self) -> dict[str, str]:
        """The header as properties of the table."""
        values = {
            "format": FORMAT,
            "system_identifier": self.system_identifier,
            "timeline": str(self.timeline),
            "slot": self.slot,
            "start_lsn": str(self.start_lsn),
        }
        return {_PREFIX + name: value for name, value in values.items()}

    @classmethod
    def of_configuration(cls, configuration: Mapping[str, str]) -> Self:
        """The header that such properties hold.

        Raises:
            KeyError: if one is missing.
        """
        return cls(
            system_identifier=configuration[_PREFIX + "system_identifier"],
            timeline=int(configuration[_PREFIX + "timeline"]),
            slot=configuration[_PREFIX + "slot"],
            start_lsn=Lsn.parse(configuration[_PREFIX + "start_lsn"]),
        )


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


class ChangeLog:
    """A change log as of when it was opened; see the module for the life of a pull."""

    def __init__(self, location: Location, changes: DurableTable, header: LogHeader) -> None:
        self._location = location
        self._changes = changes
        self.header = header
        self.prepared = PreparedTransactions(location / "prepared")

    @classmethod
    def create(cls, uri: str, header: LogHeader) -> Self:
        """Create an empty log that ends at `header.start_lsn`.

        Raises:
            ChangeLogConflict: if there is a log already.
        """
        location = Location.of(uri)
        if cls.exists(uri):
            raise ChangeLogConflict(
                f'there is a change log at "{uri}" already',
                hint="Choose another `change_log` in the configuration, or remove that one first.",
            )
        # The side tables first: with the table of changes there, the log exists and is complete. Side tables
        # of a creation that died in between are empty, so they are as good as new ones.
        for name, schema in (("relations", RELATION_SCHEMA), ("catalogs", CATALOG_SCHEMA)):
            if not (location / name / "_delta_log").exists:
                DurableTable.create(location / name, schema)
        changes = DurableTable.create(
            location / "changes",
            LOG_SCHEMA,
            configuration=header.to_configuration(),
            position=Position(header.slot, header.start_lsn.value),
        )
        return cls(location, changes, header)

    @classmethod
    def exists(cls, uri: str) -> bool:
        """There is a log at `uri`."""
        return (Location.of(uri) / "changes" / "_delta_log").exists

    @classmethod
    def open(cls, uri: str) -> Self:
        """The log as it is now.

        Raises:
            ChangeLogMissing: if there is none.
            ChangeLogDamaged: if it cannot be read, or has another format.
        """
        if not cls.exists(uri):
            raise ChangeLogMissing(
                f'there is no change log at "{uri}"',
                hint="Run `cdc-replay setup` for the publisher, or correct its `change_log` setting.",
            )
        location = Location.of(uri)
        changes = DurableTable.open(location / "changes")
        configuration = changes.configuration
        try:
            header = LogHeader.of_configuration(configuration)
        except KeyError as error:
            raise ChangeLogDamaged(
                f'"{uri}" is not a change log of this software',
                detail=f"Its table lacks {error}.",
                hint=RESTORE,
            ) from None
        if (found := configuration.get(_PREFIX + "format")) != FORMAT:
            raise ChangeLogDamaged(
                f'change log "{uri}" has format {found}, this version reads {FORMAT}',
                hint="Use the version of cdc-replay that wrote it.",
            )
        return cls(location, changes, header)

    @classmethod
    def remove(cls, uri: str) -> bool:
        """Delete the log, nothing else that is in its folder; False if there was none."""
        if not cls.exists(uri):
            return False
        # The table of changes first: without it there is no log, whatever else is left.
        for name in ("changes", "catalogs", "relations", "prepared"):
            folder = Location.of(uri) / name
            if folder.exists:
                folder.filesystem.delete_dir(folder.path)
        return True

    @property
    def uri(self) -> str:
        """Where the log is: an absolute path or a URI."""
        return self._location.uri

    @property
    def end_lsn(self) -> Lsn:
        """Everything that committed at or before this position is in the log."""
        position = self._changes.position(self.header.slot)
        return self.header.start_lsn if position is None else Lsn(position)

    def write(self, batches: Iterable[pa.RecordBatch]) -> tuple[Segment, ...]:
        """Write messages of `LOG_SCHEMA`, in order, to a durable file that nothing names yet.

        Small batches are joined, so that a row group has up to `ROW_GROUP_ROWS` rows or
        `ROW_GROUP_BYTES` bytes. Returns nothing if there was no message: then there is no file.
        """
        name = f"{self.end_lsn.file_name}-{uuid.uuid4().hex}.parquet"
        with SegmentWriter(self._location / "changes", name) as writer:
            for batch in _regrouped(batches):
                writer.write(batch)
        return () if writer.segment is None else (writer.segment,)

    def commit(self, segments: Sequence[Segment], end_lsn: Lsn) -> None:
        """Make written segments visible and move the end of the log, atomically and durably.

        Raises:
            ChangeLogConflict: if another writer has committed since this object saw the log.
        """
        self._changes.commit(segments, Position(self.header.slot, end_lsn.value))

    def add_relations(self, relations: Mapping[int, Relation]) -> None:
        """Add the shapes, by version, that the log does not know yet."""
        if not relations:
            return
        table = DurableTable.open(self._location / "relations")
        known = relations_of(read_rows(table))
        new = [relation for version, relation in relations.items() if version not in known]
        append_rows(table, RELATION_SCHEMA, relation_rows(new))

    def add_catalog(self, version: CatalogVersion) -> None:
        """Add a catalog; for a `from_lsn` that has one, the one that was read later counts."""
        append_rows(DurableTable.open(self._location / "catalogs"), CATALOG_SCHEMA, catalog_rows([version]))

    def relations(self) -> Mapping[int, Relation]:
        """All shapes by version.

        Raises:
            ChangeLogDamaged: if they cannot be read.
        """
        return relations_of(read_rows(DurableTable.open(self._location / "relations")))

    def catalogs(self) -> tuple[CatalogVersion, ...]:
        """The publisher's catalogs in the order in which they came into force.

        Raises:
            ChangeLogDamaged: if they cannot be read.
        """
        return catalogs_of(read_rows(DurableTable.open(self._location / "catalogs")))

    def segments(self, window: Window) -> tuple[RowGroup, ...]:
        """The parts of the log that hold the transactions of `window`, in order.

        The first and the last may hold others too.

        Raises:
            ChangeLogDamaged: if a segment is missing, truncated or has no readable footer.
        """
        return tuple(
            group
            for segment in self._changes.segments()
            if segment.max_commit_lsn > window.after.value and segment.min_commit_lsn <= window.upto.value
            for group in self._row_groups(segment, window)
        )

    def commits(self, window: Window) -> Iterator[LoggedCommit]:
        """The transactions of `window` in commit order; a message outside of any is none (R9.13).

        Raises:
            ChangeLogDamaged: as for `segments`.
        """
        for table in self._columns(window, ("commit_lsn", "commit_time", "xid", "seq")):
            first = pc.and_(pc.equal(table["seq"], 0), pc.is_valid(table["commit_time"]))
            for row in table.filter(first).to_pylist():
                yield LoggedCommit(Lsn(row["commit_lsn"]), row["commit_time"], row["xid"])

    def relations_in(self, window: Window) -> LoggedRelations:
        """What the messages of `window` are about; reads small columns, and the messages of TRUNCATEs.

        Raises:
            ChangeLogDamaged: as for `segments`.
        """
        versions: set[int] = set()
        truncated: set[RelationId] = set()
        first: int | None = None
        for group in self.segments(window):
            table = read_columns(group, ("lsn", "kind", "relation_version"), window)
            versions.update(pc.unique(table["relation_version"]).drop_null().to_pylist())
            lowest = pc.min(table["lsn"]).as_py()
            first = lowest if first is None else min(first, lowest or first)
            if pc.any(pc.equal(table["kind"], MessageType.TRUNCATE.value)).as_py():
                truncated.update(_truncated(group, window))
        return LoggedRelations(
            frozenset(versions), frozenset(truncated), None if first is None else Lsn(first)
        )

    def summary(self, window: Window) -> LogSummary:
        """Counts of the messages and transactions in `window`; reads small columns only.

        Raises:
            ChangeLogDamaged: as for `segments`.
        """
        messages = transactions = 0
        for table in self._columns(window, ("commit_time", "seq")):
            first = pc.and_(pc.equal(table["seq"], 0), pc.is_valid(table["commit_time"]))
            messages += table.num_rows
            transactions += pc.sum(first).as_py() or 0
        return LogSummary(messages, transactions)

    def _columns(self, window: Window, names: Sequence[str]) -> Iterator[pa.Table]:
        for group in self.segments(window):
            yield read_columns(group, names, window)

    def _row_groups(self, segment: Segment, window: Window) -> tuple[RowGroup, ...]:
        file = self._location / "changes" / segment.name
        size = file.filesystem.get_file_info(file.path).size
        if size != segment.size_bytes:
            raise ChangeLogDamaged(
                f'segment "{file.uri}" of the change log is damaged or missing',
                detail=f"It has {size or 0} bytes; {segment.size_bytes} were committed.",
                hint=RESTORE,
            )
        return plan_row_groups(file, window)


def _truncated(group: RowGroup, window: Window) -> Iterator[RelationId]:
    table = read_columns(group, ("kind", "message"), window)
    for data in table.filter(pc.equal(table["kind"], MessageType.TRUNCATE.value))["message"].to_pylist():
        message = decode(data)
        if isinstance(message, Truncate):
            yield from message.relations


def _regrouped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches, each within the limits unless a given one exceeds them."""
    held: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        if held and (rows + batch.num_rows > ROW_GROUP_ROWS or size_bytes + batch.nbytes > ROW_GROUP_BYTES):
            yield pa.concat_batches(held)
            held, rows, size_bytes = [], 0, 0
        held.append(batch)
        rows += batch.num_rows
        size_bytes += batch.nbytes
    if held:
        yield pa.concat_batches(held)
