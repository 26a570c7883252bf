"""The functions of the event triggers (`event_triggers`), composed from the reader's own queries.

`pg_event_trigger_ddl_commands` names the objects that a command created or altered, and
`pg_event_trigger_dropped_objects` those that it dropped. Relatives of a table that it altered too have
catalog rows written by this transaction: their xmin is not older than the transaction's own xid, and not that
of a later transaction, which has committed if its rows are visible. (A frozen row that is older than half of
all xids can look like one.)

Only objects that the command has locked are reported as a whole, because no other transaction can have
changed them by the commit: tables that it altered, and rows of `pg_publication` that it wrote. Lists of
publications are reported entry by entry, because DROP TABLE, for instance, removes entries of publications
that it does not lock. For objects that merely mention an altered object, such as a type, only the new
spelling is reported; so it is for tables that are added to a publication, whose generation expressions the
catalog has in full only from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, LiteralString

from psycopg import sql

from cdc_replay.capture.ddl.follow_function import follow_body
from cdc_replay.capture.ownership import SCHEMA
from cdc_replay.catalog.ddl_change import CATALOG_PREFIX, MESSAGE_FORMAT, REWRITE_PREFIX
from cdc_replay.catalog.reader import COLUMNS, MEMBERSHIPS, PUBLICATIONS, TABLES, CatalogRows
from cdc_replay.postgres.advisory_locks import CREATE_LOCK_KEY_TABLE, LOCK_KEY_TABLE
from cdc_replay.postgres.connection import PINNED_SETTINGS

FUNCTIONS: Final = (
    "tell_definitions()", "tell_rewrite()", "tell_everything()", "emit(text, json)",
    "follow()", "subscribed()",
)  # fmt: skip
"""With argument types, in an order in which they can be dropped."""

RELATIONS: Final = ("secret", "ordinal", LOCK_KEY_TABLE)
"""A materialized view, a sequence and a table in the same schema."""

_PINNED: Final = {
    "search_path": "pg_catalog, pg_temp",
    "quote_all_identifiers": "off",
    **{
        name: PINNED_SETTINGS[name]
        for name in (
            "datestyle",
            "intervalstyle",
            "timezone",
            "extra_float_digits",
            "bytea_output",
            "standard_conforming_strings",
        )
    },
    **dict.fromkeys(
        ("enable_seqscan", "enable_hashjoin", "enable_mergejoin", "enable_material", "jit"), "off"
    ),
}
"""Settings that determine the text of expressions, as in the reader's sessions.

pg_temp is listed last; unlisted it would be searched first. A command touches few objects, so index scans are
best, which the planner cannot know.
"""

_READS_TEXTS: Final = {"lock_timeout": "1s"}
"""Of functions that wait for locks of others' tables only to print expressions."""


# This transaction has written the row. No other has written a visible one with an xid from the end of the
# snapshot on, which pg_xact_status refuses.
_IS_OWN: Final = """age({xmin}) <= 0 and case when {xid} < pg_snapshot_xmax(pg_current_snapshot())
                then pg_xact_status({xid}) = 'in progress' else true end"""

