"""Only CREATE, ALTER and DROP PUBLICATION leave the parser, each written anew; everything else is refused."""

from __future__ import annotations

import pytest

from cdc_replay.errors import StatementNotAllowed
from cdc_replay.model.relation import QualifiedName
from cdc_replay.proposal.statements import Command, parse_script
from cdc_replay.proposal.tokens import TokenKind, scan

HOSTILE = {
    "another statement": "select pg_sleep(1)",
    "a second one": "drop publication p; create table pwned ()",
    "a second one after a comment": "drop publication p /* ; */ ; delete from t",
    "a second one in a comment that psql closes": "drop publication p; -- x\ndelete from t",
    "a second one after a nested comment": "/* /* */ drop publication p; */ delete from t",
    "a comment without an end": "drop publication p; /* delete from t",
    "commit": "drop publication p; commit; drop publication q",
    "rollback": "rollback; drop publication p",
    "begin": "begin; drop publication p; end",
    "savepoint": "savepoint s; drop publication p",
    "set": "set standard_conforming_strings = off; drop publication p",
    "do": "do $$ begin perform 1; end $$",
    "dollar quotes": "create publication p for table t where (a = $$;$$)",
    "tagged dollar quotes": "create publication p for table t where (a = $x$;$x$)",
    "parameter": "create publication p for table t where (a = $1)",
    "gexec": "drop publication p \\gexec",
    "psql shell": "\\! id",
    "backslash": "drop publication p\\",
    "escape string": r"create publication p for table t where (a = E'\'); drop table t; --')",
    "escape string in upper case after a space": r"create publication p for table t where (a =E'\'')",
    "bit string": "create publication p for table t where (a = b'1')",
    "hexadecimal string": "create publication p for table t where (a = X'1f')",
    "national string": "create publication p for table t where (a = n'x')",
    "unicode string": "create publication p for table t where (a = U&'\\0027')",
    "unicode name": 'create publication u&"p\\0022" for all tables',
    "string over two lines": "create publication p for table t where (a = 'x'\n'; drop table t')",
    "string without an end": "create publication p for table t where (a = 'x)",
    "name without an end": 'create publication "p for all tables',
    "empty name": 'create publication "" for all tables',
    "long name": f"create publication {'p' * 64} for all tables",
    "long name in bytes": f'create publication "{"é" * 32}" for all tables',
    "nul": "drop publication p\x00; drop table t",
    "vertical tab": "drop\x0bpublication p",
    "control character in a string": "create publication p for table t where (a = '\x1b')",
    "semicolon in parentheses": "create publication p for table t where (a = 1; drop table t)",
    "parenthesis not closed": "create publication p for table t where (a = 1",
    "parenthesis too many": "create publication p for table t where (a = 1))",
    "more after the clause": "create publication p for table t where (a = 1) drop table t",
    "more after the options": "create publication p with (publish = 'insert') select 1",
    "subscription": "create subscription s connection 'host=x' publication p",
    "publication as a word of another": "alter table publication add a int",
    "create table": "create table publication (a int)",
    "database qualified": "create publication p for table a.b.c",
    "current schema": "create publication p for tables in schema current_schema",
    "no table": "create publication p for (select 1)",
    "junk after a constant": "create publication p for table t where (a = 1e)",
    "braces": "create publication p for table t where ({fn now()})",
    "colon": "create publication p for table :t",
    "nothing": " -- nothing\n/* at /* all */ */ ;;",
    "empty": "",
    "copy": "copy t to program 'id'",
    "alter to": "alter publication p owner to x with (a)",
    "grant in place of a word": "alter publication p grant to x",
    "no-break space is no space": "drop\u00a0publication p",
}


@pytest.mark.parametrize("script", HOSTILE.values(), ids=HOSTILE)
def test_anything_else_is_refused(script: str) -> None:
    with pytest.raises(StatementNotAllowed, match=r"line \d+ of the proposal"):
        parse_script(script)


