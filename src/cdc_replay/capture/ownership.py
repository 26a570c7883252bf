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

No other role may create in that schema or call `emit`; only roles with REPLICATION may read the secret.
"""

from __future__ import annotations

from typing import Final

from cdc_replay.capture.ddl.trigger_functions import SCHEMA
from cdc_replay.capture.publications import OUR_PUBLICATIONS
from cdc_replay.errors import PublisherNotReady
from cdc_replay.postgres.connection import Connection

_UNTRUSTED: Final = """
    with trusted (oid) as (
        select oid from pg_catalog.pg_roles where rolsuper or rolname = current_user
        union
        select evtowner from pg_catalog.pg_event_trigger where evtname = any(%(triggers)s)
    ),
    replicating (oid) as (
        select oid from pg_catalog.pg_roles where rolreplication
    ),
    schema as (
        select oid, nspname, nspowner, nspacl from pg_catalog.pg_namespace where nspname = %(schema)s
    ),
    owned (object, owner) as (
        select pg_catalog.format('schema "%%s"', nspname), nspowner from schema
        union all
        select pg_catalog.format('function %%s', p.oid::pg_catalog.regprocedure), p.proowner
        from pg_catalog.pg_proc p join schema on schema.oid = p.pronamespace
        union all
        select pg_catalog.format('relation %%s', c.oid::pg_catalog.regclass), c.relowner
        from pg_catalog.pg_class c join schema on schema.oid = c.relnamespace
        union all
        select pg_catalog.format('publication "%%s"', pubname), pubowner
        from pg_catalog.pg_publication
        where pubname = any(%(publications)s)
            and pubowner <> (select datdba from pg_catalog.pg_database where datname = current_database())
            and pubowner not in (table replicating)
    ),
    privileges (object, grantee, privilege) as (
        select pg_catalog.format('schema "%%s"', nspname), acl.grantee, acl.privilege_type
        from schema, pg_catalog.aclexplode(nspacl) acl where acl.privilege_type = 'CREATE'
        union all
        select pg_catalog.format('function %%s', p.oid::pg_catalog.regprocedure),
            acl.grantee, acl.privilege_type
        from pg_catalog.pg_proc p join schema on schema.oid = p.pronamespace,
            pg_catalog.aclexplode(coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) acl
        where p.proname = 'emit'
        union all
        select pg_catalog.format('relation %%s', c.oid::pg_catalog.regclass), acl.grantee, acl.privilege_type
        from pg_catalog.pg_class c join schema on schema.oid = c.relnamespace,
            pg_catalog.aclexplode(c.relacl) acl
        where acl.privilege_type <> 'SELECT' or acl.grantee not in (table replicating)
    )
    select pg_catalog.format('%%s is owned by role "%%s"', object, pg_catalog.pg_get_userbyid(owner))
    from owned where owner not in (table trusted)
    union all
    select pg_catalog.format('role "%%s" has %%s on %%s',
        case grantee when 0 then 'public' else pg_catalog.pg_get_userbyid(grantee)::text end,
        privilege, object)
    from privileges where grantee not in (table trusted)
    order by 1
"""


def check_ownership(connection: Connection, event_triggers: tuple[str, ...]) -> None:
    """Check owners and privileges of the objects with our names on the publisher.

    Raises:
        PublisherNotReady: naming each object with its owner, and each privilege with its role.
    """
    values = {"schema": SCHEMA, "triggers": list(event_triggers), "publications": list(OUR_PUBLICATIONS)}
    violations = [violation for (violation,) in connection.execute(_UNTRUSTED, values)]
    if violations:
        raise PublisherNotReady(
            "objects of cdc-replay on the publisher are controlled by another role",
            detail="; ".join(violations),
            hint="Find out who created them and why. Drop or rename objects that are not ours. For the"
            " others, let an administrator change the owner (ALTER … OWNER TO) and revoke the privileges."
            " Then run `cdc-replay setup`.",
        )