_XID: Final = "(pg_current_xact_id()::text::bigint - age({xmin}))::text::xid8"

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
            union
            select i.indrelid from command join pg_index i on i.indexrelid = objid
            where classid = 'pg_class'::regclass and (i.indisprimary or i.indisreplident) and {own_i}
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
        below as (
            (table named union table mentioning)
            union
            select i.inhrelid from below join pg_inherits i on i.inhparent = below.oid
        ),
        above as (
            (table named union table mentioning)
            union
            select i.inhparent from above join pg_inherits i on i.inhrelid = above.oid
        ),
        relative as (
            select oid from (table below union table above) r
            where exists (select from pg_class c where c.oid = r.oid and {own_c})
                or exists (select from pg_attribute a where a.attrelid = r.oid and {own_a})
                or exists (select from pg_attrdef d where d.adrelid = r.oid and {own_d})
                or exists (select from pg_index i where i.indrelid = r.oid and {own_i})
                or exists (select from pg_inherits i where i.inhrelid = r.oid and {own_i})
        )
        select
            array(
                select c.oid from (table named union table relative) t join pg_class c using (oid)
                where c.relkind in ('r', 'p') and c.oid >= 16384
                    and (c.relpersistence = 'p'
                        or c.relpersistence = 'u' and (command_is_alter or c.relispartition))
            ),
            array(
                select c.oid from mentioning join pg_class c using (oid) where c.relkind in ('r', 'p')
                except (table named union table relative)
            ),
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
        into touched_tables, respelled_tables, touched_publications, schemas_of, added_schemas,
            added_memberships"""

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
                    and c.oid in (
                        select relation from pg_locks where pid = pg_backend_pid()
                            and mode not in ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')
                    )
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

SECRET: Final = sql.Identifier(SCHEMA, "secret")
"""The relation with the secret, of one row and one column, `value`."""

LOCK_KEYS: Final = sql.Identifier(SCHEMA, LOCK_KEY_TABLE)
"""The table with the keys of the locks of slots."""

_ORDINAL: Final = sql.Identifier(SCHEMA, "ordinal")
_EMIT_FUNCTION: Final = sql.Identifier(SCHEMA, "emit")
_TELL_EVERYTHING_FUNCTION: Final = sql.Identifier(SCHEMA, "tell_everything")

_ROWS: Final = """
            'tables', ({table_rows}),
            'columns', column_rows,
            'publications', ({publication_rows}),
            'memberships', membership_rows"""

# A table that another session has locked, or an expression that is nested too deeply, has no texts.
_READ_TEXTS: Final = """
    begin
        column_rows := ({column_rows});
        membership_rows := ({membership_rows});
    exception when lock_not_available or statement_too_complex or program_limit_exceeded then
        column_rows := ({columns_without_texts});
        membership_rows := ({memberships_without_texts});
    end;
"""

_TELL_EVERYTHING: Final = """
declare
    column_rows json;
    membership_rows json;
begin
    {read_texts}
    perform {emit}({prefix}, json_build_object('format', {format}, 'whole', true, {rows}));
end
"""

# Two random numbers of 122 bits each. The secret survives an update of the functions, so that messages that
# are not captured yet stay valid. A table would be published by publications FOR ALL TABLES; a materialized
# view never is, and survives a crash too.
_SIGNING_VIEW: Final = """
    create materialized view if not exists {secret} as
    select pg_catalog.sha256(pg_catalog.uuid_send(pg_catalog.gen_random_uuid())
        || pg_catalog.uuid_send(pg_catalog.gen_random_uuid())) as value
"""

# `emit` signs any content.
_REVOKES: Final[tuple[LiteralString, ...]] = (
    "revoke all on schema {schema} from public",
    "revoke all on {secret} from public",
    "revoke all on sequence {ordinal} from public",
    "revoke all on {lock_keys} from public",
    "revoke all on all functions in schema {schema} from public",
)

_GRANTS: Final[tuple[LiteralString, ...]] = (
    "grant usage on schema {schema} to {roles}",
    "grant select on {secret} to {roles}",
    "grant select, insert, update on {lock_keys} to {roles}",
    "grant execute on function {tell_everything}() to {roles}",
)

_EMIT: Final = """
declare
    ordinal constant bigint := nextval({ordinal});
    signed constant bytea := convert_to(
        concat_ws(E'\\n', prefix, pg_current_xact_id()::xid, ordinal, content), 'UTF8');
    code constant bytea := (select sha256(value || sha256(value || signed)) from {secret});
begin
    perform pg_logical_emit_message(true, prefix,
        convert_to(concat(ordinal, ' ', encode(code, 'hex'), E'\\n', content), 'UTF8'));
end
"""

_TELL_DEFINITIONS: Final = """
declare
    command_is_alter constant boolean := tg_tag like 'ALTER %';
    classes oid[];
    objects oid[];
    touched_tables oid[];
    respelled_tables oid[] := '{{}}';
    described_tables oid[] := '{{}}';
    touched_publications oid[];
    schemas_of oid[] := '{{}}';
    added_memberships oid[] := '{{}}';
    added_schemas json;
    removed_memberships json;
    removed_schemas json;
    column_rows json;
    membership_rows json;
