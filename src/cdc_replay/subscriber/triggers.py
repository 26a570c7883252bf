"""Triggers FOR EACH STATEMENT are disabled while rows are merged (R8.13).

A native apply worker changes row by row, without statements, so such triggers do not fire, not even those
that are ENABLE ALWAYS or REPLICA, except for TRUNCATE. A merge executes statements, so it disables them
within its transaction. ALTER TABLE … DISABLE TRIGGER takes a lock that blocks other writers but not readers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Final

from psycopg import errors as pg
from psycopg import sql

from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.as_owner import TargetSession, TargetSessions
from cdc_replay.subscriber.target_tables import StatementTrigger, TargetTable

logger = logging.getLogger(__name__)

_ENABLE: Final = {"A": "enable always", "R": "enable replica"}
_DISABLE: Final = "disable"


@contextlib.contextmanager
def disable_statement_triggers(
    connection: Connection, sessions: TargetSessions, targets: Iterable[TargetTable]
) -> Iterator[None]:
    """Within the caller's transaction, disable the statement-level triggers of the targets.

    If the role does not own a table, its triggers fire, with a warning.

    Raises:
        psycopg.Error: if a table's lock times out, or a deferred constraint is violated.
    """
    disabled = [
        target
        for target in targets
        if target.statement_triggers and _disable(connection, sessions.session_for(target), target)
    ]
    yield
    if not disabled:
        return
    # ALTER TABLE refuses a table with pending deferred triggers, which would run at commit anyway.
    connection.execute("set constraints all immediate")
    for target in disabled:
        for trigger in target.statement_triggers:
            _alter(sessions.session_for(target), target, trigger, _ENABLE[trigger.enabled])


def _disable(connection: Connection, session: TargetSession, target: TargetTable) -> bool:
    try:
        with connection.transaction():
            for trigger in target.statement_triggers:
                _alter(session, target, trigger, _DISABLE)
    except pg.InsufficientPrivilege as error:
        logger.warning(
            "table %s: statement-level triggers fire, unlike in a native worker: %s: %s",
            *(target.name, ", ".join(trigger.name for trigger in target.statement_triggers)),
            error.diag.message_primary,
        )
        return False
    return True


def _alter(session: TargetSession, target: TargetTable, trigger: StatementTrigger, action: str) -> None:
    session.execute(
        sql.SQL("alter table only {} {} trigger {}").format(
            sql.Identifier(target.name.schema, target.name.name),
            sql.SQL(action),
            sql.Identifier(trigger.name),
        )
    )
