"""The forms in which values are compared have PostgreSQL's equality and order; those of constants, here."""

from __future__ import annotations

import pytest

from cdc_replay.filters.expression import Type
from cdc_replay.filters.sortable_forms import FORMS

NUMBERS = (
    *("-Infinity", "-1000", "-100.5", "-100.05", "-100", "-99.99", "-9", "-1.5", "-1", "-0.10001", "-0.1"),
    *("-0.01", "0", "0.001", "0.01", "0.1", "0.10001", "0.9", "1", "1.5", "9", "10", "99.99", "100"),
    *("100.05", "1" + "0" * 131071, "Infinity", "NaN"),
)
DAYS = (
    "-infinity",
    *(f"{day} BC" for day in ("4714-11-24", "0045-12-31", "0044-01-01", "0044-03-15", "0001-12-31")),
    *("0001-01-01", "1999-12-31", "2000-01-01", "9999-12-31", "10000-01-01", "100000-01-01"),
    "5874897-12-31",
    "infinity",
)
MOMENTS = (
    "-infinity",
    "4714-11-24 00:00:00+00 BC",
    "0044-03-15 10:00:00+00 BC",
    "0044-03-15 10:00:00.5+00 BC",
    "1999-12-31 23:59:59.999999+00",
    "2000-01-01 00:00:00+00",
    "2000-01-01 00:00:00.000001+00",
    "2000-01-01 00:00:00.5+00",
    "2000-01-01 00:00:00.55+00",
    "2000-01-01 00:00:01+00",
    "294276-12-31 23:59:59+00",
    "infinity",
)


@pytest.mark.parametrize(
    ("kind", "ascending"),
    [(Type.NUMERIC, NUMBERS), (Type.DATE, DAYS), (Type.TIMESTAMPTZ, MOMENTS)],
)
def test_forms_sort_as_the_values_do(kind: Type, ascending: tuple[str, ...]) -> None:
    forms = [str(FORMS[kind].of_constant(value)).encode() for value in ascending]

    assert forms == sorted(set(forms))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Type.NUMERIC, ("1", "1.0", "1.00")),
        (Type.NUMERIC, ("0", "0.000")),
        (Type.NUMERIC, ("-1.50", "-1.5")),
        (Type.BPCHAR, ("ab", "ab ", "ab    ")),
        (Type.FLOAT8, (0.0, -0.0)),
    ],
)
def test_equal_values_have_one_form(kind: Type, values: tuple[str | float, ...]) -> None:
    """R3.16."""
    assert len({repr(FORMS[kind].of_constant(value)) for value in values}) == 1


def test_text_is_compared_as_it_is() -> None:
    assert FORMS[Type.TEXT].of_constant("a \t") == "a \t"