begin
    if tg_event = 'ddl_command_end' then
{by_ddl};
    else
{by_drop};
    end if;
    described_tables := array(
        select distinct m.prrelid from pg_publication_rel m
        where m.oid = any(added_memberships) and m.prrelid <> all(touched_tables || respelled_tables)
            and exists (select from pg_attribute a where a.attrelid = m.prrelid and a.attgenerated <> '')
    );
    if touched_tables || respelled_tables || touched_publications || schemas_of || added_memberships <> '{{}}'
        or coalesce(added_schemas, removed_memberships, removed_schemas) is not null
    then
        {read_texts}
        perform {emit}({prefix}, json_build_object(
            'format', {format},
            'touched_tables', touched_tables::bigint[],
            'respelled_tables', respelled_tables::bigint[],
            'described_tables', described_tables::bigint[],
            'touched_publications', touched_publications::bigint[],
            'schemas_of', schemas_of::bigint[],
            'added_schemas', coalesce(added_schemas, '[]'),
            'removed_memberships', coalesce(removed_memberships, '[]'),
            'removed_schemas', coalesce(removed_schemas, '[]'),
            'partitions', array(
                select i.inhrelid::bigint from pg_inherits i join pg_class c on c.oid = i.inhrelid
                where i.inhparent = any(touched_tables) and i.inhrelid <> all(touched_tables)
                    and c.relispartition and not i.inhdetachpending
                order by 1
            ),
            'written_columns', (
                select coalesce(json_agg(json_build_array(a.attrelid::bigint, a.attnum)), '[]')
                from pg_attribute a
                left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
                where a.attrelid = any(touched_tables) and a.attnum > 0 and not a.attisdropped
                    and (age(a.xmin) <= 0 or age(d.xmin) <= 0)
            ),
            {rows}
        ));
    end if;
exception when others then
    raise warning 'cdc-replay could not record what % changed: %', tg_tag, sqlerrm
        using hint = 'The definitions are read again at the next capture.', errcode = sqlstate;
end
"""

# 2: a default that is computed per row; 4: another type. 1 and 8, persistence and access method, keep values.
_TELL_REWRITE: Final = """
begin
    if pg_event_trigger_table_rewrite_reason() & 6 <> 0 then
        perform {emit}({prefix}, json_build_object(
            'format', {format}, 'relations', json_build_array(c.oid::bigint)))
        from pg_class c
        where c.oid = pg_event_trigger_table_rewrite_oid() and c.relkind = 'r' and c.relpersistence = 'p';
    end if;
exception when others then
    raise warning 'cdc-replay could not record that % rewrites a table: %', tg_tag, sqlerrm
        using hint = 'Copy the table again with cdc-replay snapshot --table.', errcode = sqlstate;
