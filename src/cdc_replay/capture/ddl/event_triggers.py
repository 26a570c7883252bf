"""Event triggers on the publisher, which give definitions a position in the change stream (R9.10, R9.11).

| event trigger        | event           | writes the message   | about                                     |
|----------------------|-----------------|----------------------|-------------------------------------------|
| `cdc_replay_ddl`     | ddl_command_end | `cdc_replay.catalog` | what a command made or altered            |
| `cdc_replay_drop`    | sql_drop        | `cdc_replay.catalog` | what went with it                         |
| `cdc_replay_rewrite` | table_rewrite   | `cdc_replay.rewrite` | rows that get other values unsent (R11.9) |
| `cdc_replay_follow`  | ddl_command_end |                      | what a subscribed publication got         |

The messages are transactional: they are decoded at their place inside of the transaction of the command, and
not at all if that is rolled back. Their content (`catalog.ddl_change`) is rows of the reader's own queries,
of the objects that the command touched: of a partitioned table the relatives with rows in the catalogs that
this transaction wrote, of a type, function, collation, schema or extension the tables that depend on it.

A user's command never fails because of them: any error becomes a WARNING, and the command goes unrecorded
until the next pull reads the catalog as a whole. Temporary tables are ignored.

`cdc_replay_follow` adds to the capture publications what a subscribed publication has got (tables, schemas,
publish actions, all tables, generated columns, partitioned tables that are published as themselves), in the
same transaction, so that no change is missed between ALTER PUBLICATION and the next `setup` or `refresh`.
These also remove, as without it. Its own commands alter no subscribed publication, which ends the recursion.

The functions run as their owner, with a fixed search path, and all names in their statements are quoted by
the server. What they tell carries a code that nobody else can write (`message_code`).

Everything is in the schema `cdc_replay_capture` (`cdc_replay` is the subscriber's, and a database can be
both), and is only ever changed or removed if the comments of the event triggers name the same slot.

What a trigger cannot see: DETACH PARTITION CONCURRENTLY is recorded by its second transaction. A command in a
REPEATABLE READ transaction sees the catalogs as of the transaction's snapshot, so what others have changed of
the same table since then is missing in what it records.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, LiteralString

import psycopg
from psycopg import sql

from cdc_replay.capture.ddl.trigger_functions import (
    FUNCTIONS,
    RELATIONS,
    SCHEMA,
    SECRET,
    TELL_EVERYTHING,
    create_functions,
    grant_to,
    trigger_functions,
)
from cdc_replay.capture.publications import MARKED_PUBLICATION, comment_text
from cdc_replay.catalog.json_form import same_definitions
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.postgres.connection import Connection

logger = logging.getLogger(__name__)

_DDL_TAGS: Final = (
    "CREATE TABLE", "CREATE TABLE AS", "SELECT INTO", "ALTER TABLE", "CREATE INDEX", "ALTER INDEX",
    "CREATE PUBLICATION", "ALTER PUBLICATION", "CREATE SCHEMA", "ALTER SCHEMA", "ALTER EXTENSION",
    "ALTER TYPE", "ALTER DOMAIN", "ALTER COLLATION", "ALTER OPERATOR",
    "ALTER FUNCTION", "ALTER PROCEDURE", "ALTER ROUTINE",
)  # fmt: skip

_PUBLICATION_TAGS: Final = ("CREATE PUBLICATION", "ALTER PUBLICATION")


@dataclass(frozen=True, slots=True)
class _Trigger:
    name: str
    event: LiteralString
    function: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """An event trigger of the publisher."""

    name: str
    comment: str | None
    is_enabled: bool


_TRIGGERS: Final = (
    _Trigger("cdc_replay_ddl", "ddl_command_end", "tell_definitions", _DDL_TAGS),
    _Trigger("cdc_replay_drop", "sql_drop", "tell_definitions"),
    _Trigger("cdc_replay_follow", "ddl_command_end", "follow", _PUBLICATION_TAGS),
    _Trigger("cdc_replay_rewrite", "table_rewrite", "tell_rewrite"),
)

EVENT_TRIGGERS: Final = tuple(trigger.name for trigger in _TRIGGERS)
"""The names of the event triggers, in order."""

_FIND: Final = """
    select evtname::text, obj_description(oid, 'pg_event_trigger'), evtenabled in ('A', 'O')
    from pg_event_trigger
    where evtname = any(%s)
    order by evtname
