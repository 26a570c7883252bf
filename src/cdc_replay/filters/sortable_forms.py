"""How values are compared in Spark: PostgreSQL's text → a form whose equality and order are PostgreSQL's.

Spark's own types are used where they are PostgreSQL's: booleans, integers, doubles. Elsewhere the form is a
string that Spark compares byte by byte, so nothing is ever rounded, out of range, or without a meaning:

| type                         | form                                                                        |
|------------------------------|-----------------------------------------------------------------------------|
| bool; integers, oid          | boolean; bigint                                                             |
| float4, float8               | double, -0 as 0: Spark has NaN equal to itself and above all, as PostgreSQL |
| text, varchar, uuid, bytea,  | the text itself: it is canonical, and for the last three in order           |
| time                         |                                                                             |
| bpchar                       | the text without trailing blanks, which do not count (R3.16)                |
| numeric                      | rank, length of the whole part, digits without the fraction's zeros         |
| date, timestamp, timestamptz | the text with a year of seven digits; before Christ `/` and complements     |

A numeric's rank is 0 for -Infinity, 1 below zero, 2 from zero on, 3 for Infinity, 4 for NaN. Below zero
everything is complemented and ends with a character above the digits, so that it sorts the other way round.

Every form exists for columns (of Spark) and for constants (of Python), and where that is simple enough for
arrays (of Arrow). Nothing of Spark here raises for any text, because Spark may evaluate an expression for a
row that the filter is not meant for; arrays hold what the filter is meant for, which PostgreSQL has printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F

from cdc_replay.filters.expression import Type

Plain: TypeAlias = bool | int | float | str

_DIGITS: Final = "0123456789"
_COMPLEMENTS: Final = "9876543210"
_COMPLEMENT_TABLE: Final = str.maketrans(_DIGITS, _COMPLEMENTS)
_YEAR_DIGITS: Final = 7
_LENGTH_DIGITS: Final = 6  # a numeric has at most 131072 digits before the point
_BC_YEAR_DIGITS: Final = 4  # the first year is 4714 BC
_YEAR_END: Final = 4  # of a year that is printed with as few digits as any
_SPECIAL_NUMBERS: Final = {"-Infinity": "0", "Infinity": "3", "NaN": "4"}
_ABOVE_DIGITS: Final = ":"


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a type: its Spark type, a column of text in that form, a constant's value in that form.

    `of_array` is for an Arrow array of text; None where only Spark has the form.
    """

    spark_type: str
    of_text: Callable[[SparkColumn], SparkColumn]
    of_constant: Callable[[Plain], Plain]
    of_array: Callable[[pa.StringArray], pa.Array] | None = None

    @property
    def arrow_type(self) -> pa.DataType:
        """The Arrow type of `of_array`'s result."""
        return _ARROW_TYPES[self.spark_type]


_ARROW_TYPES: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
}


def _as_it_is(value: Plain) -> Plain:
    return value


# ---- numbers


def _bigint(text: SparkColumn) -> SparkColumn:
    return text.try_cast("bigint")


def _double(width: str) -> Callable[[SparkColumn], SparkColumn]:
    def of_text(text: SparkColumn) -> SparkColumn:
        number = text.try_cast(width).cast("double")
        return F.when(number == F.lit(0.0), F.lit(0.0)).otherwise(number)

    return of_text


def _plain_double(value: Plain) -> Plain:
    return float(value) + 0.0  # -0.0 + 0.0 is 0.0


def numeric_of_text(text: SparkColumn) -> SparkColumn:
    """A numeric's text (or an integer's) in the form that sorts."""
    is_negative = text.startswith("-")
    magnitude = F.when(is_negative, F.substring(text, 2, 1 << 30)).otherwise(text)
    whole = F.substring_index(magnitude, ".", 1)
    after_point = F.substr(magnitude, F.length(whole) + F.lit(2))
    digits = F.concat(
        F.lpad(F.length(whole).cast("string"), _LENGTH_DIGITS, "0"),
        whole,
        F.rtrim(after_point, F.lit("0")),
    )
    number = F.when(
        is_negative, F.concat(F.lit("1"), F.translate(digits, _DIGITS, _COMPLEMENTS), F.lit(_ABOVE_DIGITS))
    ).otherwise(F.concat(F.lit("2"), digits))
    (first, first_rank), *rest = _SPECIAL_NUMBERS.items()
    form = F.when(text == first, F.lit(first_rank))
    for special, rank in rest:
        form = form.when(text == special, F.lit(rank))
    return form.otherwise(number)


def _numeric_of_constant(value: Plain) -> Plain:
    text = str(value)
    if text in _SPECIAL_NUMBERS:
        return _SPECIAL_NUMBERS[text]
    whole, _, fraction = text.removeprefix("-").partition(".")
    digits = f"{len(whole):0{_LENGTH_DIGITS}}{whole}{fraction.rstrip('0')}"
    if text.startswith("-"):
        return "1" + digits.translate(_COMPLEMENT_TABLE) + _ABOVE_DIGITS
    return "2" + digits


def numerics_of_array(texts: pa.StringArray) -> pa.StringArray:
    """The same for an array, or a scalar."""
    is_negative = pc.starts_with(texts, "-")
    magnitude = pc.if_else(is_negative, pc.utf8_slice_codeunits(texts, 1), texts)
    whole = pc.replace_substring_regex(magnitude, pattern=r"\..*", replacement="")
    fraction = pc.replace_substring_regex(magnitude, pattern=r"^[^.]*\.?", replacement="")
    length = pc.utf8_lpad(pc.utf8_length(whole).cast(pa.string()), _LENGTH_DIGITS, "0")
    digits = pc.binary_join_element_wise(length, whole, pc.utf8_rtrim(fraction, "0"), "")
    form = pc.binary_join_element_wise("2", digits, "")
    if pc.any(is_negative).as_py():
        below = pc.binary_join_element_wise("1", _complemented(digits), _ABOVE_DIGITS, "")
        form = pc.if_else(is_negative, below, form)
    for special, rank in _SPECIAL_NUMBERS.items():
        form = pc.if_else(pc.equal(texts, special), rank, form)
    return form