end
"""


@dataclass(frozen=True, slots=True)
class TriggerFunction:
    """A function that runs as its owner, with a fixed search path; `body` is its `pg_proc.prosrc`."""

    name: str
    body: sql.Composed
    signature: LiteralString = "() returns event_trigger"
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def statement(self) -> sql.Composed:
        """The statement that creates or replaces it."""
        settings = sql.SQL(" ").join(
            sql.SQL("set {} = {}").format(
                sql.SQL(setting), sql.SQL(value) if setting == "search_path" else value
            )
            for setting, value in {**_PINNED, **self.settings}.items()
        )
        return sql.SQL(
            "create or replace function {}{} language plpgsql security definer {}"
            " as $cdc_replay${}$cdc_replay$"
        ).format(sql.Identifier(SCHEMA, self.name), sql.SQL(self.signature), settings, self.body)


def trigger_functions() -> tuple[TriggerFunction, ...]:
    """The functions of the event triggers."""
    names = {"prefix": CATALOG_PREFIX, "format": MESSAGE_FORMAT, "emit": _EMIT_FUNCTION}
    rewrite = {**names, "prefix": REWRITE_PREFIX}
    return (
        TriggerFunction(
            "emit",
            sql.SQL(_EMIT).format(secret=SECRET, ordinal=f"{SCHEMA}.ordinal"),
            signature="(prefix text, content json) returns void",
        ),
        TriggerFunction("tell_definitions", _tell_definitions(), settings=_READS_TEXTS),
        TriggerFunction("tell_rewrite", sql.SQL(_TELL_REWRITE).format(**rewrite)),
        TriggerFunction(
            "tell_everything",
            sql.SQL(_TELL_EVERYTHING).format(**names, rows=_rows({}), read_texts=_texts({})),
            signature="() returns void",
            settings=_READS_TEXTS,
        ),
        TriggerFunction("follow", follow_body(sql.Identifier(SCHEMA, "subscribed"))),
    )


def create_functions(publications: Sequence[str]) -> tuple[sql.Composed, ...]:
    """The statements that create or replace the functions, and create their secret and the keys.

    `publications` are the subscribed ones. Only the owner may call the functions or read the secret.
    """
    # Publication names may contain quotes: with `return` the server formats the body itself.
    subscribed = sql.SQL(
        "create or replace function {}() returns name[] language sql stable return {}::name[]"
    ).format(sql.Identifier(SCHEMA, "subscribed"), sorted(publications))
    names = {
        "schema": sql.Identifier(SCHEMA),
        "secret": SECRET,
        "ordinal": _ORDINAL,
        "lock_keys": LOCK_KEYS,
    }
    return (
        sql.SQL("create sequence if not exists {ordinal}").format(**names),
        sql.SQL(_SIGNING_VIEW).format(**names),
        sql.SQL(CREATE_LOCK_KEY_TABLE).format(table=LOCK_KEYS),
        subscribed,
        *(function.statement for function in trigger_functions()),
        *(sql.SQL(revoke).format(**names) for revoke in _REVOKES),
    )


def grant_statements(roles: Sequence[str]) -> tuple[sql.Composed, ...]:
    """The statements that let capturing roles read the secret, call `tell_everything` and lock slots."""
    names = {
        "schema": sql.Identifier(SCHEMA),
        "secret": SECRET,
        "lock_keys": LOCK_KEYS,
        "tell_everything": _TELL_EVERYTHING_FUNCTION,
        "roles": sql.SQL(", ").join(map(sql.Identifier, roles)),
    }
    return tuple(sql.SQL(grant).format(**names) for grant in _GRANTS)


def _tell_definitions() -> sql.Composed:
    return sql.SQL(_TELL_DEFINITIONS).format(
        by_ddl=sql.SQL(_TOUCHED_BY_DDL).format(**{f"own_{row}": _is_own(row) for row in "cadi"}),
        by_drop=sql.SQL(_TOUCHED_BY_DROP),
        prefix=CATALOG_PREFIX,
        format=MESSAGE_FORMAT,
        rows=_rows(_TOUCHED),
        read_texts=_texts(_TOUCHED),
        emit=_EMIT_FUNCTION,
    )


def _is_own(row: str) -> sql.Composed:
    xmin = sql.Identifier(row, "xmin")
    return sql.SQL(_IS_OWN).format(xmin=xmin, xid=sql.SQL(_XID).format(xmin=xmin))


def _rows(only: Mapping[str, LiteralString]) -> sql.Composed:
    return sql.SQL(_ROWS).format(
        table_rows=_select(TABLES, only.get("table")),
        publication_rows=_select(PUBLICATIONS, only.get("publication")),
    )


def _texts(only: Mapping[str, LiteralString]) -> sql.Composed:
    """Reads the rows that have texts of expressions."""
    columns, memberships = only.get("column"), only.get("membership")
    return sql.SQL(_READ_TEXTS).format(
        column_rows=_select(COLUMNS, columns),
        membership_rows=_select(MEMBERSHIPS, memberships),
        columns_without_texts=_select(COLUMNS, columns, texts=False),
        memberships_without_texts=_select(MEMBERSHIPS, memberships, texts=False),
    )


def _select(rows: CatalogRows, only: LiteralString | None, *, texts: bool = True) -> sql.Composed:
    return rows.select_json(sql.SQL(only or "true"), texts=texts)


_TOUCHED: Final[Mapping[str, LiteralString]] = {
    "table": "c.oid = any(touched_tables || respelled_tables || described_tables)",
    "column": "a.attrelid = any(touched_tables || respelled_tables || described_tables)",
    "publication": "p.oid = any(touched_publications || schemas_of)",
    "membership": "(m.prrelid = any(touched_tables || respelled_tables) or m.oid = any(added_memberships))",
}

TELL_EVERYTHING: Final = sql.SQL("select {}()").format(_TELL_EVERYTHING_FUNCTION)
"""Writes a message with the full catalog."""
