"""Whether another role could run code through the schema `cdc_replay` of a subscriber.

A role with CREATE on the database can create a schema of that name before us. It would own the objects in it,
and a trigger, default, rule or policy of its tables would run with the rights of the replaying role. So
before anything in the schema is read or written, we check that

- schema, tables, functions and all other objects are owned by the role itself or by a superuser;
- no other role may create objects in the schema or write to its tables;
- its tables have no trigger, rule or policy.

No other role can replace or fill a schema that has passed. A schema that is not there can appear at any time:
whoever has not found it must check again before the first access.
"""

from __future__ import annotations

from typing import Final

from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.publication import STATE_SCHEMA
from cdc_replay.postgres.connection import Connection

_UNTRUSTED: Final = """
    with trusted (oid) as (
        select oid from pg_catalog.pg_roles where rolsuper or rolname = current_user
    ),
    schema as (
        select oid, nspname, nspowner, nspacl from pg_catalog.pg_namespace where nspname = %(schema)s
    ),
    relation as (
        select c.oid, c.relowner, c.relacl
        from pg_catalog.pg_class c join schema on schema.oid = c.relnamespace
    ),
    owned (object, owner) as (
        select pg_catalog.format('schema %%I', nspname), nspowner from schema
        union all
        select pg_catalog.format('relation %%s', oid::pg_catalog.regclass), relowner from relation
        union all
        select pg_catalog.format('function %%s', p.oid::pg_catalog.regprocedure), p.proowner
        from pg_catalog.pg_proc p join schema on schema.oid = p.pronamespace
        union all
        select pg_catalog.format('type %%s', t.oid::pg_catalog.regtype), t.typowner
        from pg_catalog.pg_type t join schema on schema.oid = t.typnamespace
    ),
    privileges (object, grantee, privilege) as (
        select pg_catalog.format('schema %%I', nspname), acl.grantee, acl.privilege_type
        from schema, pg_catalog.aclexplode(nspacl) acl where acl.privilege_type = 'CREATE'
        union all
        select pg_catalog.format('relation %%s', relation.oid::pg_catalog.regclass),
            acl.grantee, acl.privilege_type
        from relation, pg_catalog.aclexplode(relacl) acl
        where acl.privilege_type not in ('SELECT', 'USAGE', 'MAINTAIN')
    ),
    problem (text) as (
        select pg_catalog.format('%%s is owned by role "%%s"', object, pg_catalog.pg_get_userbyid(owner))
        from owned where owner not in (table trusted)
        union all
        select pg_catalog.format('role "%%s" has %%s on %%s',
            case grantee when 0 then 'public' else pg_catalog.pg_get_userbyid(grantee)::text end,
            privilege, object)
        from privileges where grantee not in (table trusted)
        union all
        select pg_catalog.format('%%s has trigger "%%s"', tgrelid::pg_catalog.regclass, tgname)
        from pg_catalog.pg_trigger join relation on relation.oid = tgrelid where not tgisinternal
        union all
        select pg_catalog.format('%%s has rule "%%s"', ev_class::pg_catalog.regclass, rulename)
        from pg_catalog.pg_rewrite join relation on relation.oid = ev_class
        union all
        select pg_catalog.format('%%s has policy "%%s"', polrelid::pg_catalog.regclass, polname)
        from pg_catalog.pg_policy join relation on relation.oid = polrelid
        order by 1
        limit 20
    )
    select exists (select from schema), array(select text from problem)
"""
"""Both by one snapshot: whether the schema exists, and what is wrong with it."""


def check_state_ownership(connection: Connection) -> bool:
    """Whether the schema of the state exists; checks that no other role controls it.

    Raises:
        SubscriberNotReady: naming each object with its owner, or its forbidden privilege, trigger or policy.
    """
    ((exists, problems),) = connection.execute(_UNTRUSTED, {"schema": STATE_SCHEMA})
    if problems:
        raise SubscriberNotReady(
            f'schema "{STATE_SCHEMA}" of the subscriber is controlled by another role',
            detail="; ".join(problems),
            hint="Find out who created it and why. Drop or rename objects that are not part of cdc-replay, or"
            " transfer them to the role of the subscription (ALTER … OWNER TO) and revoke the privileges.",
        )
    return bool(exists)
