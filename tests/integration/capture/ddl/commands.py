"""DDL commands that the tests of the event triggers run, and the objects that they change."""

from __future__ import annotations

SCHEMA = """
    create schema s;
    create type mood as enum ('sad', 'happy');
    create type pair as (x int, y int);
    create domain amount as numeric(10, 2);
    create collation fast (provider = libc, locale = 'C');
    create function twice(int) returns int immutable language sql return $1 * 2;
    create function twice_as_much(int) returns int immutable language sql return $1 * 2;
    create table plain (
        id int primary key, a int, b text, m mood, ms mood[], v amount, c text collate fast, o pair
    );
    create table computed (id int primary key, a int, g int generated always as (public.twice(a)) stored);
    create table keyed (id int, k int not null, j int not null);
    create unique index keyed_k on keyed (k);
    create unique index keyed_j on keyed (j);
    alter table keyed replica identity using index keyed_k;
    create table s.other (id int primary key, a int);
    create unlogged table unlogged (id int primary key);
    create table root (id int, a int, primary key (id)) partition by range (id);
    create table middle partition of root for values from (0) to (100) partition by range (id);
    create table leaf partition of middle for values from (0) to (50);
    create table once partition of root for values from (200) to (300);
    create unlogged table once_unlogged partition of root for values from (400) to (500);
    create table loose (id int not null, a int);
    create table tree (id int not null) partition by range (id);
    create table branch partition of tree for values from (0) to (100) partition by range (id);
    create table twig partition of branch for values from (0) to (50);
    create table sprig (id int not null, a int) partition by range (id);
    create table bud partition of sprig for values from (100) to (150);
    create table parent (id int primary key, a int);
    create table child () inherits (parent);
    create table rows_of (id int, c computed);
    create table typed of pair (primary key (x));
    create publication p for table plain (id, a, b) where (a > 1), table middle;
    create publication r for table root (id, a) with (publish_via_partition_root = true);
    create publication q for tables in schema s with (publish = 'insert');
    create publication every for all tables;
    create table owned (id int primary key);
    alter table owned owner to cdc_replay_somebody;
"""

COMMANDS = """
    create table fresh (id int primary key, a int default 1)
    create table fresh as select 1 as id
    select 1 as id into fresh
    create table fresh (like plain including all)
    create table fresh partition of middle for values from (50) to (100)
    create table fresh () inherits (parent)
    create unlogged table fresh partition of middle for values from (50) to (100)
    create schema fresh create table t (id int primary key)
    create table s."Größe ""x"" y" (" id " int primary key)
    drop table plain cascade
    drop table root
    drop table leaf
    drop table parent cascade
    drop schema s cascade
    drop schema public cascade
    drop type mood cascade
    drop function twice cascade
    drop domain amount cascade
    drop collation fast cascade
    drop index keyed_k
    drop index keyed_j, keyed_k
    alter table plain add column z int
    alter table plain add column z int generated always as (id * 3) stored
    alter table plain drop column m
    alter table plain rename column b to bee
    alter table plain rename to renamed
    alter table plain set schema s
    alter table plain alter column v type text using v || 'x'
    alter table plain alter column m type text using m::text
    alter table plain alter column c type text collate "C"
    alter table plain replica identity full
    alter table plain replica identity nothing
    alter table plain drop constraint plain_pkey
    alter table loose set unlogged
    alter table unlogged set logged
    alter table plain owner to current_user
    alter table plain add constraint positive check (a > 0)
    alter table computed alter column g drop expression
    alter table computed rename column a to n
    alter table computed rename to calculated
    alter table keyed replica identity using index keyed_j
    alter table keyed replica identity default
    alter table keyed drop column k
    alter table keyed add primary key (id, j)
    alter table root add column z int default 5
    alter table root drop column a cascade
    alter table root rename column a to n
    alter table root rename to trunk
    alter table root drop constraint root_pkey
    alter table root detach partition once
    alter table root detach partition middle
    alter table root detach partition once_unlogged
    alter table root attach partition loose for values from (100) to (200)
    alter table root attach partition sprig for values from (100) to (200)
    alter table root replica identity full
    alter table leaf replica identity full
    alter table leaf rename to blade
    alter table leaf set schema s
    alter table tree add primary key (id)
    alter table only tree add primary key (id)
    alter table only tree add primary key (id); alter table branch add primary key (id); {attach}
    alter table typed rename to typed_too
    do $$ begin alter table plain add column z int; alter table leaf rename to blade; end $$
    alter table parent add column z int
    alter table parent rename column a to n
    alter table child no inherit parent
    alter type mood rename to humour
    alter type mood set schema s
    alter type mood add value 'angry'
    alter type pair rename to couple
    alter type pair add attribute z int cascade
    alter domain amount rename to sum_of_money
    alter domain amount set schema s
    alter collation fast rename to slow
    alter function twice rename to double
    alter function twice set schema s
    alter schema s rename to renamed
    alter schema public rename to renamed
    create publication fresh
    create publication fresh for table leaf where (a > 7), tables in schema s
    create publication fresh for table parent
    alter publication p add table s.other (a, id)
    alter publication p drop table plain
    alter publication p set table plain where (b = 'ß'), table loose
    alter publication p set tables in schema s
    alter publication q add tables in schema public
    alter publication q drop tables in schema s
    alter publication p set (publish = 'insert, delete')
    alter publication p set (publish_via_partition_root = true)
    alter publication p rename to renamed
    alter publication p owner to current_user
    drop publication p
    drop publication p, q, every
    drop owned by cdc_replay_somebody cascade
    alter table root detach partition once concurrently
"""