ACCEPTED = {
    "create publication p": "create publication p",
    "Create\tPUBLICATION  p;": "Create PUBLICATION p",
    "create publication p for all tables with (publish = 'insert');": (
        "create publication p for all tables with (publish = 'insert')"
    ),
    "create publication p for table t": 'create publication p for table "public".t',
    'create publication p for table only "t""x" (a, "B")': (
        'create publication p for table only "public"."t""x" (a, "B")'
    ),
    "create publication p for table s.t*, tables in schema u, v, table w where (a = ';')": (
        "create publication p for table s.t*, tables in schema u, v, table \"public\".w where (a = ';')"
    ),
    "alter publication p add table s.t where (a -- ; drop table t\n > 1)": (
        "alter publication p add table s.t where (a > 1)"
    ),
    "alter publication p set (publish_via_partition_root = true)": (
        "alter publication p set (publish_via_partition_root = true)"
    ),
    "alter publication p rename to q": "alter publication p rename to q",
    "alter publication p owner to r": "alter publication p owner to r",
    "alter publication p drop table t, s.u": 'alter publication p drop table "public".t, s.u',
    "drop publication if exists p, q cascade": "drop publication if exists p, q cascade",
    "create publication p for table t where (a = 'it''s \\' and b>-1)": (
        "create publication p for table \"public\".t where (a = 'it''s \\' and b>-1)"
    ),
    "create publication p for table t where (a /* x */ + /**/ 1>0)": (
        'create publication p for table "public".t where (a + 1>0)'
    ),
    "create publication p for table tables": 'create publication p for table "public".tables',
}


@pytest.mark.parametrize(("script", "text"), ACCEPTED.items())
def test_a_statement_is_written_anew(script: str, text: str) -> None:
    (statement,) = parse_script(script)
    assert statement.text == text


def test_statements_say_what_they_name() -> None:
    first, second, third = parse_script(
        'create publication P for table A, s."B" where (C = \'x\' and "D" > 1);\n\n'
        "alter publication P rename to q;\nalter publication q owner to r"
    )
    assert first.command is Command.CREATE
    assert first.publications == ("p",)
    assert first.tables == (QualifiedName("public", "a"), QualifiedName("s", "B"))
    assert {"c", "D"} <= first.where_names
    assert (first.line, second.line, third.line) == (1, 3, 4)
    assert second.publications == ("p", "q")
    assert (second.new_owner, third.new_owner) == (False, True)


@pytest.mark.parametrize(
    "clause",
    [
        "'(1)'::s.evil = a",
        "a operator(s.=) '(1)'",
        "s.f('(1)')",
        "t = '(1)'",
        "a in (select 1)",
        "exists (values (1))",
        "a = (table t)",
        '"pg_catalog"."x".y = 1',
    ],
)
def test_a_clause_that_could_name_others_objects_is_foreign(clause: str) -> None:
    (statement,) = parse_script(f"create publication p for table t where ({clause})")
    assert statement.foreign is not None


@pytest.mark.parametrize(
    "clause", ["a = 'x'", "a::pg_catalog.int8 > 1", "pg_catalog.lower(a) = 'x'", "a in (1, 2)", "a > .5"]
)
def test_a_clause_of_builtin_names_is_not(clause: str) -> None:
    (statement,) = parse_script(f"create publication p for table t where ({clause})")
    assert statement.foreign is None


def test_the_scanner_knows_lines_and_kinds() -> None:
    tokens = scan("A /* 1\n2 */ 'x\ny' \"Z\"\n1.5e3 <= ::")
    assert [(token.kind, token.value, token.line) for token in tokens] == [
        (TokenKind.WORD, "a", 1),
        (TokenKind.STRING, "x\ny", 2),
        (TokenKind.NAME, "Z", 3),
        (TokenKind.NUMERIC, "1.5e3", 4),
        (TokenKind.SYMBOL, "<=", 4),
        (TokenKind.SYMBOL, "::", 4),
    ]
