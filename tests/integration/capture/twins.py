"""One workload, two slots and two logs: asked for in one way and in another, they must hold the same rows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdc_replay.capture.pull import CaptureSource, current_position
from cdc_replay.capture.setup import SetupRequest, setup_publisher
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.postgres.peek import PeekOptions, peek
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from fixtures.captured import Captured
from fixtures.postgres import Database

WORK_MEMORY = "64kB"
"""The least that a server takes: transactions of a thousand small rows are larger."""


@dataclass(frozen=True)
class Twins:
    """`subject` is captured as the test wants it; `plain` by a slot without streaming and two_phase."""

    database: Database
    subject: Captured
    plain: Captured

    @classmethod
    def of(cls, database: Database, folder: Path, *, two_phase: bool = False, **options: Any) -> Twins:
        """Set the publisher up for publication `p`, and copy its slot; large transactions can be streamed."""
        database.run(f"alter database {database.name} set logical_decoding_work_mem = '{WORK_MEMORY}'")
        slot = f"subject_{database.name}"
        uri = str(folder / "subject")
        request = SetupRequest("test", database.dsn, slot, uri, ("p",), two_phase)
        setup_publisher(request)
        source = CaptureSource("test", database.dsn, slot, uri, two_phase=two_phase, **options)
        subject = Captured(database, source, request)
        return cls(database, subject, _without_options(subject, folder))

    def settle(self) -> list[dict[str, Any]]:
        """Capture both up to now and compare; returns the rows of the log."""
        position = current_position(self.database.dsn)
        self.subject.capture(position)
        self.plain.capture(position)
        rows = self.subject.rows()
        assert rows == self.plain.rows()
        assert self.subject.log.end_lsn == self.plain.log.end_lsn
        return rows

    def sent(self, **options: bool) -> Counter[str]:
        """How many messages of each kind the subject's slot sends now."""
        return sent(self.subject, **options)


def sent(captured: Captured, **options: bool) -> Counter[str]:
    """How many messages of each kind the slot sends now."""
    source = captured.source
    asked = {"streaming": source.streaming, "two_phase": source.two_phase, **options}
    peeked = PeekOptions(source.slot, tuple(CAPTURE_PUBLICATIONS.values()), **asked)
    position = current_position(source.dsn)
    with captured.database.connect() as connection:
        return Counter(
            chr(kind)
            for messages in peek(connection, peeked, upto_lsn=position, upto_nchanges=10_000_000)
            for kind in messages.data.first_bytes()
        )


def inserted(rows: list[dict[str, Any]]) -> int:
    """How many rows were inserted."""
    return sum(row["kind"] == "I" for row in rows)


def _without_options(subject: Captured, folder: Path) -> Captured:
    slot = f"plain_{subject.database.name}"
    header = subject.log.header
    # A copy of a slot starts where the slot does, and has no two_phase.
    subject.database.run(f"select pg_copy_logical_replication_slot('{subject.source.slot}', '{slot}')")
    uri = str(folder / "plain")
    ChangeLog.create(uri, dataclasses.replace(header, slot=slot))
    source = CaptureSource("test", subject.source.dsn, slot, uri)
    request = dataclasses.replace(subject.request, slot=slot, change_log=uri, two_phase=False)
    return Captured(subject.database, source, request)
