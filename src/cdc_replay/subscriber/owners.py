"""With whose rights statements on a target run, so that its owner's code never runs with ours (R8.21).

Defaults, checks, generated columns, index expressions, triggers and types of a table are code that its owner
chooses. A native apply worker (16 and later) runs it as the owner, in a security-restricted operation, unless
the subscription has `run_as_owner`. We do the same (`subscriber.as_owner`), on every version.

| the table's owner                            | rights     | statements run                                 |
|----------------------------------------------|------------|------------------------------------------------|
| is our role; or `run_as_owner: true`         | OWN        | as our role                                    |
| may become our role, and has no code in it   | OWN        | as our role                                    |
| may become our role                          | SWITCHED   | as the owner                                   |
| has no code in it                            | PLAIN      | as our role, while we can lock the table       |
| any other                                    | RESTRICTED | as the owner, without a way back               |
| is a role that ours may not become           | REFUSED    | not at all                                     |

PLAIN costs nothing and is chosen only if all code is known to be harmless: PostgreSQL's own immutable
functions (but `satisfies_hash_partition`, which evaluates the partition key of any table), some others by
name (not all: `query_to_xml` runs any text), and `nextval` of sequences that both the owner and our role may
use. Expressions that are too large to be searched are code. Even reading a table can run code, because the
planner folds constants in its checks, statistics and index predicates. A lock keeps the owner from adding
code (`lock_tables`), but not from changing a domain: types must be PostgreSQL's own, or base types and enums
of a superuser or of our role.

| the lock of a table does not prevent | so a PLAIN table has                                             |
|--------------------------------------|------------------------------------------------------------------|
| changed domains, casts of enums      | no such types                                                    |
| a renamed schema                     | a schema whose row we lock as a superuser, or whose owner is     |
|                                      | trusted, or may not rename it, like all members of the owner     |

All other tables keep name and owner while statements use them (`hold_tables`): whoever owns a schema may drop
any table in it, and put another one under its name.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from psycopg import errors as pg
from psycopg import sql

from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.identifiers import commas

SET_OPTION_SINCE: Final = 160000

# Stable or volatile, but they call only PostgreSQL's own code and do nothing that their caller may not do.
_HARMLESS: Final = (
    "age", "clock_timestamp", "concat", "concat_ws", "date", "date_part", "date_trunc", "gen_random_uuid",
    "now", "random", "statement_timestamp", "time", "timeofday", "timestamp", "timestamptz",
    "timetz", "timezone", "to_char", "to_date", "to_timestamp", "transaction_timestamp", "uuidv4", "uuidv7",
)  # fmt: skip

# `needs_owner`: if our role or the owner lacks a privilege, the statement must fail as the owner's.
_OWNERS: Final = """
    with me as (
        select oid, rolsuper from pg_roles where rolname = current_user
    )
    select class.oid, owner.rolname::text,
        class.relowner = me.oid,
        me.rolsuper or pg_has_role(me.oid, class.relowner, %(become)s),
        owner.rolsuper or pg_has_role(class.relowner, me.oid, %(become)s),
        not (
            me.rolsuper or (
                schema_owner.rolsuper or namespace.nspowner = me.oid or not exists (
                    -- members too: the owner of the database is one of `pg_database_owner`
                    select from pg_roles as other
                    where not other.rolsuper and pg_has_role(other.oid, namespace.nspowner, 'usage')
                        and has_database_privilege(other.oid, current_database(), 'create')
                        and not pg_has_role(other.oid, me.oid, %(become)s)
                )
            )
            and has_schema_privilege(namespace.oid, 'usage')
            and has_table_privilege(class.oid, 'select') and has_table_privilege(class.oid, 'insert')
            and has_table_privilege(class.oid, 'update') and has_table_privilege(class.oid, 'delete')
            and has_table_privilege(class.oid, 'truncate')
        )
        or row_security_active(class.oid)
        or class.relrowsecurity and class.relforcerowsecurity and not (owner.rolsuper or owner.rolbypassrls)
        or not (
            has_table_privilege(class.relowner, class.oid, 'select')
            and has_table_privilege(class.relowner, class.oid, 'insert')
            and has_table_privilege(class.relowner, class.oid, 'update')
            and has_table_privilege(class.relowner, class.oid, 'delete')
            and has_table_privilege(class.relowner, class.oid, 'truncate')
        ) as needs_owner,
        class.relrowsecurity and class.relforcerowsecurity and not (owner.rolsuper or owner.rolbypassrls),
        array(
            select relid::oid from pg_partition_tree(class.oid::regclass) where relid <> class.oid
            union
            -- a row of a partition is checked by the expressions of what it is a partition of
            select relid::oid from pg_partition_ancestors(class.oid::regclass) as ancestor (relid)
            where relid <> class.oid
        )
    from me, pg_class as class
    join pg_roles as owner on owner.oid = class.relowner
    join pg_namespace as namespace on namespace.oid = class.relnamespace
    join pg_roles as schema_owner on schema_owner.oid = namespace.nspowner
    where class.oid = any (%(oids)s::oid[])
