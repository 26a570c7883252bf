"""The functions of the event triggers (`event_triggers`), composed from the reader's own queries.

What a command touched is found by `touched_objects`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, LiteralString

from psycopg import sql

from cdc_replay.capture.ddl.follow_function import follow_body
from cdc_replay.capture.ddl.touched_objects import touched_by_ddl, touched_by_drop
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
    rekeyed_tables oid[] := '{{}}';
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
    if touched_tables || respelled_tables || rekeyed_tables || touched_publications || schemas_of
        || added_memberships <> '{{}}'
        or coalesce(added_schemas, removed_memberships, removed_schemas) is not null
    then
        {read_texts}
        perform {emit}({prefix}, json_build_object(
            'format', {format},
            'touched_tables', touched_tables::bigint[],
            'respelled_tables', respelled_tables::bigint[],
            'rekeyed_tables', rekeyed_tables::bigint[],
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
        by_ddl=touched_by_ddl(),
        by_drop=touched_by_drop(),
        prefix=CATALOG_PREFIX,
        format=MESSAGE_FORMAT,
        rows=_rows(_TOUCHED),
        read_texts=_texts(_TOUCHED),
        emit=_EMIT_FUNCTION,
    )


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
    "table": "c.oid = any(touched_tables || respelled_tables || rekeyed_tables || described_tables)",
    "column": "a.attrelid = any(touched_tables || respelled_tables || rekeyed_tables || described_tables)",
    "publication": "p.oid = any(touched_publications || schemas_of)",
    "membership": "(m.prrelid = any(touched_tables || respelled_tables) or m.oid = any(added_memberships))",
}

TELL_EVERYTHING: Final = sql.SQL("select {}()").format(_TELL_EVERYTHING_FUNCTION)
"""Writes a message with the full catalog."""
