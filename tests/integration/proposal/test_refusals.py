"""What PostgreSQL refuses, at the statement or at the first UPDATE, `plan` says before, in its words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from cdc_replay.errors import PublisherNotReady
from cdc_replay.model.proposed_change import PlanResult
from cdc_replay.model.subscription import Subscription
from cdc_replay.postgres.connection import connect
from cdc_replay.proposal.elsewhere import THROWAWAY
from cdc_replay.proposal.publisher import PUBLISHER
from cdc_replay.proposal.run import PlanOptions, PlanRequest, plan_proposal
from fixtures.postgres import Database

TABLES = """
    create type mood as enum ('sad', 'happy');
    create domain positive as int check (value > 0);
    create table t (id int primary key, a int, b text, arr int[], m mood, d positive, stamp timestamptz);
    alter table t drop column arr;
    alter table t add column arr int[];
    create table whole (id int primary key, a int);
    alter table whole replica identity full;
    create table keyless (a int, b int);
    create table root (id int, part int, a int, primary key (id, part)) partition by list (part);
    create table leaf partition of root for values in (1);
    create table parent (id int primary key, a int);
    create table child (primary key (id)) inherits (parent);
    create view v as select * from t;
    create unlogged table u (id int primary key, a int);
    create schema s;
    create table s."T ""x"".y" (id int primary key, "Ä b" int);
    create publication p for table t;
    create publication rooted for table root where (part > 0) with (publish_via_partition_root = true);
    create publication empty
