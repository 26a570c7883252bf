"""Event triggers on the publisher, which give definitions a position in the change stream (R9.10, R9.11).

| event trigger        | event           | writes the message   | about                                     |
|----------------------|-----------------|----------------------|-------------------------------------------|
| `cdc_replay_ddl`     | ddl_command_end | `cdc_replay.catalog` | what a command created or altered         |
| `cdc_replay_drop`    | sql_drop        | `cdc_replay.catalog` | what a command dropped                    |
| `cdc_replay_rewrite` | table_rewrite   | `cdc_replay.rewrite` | rows that get other values unsent (R11.9) |
| `cdc_replay_follow`  | ddl_command_end |                      | additions to a subscribed publication     |

The messages are transactional: they are decoded at their position in the command's transaction, and not at
all if it is rolled back. Their content (`catalog.ddl_change`) is rows of the reader's queries for the objects
that the command touched: for a partitioned table the relatives with catalog rows written by this transaction;
for a type, function, collation, schema or extension the tables that depend on it.

A user's command never fails because of them: an error becomes a WARNING, and the command is not recorded; the
next capture reads the full catalog. Temporary tables are ignored.

`cdc_replay_follow` adds to the capture publications what was added to a subscribed publication (tables,
schemas, publish actions, all tables, generated columns, partitioned tables published as themselves), in the
same transaction, so that no change is missed between ALTER PUBLICATION and the next `setup` or `refresh`,
which also remove. Its own commands alter no subscribed publication, which ends the recursion.

The functions run as their owner, with a fixed search path; the server quotes all names in their statements.
Their messages carry a code that no other program can write (`message_code`).

Everything is in the schema `cdc_replay_capture` (`cdc_replay` is the subscriber's; a database can be both),
and is only changed or removed if the comments of the event triggers name the same slot.

Limits: DETACH PARTITION CONCURRENTLY is recorded by its second transaction. A command in a REPEATABLE READ
transaction sees the catalogs of the transaction's snapshot, so its message lacks what other transactions have
changed in the same table since.
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
    LOCK_KEYS,
    RELATIONS,
    SECRET,
    TELL_EVERYTHING,
    create_functions,
    grant_statements,
    trigger_functions,
)
from cdc_replay.capture.ownership import SCHEMA, ownership_guard
from cdc_replay.capture.publications import MARKED_PUBLICATION, comment_text
from cdc_replay.catalog.json_form import same_definitions
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.postgres.advisory_locks import LOCK_KEY_TABLE
from cdc_replay.postgres.connection import CREATED_MEANWHILE, Connection

logger = logging.getLogger(__name__)

_DDL_TAGS: Final = (
    "CREATE TABLE", "CREATE TABLE AS", "SELECT INTO", "ALTER TABLE", "CREATE INDEX", "ALTER INDEX",
    "CREATE PUBLICATION", "ALTER PUBLICATION", "CREATE SCHEMA", "ALTER SCHEMA", "ALTER EXTENSION",
    "ALTER TYPE", "ALTER DOMAIN", "ALTER COLLATION", "ALTER OPERATOR",
    "ALTER FUNCTION", "ALTER PROCEDURE", "ALTER ROUTINE",
    # These rename columns of tables, too.
    "ALTER VIEW", "ALTER MATERIALIZED VIEW", "ALTER FOREIGN TABLE",
)  # fmt: skip

_PUBLICATION_TAGS: Final = ("CREATE PUBLICATION", "ALTER PUBLICATION")


@dataclass(frozen=True, slots=True)
class _Trigger:
    name: str
    event: LiteralString
    function: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _ExistingTrigger:
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

OWNERSHIP_GUARD: Final = ownership_guard(EVENT_TRIGGERS)
"""The statement that fails if somebody else owns an object of ours."""

_CREATE_SCHEMA: Final = sql.SQL("create schema {}").format(sql.Identifier(SCHEMA))

_SCHEMA_EXISTS: Final = "select exists (select from pg_namespace where nspname = %s)"

_SELECT_TRIGGERS: Final = """
    select evtname::text, obj_description(oid, 'pg_event_trigger'), evtenabled in ('A', 'O')
    from pg_event_trigger
    where evtname = any(%s)
    order by evtname
"""

_BODIES: Final = """
    select proname::text, prosrc from pg_proc where pronamespace = to_regnamespace(%s)
"""

_HAS_RIGHTS: Final = """
    select coalesce(has_table_privilege(to_regclass(%s), 'select'), false)
        and coalesce(has_table_privilege(to_regclass(%s), 'update'), false)
