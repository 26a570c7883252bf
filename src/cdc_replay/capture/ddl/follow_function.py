"""The trigger function that adds to the capture publications what was added to a subscribed one.

It implements the additions of `publication.capture_set` in SQL:

| CTE                             | rows                                                                  |
|---------------------------------|-----------------------------------------------------------------------|
| `listed`                        | memberships that are no exceptions (R2.18)                            |
| `published`                     | subscribed publications with the capture publications for them        |
| `excepted`                      | tables that all of these except, by capture publication               |
| `partitioned`                   | partitioned tables of a subscribed publication via root (R2.4)        |
| `wanted_table`, `wanted_schema` | members by capture publication, root publications included (R2.14)    |
| `widened`                       | capture publications that must become FOR ALL TABLES                  |

A test checks that `setup` has nothing to add afterwards.
"""

from __future__ import annotations

from typing import Final

from psycopg import sql

from cdc_replay.capture.publications import ROOT_PUBLICATIONS
from cdc_replay.model.publication import PublishAction
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS, CAUSES, ROOT_DEPTHS

_FOLLOW: Final = """
declare
    statement text;
begin
    if not exists (
        select from pg_event_trigger_ddl_commands() command
        left join pg_publication_rel r
            on command.classid = 'pg_publication_rel'::regclass and r.oid = command.objid
        left join pg_publication_namespace n
            on command.classid = 'pg_publication_namespace'::regclass and n.oid = command.objid
        join pg_publication p on p.oid = coalesce(r.prpubid, n.pnpubid, command.objid)
        where p.pubname = any({subscribed}())
    ) then
        return;
    end if;
    for statement in
        with
        subscribed as (
            select * from pg_publication where pubname = any({subscribed}())
        ),
        published (capture, pub) as (
            select capture, p.oid from subscribed p
            cross join lateral (values {actions}) action (capture, is_published)
            where is_published
        ),
        listed as not materialized (
            select m.* from pg_publication_rel m
            where not coalesce((to_jsonb(m) ->> 'prexcept')::boolean, false)
        ),
        exception as materialized (
            select m.* from pg_publication_rel m
            where coalesce((to_jsonb(m) ->> 'prexcept')::boolean, false)
        ),
        excepted (capture, rel) as (
            select capture, m.prrelid from published join exception m on m.prpubid = pub
            group by capture, m.prrelid
            having count(*) = (select count(*) from published every where every.capture = published.capture)
        ),
        partitioned as materialized (
            select p.oid as pub, c.oid as rel, p.pubviaroot, p.pubtruncate,
                array(select a::oid from pg_partition_ancestors(c.oid) a where a <> c.oid) as above
            from subscribed p
            join pg_class c on c.relkind = 'p' and c.relpersistence = 'p' and (
                p.puballtables
                or exists (select from listed m where (m.prpubid, m.prrelid) = (p.oid, c.oid))
                or exists (
                    select from pg_publication_namespace m
                    where (m.pnpubid, m.pnnspid) = (p.oid, c.relnamespace)
                )
            )
            where p.pubviaroot and not exists (
                select from exception m
                where m.prpubid = p.oid and m.prrelid in (select pg_partition_ancestors(c.oid))
            )
        ),
        wanted_table (capture, rel) as (
            select capture, m.prrelid from published join listed m on m.prpubid = pub
            union
            select {root} || cardinality(x.above), x.rel from partitioned x
            where cardinality(x.above) < {depths}
                and not exists (select from partitioned y where y.pub = x.pub and y.rel = any(x.above))
                and exists (select from partitioned z where z.pubtruncate and z.rel = any(x.above || x.rel))
        ),
        wanted_schema (capture, nsp) as (
            select capture, m.pnnspid from published join pg_publication_namespace m on m.pnpubid = pub
        ),
        member (capture, text) as (
            select capture, format('table only %I.%I', n.nspname, c.relname)
            from wanted_table
            join pg_class c on c.oid = rel
            join pg_namespace n on n.oid = c.relnamespace
            join pg_publication k on k.pubname = capture and not k.puballtables
            where not exists (select from listed m where (m.prpubid, m.prrelid) = (k.oid, rel))
            union all
            select capture, format('tables in schema %I', n.nspname)
            from wanted_schema
            join pg_namespace n on n.oid = nsp
            join pg_publication k on k.pubname = capture and not k.puballtables
            where not exists (
                select from pg_publication_namespace m where (m.pnpubid, m.pnnspid) = (k.oid, nsp)
            )
        ),
        widened as (
            select distinct k.* from published
            join subscribed p on p.oid = pub and p.puballtables
            join pg_publication k on k.pubname = capture
            where not k.puballtables or exists (
                select from exception m
                where m.prpubid = k.oid and (capture, m.prrelid) not in (table excepted)
            )
        )
        select format('alter publication %I add %s', capture, string_agg(text, ', ' order by text))
        from member where capture not in (select pubname from widened)
        group by capture
        union all
        select unnest(array[
            format('drop publication %I', k.pubname),
            format(
                'create publication %I for all tables%s with (publish = %L%s)', k.pubname,
                (
                    select format(
                        ' except (table %s)', string_agg(format('only %I.%I', n.nspname, c.relname), ', ')
                    )
                    from excepted join pg_class c on c.oid = rel join pg_namespace n on n.oid = c.relnamespace
                    where capture = k.pubname
                    having count(*) > 0
                ),
                concat_ws(', ',
                    case when k.pubinsert then 'insert' end, case when k.pubupdate then 'update' end,
                    case when k.pubdelete then 'delete' end, case when k.pubtruncate then 'truncate' end),
                case to_jsonb(k) ->> 'pubgencols' when 's' then ', publish_generated_columns = stored' end
            ),
            format('comment on publication %I is %L', k.pubname, obj_description(k.oid, 'pg_publication'))
        ])
        from widened k
    loop
        execute statement;
    end loop;
exception when others then
    raise warning 'cdc-replay could not follow %: %', tg_tag, sqlerrm
        using hint = 'Run cdc-replay setup now: until then changes may not be captured.', errcode = sqlstate;
end
"""


def follow_body(subscribed: sql.Identifier) -> sql.Composed:
    """The body of the function; function `subscribed` returns the names of the subscribed publications."""
    actions = sql.SQL(", ").join(
        sql.SQL("({}::name, {})").format(
            CAPTURE_PUBLICATIONS[action],
            sql.SQL(" or ").join(
                sql.Identifier("p", f"pub{cause.value}") for cause in PublishAction if cause in causes
            ),
        )
        for action, causes in CAUSES.items()
    )
    return sql.SQL(_FOLLOW).format(
        subscribed=subscribed,
        actions=actions,
        captures=list(CAPTURE_PUBLICATIONS.values()),
        root=ROOT_PUBLICATIONS[0].removesuffix("0"),
        depths=ROOT_DEPTHS,
    )
