"""The mark on the publisher that says where the change log of its slot began.

A log that is missing has either never been there, because a setup died before it, or it is somewhere else,
such as on a volume that is not mounted. In its place the two look alike, so the publisher remembers: the
comment of one capture publication also tells the position that the slot was made at.

| slot                 | mark              | a missing log                                                |
|----------------------|-------------------|--------------------------------------------------------------|
| is at the mark       | of this slot      | nothing was read: the log is begun there                     |
| is elsewhere         | of this slot      | changes were read into it: refused, a new one would hide it  |
| any                  | none              | a setup died before the mark: the log is begun at the slot   |
| none                 | of the one before | taken back before a new slot is made                         |

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

# So that what a dry run prints sets the mark, too. Without a slot it leaves the comment without a position:
# NULL would remove it.
_MARK_AT_SLOT: Final = """
    do $cdc_replay$ begin
        execute format('comment on publication %I is %L', {name}, {comment} || coalesce({log_from} || (
            select confirmed_flush_lsn::text from pg_catalog.pg_replication_slots where slot_name = {slot}
        ), ''));
    end $cdc_replay$
"""


def log_mark(connection: Connection, slot: str) -> Lsn | None:
    """Where the log of `slot` began, as its publisher remembers; None without a mark."""
    comment = publication_comments(connection).get(MARKED_PUBLICATION) or ""
    start = comment.removeprefix(comment_text(slot) + LOG_FROM)
    return None if start == comment else Lsn.parse(start)


def plan_mark(slot: str, start: Lsn | None = None) -> sql.Composed:
    """The statement that sets the mark: to `start`, where the log begins, by default to where the slot is."""
    if start is not None:
        return comment_on(MARKED_PUBLICATION, f"{comment_text(slot)}{LOG_FROM}{start}")
    return sql.SQL(_MARK_AT_SLOT).format(
        name=MARKED_PUBLICATION, comment=comment_text(slot), log_from=LOG_FROM, slot=slot
    )


def plan_unmark(connection: Connection, slot: str) -> tuple[sql.Composed, ...]:
    """The statement that takes the mark of an earlier slot of that name back; none if there is no mark."""
    return () if log_mark(connection, slot) is None else (comment_on(MARKED_PUBLICATION, comment_text(slot)),)


def execute_marks(connection: Connection, statements: Sequence[sql.Composed]) -> tuple[str, ...]:
    """Execute them; a warning for each that a role that does not own the publication may not execute.

    All else works without a mark, so such a role is not stopped by it.
    """
    warnings = []
    for statement in statements:
        try:
            connection.execute(statement)
        except psycopg.errors.InsufficientPrivilege as error:
            warnings.append(
                f"the change log cannot be marked as begun ({error.diag.message_primary}): let the owner of"
                f" the publication run `{' '.join(statement.as_string(connection).split())}`; until then"
                " `setup` cannot tell a log that is missing from one that was never there"
            )
    return tuple(warnings)


def check_unread(connection: Connection, slot: str, change_log: str) -> Lsn:
    """Where a log that is not there is to begin: at the slot, if nothing was read from that.

    Raises:
        ChangeLogMissing: if changes were read from the slot, into a log that is somewhere else.
        SlotMissing, SlotLost, PublisherNotReady: if the slot cannot be read.
    """
    position = check_slot(connection, slot).confirmed_flush
    mark = log_mark(connection, slot)
    if mark is None or mark == position:
        return position
    raise ChangeLogMissing(
        f'the change log of replication slot "{slot}" is not at "{change_log}"',
        detail=f"The slot was at {mark} when its log began and is at {position} now: the changes in between"
        " are in that log only.",
        hint="Mount or restore the folder, or correct `change_log`. To begin a new log instead: run"
        " `cdc-replay teardown` and `cdc-replay setup` for the publisher, then `cdc-replay snapshot` for each"
        " of its subscriptions.",
    )
