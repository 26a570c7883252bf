"""Texts that templates give are read strictly: a misspelt flag must not write."""

from __future__ import annotations

import pytest

from cdc_replay.airflow.template_values import is_set, table_names
from cdc_replay.errors import InvalidConfiguration


@pytest.mark.parametrize(
    ("value", "expected"), [(True, True), ("True", True), (False, False), ("False", False)]
)
def test_flags(value: bool | str, expected: bool) -> None:
    assert is_set(value) is expected


@pytest.mark.parametrize("value", ["true", "yes", "", "None", "0"])
def test_another_text_is_no_flag(value: str) -> None:
    with pytest.raises(InvalidConfiguration, match="neither True nor False"):
        is_set(value)


def test_tables() -> None:
    assert table_names(()) == table_names("[]") == ()
    assert table_names(["a.b c.d"]) == ("a.b c.d",)
    assert table_names('["a.b", "c.d<e>"]') == ("a.b", "c.d<e>")


@pytest.mark.parametrize("value", ["a.b", '"a.b"', "[1]", ["a"], "{}x"])
def test_other_texts_are_no_tables(value: str | list[str]) -> None:
    with pytest.raises(InvalidConfiguration, match="no list of tables"):
        table_names(value)