"""

# A tree is searched by regular expressions, which take many times its size. It is stored compressed, so its
# stored size is checked before it is read.
_WITH_CODE: Final = """
    with recursive relation (target, oid, relkind) as (
        select part.target, part.oid, relkind
        from unnest(%(targets)s::oid[], %(relations)s::oid[]) as part (target, oid)
        join pg_class on pg_class.oid = part.oid
    ),
    stored (target, oid, is_default, tree) as (
        select relation.target, relation.oid, found.is_default, found.tree
        from relation
        cross join lateral (
            select true, adbin from pg_attrdef where adrelid = relation.oid
            union all select false, conbin from pg_constraint where conrelid = relation.oid
            union all select false, indexprs from pg_index where indrelid = relation.oid
            union all select false, indpred from pg_index where indrelid = relation.oid
            union all select false, partexprs from pg_partitioned_table where partrelid = relation.oid
            union all select false, stxexprs from pg_statistic_ext where stxrelid = relation.oid
        ) as found (is_default, tree)
        where found.tree is not null
    ),
    large (target) as (
        select target from stored group by target, oid having sum(pg_column_size(tree)) > %(largest)s
    ),
    expression (target, tree) as (
        -- a default's nextval of a sequence by its name is judged below
        select target, case
            when is_default
            then regexp_replace(tree::text, ':funcid 1574 [^(]*:args \\(\\{CONST :consttype 2205 ', '', 'g')
            else tree::text
        end
        from stored where target not in (select target from large)
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
    )
    select target from large
    union
    -- foreign tables are accessed through our user mapping
    select target from relation where relkind not in ('r', 'p')
    union
    select target from relation join pg_trigger on tgrelid = relation.oid and tgenabled in ('A', 'R')
    union
    -- nextval checks the rights of who calls it, and the owner gets the number
    select relation.target
    from relation join pg_class as class on class.oid = relation.target
    join pg_attrdef on adrelid = relation.oid
    join pg_depend on pg_depend.classid = 'pg_attrdef'::regclass and pg_depend.objid = pg_attrdef.oid
        and refclassid = 'pg_class'::regclass
    join pg_class as sequence on sequence.oid = refobjid and sequence.relkind = 'S'
    where not (
        has_sequence_privilege(class.relowner, sequence.oid, 'usage, update')
        and has_sequence_privilege(sequence.oid, 'usage, update')
    )
    union
    select target from expression where tree ~ '\\{(COERCETODOMAIN|JSON|SUBLINK|SUBPLAN)'
    union
    select target
    from expression, regexp_matches(tree, ':(?:op)?funcid ([0-9]+)', 'g') as number
    where not exists (
        select from pg_proc
        where pg_proc.oid = number[1]::oid and pg_proc.oid < %(first_user_oid)s
            and (provolatile = 'i' and proname <> 'satisfies_hash_partition' or proname = any (%(harmless)s))
    )
    union
    select type.target
    from type join pg_type on pg_type.oid = type.oid
    where type.oid >= %(first_user_oid)s and not (
        typtype in ('b', 'e') and exists (
            select from pg_roles where pg_roles.oid = typowner and (rolsuper or rolname = current_user)
        )
    )
"""

LARGEST_TREES: Final = 65_536
"""Bytes of a table's expression trees that are searched, compressed as they are stored."""

_FIRST_USER_OID: Final = 16384
"""Objects with a smaller oid were created by initdb."""

# Renaming a schema takes no lock, but waits for a lock on its row, which no other role can take.
_HOLD_SCHEMAS: Final = """
    select from pg_namespace
    where oid in (select relnamespace from pg_class where pg_class.oid = any (%s::oid[]))
        and nspowner in (select pg_roles.oid from pg_roles where not rolsuper)
    for share of pg_namespace
"""

# By the present catalog, not that of a snapshot; a name may have led elsewhere when it was locked.
_HOLD_TABLES: Final = """
    {become};
    lock table only {tables} in access share mode;
    select planned.oid from unnest({oids}::oid[], {names}::text[]) as planned (oid, name)
    where to_regclass(planned.name) is distinct from planned.oid or not exists (
        select from pg_locks where pid = pg_backend_pid() and relation = planned.oid and locktype = 'relation'
    );
    {leave}
"""


CANNOT_BECOME: Final = (
    'Grant "{owner}" to the role; if that is a superuser, give the table to another role instead. With'
    " `run_as_owner: true` in the subscription's configuration, code in the table runs with the role's own"
    " rights."
)
"""The remedies for a table whose owner our role may not become."""

FORCED_ON_OWNER: Final = 'row-level security is forced on its owner "{owner}"'
UNFORCE: Final = "Give the owner BYPASSRLS, or set the table to NO FORCE ROW LEVEL SECURITY."
"""The problem of a table whose owner does not see all rows, and the remedies."""


class Rights(enum.Enum):
    """With whose rights statements on a table run; see the table above."""

    OWN = "own"
    PLAIN = "plain"
    SWITCHED = "switched"
    RESTRICTED = "restricted"
    REFUSED = "refused"

    @property
    def owner_is_untrusted(self) -> bool:
        """Whether the table is owned by a role that is not trusted with our rights."""
        return self in {Rights.PLAIN, Rights.RESTRICTED}

    @property
    def runs_as_owner(self) -> bool:
        """Whether statements run as the table's owner."""
        return self in {Rights.SWITCHED, Rights.RESTRICTED}


