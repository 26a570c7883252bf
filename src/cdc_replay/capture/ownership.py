"""Nothing on the publisher is ours because of its name: who owns it, and who may do what with it, decides.

A role with CREATE on the database can make a schema, functions or publications of our names before us, or
instead of us, and owns them whatever `create … if not exists` and `create or replace` do to them. The
functions of the event triggers run in sessions of superusers, and a capture publication decides what is
captured. So every command that reads or writes there checks first:

| object                              | owned by                                                        |
|-------------------------------------|-----------------------------------------------------------------|
| schema `cdc_replay_capture`, and    | the owner of our event triggers (nobody else can create these), |
| everything in it                    | a superuser, or the role itself                                 |
| capture publications                | likewise, or the owner of the database, or a role that may      |
|                                     | replicate: it can read everything anyway                        |

and that nobody else may create in that schema or call `emit`, and that only roles that may replicate read the
secret.
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
    """Check that what has our names on the publisher is of those who may have made it.

    Raises:
        PublisherNotReady: naming each object with its owner, and each privilege with its role.
    """
    values = {"schema": SCHEMA, "triggers": list(event_triggers), "publications": list(OUR_PUBLICATIONS)}
    found = [sentence for (sentence,) in connection.execute(_UNTRUSTED, values)]
    if found:
        raise PublisherNotReady(
            "objects of the publisher that must be cdc-replay's are in the hands of another role",
            detail="; ".join(found),
            hint="Find out who made them and why. Drop or rename what is not of cdc-replay, or let an"
            " administrator give it to its owner (ALTER … OWNER TO) and revoke the privileges; then run"
            " `cdc-replay setup`.",
        )