"""

_BODIES: Final = """
    select proname::text, prosrc from pg_proc where pronamespace = to_regnamespace(%s)
"""

_MAY_READ: Final = "select coalesce(has_table_privilege(to_regclass(%s), 'select'), false)"

# The role of the session, and that of a setup which had made the capture publications before.
_CAPTURING: Final = """
    select current_user::text
    union
    select pg_get_userbyid(pubowner)::text from pg_publication where pubname = %s
    order by 1
"""

_HAS_MORE: Final = """
    select exists (
        select from pg_depend d
        where d.refclassid = 'pg_namespace'::regclass and d.refobjid = to_regnamespace(%s)
            and not exists (
                select from pg_proc p
                where d.classid = 'pg_proc'::regclass and p.oid = d.objid and p.proname = any(%s)
            )
            and not exists (
                select from pg_class c
                where d.classid = 'pg_class'::regclass and c.oid = d.objid and c.relname = any(%s)
            )
            and d.classid <> 'pg_type'::regclass
    )
"""


def plan_event_triggers(
    connection: Connection, slot: str, publications: Sequence[str]
) -> tuple[sql.Composed, ...]:
    """The statements that bring functions and event triggers to what they must be; none if they are that.

    They are to be executed in one transaction, which also tells all definitions: so they are known wherever
    the event triggers are. `publications` are those that subscriptions name. Where an event trigger of our
    names is not of `slot` there are none: it stays as it is.
    """
    found = _found(connection)
    wanted = _statements(publications)
    digest = hashlib.sha256("\n".join(each.as_string(None) for each in wanted).encode()).hexdigest()[:16]
    comment = f"{_mark(slot)}{digest}"
    is_there = found == tuple(_Found(name, comment, is_enabled=True) for name in EVENT_TRIGGERS)
    is_there = is_there and _have_their_bodies(connection) and _may_read_secret(connection)
    if is_there or not _are_ours(found, slot):
        return ()
    removal = [sql.SQL("drop event trigger {}").format(sql.Identifier(each.name)) for each in found]
    marks = [
        sql.SQL("comment on event trigger {} is {}").format(sql.Identifier(name), comment)
        for name in EVENT_TRIGGERS
    ]
    roles = [role for (role,) in connection.execute(_CAPTURING, (MARKED_PUBLICATION,))]
    return (*removal, *wanted, *grant_to(roles), *marks, TELL_EVERYTHING)


def plan_removal(connection: Connection, slot: str) -> tuple[sql.Composed, ...]:
    """The statements that remove the event triggers of `slot` and their functions; none if there are none.

    The schema stays if there is anything else in it.
    """
    found = _found(connection)
    if not found or not _are_ours(found, slot):
        return ()
    names = [function.partition("(")[0] for function in FUNCTIONS]
    ((has_more,),) = connection.execute(_HAS_MORE, (SCHEMA, names, list(RELATIONS))).fetchall()
    return (
        *(sql.SQL("drop event trigger {}").format(sql.Identifier(each.name)) for each in found),
        *(
            sql.SQL("drop function if exists {}.{}").format(sql.Identifier(SCHEMA), sql.SQL(function))
            for function in FUNCTIONS
        ),
        sql.SQL("drop materialized view if exists {}").format(SECRET),
        sql.SQL("drop sequence if exists {}").format(sql.Identifier(SCHEMA, "ordinal")),
        *(() if has_more else (sql.SQL("drop schema if exists {}").format(sql.Identifier(SCHEMA)),)),
    )


def apply_plan(connection: Connection, plan: Sequence[sql.Composed]) -> str | None:
    """Execute the statements in one transaction; why not, and nothing done, where that is not permitted."""
    try:
        with connection.transaction():
            for statement in plan:
                connection.execute(statement)
    except (psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
        return error.diag.message_primary or str(error)
    return None


def remove_event_triggers(connection: Connection, slot: str) -> tuple[str, ...]:
    """Remove the event triggers of `slot` with their functions; returns the names of the former."""
    found = _found(connection)
    plan = plan_removal(connection, slot)
    with connection.transaction():
        for statement in plan:
            connection.execute(statement)
    return tuple(each.name for each in found) if plan else ()


def is_installed(connection: Connection, slot: str) -> bool:
    """Whether the event triggers of `slot` are all there and enabled, in whatever version of this software.

    From where in the stream on: from the first message with `catalog.ddl_change.CATALOG_PREFIX`, which is
    `whole` and is written by the `setup` that installs them, or that begins the log.
    """
    found = _found(connection)
    names = tuple(each.name for each in found if each.is_enabled)
    return names == EVENT_TRIGGERS and _are_ours(found, slot)


def read_secret(connection: Connection, slot: str) -> bytes | None:
    """With what the messages of the event triggers of `slot` are signed; None if they are not installed.

    Also None, with a warning, where the role may not read it: then no message can be believed.
    """
    if not is_installed(connection, slot):
        return None
    try:
        row = connection.execute(sql.SQL("select value from {}").format(SECRET)).fetchone()
    except psycopg.ProgrammingError as error:
        logger.warning(
            "the event triggers are not heard, because what signs their messages cannot be read (%s): let an"
            " administrator run what `setup --dry-run` prints; until then a changed definition takes effect"
            " from the beginning of the pull that finds it",
            error.diag.message_primary,
        )
        return None
    return None if row is None else bytes(row[0])


def foreign_event_triggers(connection: Connection, slot: str) -> str | None:
    """Which event triggers of our names are not of `slot`, and whose they are; None if there are none."""
    foreign = [each for each in _found(connection) if not _is_ours(each, slot)]
    if not foreign:
        return None
    names = ", ".join(each.name for each in foreign)
    return f'{names} do not belong to replication slot "{slot}" ({foreign[0].comment or "no comment"})'


def emit_full_catalog(connection: Connection) -> None:
    """Write a `whole` message: from its position on definitions are exact, whatever was known before.

    It is written again if something was altered meanwhile: a command that committed between the message's
    snapshot and its commit would otherwise be undone by it.
    """
    known = read_catalog(connection)
    while True:
        connection.execute(TELL_EVERYTHING)
        now = read_catalog(connection)
        if same_definitions(known, now):
            return
        known = now


def _have_their_bodies(connection: Connection) -> bool:
    wanted = {function.name: function.body.as_string(connection) for function in trigger_functions()}
    found: dict[str, str] = dict(connection.execute(_BODIES, (SCHEMA,)).fetchall())
    return wanted.items() <= found.items()


def _may_read_secret(connection: Connection) -> bool:
    ((may_read,),) = connection.execute(_MAY_READ, (SECRET.as_string(connection),)).fetchall()
    return bool(may_read)


def _statements(publications: Sequence[str]) -> tuple[sql.Composed, ...]:
    """Schema, functions and event triggers, without comments."""
    return (
        sql.SQL("create schema if not exists {}").format(sql.Identifier(SCHEMA)),
        *create_functions(publications),
        *(statement for trigger in _TRIGGERS for statement in _event_trigger(trigger)),
    )


def _event_trigger(trigger: _Trigger) -> tuple[sql.Composed, ...]:
    tags = sql.SQL(" when tag in ({})").format(sql.SQL(", ").join(map(sql.Literal, trigger.tags)))
    name = sql.Identifier(trigger.name)
    return (
        sql.SQL("create event trigger {} on {}{} execute function {}()").format(
            name,
            sql.SQL(trigger.event),
            tags if trigger.tags else sql.SQL(""),
            sql.Identifier(SCHEMA, trigger.function),
        ),
        # Also for commands in a session with session_replication_role = replica.
        sql.SQL("alter event trigger {} enable always").format(name),
    )


def _found(connection: Connection) -> tuple[_Found, ...]:
    """The event triggers of our names that exist, in order of name."""
    return tuple(_Found(*row) for row in connection.execute(_FIND, (list(EVENT_TRIGGERS),)).fetchall())


def _are_ours(found: Sequence[_Found], slot: str) -> bool:
    return all(_is_ours(each, slot) for each in found)


def _is_ours(found: _Found, slot: str) -> bool:
    return (found.comment or "").startswith(_mark(slot))


def _mark(slot: str) -> str:
    """How the comments begin; what follows tells versions of the definitions apart."""
    return f"{comment_text(slot)}, definition "
