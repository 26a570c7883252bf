"""The queries of the event triggers that find what a command touched.

`pg_event_trigger_ddl_commands` names the objects that a command created or altered, and
`pg_event_trigger_dropped_objects` those that it dropped. Relatives of a table that it altered too have
catalog rows written by this transaction: their xmin is not older than the transaction's own xid, and not that
of a later transaction, which has committed if its rows are visible. (A frozen row that is older than half of
all xids can look like one.)

Only objects that the transaction has locked are reported as a whole, because no other one can have changed
them by the commit: tables that it altered, and rows of `pg_publication` that it wrote. GRANT and ALTER INDEX
write rows of tables without such a lock: of these, only the keys that this changes are reported. Lists of
publications are reported entry by entry, because DROP TABLE, for instance, removes entries of publications
that it does not lock. For objects that merely mention an altered object, such as a type, only the new
spelling is reported; so it is for tables that are added to a publication, whose generation expressions the
catalog has in full only from then on.
"""

from __future__ import annotations

from typing import Final

from psycopg import sql

# This transaction has written the row. No other has written a visible one with an xid from the end of the
# snapshot on, which pg_xact_status refuses.
_IS_OWN: Final = """age({xmin}) <= 0 and case when {xid} < pg_snapshot_xmax(pg_current_snapshot())
                then pg_xact_status({xid}) = 'in progress' else true end"""

_XID: Final = "(pg_current_xact_id()::text::bigint - age({xmin}))::text::xid8"

# Weaker locks let other transactions change the table's definition and what publishes it.
_LOCKED: Final = """select relation from pg_locks where pid = pg_backend_pid()
                and mode not in ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')"""

_TOUCHED_BY_DDL: Final = """
        select array_agg(classid), array_agg(objid) into classes, objects
        from pg_event_trigger_ddl_commands()
        where objid is not null and schema_name is distinct from 'pg_temp';
        if objects is null then
            return;
        end if;
        with recursive
        command as (
            select classid, objid from unnest(classes, objects) as command (classid, objid)
        ),
        inside as (
            table command
            union
            select d.classid, d.objid from command
            join pg_depend d on (d.refclassid, d.refobjid) = (command.classid, command.objid)
            where command.classid in ('pg_namespace'::regclass, 'pg_extension'::regclass)
        ),
        types as (
            select objid as oid from inside where classid = 'pg_type'::regclass
            union
            select c.reltype from inside join pg_class c on c.oid = objid
            where classid = 'pg_class'::regclass and c.reltype <> 0
        ),
        altered as (
            select classid, objid from inside
            where classid in ('pg_proc'::regclass, 'pg_operator'::regclass, 'pg_collation'::regclass)
            union
            select 'pg_type'::regclass, unnest(array[t.oid, t.typarray]) from types join pg_type t using (oid)
        ),
        dependent as (
            select d.classid, d.objid from altered
            join pg_depend d on (d.refclassid, d.refobjid) = (altered.classid, altered.objid)
            where command_is_alter
        ),
        named as (
            select objid as oid from command where classid = 'pg_class'::regclass
        ),
        mentioning as (
            select objid as oid from (table inside union table dependent) o
            where classid = 'pg_class'::regclass
            union
            select d.adrelid from dependent join pg_attrdef d on d.oid = objid
            where classid = 'pg_attrdef'::regclass
            union
            select m.prrelid from dependent join pg_publication_rel m on m.oid = objid
            where classid = 'pg_publication_rel'::regclass
        ),
        found as (
            table named union table mentioning
            union
            select i.indrelid from command join pg_index i on i.indexrelid = objid
            where classid = 'pg_class'::regclass and (i.indisprimary or i.indisreplident) and {own_i}
        ),
        below as (
            table found
            union
            select i.inhrelid from below join pg_inherits i on i.inhparent = below.oid
        ),
        above as (
            table found
            union
            select i.inhparent from above join pg_inherits i on i.inhrelid = above.oid
        ),
        rekeyed as (
            select i.indrelid as oid from (table below union table above) r
            join pg_index i on i.indrelid = r.oid
            where (i.indisprimary or i.indisreplident) and {own_i}
        ),
        written as (
            select oid from (table below union table above) r
            where exists (select from pg_class c where c.oid = r.oid and {own_c})
                or exists (select from pg_attribute a where a.attrelid = r.oid and {own_a})
                or exists (select from pg_attrdef d where d.adrelid = r.oid and {own_d})
                or exists (select from pg_index i where i.indrelid = r.oid and {own_i})
                or exists (select from pg_inherits i where i.inhrelid = r.oid and {own_i})
        ),
        touched as (
            table named
            union
            select oid from written where oid in ({locked})
        )
        select
            array(
                select c.oid from touched join pg_class c using (oid)
                where c.relkind in ('r', 'p') and c.oid >= 16384
                    and (c.relpersistence = 'p'
                        or c.relpersistence = 'u' and (command_is_alter or c.relispartition))
            ),
            array(
                select c.oid from mentioning join pg_class c using (oid) where c.relkind in ('r', 'p')
                except table touched
            ),
            array(table rekeyed except table touched),
            array(select objid from command where classid = 'pg_publication'::regclass),
            array(
                select m.pnpubid from command join pg_publication_namespace m on m.pnnspid = objid
                where classid = 'pg_namespace'::regclass
            ),
            (
                select json_agg(json_build_array(m.pnpubid::bigint, n.nspname)) from command
                join pg_publication_namespace m on m.oid = objid join pg_namespace n on n.oid = m.pnnspid
                where classid = 'pg_publication_namespace'::regclass
            ),
            array(
                select m.oid from command join pg_publication_rel m on m.oid = objid
                where classid = 'pg_publication_rel'::regclass
                union
                select m.oid from command join pg_publication_rel m on m.prpubid = objid
                where classid = 'pg_publication'::regclass and not command_is_alter
            )
        into touched_tables, respelled_tables, rekeyed_tables, touched_publications, schemas_of,
            added_schemas, added_memberships"""

