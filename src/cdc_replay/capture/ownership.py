"""Checks who owns the objects with our names on the publisher, and who may change them.

Any role with CREATE on the database can create schemas, functions or publications with our names before us,
and keeps owning them despite `create … if not exists` and `create or replace`. The functions of the event
triggers run in sessions of superusers, and a capture publication decides what is captured. So every command
that uses these objects first checks their owners:

| object                           | allowed owners                                                     |
|----------------------------------|--------------------------------------------------------------------|
| schema `cdc_replay_capture`, and | the owner of our event triggers (only superusers can create them), |
| everything in it                 | a superuser, or the session's role                                 |
| capture publications             | the same, the owner of the database, or a role with REPLICATION,   |
|                                  | which can read everything anyway                                   |

No other role may create in that schema or call `emit`; only roles with REPLICATION may read the secret and
write the keys of locks.

Objects can appear after that check: before an administrator runs a printed script, or while `setup` waits for
a lock. So one transaction creates them all, in `setup` and in its script. It begins with the check as a
statement (`ownership_guard`), which is repeated when everything exists that an event trigger executes, and
before the event triggers are created: nobody else's function is ever executed, and nothing is committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import psycopg
from psycopg import sql

from cdc_replay.capture.publications import OUR_PUBLICATIONS
from cdc_replay.errors import PublisherNotReady
from cdc_replay.postgres.advisory_locks import LOCK_KEY_TABLE
from cdc_replay.postgres.connection import CREATED_MEANWHILE, Connection

SCHEMA: Final = "cdc_replay_capture"
"""The schema of the event triggers' functions."""

_UNTRUSTED: Final = """
    with trusted (oid) as (
        select oid from pg_catalog.pg_roles where rolsuper or rolname = current_user
        union
        select evtowner from pg_catalog.pg_event_trigger where evtname = any({triggers})
    ),
    replicating (oid) as (
        select oid from pg_catalog.pg_roles where rolreplication
    ),
    schema as (
        select oid, nspname, nspowner, nspacl from pg_catalog.pg_namespace where nspname = {schema}
    ),
    owned (object, owner) as (
        select pg_catalog.format('schema "%s"', nspname), nspowner from schema
        union all
        select pg_catalog.format('function %s', p.oid::pg_catalog.regprocedure), p.proowner
        from pg_catalog.pg_proc p join schema on schema.oid = p.pronamespace
        union all
        select pg_catalog.format('relation %s', c.oid::pg_catalog.regclass), c.relowner
        from pg_catalog.pg_class c join schema on schema.oid = c.relnamespace
        union all
        select pg_catalog.format('publication "%s"', pubname), pubowner
        from pg_catalog.pg_publication
        where pubname = any({publications})
            and pubowner <> (select datdba from pg_catalog.pg_database where datname = current_database())
            and pubowner not in (table replicating)
    ),
    privileges (object, grantee, privilege) as (
        select pg_catalog.format('schema "%s"', nspname), acl.grantee, acl.privilege_type
        from schema, pg_catalog.aclexplode(nspacl) acl where acl.privilege_type = 'CREATE'
        union all
        select pg_catalog.format('function %s', p.oid::pg_catalog.regprocedure),
            acl.grantee, acl.privilege_type
        from pg_catalog.pg_proc p join schema on schema.oid = p.pronamespace,
            pg_catalog.aclexplode(coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) acl
        where p.proname = 'emit'
        union all
        select pg_catalog.format('relation %s', c.oid::pg_catalog.regclass), acl.grantee, acl.privilege_type
        from pg_catalog.pg_class c join schema on schema.oid = c.relnamespace,
            pg_catalog.aclexplode(c.relacl) acl
        where acl.grantee not in (table replicating)
            or not (
                acl.privilege_type = 'SELECT'
                or c.relname = {lock_keys} and acl.privilege_type in ('INSERT', 'UPDATE')
            )
    )
    select pg_catalog.format('%s is owned by role "%s"', object, pg_catalog.pg_get_userbyid(owner))
    from owned where owner not in (table trusted)
    union all
    select pg_catalog.format('role "%s" has %s on %s',
        case grantee when 0 then 'public' else pg_catalog.pg_get_userbyid(grantee)::text end,
        privilege, object)
    from privileges where grantee not in (table trusted)
    order by 1
"""

_GUARD: Final = """
    do $cdc_replay_guard$
    declare
        violations constant text := (
            select pg_catalog.string_agg(violation, '; ') from ({untrusted}) as found (violation)
        );
    begin
        if violations is not null then
            raise exception using message = {message}, detail = violations, hint = {hint}, errcode = {code};
        end if;
    end $cdc_replay_guard$
"""

_CODE: Final = "CDC01"
"""The SQLSTATE of the guard's error; no class of PostgreSQL's begins like it."""

_MESSAGE: Final = "objects of cdc-replay on the publisher are controlled by another role"

_HINT: Final = (
    "Find out who created them and why. Drop or rename objects that are not ours. For the others, let an"
    " administrator change the owner (ALTER ... OWNER TO) and revoke the privileges. Then run"
    " `cdc-replay setup`."
)


def check_ownership(connection: Connection, event_triggers: Sequence[str]) -> None:
    """Check owners and privileges of the objects with our names on the publisher.

    Raises:
        PublisherNotReady: naming each object with its owner, and each privilege with its role.
    """
    violations = [violation for (violation,) in connection.execute(_untrusted(event_triggers))]
    if violations:
        raise PublisherNotReady(_MESSAGE, detail="; ".join(violations), hint=_HINT)


def ownership_guard(event_triggers: Sequence[str]) -> sql.Composed:
    """The statement that fails where `check_ownership` refuses, for scripts and inside of transactions.

    The session's role is that of whoever executes it.
    """
    return sql.SQL(_GUARD).format(
        untrusted=_untrusted(event_triggers), message=_MESSAGE, hint=_HINT, code=_CODE
    )


@contextlib.contextmanager
def nothing_adopted(connection: Connection, event_triggers: Sequence[str]) -> Iterator[None]:
    """Around a transaction that creates our objects: refuse what somebody else made meanwhile.

    Raises:
        PublisherNotReady: if a guard failed, or an object to be created is there.
    """
    try:
        yield
    except CREATED_MEANWHILE as error:
        check_ownership(connection, event_triggers)
        raise PublisherNotReady(
            f"an object was created while setup was creating it: {error.diag.message_primary}",
            detail=error.diag.message_detail,
            hint="Nothing was changed. If another setup was running, run `cdc-replay setup` again.",
        ) from error
    except psycopg.Error as error:
        if error.sqlstate != _CODE:
            raise
        raise PublisherNotReady(_MESSAGE, detail=error.diag.message_detail, hint=_HINT) from error


def _untrusted(event_triggers: Sequence[str]) -> sql.Composed:
    return sql.SQL(_UNTRUSTED).format(
        schema=SCHEMA,
        triggers=list(event_triggers),
        publications=list(OUR_PUBLICATIONS),
        lock_keys=LOCK_KEY_TABLE,
    )
