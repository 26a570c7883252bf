"""Keys as people give them."""

from __future__ import annotations

import pytest

from cdc_replay.errors import InvalidConfiguration
from cdc_replay.explain_row.row_key import RowKey, parse_key

COLUMNS = ("id", "region", "total", "a=b")


@pytest.mark.parametrize(
    ("arguments", "key", "texts"),
    [
        (["5"], ("id",), ("5",)),
        (["5", "nsw"], ("id", "region"), ("5", "nsw")),
        (["region=nsw", "id=5"], ("id", "region"), ("5", "nsw")),
        (["id="], ("id",), ("",)),
        (["a=b=c"], ("a=b",), ("c",)),
        (["x=5"], ("id",), ("x=5",)),
        (["id=id=5"], ("id",), ("id=5",)),
        (["id=5", "nsw"], ("id", "region"), ("id=5", "nsw")),
    ],
)
def test_values_in_order_or_by_name(
    arguments: list[str], key: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    assert parse_key(arguments, key, COLUMNS, "s.t") == RowKey(key, texts)


def test_without_a_key_any_columns_by_name() -> None:
    assert parse_key(["total=1", "id=2"], (), COLUMNS, "s.t") == RowKey(("total", "id"), ("1", "2"))
    with pytest.raises(InvalidConfiguration, match="has no key"):
        parse_key(["5"], (), COLUMNS, "s.t")


@pytest.mark.parametrize(
    "arguments", [[], ["5"], ["1", "2", "3"], ["id=5"], ["id=5", "id=6"], ["id=5", "total=1"]]
)
def test_another_key_is_refused_with_the_right_one(arguments: list[str]) -> None:
    with pytest.raises(InvalidConfiguration, match=r"is not a key of table") as caught:
        parse_key(arguments, ("id", "region"), COLUMNS, "s.t")
    assert "id=… region=…" in (caught.value.hint or "")


def test_bytes_that_are_no_text_are_refused() -> None:
    """A shell passes any bytes, and JSON half a character."""
    for argument in (b"\xff".decode(errors="surrogateescape"), "id=\ud800"):
        with pytest.raises(InvalidConfiguration, match="is no text"):
            parse_key([argument], ("id",), COLUMNS, "s.t")
    assert parse_key(["ñ\ufffd"], ("id",), COLUMNS, "s.t").texts == ("ñ\ufffd",)


def test_a_wrong_count_of_values_is_told() -> None:
    with pytest.raises(InvalidConfiguration, match=r"DETAIL: Given: 1 value\."):
        parse_key(["5"], ("id", "region"), COLUMNS, "s.t")
