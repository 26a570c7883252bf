"""The change log for a snapshot that resumes a killed one (`snapshot.resume`).

The log is captured up to the new snapshot, once, and only if anything is staged. Its changes are read once
for each table with staged chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

from cdc_replay.capture.capture_to import ensure_captured
from cdc_replay.capture.pull import CaptureSource
from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import ChangeLogPruned
from cdc_replay.model.lsn import Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import RelationId
from cdc_replay.publication.capture_coverage import is_captured
from cdc_replay.publication.effective_filter import ROW_ACTIONS
from cdc_replay.replay.log_window import catalog_history, decode_window
from cdc_replay.snapshot.resume import LoggedChanges, ReadLog
from cdc_replay.spark.session import spark_session


def log_identity(header: LogHeader) -> str:
    """Identifies the log: positions in another log are not comparable."""
    return f"{header.system_identifier} {header.timeline} {header.slot} {header.start_lsn}"


def log_reader(source: CaptureSource) -> ReadLog:
    """A reader of the publisher's log for a snapshot."""

    def read(window: Window, leaves: Sequence[RelationId]) -> LoggedChanges | None:
        change_log = ChangeLog.open(source.change_log)
        if window.after < change_log.start_lsn:
            return None
        ensure_captured(source, window.upto)
        try:
            return _read_changes(ChangeLog.open(change_log.uri), window, leaves)
        except ChangeLogPruned:
            return None

    return read


def _read_changes(
    change_log: ChangeLog, window: Window, leaves: Sequence[RelationId]
) -> LoggedChanges | None:
    catalogs = tuple(catalog_history(change_log).within(window).values())
    if not all(_is_captured(catalog, leaf) for catalog in catalogs for leaf in leaves):
        return None
    relations_by_version = change_log.relations()
    versions = change_log.relation_versions(window)
    relations = tuple(
        relations_by_version[version]
        for version in sorted(versions)
        if relations_by_version[version].id in leaves
    )
    frame = decode_window(spark_session("cdc-replay"), change_log, window)
    return LoggedChanges(frame, relations, catalogs)


def _is_captured(catalog: PublisherCatalog, leaf: RelationId) -> bool:
    """Whether every row change of the leaf is captured under this catalog."""
    table = catalog.tables.get(leaf)
    return table is not None and all(is_captured(catalog, table, action) for action in ROW_ACTIONS)