# Nothing names the table of a dropped index: so report the tables, locked by this transaction, whose replica
# identity was an index. (An index that is dropped with its table or a column is reported with them.)
_TOUCHED_BY_DROP: Final = """
        with dropped as materialized (
            select objid, original, object_type, address_names, address_args
            from pg_event_trigger_dropped_objects() where not is_temporary
        )
        select
            array(
                select objid from dropped where object_type in ('table', 'table column')
                union
                select c.oid from dropped
                join pg_namespace n on n.nspname = address_names[1]
                join pg_class c on c.relnamespace = n.oid and c.relname = address_names[2]
                where object_type = 'table constraint' and c.relkind in ('r', 'p')
                union
                select c.oid from pg_class c
                where c.relreplident = 'i' and c.relkind in ('r', 'p')
                    and exists (select from dropped where object_type = 'index' and original)
                    and not exists (select from pg_index i where i.indrelid = c.oid and i.indisreplident)
                    and c.oid in ({locked})
            ),
            array(select objid from dropped where object_type = 'publication'),
            (
                select json_agg(json_build_array(p.oid::bigint, c.oid::bigint)) from dropped
                join pg_publication p on p.pubname = address_args[1]
                join pg_namespace n on n.nspname = address_names[1]
                join pg_class c on c.relnamespace = n.oid and c.relname = address_names[2]
                where object_type = 'publication relation'
            ),
            (
                select json_agg(json_build_array(p.oid::bigint, address_names[1])) from dropped
                join pg_publication p on p.pubname = address_args[1]
                where object_type = 'publication namespace'
            )
        into touched_tables, touched_publications, removed_memberships, removed_schemas"""


def touched_by_ddl() -> sql.Composed:
    """Sets the variables of `tell_definitions` at the end of a command."""
    own = {f"own_{row}": _is_own(row) for row in "cadi"}
    return sql.SQL(_TOUCHED_BY_DDL).format(locked=sql.SQL(_LOCKED), **own)


def touched_by_drop() -> sql.Composed:
    """Sets them when objects were dropped."""
    return sql.SQL(_TOUCHED_BY_DROP).format(locked=sql.SQL(_LOCKED))


def _is_own(row: str) -> sql.Composed:
    xmin = sql.Identifier(row, "xmin")
    return sql.SQL(_IS_OWN).format(xmin=xmin, xid=sql.SQL(_XID).format(xmin=xmin))
