"""Names of tables as texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.relation import QualifiedName

PARTS = st.text(st.sampled_from('ab."\n'), min_size=1, max_size=6)


@given(PARTS, PARTS)
def test_no_two_tables_have_the_same_text(schema: str, name: str) -> None:
    table = QualifiedName(schema, name)
    assert QualifiedName.parse(str(table)) == table


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("public.t", QualifiedName("public", "t")),
        ("a.b.c", QualifiedName("a", "b.c")),
        ('"a.b".c', QualifiedName("a.b", "c")),
        ('"a".b', QualifiedName("a", "b")),
        ('"a.b', QualifiedName('"a', "b")),
        ('a".b', QualifiedName('a"', "b")),
    ],
)
def test_the_first_dot_ends_the_schema_unless_it_is_quoted(text: str, table: QualifiedName) -> None:
    assert QualifiedName.parse(text) == table


@pytest.mark.parametrize("text", ["", "t", ".t", "public.", '""', '"a".', '"a"'])
def test_other_texts_are_no_tables(text: str) -> None:
    with pytest.raises(InvalidConfiguration, match="is not a table name"):
        QualifiedName.parse(text)