SILENT_COMMANDS = """
    alter index keyed_j rename to keyed_jay
    alter index keyed_jay rename to keyed_j
    create temporary table fresh (id int primary key)
    create temporary table fresh_too as select 1 as id
    create unlogged table fresh_unlogged (id int primary key)
    create index on keyed (id)
    create unique index on keyed (id)
    create unique index on tree (id)
    create unique index concurrently on keyed (id)
    drop index keyed_j
    create view fresh_view as select * from plain
    create materialized view fresh_kept as select * from plain
    create sequence fresh_numbers
    comment on column plain.a is 'a column'
    grant select on plain to public
    alter role cdc_replay_somebody connection limit 5
    drop function twice_as_much
    create type fresh_kind as enum ('a')
    analyze plain
    vacuum plain
    truncate plain
"""


ATTACH = "alter index tree_pkey attach partition branch_pkey"

MEETING = """
    drop table plain cascade
    drop publication p
    drop schema s cascade
    alter table plain add column z int
    alter table plain rename column b to bee
    alter table plain replica identity full
    alter table root rename to trunk
    alter table root detach partition once
    alter table leaf rename to blade
    alter table s.other set schema public
    create table s.another (id int primary key)
    alter publication p set (publish = 'insert')
    alter publication p rename to renamed
    alter publication p set table middle
    alter publication p set table plain where (a > 2), middle
    alter publication p add table loose
    alter publication p drop table middle
    alter publication q set (publish = 'delete')
    alter publication q add tables in schema public
    alter publication q drop tables in schema s
    alter publication q add table computed where (a > 5)
    alter publication q add table computed
    alter publication q add table computed where (a > 5); alter publication q drop table computed
    alter publication q add table computed where (a > 5); alter publication q set table computed
    alter publication q add table computed where (a > 5); drop publication q
    alter publication q add table computed where (a > 5); alter table computed add b int
    create publication another for table computed where (a > 5)
    create publication another for table plain, root
    alter index keyed_j rename to keyed_jay
    create unique index on plain (a, b)
    alter type mood rename to feeling
    alter function twice(int) rename to double
"""


def lines(commands: str) -> list[str]:
    return [line.strip().replace("{attach}", ATTACH) for line in commands.strip().splitlines()]
