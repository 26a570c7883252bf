"""The last results of each command, stored on the subscriber."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from psycopg.types.json import Jsonb

from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.state_schema import is_installed

RESULTS_KEPT: Final = 20
"""Results kept per subscription and command."""


_FORGET_OLD_RESULTS: Final = """
    delete from cdc_replay.result
    where subscription = %(subscription)s and command = %(command)s and number <= (
        select number from cdc_replay.result
        where subscription = %(subscription)s and command = %(command)s
        order by number desc offset %(kept)s limit 1
    )
"""


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """The result of a command, as its JSON object."""

    command: str
    finished: datetime
    result: Mapping[str, object]

    @property
    def has_failed(self) -> bool:
        """Whether the command ended with an error."""
        return bool(self.result.get("error"))


def record_result(
    connection: Connection, subscription: str, command: str, result: Mapping[str, object]
) -> None:
    """Store the result of a command, in the transaction of its work, and delete old results."""
    connection.execute(
        "insert into cdc_replay.result (subscription, command, result) values (%s, %s, %s)",
        (subscription, command, Jsonb(dict(result))),
    )
    connection.execute(
        _FORGET_OLD_RESULTS, {"subscription": subscription, "command": command, "kept": RESULTS_KEPT}
    )


def last_result(connection: Connection, subscription: str, command: str) -> RecordedResult | None:
    """The newest result of the command for this subscription."""
    if not is_installed(connection):
        return None
    row = connection.execute(
        "select command, finished, result from cdc_replay.result"
        " where subscription = %s and command = %s order by number desc limit 1",
        (subscription, command),
    ).fetchone()
    return None if row is None else RecordedResult(*row)


def recorded_results(connection: Connection, subscription: str, command: str) -> tuple[RecordedResult, ...]:
    """The results of the command that are kept, the oldest first."""
    if not is_installed(connection):
        return ()
    rows = connection.execute(
        "select command, finished, result from cdc_replay.result"
        " where subscription = %s and command = %s order by number",
        (subscription, command),
    )
    return tuple(RecordedResult(*row) for row in rows)
