"""Compaction of a change log while captures write to it."""

from __future__ import annotations

import logging

from cdc_replay.changelog.compaction import CompactionResult
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import CdcReplayError

logger = logging.getLogger(__name__)


def compact_log(uri: str, publisher: str) -> CompactionResult:
    """Merge small segments of a publisher's log, if there are enough.

    An error, such as another compaction or a full disk, is only a warning: the log is intact, and a later run
    retries.
    """
    try:
        return ChangeLog.open(uri).compact()
    except CdcReplayError as error:
        logger.warning("cannot compact the change log of %s: %s", publisher, error)
        return CompactionResult()
