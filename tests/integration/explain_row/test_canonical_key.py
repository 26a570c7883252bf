"""A key as its types print it: never that of another row."""

from __future__ import annotations

import pytest

from cdc_replay.errors import InvalidConfiguration
from cdc_replay.explain_row.present_rows import canonical_key
from cdc_replay.explain_row.row_key import RowKey
from cdc_replay.model.relation import QualifiedName
from cdc_replay.subscriber.target_tables import read_target_tables
from fixtures.postgres import Database

EQUAL: list[tuple[str, str, str]] = [
    ("varchar(3)", "abc", "abc"),
    ("char(3)", "ab", "ab "),
    ("char(3)", "ab   ", "ab "),
    ("char", "a", "a"),
    ("numeric(3,1)", "012.30", "12.3"),
    ("numeric", "12.30", "12.30"),
    ("timestamp(0)", "2026-01-01 00:00", "2026-01-01 00:00:00"),
    ("interval day to second(0)", "26 hours", "26:00:00"),
    ("bit(3)", "101", "101"),
    ("bit", "1", "1"),
    ("varchar(3)[]", "{ abc }", "{abc}"),
    ("code", "abc", "abc"),
    ("name", "n", "n"),
    ('"char"', "a", "a"),
    ("json", '{"a": 1}', '{"a": 1}'),
    ("point", "1,2", "(1,2)"),
]

REFUSED: list[tuple[str, str]] = [
    ("varchar(3)", "abcdef"),
    ("varchar(3)", "abc "),
    ("char(3)", "abcd"),
    ("char", "ab"),
    ("numeric(3,1)", "12.34"),
    ("timestamp(0)", "2026-01-01 00:00:00.6"),
    ("timestamptz(3)", "2026-01-01 00:00:00.1234"),
    ("interval day to second(0)", "1.3 seconds"),
    ("bit(3)", "1011"),
    ("bit(3)", "10"),
    ("bit", "10"),
    ("varbit(3)", "1011"),
    ("varchar(3)[]", "{abcdef}"),
    ("code", "abcdef"),
    ("name", "n" * 64),
    ('"char"', "ab"),
    ("tsquery", "a &"),
    ("jsonpath", "$$$"),
    ("regclass", "nothing"),
    ("text", "\0"),
]


def canonical(publisher: Database, type_sql: str, text: str) -> str:
    publisher.run(f"create domain code as varchar(3); create table t (k {type_sql})")
    with publisher.connect() as connection:
        (table,) = read_target_tables(connection, [QualifiedName("public", "t")]).values()
        return canonical_key(connection, table, RowKey(("k",), (text,))).texts[0]


@pytest.mark.parametrize(("type_sql", "text", "printed"), EQUAL)
def test_an_equal_text_is_the_key(publisher: Database, type_sql: str, text: str, printed: str) -> None:
    assert canonical(publisher, type_sql, text) == printed


@pytest.mark.parametrize(("type_sql", "text"), REFUSED)
def test_a_text_that_a_type_cuts_rounds_or_refuses_is_no_key(
    publisher: Database, type_sql: str, text: str
) -> None:
    """A row of the shorter key is another one: nothing that is said of it answers the question."""
    with pytest.raises(InvalidConfiguration, match='is not a value of column "k"'):
        canonical(publisher, type_sql, text)
