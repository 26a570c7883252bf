"""A log that this process may read but not write."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import ChangeLogNotWritable, ChangeLogUnavailable
from cdc_replay.model.lsn import Lsn
from integration.changelog.pulls import (
    HEADER,
    PULLS,
    Publisher,
    expected_rows,
    messages,
    read_log_rows,
    relation,
)

NOBODY = 65534
LAST = PULLS[-1].end


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Make permissions count in the block, also if the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def uri() -> Iterator[str]:
    """A log that only its owner may change, in a folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        uri, publisher = f"{folder}/log", Publisher()
        publisher.set_up(uri)
        publisher.capture(uri)
        permit(Path(uri), 0o555)
        yield uri
        permit(Path(uri), 0o755)


def permit(folder: Path, mode: int) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(mode)


def test_a_reader_needs_no_permission_to_write(uri: str) -> None:
    with unprivileged():
        log = ChangeLog.open(uri)
        assert (log.end_lsn.value, read_log_rows(log)) == (LAST, expected_rows(LAST))


def test_every_write_is_refused_with_its_reason_and_changes_nothing(uri: str) -> None:
    with unprivileged():
        log = ChangeLog.open(uri)
        attempts = (
            lambda: log.write([messages(170, 1)]),
            lambda: log.add_relations({9: relation(9)}),
            lambda: log.commit([], Lsn(170)),
            lambda: ChangeLog.create(f"{uri}/another", HEADER),
        )
        for attempt in attempts:
            with pytest.raises(ChangeLogNotWritable, match=uri) as refused:
                attempt()
            assert "Permission denied" in str(refused.value.detail)
    log = ChangeLog.open(uri)
    assert (log.end_lsn.value, read_log_rows(log)) == (LAST, expected_rows(LAST))


def test_a_log_without_read_permission_is_not_reported_as_missing(uri: str) -> None:
    Path(uri).chmod(0)
    with unprivileged(), pytest.raises(ChangeLogUnavailable, match=uri):
        ChangeLog.open(uri)
