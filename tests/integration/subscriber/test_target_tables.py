"""Targets: columns that identify rows (R8.6), and what is missing (R8.1, R6.10)."""

from __future__ import annotations

import pytest

from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber.target_checks import check_targets
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables
from fixtures.postgres import Database

NUMBERING_DOMAIN = "create sequence s; create domain d as int default nextval('s')"


def read(database: Database, *names: str) -> dict[str, TargetTable]:
    with connect(database.dsn, purpose="test") as connection:
        targets = read_target_tables(connection, [QualifiedName("public", name) for name in names])
    return {name.name: table for name, table in targets.items()}


@pytest.mark.parametrize(
    ("definition", "identity"),
    [
        ("create table t (a int, b int, primary key (b, a))", ("b", "a")),
        ("create table t (a int primary key deferrable, b int)", ()),
        ("create table t (a int primary key, b int); alter table t replica identity full", ("a",)),
        ("create table t (a int primary key, b int); alter table t replica identity nothing", ("a",)),
        (
            """
            create table t (a int primary key, b int not null);
            create unique index i on t (b) include (a);
            alter table t replica identity using index i
            """,
            ("b",),
        ),
        ("create table t (a int, b int not null unique)", ()),
        ("create table t (a int, b int, primary key (a)) partition by hash (a)", ("a",)),
    ],
)
def test_identity_is_the_replica_identity_index_or_primary_key(
    subscriber: Database, definition: str, identity: tuple[str, ...]
) -> None:
    subscriber.run(definition)
    assert read(subscriber, "t")["t"].identity == identity


def test_columns_are_read_with_types_defaults_and_collations(subscriber: Database) -> None:
    subscriber.run(
        """
        create domain public.short as varchar(5) not null;
        create domain public.shorter as public.short check (value <> '');
        create table t (
            id int generated always as identity primary key,
            gone int,
            d public.shorter,
            n numeric(10,2) default 1.5,
            c text collate "C" not null,
            g int generated always as (id + 1) stored
        );
        alter table t drop column gone
        """
    )
    table = read(subscriber, "t")["t"]
    assert [column.name for column in table.columns] == ["id", "d", "n", "c", "g"]
    key, domain, numeric, text, generated = table.columns
    assert (key.identity, key.equality) != ("", None)
    assert key.identity == "a"
    assert (domain.type_sql, domain.base_type_sql) == ("public.shorter", "character varying(5)")
    assert numeric.type_sql == "numeric(10,2)"
    assert text.collation == ("pg_catalog", "C")
    assert generated.is_generated
    assert not key.is_generated


def test_all_missing_tables_and_columns_are_listed(subscriber: Database) -> None:
    subscriber.run(
        """
        create table t (id int primary key, g int generated always as (id) stored);
        create table "We""ird" (a int);
        create view v as select 1 as id
        """
    )
    required_columns = {
        QualifiedName("public", "t"): ("id", "g", "x", "Y"),
        QualifiedName("public", "v"): ("id",),
        QualifiedName("public", "gone"): ("id",),
        QualifiedName("public", 'We"ird'): ("a",),
    }
    with connect(subscriber.dsn, purpose="test") as connection:
        targets = read_target_tables(connection, required_columns)
    with pytest.raises(SubscriberNotReady) as raised:
        check_targets(required_columns, targets)
    assert raised.value.message == "the subscriber cannot receive 3 of the published tables"
    assert raised.value.detail is not None
    assert raised.value.detail.splitlines() == [
        'table "public"."t": missing columns "x", "Y"',
        'table "public"."t": published, but generated on the subscriber: column "g"',
        'table "public"."v": the table does not exist as a plain or partitioned table',
        'table "public"."gone": the table does not exist as a plain or partitioned table',
    ]
    assert raised.value.rule == "R8.1"
    for remedy in ("Create what is missing", "Do not publish a column that is generated"):
        assert remedy in str(raised.value.hint)


def test_row_level_security_is_refused_with_the_matching_remedy(subscriber: Database) -> None:
    """R8.21: until the role bypasses it, or owns the table."""
    role = f"poor_{subscriber.name}"
    subscriber.run(f"""
        create table t (id int primary key);
        alter table t enable row level security;
        create role {role} login;
        grant all on t to {role}
    """)
    required_columns = {QualifiedName("public", "t"): ("id",)}
    dsn = subscriber.cluster.dsn(subscriber.name, role)
    try:
        with connect(dsn, purpose="test") as connection:
            with pytest.raises(SubscriberNotReady, match="the role does not bypass it") as raised:
                check_targets(
                    required_columns, read_target_tables(connection, required_columns, run_as_owner=True)
                )
            assert raised.value.rule == "R8.21"
            assert "BYPASSRLS, or make it the owner" in str(raised.value.hint)
            assert "Create what is missing" not in str(raised.value.hint)

            subscriber.run(f"alter role {role} bypassrls")
            check_targets(
                required_columns, read_target_tables(connection, required_columns, run_as_owner=True)
            )
            subscriber.run(f"alter role {role} nobypassrls; alter table t owner to {role}")
            check_targets(required_columns, read_target_tables(connection, required_columns))
    finally:
        subscriber.run(f"drop owned by {role}; drop role {role}")


