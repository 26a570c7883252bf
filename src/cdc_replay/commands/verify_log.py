"""`verify-log`: read a publisher's whole change log and report the first fault, without the publisher."""

from __future__ import annotations

import logging
import time
from typing import Final

from cdc_replay.catalog.ddl_change import parse_ddl_change
from cdc_replay.catalog.json_form import catalog_from_json
from cdc_replay.changelog import verify
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.segment import RESTORE
from cdc_replay.config import Config
from cdc_replay.errors import ChangeLogDamaged, InvalidMessage
from cdc_replay.model.results import VerifyLogResult

logger = logging.getLogger(__name__)

REPORT_SECONDS: Final = 10


def verify_log(config: Config, publisher: str, *, progress: verify.Progress | None = None) -> VerifyLogResult:
    """Read the whole log; `progress` is called with the verified and the total bytes.

    Raises:
        ChangeLogMissing: before `setup`.
        ChangeLogDamaged: for the first fault.
    """
    began = time.monotonic()
    configured = config.publisher(publisher)
    verified = verify.verify_log(configured.change_log, progress=_Reporter(publisher, progress))
    _check_catalogs(ChangeLog.open(configured.change_log))
    result = VerifyLogResult(
        publisher=publisher,
        from_lsn=verified.from_lsn,
        to_lsn=verified.to_lsn,
        seconds=time.monotonic() - began,
        segments=verified.segments,
        messages=verified.messages,
        transactions=verified.transactions,
        bytes=verified.bytes,
        prepared=verified.prepared,
    )
    logger.info(
        "verified the change log of %s (%s, %s]: %d segments, %d transactions, %d messages, %d bytes, %.2f s",
        publisher, result.from_lsn, result.to_lsn, result.segments, result.transactions, result.messages,
        result.bytes, result.seconds,
    )  # fmt: skip
    return result


class _Reporter:
    """Forwards progress, and logs it every `REPORT_SECONDS`."""

    def __init__(self, publisher: str, progress: verify.Progress | None) -> None:
        self._publisher = publisher
        self._progress = progress
        self._reported = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)
        if time.monotonic() - self._reported >= REPORT_SECONDS:
            self._reported = time.monotonic()
            logger.info("verifying the change log of %s: %d of %d bytes", self._publisher, done, total)


def _check_catalogs(change_log: ChangeLog) -> None:
    for version in change_log.catalogs():
        try:
            if version.owner is None:
                catalog_from_json(version.text)
            else:
                parse_ddl_change(version.text)
        except (ChangeLogDamaged, InvalidMessage) as error:
            raise ChangeLogDamaged(
                f'the catalog that is in force from {version.from_lsn} on in change log "{change_log.uri}"'
                " cannot be read",
                detail=error.detail,
                hint=RESTORE,
            ) from error
