"""A proposal runs nobody's code with the rights of the role that plans it.

The literals of a WHERE clause are read while it is parsed, before PostgreSQL refuses user-defined types, and
the checks of a domain inside of a composite type or an array run then. So such a clause never reaches the
publisher. The trace is a sequence, which a rollback does not take back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psycopg
import pytest

from cdc_replay.errors import StatementNotAllowed
from cdc_replay.model.proposed_change import PlanResult
from cdc_replay.model.subscription import Subscription
from cdc_replay.proposal.run import PlanRequest, plan_proposal
from fixtures.postgres import Database
from security.stranger import Stranger

OWNED: Final = """
    create sequence lair.trace;
    create function lair.evil(int) returns boolean language plpgsql as
        $$ begin perform pg_catalog.nextval('lair.trace'); return true; end $$;
    create function lair.takes(lair_text text) returns boolean language plpgsql immutable as
        $$ begin perform pg_catalog.nextval('lair.trace'); return true; end $$;
    create domain lair.checked as int check (lair.evil(value));
    create type lair.pair as (c lair.checked);
    create function lair.of_pair(lair.pair) returns boolean language sql immutable as 'select true';
    create operator lair.=== (leftarg = int, rightarg = lair.pair, function = lair.with_pair);
    create table lair.t (id int primary key, a text, p lair.pair, many lair.checked[]);
    create view lair.v as select id, p from lair.t;
    create unlogged table lair.u (id int primary key, p lair.pair)
"""
WITH_PAIR: Final = """
    create function lair.with_pair(int, lair.pair) returns boolean language sql immutable as 'select true'
"""

ATTACKS: Final = {
    "composite column": "lair.t where (p = '(1)')",
    "array column": "lair.t where (many = '{1}')",
    "quoted column": """lair.t where ("p" = '(1)')""",
    "cast": "lair.t where ('(1)'::lair.pair is null)",
    "cast in words": "lair.t where (cast('(1)' as lair.pair) is null)",
    "literal of a type": "lair.t where (lair.pair '(1)' is null)",
    "array of the domain": "lair.t where ('{1}'::lair.checked[] is null)",
    "function": "lair.t where (lair.of_pair('(1)'))",
    "operator": "lair.t where (id operator(lair.===) '(1)')",
    "row": "lair.t where (t = '(1,x,(1),{})')",
    "subquery": "lair.t where (exists (select from lair.t where p = '(1)'))",
    "view": "lair.v where (p = '(1)')",
    "unlogged table": "lair.u where (p = '(1)')",
    "comment inside": "lair.t where (p /* \n */ = '(1)')",
}


@pytest.fixture
def lair(publisher: Database, stranger: Stranger) -> Database:
    """A schema with the stranger's tables, types, functions and operators."""
    publisher.run(f"create schema lair authorization {stranger.name}")
    before, operator = OWNED.split("    create operator")
    stranger.run(before)
    stranger.run(WITH_PAIR)
    stranger.run(f"create operator{operator}")
    publisher.run("create publication p")
    return publisher


def plan(database: Database, script: str, folder: Path) -> PlanResult:
    request = PlanRequest(
        subscription=Subscription(name="s", publisher="pub", publications=("p",)),
        publisher_dsn=database.dsn,
        change_log=str(folder / "no_log"),
        script=script,
    )
    return plan_proposal(request)


def has_run(database: Database) -> bool:
    [(called,)] = database.rows("select is_called from lair.trace")
    return bool(called)


@pytest.mark.parametrize("member", ATTACKS.values(), ids=ATTACKS)
def test_no_code_of_a_stranger_runs(lair: Database, tmp_path: Path, member: str) -> None:
    result = plan(lair, f"alter publication p add table {member}", tmp_path)
    assert result.refused is not None
    assert not has_run(lair)


@pytest.mark.parametrize("name", ["array column", "cast", "function", "operator"])
def test_the_attacks_are_real(lair: Database, name: str) -> None:
    """Executed by a superuser as they are, they run the stranger's code, and are refused only then."""
    with pytest.raises(psycopg.Error):
        lair.run(f"alter publication p add table {ATTACKS[name]}")
    assert has_run(lair)


def test_a_name_without_a_schema_is_none_of_a_strangers(
    lair: Database, stranger: Stranger, tmp_path: Path
) -> None:
    """An operator in `public` that fits better than PostgreSQL's own would read the literal as its type."""
    lair.run(f"grant create on schema public to {stranger.name}")
    stranger.run(
        "create function lair.text_pair(text, lair.pair) returns boolean language sql immutable"
        " as 'select true'"
    )
    stranger.run("create operator public.= (leftarg = text, rightarg = lair.pair, function = lair.text_pair)")
    stranger.run("create function public.lower(lair.pair) returns text language sql immutable as 'select 1'")
    result = plan(lair, "alter publication p add table lair.t where (a = '(1)' and lower('X') = a)", tmp_path)
    assert result.refused is None
    assert not has_run(lair)


@pytest.mark.parametrize(
    "script",
    [
        "alter publication p add table lair.t; create table pwned ()",
        "alter publication p add table lair.t; commit; create table pwned ()",
        "commit",
        "select lair.takes('x')",
        "alter publication p add table lair.t where (a = $$x$$)",
        "alter publication p add table lair.t where (a = E'\\'); create table pwned (); --')",
        "do $$ begin perform lair.takes('x'); end $$",
        "drop publication p \\gexec",
    ],
)
def test_nothing_but_statements_about_publications_is_sent(
    lair: Database, tmp_path: Path, script: str
) -> None:
    with pytest.raises(StatementNotAllowed):
        plan(lair, script, tmp_path)
    assert lair.rows("select relname from pg_class where relname = 'pwned'") == []
    assert lair.rows("select pubname::text from pg_publication") == [("p",)]
    assert not has_run(lair)


def test_rows_are_counted_without_code_of_their_owner(lair: Database, tmp_path: Path) -> None:
    """The filter is printed from its tree; a rule or a view in place of the table is noticed."""
    lair.run("insert into lair.t (id, a) values (1, 'x'), (2, 'y')")
    result = plan(lair, "alter publication p add table lair.t where (a = 'x')", tmp_path)
    (table,) = result.tables
    assert table.rows is not None
    assert (table.rows.enter, table.rows.leave) == (1, 0)
    assert not has_run(lair)
