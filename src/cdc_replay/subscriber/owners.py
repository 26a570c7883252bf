"""With whose rights statements on a target run, so that no code of its owner runs with ours (R8.21).

Defaults, checks, generated columns, expressions of indexes, triggers and types of a table are code of its
owner's choice. A native apply worker (16 and later) runs it as the owner, in a security-restricted operation,
unless the subscription has `run_as_owner`. So do we (`subscriber.as_owner`), on every version.

| the table's owner                            | rights     | statements run                                 |
|----------------------------------------------|------------|------------------------------------------------|
| is our role; or `run_as_owner: true`         | OWN        | as our role                                    |
| may become our role, and has no code in it   | OWN        | as our role                                    |
| may become our role                          | SWITCHED   | as the owner                                   |
| has no code in it                            | PLAIN      | as our role, while we can lock the table       |
| any other                                    | RESTRICTED | as the owner, without a way back               |
| is a role that ours may not become           | REFUSED    | not at all                                     |

PLAIN is what costs nothing, and only what is known to be harmless is: functions of PostgreSQL itself that
are immutable, and some more by name; not all, as `query_to_xml` runs any text. Even reading a table can run
code, because the planner folds constants in its checks, its statistics and the predicates of its indexes.
A lock keeps the owner from adding any (`hold`), but not from changing a domain: its types must be
PostgreSQL's own, or base types and enums of a superuser or of our role.

| what the lock of a table does not keep | so a PLAIN table has                                           |
|----------------------------------------|----------------------------------------------------------------|
| constraints of domains, casts of enums | no such types                                                  |
| its name, if its schema is renamed     | a schema whose row we lock as a superuser, or whose owner is   |
|                                        | trusted, or may not rename it                                  |
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from psycopg import errors as pg
from psycopg import sql

from cdc_replay.postgres.connection import Connection

SET_OPTION_SINCE: Final = 160000

# Stable or volatile, and known to call no code that is not PostgreSQL's, nor to do what their caller may not.
_HARMLESS: Final = (
    "age",
    "clock_timestamp",
    "concat",
    "concat_ws",
    "date",
    "date_part",
    "date_trunc",
    "gen_random_uuid",
    "nextval",
    "now",
    "random",
    "statement_timestamp",
    "time",
    "timeofday",
    "timestamp",
    "timestamptz",
    "timetz",
    "timezone",
    "to_char",
    "to_date",
    "to_timestamp",
    "transaction_timestamp",
    "uuidv4",
    "uuidv7",
)

_FACTS: Final = """
    with recursive me as (
        select oid, rolname, rolsuper from pg_roles where rolname = current_user
    ),
    relation (target, oid, relkind) as (
        select target.oid, class.oid, class.relkind
        from unnest(%(oids)s::oid[]) as target (oid)
        cross join lateral (
            select target.oid union select relid::oid from pg_partition_tree(target.oid::regclass)
        ) as part (oid)
        join pg_class as class on class.oid = part.oid
    ),
    expression (target, tree) as (
        select relation.target, found.tree::text
        from relation
        cross join lateral (
            select adbin from pg_attrdef where adrelid = relation.oid
            union all select conbin from pg_constraint where conrelid = relation.oid
            union all select indexprs from pg_index where indrelid = relation.oid
            union all select indpred from pg_index where indrelid = relation.oid
            union all select partexprs from pg_partitioned_table where partrelid = relation.oid
            union all select stxexprs from pg_statistic_ext where stxrelid = relation.oid
        ) as found (tree)
        where found.tree is not null
    ),
    type (target, oid) as (
        select relation.target, atttypid
        from relation join pg_attribute on attrelid = relation.oid
        where attnum > 0 and not attisdropped and atttypid >= %(first_user_oid)s
        union
        select target, number[1]::oid
        from expression, regexp_matches(tree, ':[a-z_]*type(?:id)? ([0-9]+)', 'g') as number
        where number[1]::oid >= %(first_user_oid)s
        union
        select type.target, typelem from type join pg_type on pg_type.oid = type.oid where typelem <> 0
    ),
    code (target) as (
        -- foreign tables are reached with the rights that somebody has mapped for us
        select target from relation where relkind not in ('r', 'p')
        union all
        select target from relation join pg_trigger on tgrelid = relation.oid and tgenabled in ('A', 'R')
        union all
        select target from expression where tree ~ '\\{(COERCETODOMAIN|JSON|SUBLINK|SUBPLAN)'
        union all
        select target
        from expression, regexp_matches(tree, ':(?:op)?funcid ([0-9]+)', 'g') as number
        where not exists (
            select from pg_proc
            where pg_proc.oid = number[1]::oid and pg_proc.oid < %(first_user_oid)s
                and (provolatile = 'i' or proname = any (%(harmless)s))
        )
        union all
        select type.target
        from type join pg_type on pg_type.oid = type.oid
        where type.oid >= %(first_user_oid)s and not (
            typtype in ('b', 'e')
            and (typowner = (select oid from me) or exists (
                select from pg_roles where pg_roles.oid = typowner and rolsuper
            ))
        )
    )
    select class.oid, owner.rolname::text,
        class.relowner = me.oid,
        me.rolsuper or pg_has_role(me.oid, class.relowner, %(become)s),
        owner.rolsuper or pg_has_role(class.relowner, me.oid, %(become)s),
        class.oid in (select target from code),
        not (
            me.rolsuper or (
                schema_owner.rolsuper or namespace.nspowner = me.oid
                or not has_database_privilege(namespace.nspowner, current_database(), 'create')
            )
            and has_schema_privilege(namespace.oid, 'usage')
            and has_table_privilege(class.oid, 'select') and has_table_privilege(class.oid, 'insert')
            and has_table_privilege(class.oid, 'update') and has_table_privilege(class.oid, 'delete')
            and has_table_privilege(class.oid, 'truncate')
        ) or row_security_active(class.oid)
        or class.relrowsecurity and class.relforcerowsecurity and not (owner.rolsuper or owner.rolbypassrls)
        or not (
            has_table_privilege(class.relowner, class.oid, 'select')
            and has_table_privilege(class.relowner, class.oid, 'insert')
            and has_table_privilege(class.relowner, class.oid, 'update')
            and has_table_privilege(class.relowner, class.oid, 'delete')
            and has_table_privilege(class.relowner, class.oid, 'truncate')
        ),
        class.relrowsecurity and class.relforcerowsecurity and not (owner.rolsuper or owner.rolbypassrls)
    from me, pg_class as class
    join pg_roles as owner on owner.oid = class.relowner
    join pg_namespace as namespace on namespace.oid = class.relnamespace
    join pg_roles as schema_owner on schema_owner.oid = namespace.nspowner
    where class.oid = any (%(oids)s::oid[])
