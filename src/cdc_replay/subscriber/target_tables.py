"""The subscriber's tables as targets: columns, identity, and what their triggers and rights require.

A target is the plain or partitioned table with the published relation's schema and name (R8.1). Its rows are
identified by its own key (R8.6): the replica identity index if the table names one, else the primary key
unless it is deferrable, else none. Equality is that of the index's operator class, by qualified operator:
with an empty search path (R8.13) a plain `=` would compare an extension's type, such as citext, as text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.owners import LARGEST_TREES, ActingRole, read_acting_roles

_TABLES: Final = """
    select wanted.schema_name, wanted.table_name, class.oid, class.relkind = 'p',
        row_security_active(class.oid),
        array(
            select rulename::text from pg_rewrite
            where ev_class = class.oid and ev_enabled in ('A', 'R') and ev_type <> '1' order by rulename
        ),
        array(
            -- not FOR EACH ROW (1), but of INSERT (4), DELETE (8) or UPDATE (16)
            select array[tgname::text, tgenabled::text] from pg_trigger
            where tgrelid = class.oid and not tgisinternal and tgenabled in ('A', 'R')
                and tgtype::int & 1 = 0 and tgtype::int & 28 <> 0
            order by tgname
        ),
        exists (
            -- FOR EACH ROW (1) of INSERT (4); a partition fires its own
            select from pg_trigger
            where (tgrelid = class.oid or tgrelid in (select relid from pg_partition_tree(class.oid)))
                and not tgisinternal and tgenabled in ('A', 'R') and tgtype::int & 5 = 5
        ),
        exists (
            select from pg_trigger
            where tgrelid = any (
                    array(select class.oid union all select relid::oid from pg_partition_tree(class.oid))
                )
                and tgenabled in ('A', 'R')
                and tgfoid in (
                    '"RI_FKey_cascade_del"'::regproc, '"RI_FKey_setnull_del"'::regproc,
                    '"RI_FKey_setdefault_del"'::regproc
                )
        ),
        array(
            -- which relation of a tree has the constraint, and which the triggers, depends on the side
            select distinct referenced.oid
            from pg_constraint
            cross join lateral (
                select confrelid union all select relid::oid from pg_partition_tree(confrelid)
                union all select relid::oid from pg_partition_ancestors(confrelid) as ancestor (relid)
            ) as referenced (oid)
            where contype = 'f'
                and conrelid = any (array(
                    select class.oid union all select relid::oid from pg_partition_tree(class.oid)
                    union all select relid::oid from pg_partition_ancestors(class.oid) as ancestor (relid)
                ))
                and exists (
                    select from pg_trigger
                    where tgconstraint = pg_constraint.oid and tgenabled in ('A', 'R')
                )
        ),
        coalesce(
            (select indexrelid from pg_index
             where indrelid = class.oid and indisreplident and indisvalid and class.relreplident = 'i'),
            (select indexrelid from pg_index
             where indrelid = class.oid and indisprimary and indimmediate and indisvalid)
        )
    from unnest(%s::text[], %s::text[]) as wanted (schema_name, table_name)
    join pg_namespace as namespace on namespace.nspname = wanted.schema_name
    join pg_class as class on class.relnamespace = namespace.oid and class.relname = wanted.table_name
    where class.relkind in ('r', 'p')
