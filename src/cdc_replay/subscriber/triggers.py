"""Triggers FOR EACH STATEMENT stand still while rows are merged (R8.13).

A native apply worker changes row by row, without any statement: such triggers do not fire in it, not even
those that are ENABLE ALWAYS or REPLICA, except for TRUNCATE. A merge has statements, so they are disabled
within its transaction, which takes the lock of ALTER TABLE … DISABLE TRIGGER: other writers wait, readers go
on.
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

_log: Final = logging.getLogger(__name__)

_ENABLE: Final = {"A": "enable always", "R": "enable replica"}
_DISABLE: Final = "disable"


@contextlib.contextmanager
def statement_triggers_disabled(
    connection: Connection, sessions: TargetSessions, targets: Iterable[TargetTable]
) -> Iterator[None]:
    """Within, in the caller's transaction, no statement on the targets fires their statement-level triggers.

    A role that does not own a table cannot do that, and is warned that they fire.

    Raises:
        psycopg.Error: if another session holds a table for too long, or a deferred constraint does not hold.
    """
    disabled = [
        target
        for target in targets
        if target.statement_triggers and _disable(connection, sessions.session_for(target), target)
    ]
    yield
    if not disabled:
        return
    # ALTER TABLE refuses a table whose deferred triggers are due, which they are at the commit anyway.
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
        _log.warning(
            "table %s: triggers for each statement fire, other than in a native worker: %s: %s",
            *(target.name, ", ".join(each.name for each in target.statement_triggers)),
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
