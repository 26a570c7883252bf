"""The change log: readable, writable, with space left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.storage import Location, check_put_if_absent, storage_write_errors
from cdc_replay.doctor.folders import check_folder
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.check import Check, Verdict, failed_check


def check_change_log(subject: str, uri: str) -> Iterator[Check]:
    """Whether the log can be read and written."""
    try:
        location = Location.parse(uri)
        yield _contents(subject, uri)
        if location.is_local:
            yield check_folder(subject, "change log", Path(location.path))
            return
        with storage_write_errors(uri):
            check_put_if_absent(location)
        yield Check(subject, Verdict.OK, f"change log {location.uri} is writable")
    except (CdcReplayError, OSError) as error:
        yield failed_check(subject, error)


def _contents(subject: str, uri: str) -> Check:
    if not ChangeLog.exists(uri):
        return Check(subject, Verdict.OK, "there is no change log yet: setup creates it")
    log = ChangeLog.open(uri)
    return Check(subject, Verdict.OK, f"the change log is readable, from {log.start_lsn} to {log.end_lsn}")