"""


_COLUMNS: Final = """
    with recursive base_type (attrelid, attnum, type_oid, typmod) as (
        select attrelid, attnum, atttypid, atttypmod
        from pg_attribute
        where attrelid = any(%(oids)s) and attnum > 0 and not attisdropped
        union all
        select attrelid, attnum, typbasetype, typtypmod
        from base_type join pg_type on pg_type.oid = type_oid
        where typtype = 'd'
    ),
    element (attrelid, attnum, type_oid) as (
        select attrelid, attnum, type_oid
        from base_type join pg_type on pg_type.oid = type_oid
        where typtype <> 'd'
        union
        select attrelid, attnum, typelem
        from element join pg_type on pg_type.oid = type_oid
        where typelem <> 0
    ),
    ordered (type_oid) as (
        select opcintype from pg_opclass join pg_am on pg_am.oid = opcmethod
        where amname = 'btree' and opcdefault
    )
    select attribute.attrelid, attribute.attname,
        format_type(attribute.atttypid, attribute.atttypmod),
        format_type(base_type.type_oid, base_type.typmod),
        collation_namespace.nspname, pg_collation.collname,
        exists (
            -- of users, and neither a base type nor an enum
            select from element join pg_type on pg_type.oid = type_oid
            where element.attrelid = attribute.attrelid and element.attnum = attribute.attnum
                and type_oid >= 16384 and typtype not in ('b', 'e')
        ),
        attribute.attgenerated <> '', attribute.attidentity,
        attribute.attidentity <> '' or case
            when pg_column_size(coalesce(attrdef.adbin, own_type.typdefaultbin)) > %(largest)s then true
            else exists (
                select from pg_proc
                where provolatile = 'v' and oid in (
                    select number[1]::oid
                    from regexp_matches(
                        coalesce(attrdef.adbin, own_type.typdefaultbin)::text, ':(?:op)?funcid ([0-9]+)', 'g'
                    ) as number
                )
            )
        end,
        -- Classes of other kinds of types, and of arrays, are polymorphic.
        pg_type.typtype <> 'b' or pg_type.typcategory = 'A' or pg_type.oid in (
            select type_oid from ordered
            union all
            select castsource from pg_cast join ordered on type_oid = casttarget
            where castmethod = 'b' and castcontext = 'i'
        )
    from pg_attribute as attribute
    join base_type using (attrelid, attnum)
    join pg_type on pg_type.oid = base_type.type_oid and pg_type.typtype <> 'd'
    join pg_type as own_type on own_type.oid = attribute.atttypid
    left join pg_attrdef as attrdef
        on attrdef.adrelid = attribute.attrelid and attrdef.adnum = attribute.attnum
    left join pg_collation on pg_collation.oid = attribute.attcollation
    left join pg_namespace as collation_namespace on collation_namespace.oid = pg_collation.collnamespace
    order by attribute.attrelid, attribute.attnum
"""


# A replica identity index or primary key is a btree, with strategy 3 for equality and 1 for less than. A key
# WITHOUT OVERLAPS is GiST, whose strategies differ: equality is that of the type's default btree class, and
# there is no order.
_IDENTITIES: Final = """
    with part as materialized (
        select pg_index.indexrelid, index_class.relname, attribute.attname, part.position, part.opclass
        from pg_index
        join pg_class as index_class on index_class.oid = pg_index.indexrelid
        cross join unnest(pg_index.indkey::int2[], pg_index.indclass::oid[])
            with ordinality as part (attnum, opclass, position)
        join pg_attribute as attribute
            on attribute.attrelid = pg_index.indrelid and attribute.attnum = part.attnum
        where pg_index.indexrelid = any(%s) and part.position <= pg_index.indnkeyatts
    ),
    operators as not materialized (
        select pg_amop.amopfamily as family, pg_amop.amoplefttype as type, pg_amop.amopstrategy as strategy,
            pg_namespace.nspname as schema, pg_operator.oprname as name
        from pg_amop
        join pg_operator on pg_operator.oid = pg_amop.amopopr
        join pg_namespace on pg_namespace.oid = pg_operator.oprnamespace
        where pg_amop.amoplefttype = pg_amop.amoprighttype
    ),
    comparison as materialized (
        select own.oid as opclass, equal.schema, equal.name,
            less.schema as less_schema, less.name as less_name
        from (select distinct opclass from part) as used
        join pg_opclass as own on own.oid = used.opclass
        cross join (select oid from pg_am where amname = 'btree') as btree
        join pg_opclass as class on class.oid = own.oid and own.opcmethod = btree.oid
            or class.opcmethod = btree.oid and own.opcmethod <> btree.oid and class.opcdefault
                and class.opcintype = own.opcintype
        join operators as equal on equal.family = class.opcfamily and equal.type = class.opcintype
            and equal.strategy = 3
        left join operators as less on less.family = class.opcfamily and less.type = class.opcintype
            and less.strategy = 1 and own.opcmethod = btree.oid
    )
    select part.indexrelid, part.relname, part.attname,
        comparison.schema, comparison.name, comparison.less_schema, comparison.less_name
    from part join comparison on comparison.opclass = part.opclass
    order by part.indexrelid, part.position
"""

# The leaves of partitioned tables without a key, as an apply worker sees each of them (R8.6, R8.12).
_LEAVES: Final = """
    select root.oid, namespace.nspname, leaf.relname, leaf.oid,
        coalesce(pg_get_partition_constraintdef(leaf.oid), 'true'),
        coalesce(
            (select indexrelid from pg_index
             where indrelid = leaf.oid and indisreplident and indisvalid and leaf.relreplident = 'i'),
            (select indexrelid from pg_index
             where indrelid = leaf.oid and indisprimary and indimmediate and indisvalid)
        )
    from unnest(%s::oid[]) as root (oid)
    cross join pg_partition_tree(root.oid) as tree
    join pg_class as leaf on leaf.oid = tree.relid
    join pg_namespace as namespace on namespace.oid = leaf.relnamespace
    where leaf.relkind = 'r'
    order by root.oid, leaf.oid