"""

PlanScript = Callable[..., PlanResult]


@pytest.fixture
def planned(publisher: Database, tmp_path: Path) -> PlanScript:
    publisher.run(TABLES)

    def planned(script: str, *, dsn: str | None = None, **options: Any) -> PlanResult:
        publications = options.pop("publications", ("p", "rooted", "empty"))
        request = PlanRequest(
            subscription=Subscription(name="s", publisher="pub", publications=publications),
            publisher_dsn=dsn or publisher.dsn,
            change_log=str(tmp_path / "no_log"),
            script=script,
            options=PlanOptions(**options),
        )
        return plan_proposal(request)

    return planned


REFUSED = {
    "syntax": "alter publication p set table t where (a + )",
    "no boolean": "alter publication p set table t where (a + 1)",
    "no such column": "alter publication p set table t where (nothing > 1)",
    "no such table": "alter publication p add table public.nothing",
    "no such publication": "alter publication nothing add table t",
    "drop of nothing": "drop publication nothing",
    "it exists": "create publication p for table t",
    "renamed to what exists": "alter publication p rename to rooted",
    "twice": "create publication q for table t where (a > 1), t",
    "already a member": "alter publication p add table t",
    "aggregate": "alter publication p set table t where (count(a) > 1)",
    "mutable": "alter publication p set table t where (stamp > now())",
    "array subscript": "alter publication p set table t where (arr[1] > 1)",
    "cast through text": "alter publication p set table t where (a::text = '1')",
    "system column": "alter publication p set table t where (ctid = '(0,1)')",
    "current date": "alter publication p set table t where (stamp::date = current_date)",
    "bad literal": "alter publication p set table t where (a = 'x')",
    "no such action": "alter publication p set (publish = 'insert, upsert')",
    "no such option": "alter publication p set (publish_all = true)",
    "filter of a root": "alter publication p add table root where (part > 1)",
    "root no more": "alter publication rooted set (publish_via_partition_root = false)",
    "list of a root": "alter publication p add table root (id, part)",
    "column listed twice": "alter publication p set table t (id, id)",
    "unknown column in a list": "alter publication p set table t (id, nothing)",
    "list with a schema": "create publication q for table t (id), tables in schema s",
    "a view": "alter publication p add table v",
    "an unlogged table": "alter publication p add table u",
    "drop of no member": "alter publication p drop table whole",
    "where in drop": "alter publication p drop table t where (a > 1)",
}


@pytest.mark.parametrize("script", REFUSED.values(), ids=REFUSED)
def test_a_statement_is_refused_in_the_words_of_postgresql(
    publisher: Database, planned: PlanScript, script: str
) -> None:
    result = planned("-- a comment\ncreate publication first;\n" + script)
    words = error_of(publisher, script)
    assert result.parsed_by == PUBLISHER
    assert result.refused is not None
    assert (result.refused.message, result.refused.detail) == words
    assert result.refused.line == 3
    assert result.error == f"PostgreSQL would refuse the proposal: {words[0]}"
    assert publisher.rows("select pubname from pg_publication where pubname = 'first'") == []


def error_of(database: Database, script: str) -> tuple[str | None, str | None]:
    with database.connect() as connection, pytest.raises(psycopg.Error) as raised:
        connection.execute(script.encode())
    return raised.value.diag.message_primary, raised.value.diag.message_detail


@pytest.mark.parametrize(
    "name",
    ["syntax", "it exists", "renamed to what exists", "mutable", "array subscript", "root no more", "twice"],
)
def test_the_throwaway_server_refuses_the_same(planned: PlanScript, name: str) -> None:
    elsewhere, here = planned(REFUSED[name], throwaway=True), planned(REFUSED[name])
    assert elsewhere.parsed_by == THROWAWAY
    assert elsewhere.refused is not None
    assert elsewhere.refused == here.refused


@pytest.mark.parametrize("clause", ["m = 'happy'", "d > 1", "b = (select 'x')", "t is null", "public.f(a)"])
def test_what_the_publisher_must_not_parse_is_refused_elsewhere(planned: PlanScript, clause: str) -> None:
    result = planned(f"alter publication p set table t where ({clause})")
    assert (result.parsed_by, result.because is None) == (THROWAWAY, False)
    assert result.refused is not None


def test_a_where_clause_for_a_view_is_refused_without_parsing_it(planned: PlanScript) -> None:
    for relation in ("v", "u", "nothing"):
        result = planned(f"alter publication p add table {relation} where (a > 1)")
        assert result.refused is not None
        assert "no table that can be published" in result.refused.message


def test_column_lists_that_cannot_be_decoded_together_are_refused(planned: PlanScript) -> None:
    """R6.4: ALTER PUBLICATION accepts it, and the first change stops replication for good (R1.36)."""
    result = planned("alter publication empty add table t (id, a)")
    assert result.refused is not None
    assert (result.refused.rule, "different column lists" in result.refused.message) == ("R6.4", True)


FAILING = {
    "filter outside of the key": (
        "alter publication p set table t where (a > 1)",
        ["update t set a = 1", "delete from t"],
        "R5.6",
    ),
    "filter, update alone": (
        "alter publication p set table t where (a > 1); alter publication p set (publish = 'insert, update')",
        ["update t set a = 1"],
        "R5.6",
    ),
    "list without the key": (
        "alter publication p set table t (a, b)",
        ["update t set a = 1", "delete from t"],
        "R6.6",
    ),
    "list of a full identity": (
        "alter publication empty add table whole (id, a)",
        ["update whole set a = 1", "delete from whole"],
        "R6.6",
    ),
    "no identity": (
        "create publication q for table keyless",
        ["update keyless set a = 1", "delete from keyless"],
        "R2.17",
    ),
    "filter of a root for its leaf": (
        "alter publication rooted set table root where (a > 1)",
        ["update leaf set a = 1", "delete from leaf"],
        "R5.6",
    ),
}


@pytest.mark.parametrize(("script", "statements", "rule"), FAILING.values(), ids=FAILING)
def test_statements_that_would_fail_on_the_publisher(
    publisher: Database, planned: PlanScript, script: str, statements: list[str], rule: str
) -> None:
    result = planned(script)
    assert result.refused is None
    assert [failing.rule for failing in result.failing] == [rule] * len(statements)
    assert result.error is not None
    publisher.run(script)
    for failing, statement in zip(result.failing, statements, strict=True):
        message, detail = error_of(publisher, statement)
        assert message is not None
        assert message.startswith(failing.message)
        if rule != "R2.17":
            assert (detail or "").rstrip(".") in failing.detail
    # What fails already is not the proposal's.
    assert planned("alter publication empty add table parent").failing == ()


def test_an_insert_only_publication_makes_nothing_fail(publisher: Database, planned: PlanScript) -> None:
    script = (
        "create publication q for table t (a), whole (a), keyless where (b > 1) with (publish = 'insert')"
    )
    assert planned(script).failing == ()
    publisher.run(script)
    publisher.run("update t set a = 1; update whole set a = 1; delete from keyless")


def test_a_dropped_publication_takes_its_tables_along(planned: PlanScript) -> None:
    """R1.19."""
    for throwaway in (False, True):
        result = planned("drop publication p, empty cascade", throwaway=throwaway)
        assert [(table.table, table.membership) for table in result.tables] == [("public.t", "removed")]
        assert 'publication "p" does not exist' in result.warnings[0]


def test_a_publication_that_is_renamed_is_another_one(planned: PlanScript) -> None:
    """A subscription lists publications by name."""
    for throwaway in (False, True):
        (table,) = planned("alter publication p rename to q", throwaway=throwaway).tables
        assert (table.table, table.membership) == ("public.t", "removed")
        script = "alter publication p rename to q; alter publication q rename to p"
        assert planned(script, throwaway=throwaway).tables == ()


def test_children_by_inheritance_are_members_on_both_servers(planned: PlanScript) -> None:
    """R2.16."""
    for throwaway in (False, True):
        result = planned("alter publication empty add table parent where (id > 1)", throwaway=throwaway)
        assert [table.table for table in result.tables] == ["public.child", "public.parent"]


def test_names_and_dropped_columns_survive_the_throwaway_server(planned: PlanScript) -> None:
    script = """
        alter publication empty add table s."T ""x"".y" ("Ä b", id) where ("Ä b" > 1 and id > 1);
        alter publication p set table t where (arr @> '{1}' and id > 1)
    """
    here, elsewhere = planned(script), planned(script, throwaway=True)
    assert [(table.table, table.rows) for table in here.tables] == [
        (table.table, table.rows) for table in elsewhere.tables
    ]
    assert [table.filters_then for table in here.tables] == [table.filters_then for table in elsewhere.tables]
    assert len(here.tables) == 2


@contextlib.contextmanager
def role_of(database: Database, grants: str) -> Iterator[str]:
    name = f"plan_of_{database.name}"
    role = sql.Identifier(name)
    with database.connect() as connection:
        connection.execute(sql.SQL("create role {} login").format(role))
        connection.execute(sql.SQL(grants).format(role))
    try:
        yield database.cluster.dsn(database.name, name)
    finally:
        with database.connect() as connection:
            connection.execute(sql.SQL("drop owned by {0} cascade; drop role {0}").format(role))


def test_a_role_without_rights_plans_on_a_throwaway_server(publisher: Database, planned: PlanScript) -> None:
    publisher.run("insert into t (id, a) select i, i from generate_series(1, 10) as i")
    with role_of(publisher, "grant select on t to {}") as dsn:
        result = planned("alter publication p set table t where (id > 7)", dsn=dsn)
    (table,) = result.tables
    assert result.parsed_by == THROWAWAY
    assert "must be owner of publication p" in (result.because or "")
    assert table.rows is not None
    assert (table.rows.now, table.rows.then, table.rows.leave) == (10, 3, 7)


def test_an_owner_plans_on_the_publisher(publisher: Database, planned: PlanScript) -> None:
    owns = "alter table t owner to {0}; alter publication p owner to {0}"
    with role_of(publisher, owns) as dsn:
        result = planned("alter publication p set table t where (id > 7)", dsn=dsn)
    assert (result.parsed_by, result.error) == (PUBLISHER, None)


def test_a_filter_with_an_oid_of_its_server_is_not_planned_elsewhere(planned: PlanScript) -> None:
    script = "alter publication p set table t where (to_tsvector('english', b) @@ 'x' and id > 0)"
    assert planned(script).refused is None
    with pytest.raises(PublisherNotReady, match="another oid"):
        planned(script, throwaway=True)
    collated = planned("alter publication p set table t where (b < 'x' collate \"C\")", throwaway=True)
    (table,) = collated.tables
    assert table.rows is not None
    assert table.rows.error is None


def test_rows_that_the_role_may_not_read_are_not_counted(publisher: Database, planned: PlanScript) -> None:
    with role_of(publisher, "grant select (id) on whole to {}") as dsn:
        result = planned("alter publication p set table t where (id > 7)", dsn=dsn)
    (table,) = result.tables
    assert table.rows is not None
    assert "permission denied" in (table.rows.error or "")


def test_a_locked_table_is_not_waited_for(publisher: Database, planned: PlanScript) -> None:
    with connect(publisher.dsn, purpose="test", autocommit=False) as other:
        other.execute("lock table public.t in share update exclusive mode")
        result = planned("alter publication p set table t where (id > 7)")
        other.rollback()
    assert result.parsed_by == THROWAWAY
    assert result.because == "another session has locked a table or publication of it"


def test_a_filter_that_fails_for_a_row_is_said(publisher: Database, planned: PlanScript) -> None:
    publisher.run("insert into t (id, a) values (0, 0), (1, 1)")
    result = planned("alter publication p set table t where (1 / id > 0), whole where (id > 0)")
    rows = {table.table: table.rows for table in result.tables}
    failed, counted = rows["public.t"], rows["public.whole"]
    assert failed is not None
    assert counted is not None
    assert "division by zero" in (failed.error or "")
    assert counted.enter == 0


def test_old_values_that_the_log_lacks_are_named(planned: PlanScript) -> None:
    result = planned("alter publication p set table t where (a > 1 and id > 1)")
    (table,) = result.tables
    (unknown,) = table.unknown_old_values
    assert (unknown.leaf, unknown.columns) == ("public.t", ("a",))
    assert result.log_error == "there is no change log yet"