@dataclass(frozen=True, slots=True)
class ActingRole:
    """The owner of a table, and with whose rights we act on it.

    `forces_row_security`: policies restrict even the owner. `run_as_owner` is the subscription's option: as
    natively, whatever has the table's name is trusted.
    """

    owner: str
    rights: Rights
    forces_row_security: bool = False
    run_as_owner: bool = False

    def without_lock(self) -> ActingRole:
        """The rights if the owner may add code to the table at any time."""
        is_plain = self.rights is Rights.PLAIN
        return dataclasses.replace(self, rights=Rights.RESTRICTED) if is_plain else self


def read_acting_roles(
    connection: Connection, oids: Collection[int], *, run_as_owner: bool
) -> dict[int, ActingRole]:
    """With whose rights to act on the tables of these oids, as of now."""
    become = "set" if connection.info.server_version >= SET_OPTION_SINCE else "member"
    rows = connection.execute(_OWNERS, {"oids": list(oids), "become": become}).fetchall() if oids else []
    related = {oid: relatives for oid, _, is_ours, *_, relatives in rows if not (is_ours or run_as_owner)}
    with_code = _with_code(connection, related)
    return {
        oid: ActingRole(
            owner,
            Rights.OWN
            if run_as_owner or is_ours
            else _rights(may_become, is_trusted, needs_owner=needs_owner or oid in with_code),
            forces_row_security,
            run_as_owner,
        )
        for oid, owner, is_ours, may_become, is_trusted, needs_owner, forces_row_security, _ in rows
    }


def _with_code(connection: Connection, related: Mapping[int, Collection[int]]) -> frozenset[int]:
    """The tables that may contain code, in themselves or in their partitions and ancestors."""
    relations = [(oid, relation) for oid, relatives in related.items() for relation in (oid, *relatives)]
    if not relations:
        return frozenset()
    values = {
        "targets": [oid for oid, _ in relations],
        "relations": [relation for _, relation in relations],
        "first_user_oid": _FIRST_USER_OID,
        "harmless": list(_HARMLESS),
        "largest": LARGEST_TREES,
    }
    return frozenset(oid for (oid,) in connection.execute(_WITH_CODE, values))


def _rights(may_become_owner: bool, is_trusted: bool, *, needs_owner: bool) -> Rights:
    if not may_become_owner:
        return Rights.REFUSED
    if is_trusted:
        return Rights.SWITCHED if needs_owner else Rights.OWN
    return Rights.RESTRICTED if needs_owner else Rights.PLAIN


def lock_tables(connection: Connection, tables: Mapping[int, sql.Composable]) -> frozenset[int]:
    """Lock tables against changes and renames until the transaction ends; returns those that could be locked.

    `tables` maps oids to references for LOCK TABLE. The lock is the weakest that conflicts with CREATE
    STATISTICS, CREATE INDEX CONCURRENTLY and ATTACH PARTITION. Vacuum takes the same one and would be
    canceled for a waiting session, so we never wait.
    """
    hold_schemas(connection, tables)
    if _is_locked(connection, tables.values()):
        return frozenset(tables)
    return frozenset(oid for oid, table in tables.items() if _is_locked(connection, [table]))


def hold_schemas(connection: Connection, oids: Collection[int]) -> None:
    """Keep the schemas of these tables from being renamed until the transaction ends; only superusers can."""
    ((is_superuser,),) = connection.execute("select current_setting('is_superuser')::bool")
    if is_superuser:
        connection.execute(_HOLD_SCHEMAS, (list(oids),))


def hold_tables(
    connection: Connection, tables: Mapping[int, QualifiedName], owner: str | None
) -> frozenset[int]:
    """Keep these tables from being dropped, renamed or given away until the transaction ends.

    `owner` is the role that does it, None: ours. Returns the oids of tables that have lost their name before.
    LOCK TABLE runs no code of a table.
    """
    identifiers = [sql.Identifier(name.schema, name.name) for name in tables.values()]
    statement = sql.SQL(_HOLD_TABLES).format(
        become=sql.SQL("") if owner is None else sql.SQL("set local role {}").format(sql.Identifier(owner)),
        tables=sql.SQL(", only ").join(identifiers),
        oids=list(tables),
        names=[identifier.as_string(connection) for identifier in identifiers],
        leave=sql.SQL("" if owner is None else "reset role"),
    )
    cursor = connection.execute(statement)
    while cursor.description is None and cursor.nextset():
        pass
    return frozenset(oid for (oid,) in cursor.fetchall())


def _is_locked(connection: Connection, tables: Iterable[sql.Composable]) -> bool:
    listed = commas(tables)
    try:
        with connection.transaction():
            connection.execute(sql.SQL("lock table {} in share update exclusive mode nowait").format(listed))
    except pg.LockNotAvailable:
        return False
    return True