def _complemented(digits: pa.StringArray) -> pa.StringArray:
    for low, high in zip(_DIGITS[:5], reversed(_DIGITS), strict=False):
        # By a detour over a character that no digit is.
        for found, replaced in ((low, _ABOVE_DIGITS), (high, low), (_ABOVE_DIGITS, high)):
            digits = pc.replace_substring(digits, pattern=found, replacement=replaced)
    return digits


# ---- times


def _parse_timestamp_text(text: SparkColumn) -> SparkColumn:
    # "infinity" sorts above and "-infinity" below all digits; "/" stands between "-" and the digits.
    year = F.substring_index(text, "-", 1)
    before_christ = F.concat(
        F.lit("/"),
        F.translate(F.substring(text, 1, _BC_YEAR_DIGITS), _DIGITS, _COMPLEMENTS),
        F.substr(text, F.lit(_BC_YEAR_DIGITS + 1), F.length(text) - F.lit(_BC_YEAR_DIGITS + len(" BC"))),
    )
    ordinary = F.concat(F.lpad(year, _YEAR_DIGITS, "0"), F.substr(text, F.length(year) + F.lit(1)))
    return (
        F.when(text.endswith("infinity"), text).when(text.endswith(" BC"), before_christ).otherwise(ordinary)
    )


def _parse_timestamp_constant(value: Plain) -> Plain:
    text = str(value)
    if text.endswith("infinity"):
        return text
    if text.endswith(" BC"):
        year, rest = text[:_BC_YEAR_DIGITS], text[_BC_YEAR_DIGITS:].removesuffix(" BC")
        return "/" + year.translate(_COMPLEMENT_TABLE) + rest
    year, _, rest = text.partition("-")
    return f"{year:0>{_YEAR_DIGITS}}-{rest}"


def _moments_of_array(texts: pa.StringArray) -> pa.StringArray:
    has_four_digits = pc.equal(pc.utf8_slice_codeunits(texts, _YEAR_END, _YEAR_END + 1), "-")
    is_ordinary = pc.and_(has_four_digits, pc.invert(pc.ends_with(texts, " BC")))
    forms = pc.binary_join_element_wise("0" * (_YEAR_DIGITS - _YEAR_END), texts, "")
    if pc.all(is_ordinary).as_py() is not False:
        return forms
    # Infinities, and years before Christ or after 9999.
    rare = texts.filter(pc.invert(is_ordinary)).to_pylist()
    return pc.replace_with_mask(forms, pc.invert(is_ordinary), pa.array(map(_parse_timestamp_constant, rare)))


def midnight_of(date: SparkColumn) -> SparkColumn:
    """A date's form as a timestamp's."""
    return F.when(date.endswith("infinity"), date).otherwise(F.concat(date, F.lit(" 00:00:00")))


def midnights_of_array(dates: pa.StringArray) -> pa.StringArray:
    """The same for an array, or a scalar."""
    is_infinite = pc.ends_with(dates, "infinity")
    return pc.if_else(is_infinite, dates, pc.binary_join_element_wise(dates, " 00:00:00", ""))


def date_of(timestamp: SparkColumn) -> SparkColumn:
    """A timestamp's form as a date's."""
    return F.substring_index(timestamp, " ", 1)


def dates_of_array(timestamps: pa.StringArray) -> pa.StringArray:
    """The same for an array, or a scalar."""
    return pc.replace_substring_regex(timestamps, pattern=" .*", replacement="")


# ---- text


def trimmed(text: SparkColumn) -> SparkColumn:
    """Text as a bpchar: without trailing blanks."""
    return F.rtrim(text)


def trimmed_array(texts: pa.StringArray) -> pa.StringArray:
    """The same for an array."""
    return pc.utf8_rtrim(texts, characters=" ")


_TEXT: Final = Form("string", lambda text: text, _as_it_is, lambda texts: texts)
_INTEGER: Final = Form("bigint", _bigint, _as_it_is, lambda texts: texts.cast(pa.int64()))
_MOMENT: Final = Form("string", _parse_timestamp_text, _parse_timestamp_constant, _moments_of_array)

FORMS: Final[Mapping[int, Form]] = {
    Type.BOOL: Form(
        "boolean", lambda text: text == F.lit("t"), _as_it_is, lambda texts: pc.equal(texts, "t")
    ),
    Type.INT2: _INTEGER,
    Type.INT4: _INTEGER,
    Type.INT8: _INTEGER,
    Type.OID: _INTEGER,
    Type.NUMERIC: Form("string", numeric_of_text, _numeric_of_constant, numerics_of_array),
    Type.FLOAT4: Form("double", _double("float"), _plain_double),
    Type.FLOAT8: Form("double", _double("double"), _plain_double),
    Type.TEXT: _TEXT,
    Type.VARCHAR: _TEXT,
    Type.BPCHAR: Form("string", trimmed, lambda value: str(value).rstrip(" "), trimmed_array),
    Type.DATE: _MOMENT,
    Type.TIME: _TEXT,
    Type.TIMESTAMP: _MOMENT,
    Type.TIMESTAMPTZ: _MOMENT,
    Type.UUID: _TEXT,
    Type.BYTEA: _TEXT,
}
"""The types that a filter may compute with in Spark."""
