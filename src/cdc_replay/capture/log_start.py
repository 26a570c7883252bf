"""The mark on the publisher that records where the change log of its slot began.

A missing log either never existed, because a setup died before creating it, or is elsewhere, for instance on
a volume that is not mounted. To distinguish the two, the comment of one capture publication records the
position at which the slot was created.

| position of the slot | mark                 | a missing log                                               |
|----------------------|----------------------|-------------------------------------------------------------|
| the mark             | of this slot         | nothing was read: the log is created at the mark            |
| another              | of this slot         | changes were read into it: refused, a new log would hide it |
| any                  | none                 | setup died before the mark: the log is created at the slot  |
| no slot              | of the previous slot | the mark is removed before a new slot is created            |

`teardown` drops the publication, and the mark with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import psycopg
from psycopg import sql

from cdc_replay.capture.publications import (
    LOG_FROM,
    MARKED_PUBLICATION,
    comment_on,
    comment_text,
    publication_comments,
)
from cdc_replay.errors import ChangeLogMissing
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.slot import check_slot

# A DO block, so that the output of a dry run works too. Without a slot the comment gets no position; NULL
# would remove the comment. The search path of an administrator's session is the database owner's choice.
_MARK_AT_SLOT: Final = """
    do $cdc_replay$ begin
        perform pg_catalog.set_config('search_path', '', true);
        execute pg_catalog.format('comment on publication %I is %L', {name},
            {comment} || coalesce({log_from} || (
                select confirmed_flush_lsn::text from pg_catalog.pg_replication_slots where slot_name = {slot}
            ), ''));
    end $cdc_replay$
"""


def read_mark(connection: Connection, slot: str) -> Lsn | None:
    """The recorded start of the log of `slot`; None without a mark."""
    comment = publication_comments(connection).get(MARKED_PUBLICATION) or ""
    start = comment.removeprefix(comment_text(slot) + LOG_FROM)
    return None if start == comment else Lsn.parse(start)


def plan_mark(slot: str, start: Lsn | None = None) -> sql.Composed:
    """The statement that sets the mark to `start` (default: the slot's position)."""
    if start is not None:
        return comment_on(MARKED_PUBLICATION, f"{comment_text(slot)}{LOG_FROM}{start}")
    return sql.SQL(_MARK_AT_SLOT).format(
        name=MARKED_PUBLICATION, comment=comment_text(slot), log_from=LOG_FROM, slot=slot
    )


def plan_unmark(connection: Connection, slot: str) -> tuple[sql.Composed, ...]:
    """The statement that removes the mark of an earlier slot of that name; none if there is no mark."""
    return (
        () if read_mark(connection, slot) is None else (comment_on(MARKED_PUBLICATION, comment_text(slot)),)
    )


def execute_marks(connection: Connection, statements: Sequence[sql.Composed]) -> tuple[str, ...]:
    """Execute the statements; returns a warning for each that the role may not execute.

    Everything else works without a mark, so a missing privilege is no error.
    """
    warnings = []
    for statement in statements:
        try:
            connection.execute(statement)
        except psycopg.errors.InsufficientPrivilege as error:
            warnings.append(
                f"the start of the log cannot be recorded ({error.diag.message_primary}): let the owner"
                f" of the publication run `{' '.join(statement.as_string(connection).split())}`; until then"
                " `setup` cannot tell a missing log from one that was never created"
            )
    return tuple(warnings)


def check_unread(connection: Connection, slot: str, change_log: str) -> Lsn:
    """Where to begin a missing log: at the slot's position, if nothing was read from the slot.

    Raises:
        ChangeLogMissing: if changes were read from the slot, into a log that is elsewhere.
        SlotMissing, SlotLost, PublisherNotReady: if the slot cannot be read.
    """
    position = check_slot(connection, slot).confirmed_flush
    mark = read_mark(connection, slot)
    if mark is None or mark == position:
        return position
    raise ChangeLogMissing(
        f'the change log of replication slot "{slot}" is not at "{change_log}"',
        detail=f"The slot was created at {mark} and is at {position} now: the changes in between are in that"
        " log only.",
        hint="Mount or restore the folder, or correct `change_log`. To begin a new log instead: run"
        " `cdc-replay teardown` and `cdc-replay setup` for the publisher, then `cdc-replay snapshot` for each"
        " of its subscriptions.",
    )