"""

# Not to_regclass, which fails without USAGE on the schema.
_MAY_WRITE_KEYS: Final = """
    select not pg_is_in_recovery() and exists (
        select from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where n.nspname = %s and c.relname = %s
            and has_schema_privilege(n.oid, 'usage') and has_table_privilege(c.oid, 'update')
    )
"""

# The role of the session, and the role whose setup created the capture publications.
_SELECT_CAPTURE_ROLES: Final = """
    select current_user::text
    union
    select pg_get_userbyid(pubowner)::text from pg_publication where pubname = %s
    order by 1
"""

_HAS_OTHER_OBJECTS: Final = """
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
    """The statements that create or replace functions and event triggers; none if they are up to date.

    Execute them in one transaction, which also writes the full catalog: so it is known from the event
    triggers' first position on. `publications` are the subscribed ones. There are no statements if an event
    trigger with one of our names belongs to another slot.

    The transaction must begin with `OWNERSHIP_GUARD`; it is repeated before the event triggers are created.
    """
    existing = _read_triggers(connection)
    functions, triggers = create_functions(publications), _create_triggers()
    comment = f"{_comment_prefix(slot)}{_digest((_CREATE_SCHEMA, *functions, *triggers))}"
    is_current = existing == tuple(
        _ExistingTrigger(name, comment, is_enabled=True) for name in EVENT_TRIGGERS
    )
    is_current = is_current and _have_expected_bodies(connection) and _has_rights(connection)
    if is_current or not _are_ours(existing, slot):
        return ()
    removal = [sql.SQL("drop event trigger {}").format(sql.Identifier(trigger.name)) for trigger in existing]
    comments = [
        sql.SQL("comment on event trigger {} is {}").format(sql.Identifier(name), comment)
        for name in EVENT_TRIGGERS
    ]
    roles = [role for (role,) in connection.execute(_SELECT_CAPTURE_ROLES, (MARKED_PUBLICATION,))]
    return (
        *removal,
        # Never `if not exists`: a schema that appears until then is somebody else's.
        *(() if _schema_exists(connection) else (_CREATE_SCHEMA,)),
        *functions,
        *grant_statements(roles),
        OWNERSHIP_GUARD,
        *triggers,
        *comments,
        TELL_EVERYTHING,
    )


def plan_removal(connection: Connection, slot: str) -> tuple[sql.Composed, ...]:
    """The statements that remove the event triggers of `slot` and their functions; none if there are none.

    The schema stays if it has other objects.
    """
    existing = _read_triggers(connection)
    if not existing or not _are_ours(existing, slot):
        return ()
    names = [function.partition("(")[0] for function in FUNCTIONS]
    ((has_other_objects,),) = connection.execute(
        _HAS_OTHER_OBJECTS, (SCHEMA, names, list(RELATIONS))
    ).fetchall()
    return (
        *(sql.SQL("drop event trigger {}").format(sql.Identifier(trigger.name)) for trigger in existing),
        *(
            sql.SQL("drop function if exists {}.{}").format(sql.Identifier(SCHEMA), sql.SQL(function))
            for function in FUNCTIONS
        ),
        sql.SQL("drop materialized view if exists {}").format(SECRET),
        sql.SQL("drop sequence if exists {}").format(sql.Identifier(SCHEMA, "ordinal")),
        sql.SQL("drop table if exists {}").format(LOCK_KEYS),
        *(() if has_other_objects else (sql.SQL("drop schema if exists {}").format(sql.Identifier(SCHEMA)),)),
    )


