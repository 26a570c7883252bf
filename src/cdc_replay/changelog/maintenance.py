"""Compaction of a publisher's change log, beside the captures that write it."""

from __future__ import annotations

import logging

from cdc_replay.changelog.compaction import Compacted
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.config import PublisherConfig
from cdc_replay.errors import CdcReplayError

log = logging.getLogger(__name__)


def compacted(publisher: PublisherConfig) -> Compacted:
    """Merge small segments of the publisher's log, if enough have gathered.

    The log is as good without. So what stands in the way, such as another compaction or a full disk, is a
    line in the operator's log, and a later run tries again.
    """
    try:
        return ChangeLog.open(publisher.change_log).compact()
    except CdcReplayError as error:
        log.warning("the change log of %s is not compacted now: %s", publisher.name, error)
        return Compacted()