"""


_ROUTING_COLUMNS: Final = """
    select root.oid, array_agg(distinct attribute.attname::text)
    from unnest(%(oids)s::oid[]) as root (oid)
    cross join pg_partition_tree(root.oid) as tree
    join pg_partitioned_table as part on part.partrelid = tree.relid
    join pg_attribute as attribute on attribute.attrelid = tree.relid and (
        attribute.attnum = any (part.partattrs::int2[])
        or case
            when pg_column_size(part.partexprs) > %(largest)s
            then attribute.attnum > 0 and not attribute.attisdropped
            else attribute.attnum in (
                select number[1]::int2
                from regexp_matches(part.partexprs::text, ':varattno ([0-9]+)', 'g') as number
            )
        end
    )
    group by root.oid
"""


@dataclass(frozen=True, slots=True)
class Operator:
    """A qualified operator for two values of a key column, from the index's operator class."""

    schema: str
    name: str


_Operators: TypeAlias = tuple[Operator, Operator | None]
"""The operators for equality and for less than."""


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of a target.

    `type_sql` is schema-qualified, for DDL; `base_type_sql` is the type below all domains, which accepts
    NULL. `is_opaque`: reading a value may run code of the type's owner, such as constraints of domains within
    a composite type. `collation` is (schema, name), None for types without one. `identity` is
    `pg_attribute.attidentity`. `equality` and `less` are set for columns of the table's identity, `less` only
    if the index has an order. `is_volatile`: its default can differ per row, because it calls a volatile
    function such as `nextval` or the column is an identity. `has_order`: its type has a default btree class.
    """

    name: str
    type_sql: str
    base_type_sql: str
    collation: tuple[str, str] | None
    is_opaque: bool
    is_generated: bool
    identity: str
    is_volatile: bool
    has_order: bool
    equality: Operator | None
    less: Operator | None

    @property
    def is_settable(self) -> bool:
        """UPDATE can set it: it is not GENERATED ALWAYS AS IDENTITY."""
        return self.identity != "a"


@dataclass(frozen=True, slots=True)
class StatementTrigger:
    """A trigger FOR EACH STATEMENT; `enabled` is `pg_trigger.tgenabled`, `A` or `R`."""

    name: str
    enabled: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf partition of a table that has no key.

    It holds the rows for which `constraint_sql`, with bare column names, is true. `key` has the columns of
    its own replica identity index or primary key, with their equality; empty if it has neither.
    """

    name: QualifiedName
    oid: int
    constraint_sql: str
    key: Mapping[str, Operator]


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaf partitions of a table that has no key; `routing` has the columns of the partition keys."""

    routing: frozenset[str] = frozenset()
    leaves: tuple[Leaf, ...] = ()

    def with_key(self, published: Iterable[str]) -> list[Leaf]:
        """The leaves in which rows are identified by the leaf's own key (R8.6, R8.12).

        The published columns must include the partition keys and the leaf's whole key.
        """
        sent = frozenset(published)
        if not self.routing <= sent:
            return []
        return [leaf for leaf in self.leaves if leaf.key and leaf.key.keys() <= sent]


@dataclass(frozen=True, slots=True)
class TargetTable:
    """A table that receives changes; `identity`, perhaps empty, are the columns that identify its rows."""

    name: QualifiedName
    oid: int
    is_partitioned: bool
    row_security: bool
    """Row-level security restricts this session on the table (R8.21)."""
    rules: tuple[str, ...]
    """The names of the rewrite rules that are enabled in replicating sessions."""
    statement_triggers: tuple[StatementTrigger, ...]
    """Triggers that fire in replicating sessions on INSERT, UPDATE or DELETE."""
    has_insert_triggers: bool
    """Row-level triggers fire in replicating sessions on INSERT into it or one of its partitions."""
    columns: tuple[TargetColumn, ...]
    identity: tuple[str, ...]
    identity_index: str | None
    """Name of the index of `identity`."""
    acting: ActingRole
    """With whose rights statements run (R8.21)."""
    leaves: Leaves = Leaves()
    """Set if the table is partitioned and has no `identity`."""
    references: frozenset[int] = frozenset()
    """The oids of tables that its foreign keys refer to, if their triggers fire in replicating sessions."""
    acts_on_delete: bool = False
    """A DELETE changes rows of other tables: ON DELETE CASCADE, SET NULL or SET DEFAULT, likewise."""

    @property
    def writable(self) -> tuple[TargetColumn, ...]:
        """The columns that INSERT can set: all but generated ones."""
        return tuple(column for column in self.columns if not column.is_generated)

    def column(self, name: str) -> TargetColumn:
        """The column of that name.

        Raises:
            KeyError: if there is none.
        """
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    def shows_order_of_inserts(self, published: Collection[str]) -> bool:
        """Whether the table's content depends on the order in which rows are inserted (R8.2, R8.13).

        It does if triggers see the rows, or if a column that is not `published` has a volatile default. The
        default of a published column applies only to rows whose relation version did not have the column.
        """
        return self.has_insert_triggers or any(
            column.is_volatile for column in self.columns if column.name not in published
        )


def read_target_tables(
    connection: Connection, names: Iterable[QualifiedName], *, run_as_owner: bool = False
) -> dict[QualifiedName, TargetTable]:
    """The tables of `names` that exist as plain or partitioned tables, by name, as of now.

    `run_as_owner` is the subscription's option: statements run as our role, whoever owns the table.
    """
    names = list(names)
    values = ([name.schema for name in names], [name.name for name in names])
    tables = connection.execute(_TABLES, values).fetchall()
    identities = _read_identities(connection, [index for *_, index in tables if index is not None])
    columns = _read_columns(connection, [oid for _, _, oid, *_ in tables])
    acting = read_acting_roles(connection, [oid for _, _, oid, *_ in tables], run_as_owner=run_as_owner)
    leaves = _read_leaves(
        connection,
        [oid for _, _, oid, is_partitioned, *_, index in tables if is_partitioned and index is None],
    )
    targets = {}
    for schema, table, oid, is_partitioned, row_security, rules, triggers, *more in tables:
        if oid not in acting:
            continue  # dropped by another session
        has_insert_triggers, acts_on_delete, references, index = more
        index_name, identity = identities.get(index, (None, {}))
        targets[QualifiedName(schema, table)] = TargetTable(
            QualifiedName(schema, table),
            oid,
            is_partitioned,
            row_security,
            tuple(rules),
            tuple(StatementTrigger(name, enabled) for name, enabled in triggers),
            has_insert_triggers,
            tuple(_target_column(row, identity) for row in columns.get(oid, ())),
            tuple(identity),
            index_name,
            acting[oid],
            leaves.get(oid, Leaves()),
            frozenset(references),
            acts_on_delete,
        )
    return targets


def _read_identities(
    connection: Connection, indexes: list[int]
) -> dict[int, tuple[str, dict[str, _Operators]]]:
    identities: dict[int, tuple[str, dict[str, _Operators]]] = {}
    for index, index_name, column, *operators in connection.execute(_IDENTITIES, (indexes,)):
        _, columns = identities.setdefault(index, (index_name, {}))
        less = Operator(*operators[2:]) if operators[2] is not None else None
        columns[column] = (Operator(*operators[:2]), less)
    return identities


def _read_leaves(connection: Connection, oids: list[int]) -> dict[int, Leaves]:
    """The leaves of these partitioned tables, by the tables' oids."""
    if not oids:
        return {}
    rows = connection.execute(_LEAVES, (oids,)).fetchall()
    identities = _read_identities(connection, [index for *_, index in rows if index is not None])
    leaves: dict[int, list[Leaf]] = {}
    for root, schema, name, oid, constraint, index in rows:
        _, key = identities.get(index, (None, {}))
        equalities = {column: equality for column, (equality, _) in key.items()}
        leaves.setdefault(root, []).append(Leaf(QualifiedName(schema, name), oid, constraint, equalities))
    values = {"oids": oids, "largest": LARGEST_TREES}
    routing = {root: frozenset(names) for root, names in connection.execute(_ROUTING_COLUMNS, values)}
    return {
        root: Leaves(routing.get(root, frozenset()), tuple(partitions)) for root, partitions in leaves.items()
    }


def _read_columns(connection: Connection, oids: list[int]) -> dict[int, list[tuple[object, ...]]]:
    columns: dict[int, list[tuple[object, ...]]] = {}
    values = {"oids": oids, "largest": LARGEST_TREES}
    for oid, *column in connection.execute(_COLUMNS, values):
        columns.setdefault(oid, []).append(tuple(column))
    return columns


def _target_column(row: tuple[object, ...], identity: Mapping[str, _Operators]) -> TargetColumn:
    name, type_sql, base_type_sql, collation_schema, collation, is_opaque, generated, kind, *more = row
    is_volatile, has_order = more
    return TargetColumn(
        str(name),
        str(type_sql),
        str(base_type_sql),
        None if collation is None else (str(collation_schema), str(collation)),
        bool(is_opaque),
        bool(generated),
        str(kind),
        bool(is_volatile),
        bool(has_order),
        *identity.get(str(name), (None, None)),
    )
