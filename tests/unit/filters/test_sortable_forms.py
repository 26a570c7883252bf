"""The forms in which values are compared have PostgreSQL's equality and order."""

from __future__ import annotations

import itertools
import math

import pyarrow as pa
import pyarrow.compute as pc
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
DOUBLES = (
    *("-Infinity", "-1.7976931348623157e+308", "-1", "-2.2250738585072014e-308", "-5e-324", "0", "5e-324"),
    *("2.2250738585072014e-308", "0.1", "1", "1.0000000000000002", "1.7976931348623157e+308", "Infinity"),
    "NaN",
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
    [(Type.NUMERIC, NUMBERS), (Type.DATE, DAYS), (Type.TIMESTAMPTZ, MOMENTS), (Type.FLOAT8, DOUBLES)],
)
def test_forms_sort_as_their_values(kind: Type, ascending: tuple[str, ...]) -> None:
    forms = [FORMS[kind].constant(value) for value in ascending]

    assert all(pc.less(lower, higher).as_py() for lower, higher in itertools.pairwise(forms))
    assert FORMS[kind].from_texts(pa.array(ascending)).to_pylist() == [form.as_py() for form in forms]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Type.NUMERIC, ("1", "1.0", "1.00")),
        (Type.NUMERIC, ("0", "0.000")),
        (Type.NUMERIC, ("-1.50", "-1.5")),
        (Type.BPCHAR, ("ab", "ab ", "ab    ")),
        (Type.FLOAT8, (0.0, -0.0, "-0")),
        (Type.FLOAT8, ("NaN", math.nan, -math.nan)),
        (Type.FLOAT4, ("0.1", 0.10000000149011612)),
    ],
)
def test_equal_values_have_one_form(kind: Type, values: tuple[str | float, ...]) -> None:
    """R3.16."""
    assert len({FORMS[kind].constant(value).as_py() for value in values}) == 1


def test_text_is_compared_as_it_is() -> None:
    assert FORMS[Type.TEXT].constant("a \t").as_py() == "a \t"
