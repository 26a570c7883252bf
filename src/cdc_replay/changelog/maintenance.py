"""Compaction of a change log, beside the captures that write it."""

from __future__ import annotations

import logging

from cdc_replay.changelog.compaction import CompactionResult
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import CdcReplayError

logger = logging.getLogger(__name__)


def compact_log(uri: str, publisher: str) -> CompactionResult:
    """Merge small segments of a publisher's log, if enough have gathered.

    The log is as good without. So an error, such as another compaction or a full disk, is a warning, and a
    later run tries again.
    """
    try:
        return ChangeLog.open(uri).compact()
    except CdcReplayError as error:
        logger.warning("the change log of %s is not compacted now: %s", publisher, error)
        return CompactionResult()
