"""`snapshot`: initial sync of the tables that need it, or a resync of named ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.config import Config
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import SnapshotResult
from cdc_replay.opening import capture_source, open_subscription, snapshot_options
from cdc_replay.replay.rewritten_values import compare_marked_tables
from cdc_replay.snapshot.run import snapshot_session


def snapshot(
    config: Config,
    subscription: str,
    *,
    tables: Sequence[QualifiedName] = (),
    report: Report = unreported,
) -> SnapshotResult:
    """Copy every table that is not ready, or copy `tables` again, replacing their rows.

    The values of a table that the publisher has rewritten are compared (R11.9).

    Raises:
        ChangeLogMissing: before `setup` of the publisher.
        CdcReplayError: as `snapshot_session`.
    """
    options = dataclasses.replace(snapshot_options(config, subscription), tables=tuple(dict.fromkeys(tables)))
    with open_subscription(config, subscription, "snapshot", report=report) as session:
        source = capture_source(config, session.subscription.publisher, report)
        copied = snapshot_session(source, ChangeLog.open(source.change_log), session, options)
        return dataclasses.replace(copied, compared=compare_marked_tables(source, session))
