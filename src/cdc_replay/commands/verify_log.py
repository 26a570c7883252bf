"""`verify-log`: read a publisher's whole change log and report the first fault, without the publisher."""

from __future__ import annotations

import logging
import time

from cdc_replay.catalog.ddl_change import parse_ddl_change
from cdc_replay.catalog.json_form import catalog_from_json
from cdc_replay.changelog import verify
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.segment import RESTORE
from cdc_replay.config import Config
from cdc_replay.errors import ChangeLogDamaged, InvalidMessage
from cdc_replay.model.progress import Progress, Report, unreported
from cdc_replay.model.results import VerifyLogResult

logger = logging.getLogger(__name__)


def verify_log(config: Config, publisher: str, *, report: Report = unreported) -> VerifyLogResult:
    """Read the whole log.

    Raises:
        ChangeLogMissing: before `setup`.
        ChangeLogDamaged: for the first fault.
    """
    began = time.monotonic()
    configured = config.publisher(publisher)

    def verified_bytes(done: int, total: int) -> None:
        report(Progress("verify", publisher, done, total))

    verified = verify.verify_log(configured.change_log, progress=verified_bytes)
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