"""

_FIRST_USER_OID: Final = 16384
"""What has a smaller oid was made by initdb."""

_HOLD_SCHEMAS: Final = """
    select from pg_catalog.pg_namespace
    where oid in (select relnamespace from pg_catalog.pg_class where oid = any (%s::oid[])) for share
"""


CANNOT_BECOME: Final = (
    'Grant "{owner}" to the role, or make the role the owner of the table. With `run_as_owner: true` in the'
    " configuration of the subscription code in the table runs with the role's own rights."
)
"""The remedies where a table is of a role that ours may not become."""


class Rights(enum.Enum):
    """With whose rights statements on a table run; the table above."""

    OWN = "own"
    PLAIN = "plain"
    SWITCHED = "switched"
    RESTRICTED = "restricted"
    REFUSED = "refused"

    @property
    def is_of_another(self) -> bool:
        """Whether the table is of a role that is not trusted with our rights."""
        return self in {Rights.PLAIN, Rights.RESTRICTED}

    @property
    def is_owners(self) -> bool:
        """Whether statements run as the table's owner."""
        return self in {Rights.SWITCHED, Rights.RESTRICTED}


@dataclass(frozen=True, slots=True)
class Acting:
    """The owner of a table, and with whose rights we act on it.

    `forces_row_security` says that policies restrict the owner itself.
    """

    owner: str
    rights: Rights
    forces_row_security: bool = False

    def without_lock(self) -> Acting:
        """The same, where the owner may put code into the table at any time."""
        is_plain = self.rights is Rights.PLAIN
        return dataclasses.replace(self, rights=Rights.RESTRICTED) if is_plain else self


def read_acting(connection: Connection, oids: Collection[int], *, run_as_owner: bool) -> dict[int, Acting]:
    """With whose rights to act on the tables of these oids, as of now."""
    has_set_option = connection.info.server_version >= SET_OPTION_SINCE
    values = {
        "oids": list(oids),
        "first_user_oid": _FIRST_USER_OID,
        "harmless": list(_HARMLESS),
        "become": "set" if has_set_option else "member",
    }
    acting = {}
    for oid, owner, *facts, forces_row_security in connection.execute(_FACTS, values) if oids else ():
        acting[oid] = Acting(owner, Rights.OWN if run_as_owner else _rights(*facts), forces_row_security)
    return acting


def _rights(
    is_ours: bool, may_become_owner: bool, is_trusted: bool, has_code: bool, needs_owner: bool
) -> Rights:
    if is_ours:
        return Rights.OWN
    if not may_become_owner:
        return Rights.REFUSED
    if is_trusted:
        return Rights.SWITCHED if has_code or needs_owner else Rights.OWN
    return Rights.RESTRICTED if has_code or needs_owner else Rights.PLAIN


def hold(connection: Connection, tables: Mapping[int, sql.Composable]) -> frozenset[int]:
    """Keep tables from being changed or renamed until the caller's transaction ends; those that are kept so.

    `tables` are what to lock, as LOCK TABLE wants it, by oid. It takes the weakest lock that keeps off CREATE
    STATISTICS, CREATE INDEX CONCURRENTLY and ATTACH PARTITION. Vacuum takes that one, too, and would be
    cancelled for who waits: so nobody waits.
    """
    ((is_superuser,),) = connection.execute("select current_setting('is_superuser')::bool")
    if is_superuser:
        # Renaming a schema takes no lock; it waits for that of its row, which no other role can take.
        connection.execute(_HOLD_SCHEMAS, (list(tables),))
    if _is_locked(connection, tables.values()):
        return frozenset(tables)
    return frozenset(oid for oid, table in tables.items() if _is_locked(connection, [table]))


def _is_locked(connection: Connection, tables: Iterable[sql.Composable]) -> bool:
    listed = sql.SQL(", ").join(tables)
    try:
        with connection.transaction():
            connection.execute(sql.SQL("lock table {} in share update exclusive mode nowait").format(listed))
    except pg.LockNotAvailable:
        return False
    return True