def apply_plan(connection: Connection, plan: Sequence[sql.Composed]) -> str | None:
    """Execute the statements in one transaction; if that is not permitted, return the server's message.

    Errors of `OWNERSHIP_GUARD`, and of objects that appeared after the planning, pass unchanged.
    """
    try:
        with connection.transaction():
            for statement in plan:
                connection.execute(statement)
    except CREATED_MEANWHILE:
        raise
    except (psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
        return error.diag.message_primary or str(error)
    return None


def remove_event_triggers(connection: Connection, slot: str) -> tuple[str, ...]:
    """Remove the event triggers of `slot` and their functions; returns the triggers' names."""
    existing = _read_triggers(connection)
    plan = plan_removal(connection, slot)
    with connection.transaction():
        for statement in plan:
            connection.execute(statement)
    return tuple(trigger.name for trigger in existing) if plan else ()


def is_installed(connection: Connection, slot: str) -> bool:
    """Whether all event triggers of `slot` exist and are enabled, in any version of this software.

    The first message with `catalog.ddl_change.CATALOG_PREFIX` marks the position from which they were active:
    it is `whole`, and is written by the `setup` that installs them or creates the log.
    """
    existing = _read_triggers(connection)
    names = tuple(trigger.name for trigger in existing if trigger.is_enabled)
    return names == EVENT_TRIGGERS and _are_ours(existing, slot)


def may_write_lock_keys(connection: Connection, slot: str) -> bool:
    """Whether the event triggers of `slot` exist, and the role can write the keys of locks beside them."""
    existing = _read_triggers(connection)
    if not existing or not _are_ours(existing, slot):
        return False
    ((may_write,),) = connection.execute(_MAY_WRITE_KEYS, (SCHEMA, LOCK_KEY_TABLE)).fetchall()
    return bool(may_write)


def read_secret(connection: Connection, slot: str) -> bytes | None:
    """The secret that signs the event triggers' messages; None if they are not installed.

    Also None, with a warning, if the role may not read it: then no message can be verified.
    """
    if not is_installed(connection, slot):
        return None
    try:
        row = connection.execute(sql.SQL("select value from {}").format(SECRET)).fetchone()
    except psycopg.ProgrammingError as error:
        logger.warning(
            "the event triggers' messages are ignored, because their secret cannot be read (%s): let an"
            " administrator run what `setup --dry-run` prints; until then a changed definition takes effect"
            " at the start of the pull that detects it",
            error.diag.message_primary,
        )
        return None
    return None if row is None else bytes(row[0])


def foreign_event_triggers(connection: Connection, slot: str) -> str | None:
    """Describe event triggers with our names that belong to another slot; None if there are none."""
    foreign = [trigger for trigger in _read_triggers(connection) if not _is_ours(trigger, slot)]
    if not foreign:
        return None
    names = ", ".join(trigger.name for trigger in foreign)
    return f'{names} do not belong to replication slot "{slot}" ({foreign[0].comment or "no comment"})'


def emit_full_catalog(connection: Connection) -> None:
    """Write a `whole` message: from its position on definitions are exact.

    It is written again if the catalog changed meanwhile: otherwise it would undo a command that committed
    between the message's snapshot and its commit.
    """
    previous = read_catalog(connection)
    while True:
        connection.execute(TELL_EVERYTHING)
        current = read_catalog(connection)
        if same_definitions(previous, current):
            return
        previous = current


def _have_expected_bodies(connection: Connection) -> bool:
    expected = {function.name: function.body.as_string(connection) for function in trigger_functions()}
    installed: dict[str, str] = dict(connection.execute(_BODIES, (SCHEMA,)).fetchall())
    return expected.items() <= installed.items()


def _has_rights(connection: Connection) -> bool:
    """Whether the role may read the secret and write the keys."""
    names = (SECRET.as_string(connection), LOCK_KEYS.as_string(connection))
    ((has_rights,),) = connection.execute(_HAS_RIGHTS, names).fetchall()
    return bool(has_rights)


def _schema_exists(connection: Connection) -> bool:
    ((exists,),) = connection.execute(_SCHEMA_EXISTS, (SCHEMA,)).fetchall()
    return bool(exists)


def _digest(statements: Sequence[sql.Composed]) -> str:
    text = "\n".join(statement.as_string(None) for statement in statements)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _create_triggers() -> tuple[sql.Composed, ...]:
    return tuple(statement for trigger in _TRIGGERS for statement in _trigger_statements(trigger))


def _trigger_statements(trigger: _Trigger) -> tuple[sql.Composed, ...]:
    tags = sql.SQL(" when tag in ({})").format(sql.SQL(", ").join(map(sql.Literal, trigger.tags)))
    name = sql.Identifier(trigger.name)
    return (
        sql.SQL("create event trigger {} on {}{} execute function {}()").format(
            name,
            sql.SQL(trigger.event),
            tags if trigger.tags else sql.SQL(""),
            sql.Identifier(SCHEMA, trigger.function),
        ),
        # ALWAYS: also in sessions with session_replication_role = replica.
        sql.SQL("alter event trigger {} enable always").format(name),
    )


def _read_triggers(connection: Connection) -> tuple[_ExistingTrigger, ...]:
    return tuple(
        _ExistingTrigger(*row)
        for row in connection.execute(_SELECT_TRIGGERS, (list(EVENT_TRIGGERS),)).fetchall()
    )


def _are_ours(existing: Sequence[_ExistingTrigger], slot: str) -> bool:
    return all(_is_ours(trigger, slot) for trigger in existing)


def _is_ours(existing: _ExistingTrigger, slot: str) -> bool:
    return (existing.comment or "").startswith(_comment_prefix(slot))


def _comment_prefix(slot: str) -> str:
    """The prefix of the comments; a digest of the definitions follows."""
    return f"{comment_text(slot)}, definition "