@pytest.mark.parametrize(
    ("definition", "shows_order"),
    [
        ("create table t (id int primary key, own int, at timestamptz default now())", False),
        ("create table t (id serial primary key)", False),
        ("create table t (id int primary key, own bigserial)", True),
        ("create table t (id int primary key, own int generated always as identity)", True),
        ("create table t (id int primary key, own text default upper('n' || random()))", True),
        ("create table t (id int primary key, own text default ':funcid 480')", False),
        (f"{NUMBERING_DOMAIN}; create table t (id int primary key, own d)", True),
        (f"{NUMBERING_DOMAIN}; create table t (id int primary key, own d default 1)", False),
        ("create table t (id int primary key, own int generated always as (id + 1) stored)", False),
    ],
)
def test_volatile_unpublished_defaults_show_the_order_of_inserts(
    subscriber: Database, definition: str, shows_order: bool
) -> None:
    """R8.2: they are evaluated when a row is applied."""
    subscriber.run(definition)
    assert read(subscriber, "t")["t"].shows_order_of_inserts(("id",)) == shows_order


@pytest.mark.parametrize(
    ("trigger", "enabled", "shows_order"),
    [
        ("after insert on t for each row", "enable always trigger x", True),
        ("before insert or update on t for each row", "enable replica trigger x", True),
        ("after insert on t for each row", "enable trigger x", False),
        ("after update or delete on t for each row", "enable always trigger x", False),
        ("after insert on t for each statement", "enable always trigger x", False),
        ("after insert on leaf for each row", "enable always trigger x", True),
    ],
)
def test_row_level_insert_triggers_show_the_order_of_inserts(
    subscriber: Database, trigger: str, enabled: str, shows_order: bool
) -> None:
    """R8.13: triggers that fire in replicating sessions, in any partition."""
    table = "leaf" if " leaf " in trigger else "t"
    subscriber.run(
        f"""
        create table t (id int primary key) partition by range (id);
        create table middle partition of t for values from (0) to (100) partition by range (id);
        create table leaf partition of middle for values from (0) to (50);
        create function f() returns trigger language plpgsql as 'begin return new; end';
        create trigger x {trigger} execute function f();
        alter table {table} {enabled}
        """
    )
    assert read(subscriber, "t")["t"].shows_order_of_inserts(("id",)) == shows_order


@pytest.mark.parametrize(
    ("enabled", "references"),
    [
        ("none", {}),
        ("c2", {"c": "p q q2", "c2": "p q q2"}),
        ("c1", {"c": "p", "c1": "p"}),
        ("p", {"c": "p", "c1": "p", "c2": "p"}),
        ("q2", {"c": "q q2", "c2": "q q2"}),
    ],
)
def test_referenced_tables_are_those_of_foreign_keys_that_fire_in_replicating_sessions(
    subscriber: Database, enabled: str, references: dict[str, str]
) -> None:
    """Of partitions as well, on both sides: each can be a target."""
    subscriber.run(
        f"""
        create table p (id int primary key);
        create table q (id int primary key) partition by range (id);
        create table q2 partition of q for values from (0) to (50);
        create table c (id int primary key, p int references p) partition by range (id);
        create table c1 partition of c for values from (0) to (50);
        create table c2 partition of c for values from (50) to (99);
        alter table c2 add foreign key (p) references q;
        do $$ declare name text; begin
            for name in select tgname from pg_trigger where tgrelid::regclass::text = '{enabled}' loop
                execute format('alter table {enabled} enable replica trigger %I', name);
            end loop;
        end $$
        """
    )
    names = ["p", "q", "q2", "c", "c1", "c2"]
    tables = read(subscriber, *names)
    names_by_oid = {table.oid: name for name, table in tables.items()}
    found = {name: sorted(names_by_oid[oid] for oid in table.references) for name, table in tables.items()}
    assert {name: " ".join(others) for name, others in found.items() if others} == references


@pytest.mark.parametrize(
    ("action", "enabled", "acts"),
    [
        ("no action", "always", False),
        ("restrict", "always", False),
        ("cascade", "always", True),
        ("set null", "replica", True),
        ("set default", "always", True),
        ("cascade", "", False),
        ("no action on update cascade", "always", False),
    ],
)
def test_deletion_acts_on_other_tables_if_a_foreign_key_says_so_and_fires(
    subscriber: Database, action: str, enabled: str, acts: bool
) -> None:
    """Also if it refers to a partition."""
    subscriber.run(
        f"""
        create table p (id int primary key) partition by range (id);
        create table p1 partition of p for values from (0) to (50);
        create table c (id int primary key, p int references p1 on delete {action});
        do $$ declare name text; begin
            for name in select tgname from pg_trigger where tgrelid = 'p1'::regclass and tgisinternal loop
                execute format('alter table p1 enable {enabled} trigger %I', name);
            end loop;
        end $$
        """
    )
    assert [table.acts_on_delete for table in read(subscriber, "p", "p1", "c").values()] == [
        acts,
        acts,
        False,
    ]
