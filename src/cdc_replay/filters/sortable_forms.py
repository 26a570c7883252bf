"""How values are compared: PostgreSQL's text → a form in Arrow whose equality and order are PostgreSQL's.

Arrow's own types are used where they are PostgreSQL's: booleans and integers. Elsewhere the form is a string
that is compared byte by byte, or an integer, so nothing is ever rounded or out of range:

| type                         | form                                                                        |
|------------------------------|-----------------------------------------------------------------------------|
| bool; integers, oid          | boolean; int64                                                              |
| float4, float8               | int64: the double's bits, in order; -0 as 0, NaN equal to itself, above all |
| text, varchar, uuid, bytea,  | the text itself: it is canonical, and for the last three in order           |
| time                         |                                                                             |
| bpchar                       | the text without trailing blanks, which do not count (R3.16)                |
| numeric                      | rank, length of the whole part, digits without the fraction's zeros         |
| date, timestamp, timestamptz | the text with a year of seven digits; before Christ `/` and complements     |

A numeric's rank is 0 for -Infinity, 1 below zero, 2 from zero on, 3 for Infinity, 4 for NaN. Below zero
everything is complemented and ends with a character above the digits, so that it sorts the other way round.

Equal values have the same form, so it does not matter which of two equal values an expression yields. Texts
are those that PostgreSQL prints for the type; any other raises `pa.ArrowInvalid` or has a meaningless form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.filters.expression import Type

Plain: TypeAlias = bool | int | float | str
Datum: TypeAlias = pa.Array | pa.Scalar

_DIGITS: Final = "0123456789"
_COMPLEMENT_TABLE: Final = str.maketrans(_DIGITS, _DIGITS[::-1])
_YEAR_DIGITS: Final = 7
_LENGTH_DIGITS: Final = 6  # a numeric has at most 131072 digits before the point
_BC_YEAR_DIGITS: Final = 4  # the first year is 4714 BC
_YEAR_END: Final = 4  # of a year that is printed with as few digits as any
_SPECIAL_NUMBERS: Final = {"-Infinity": "0", "Infinity": "3", "NaN": "4"}
_ABOVE_DIGITS: Final = ":"
_MAX_INT64: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a type: its Arrow type, and what converts an array of PostgreSQL's texts to it."""

    arrow_type: pa.DataType
    from_texts: Callable[[pa.StringArray], pa.Array]

    def constant(self, value: Plain | None) -> pa.Scalar:
        """A constant's value in this form."""
        if value is None:
            return pa.scalar(None, self.arrow_type)
        text = ("f", "t")[value] if isinstance(value, bool) else str(value)
        return self.from_texts(pa.array([text], pa.string()))[0]


# ---- numbers


def form_doubles(doubles: Datum) -> Datum:
    """Doubles in the form that sorts."""
    if isinstance(doubles, pa.Scalar):
        return form_doubles(pa.array([doubles.as_py()], pa.float64()))[0]
    bits = pc.add(doubles, 0.0).view(pa.int64())  # -0.0 + 0.0 is 0.0
    # Below zero the bits after the sign grow with the magnitude.
    form = pc.if_else(pc.less(bits, 0), pc.bit_wise_xor(bits, _MAX_INT64), bits)
    return pc.if_else(pc.is_nan(doubles), _MAX_INT64, form)


def form_numerics(texts: Datum) -> Datum:
    """Texts of numerics or integers in the form that sorts."""
    is_negative = pc.starts_with(texts, "-")
    magnitude = pc.if_else(is_negative, pc.utf8_slice_codeunits(texts, 1), texts)
    whole = pc.replace_substring_regex(magnitude, pattern=r"\..*", replacement="")
    fraction = pc.replace_substring_regex(magnitude, pattern=r"^[^.]*\.?", replacement="")
    length = pc.utf8_lpad(pc.utf8_length(whole).cast(pa.string()), _LENGTH_DIGITS, "0")
    digits = pc.binary_join_element_wise(length, whole, pc.utf8_rtrim(fraction, "0"), "")
    form = pc.binary_join_element_wise("2", digits, "")
    if pc.any(is_negative).as_py():
        below = pc.binary_join_element_wise("1", _complement(digits), _ABOVE_DIGITS, "")
        form = pc.if_else(is_negative, below, form)
    for special, rank in _SPECIAL_NUMBERS.items():
        form = pc.if_else(pc.equal(texts, special), rank, form)
    return form


def _complement(digits: Datum) -> Datum:
    for low, high in zip(_DIGITS[:5], reversed(_DIGITS), strict=False):
        # Swapped by way of a character that is not a digit.
        for old, new in ((low, _ABOVE_DIGITS), (high, low), (_ABOVE_DIGITS, high)):
            digits = pc.replace_substring(digits, pattern=old, replacement=new)
    return digits


# ---- dates and timestamps


def _form_timestamps(texts: pa.StringArray) -> pa.StringArray:
    has_four_digits = pc.equal(pc.utf8_slice_codeunits(texts, _YEAR_END, _YEAR_END + 1), "-")
    is_ordinary = pc.and_(has_four_digits, pc.invert(pc.ends_with(texts, " BC")))
    forms = pc.binary_join_element_wise("0" * (_YEAR_DIGITS - _YEAR_END), texts, "")
    if pc.all(is_ordinary).as_py() is not False:
        return forms
    # Infinities, and years before Christ or after 9999.
    rare = texts.filter(pc.invert(is_ordinary)).to_pylist()
    return pc.replace_with_mask(forms, pc.invert(is_ordinary), pa.array(map(_form_rare_timestamp, rare)))


def _form_rare_timestamp(text: str) -> str:
    # "infinity" sorts above and "-infinity" below all digits; "/" stands between "-" and the digits.
    if text.endswith("infinity"):
        return text
    if text.endswith(" BC"):
        year, rest = text[:_BC_YEAR_DIGITS], text[_BC_YEAR_DIGITS:].removesuffix(" BC")
        return "/" + year.translate(_COMPLEMENT_TABLE) + rest
    year, _, rest = text.partition("-")
    return f"{year:0>{_YEAR_DIGITS}}-{rest}"


def date_to_timestamp(dates: Datum) -> Datum:
    """Forms of dates as those of timestamps: midnight."""
    is_infinite = pc.ends_with(dates, "infinity")
    return pc.if_else(is_infinite, dates, pc.binary_join_element_wise(dates, " 00:00:00", ""))


def timestamp_to_date(timestamps: Datum) -> Datum:
    """Forms of timestamps as those of dates."""
    return pc.replace_substring_regex(timestamps, pattern=" .*", replacement="")


# ---- text


def trim_blanks(texts: Datum) -> Datum:
    """Text as a bpchar: without trailing blanks."""
    return pc.utf8_rtrim(texts, characters=" ")


_TEXT: Final = Form(pa.string(), lambda texts: texts)
_INTEGER: Final = Form(pa.int64(), lambda texts: texts.cast(pa.int64()))
_TIMESTAMP: Final = Form(pa.string(), _form_timestamps)

FORMS: Final[Mapping[int, Form]] = {
    Type.BOOL: Form(pa.bool_(), lambda texts: pc.equal(texts, "t")),
    Type.INT2: _INTEGER,
    Type.INT4: _INTEGER,
    Type.INT8: _INTEGER,
    Type.OID: _INTEGER,
    Type.NUMERIC: Form(pa.string(), form_numerics),
    Type.FLOAT4: Form(pa.int64(), lambda texts: form_doubles(texts.cast(pa.float32()).cast(pa.float64()))),
    Type.FLOAT8: Form(pa.int64(), lambda texts: form_doubles(texts.cast(pa.float64()))),
    Type.TEXT: _TEXT,
    Type.VARCHAR: _TEXT,
    Type.BPCHAR: Form(pa.string(), trim_blanks),
    Type.DATE: _TIMESTAMP,
    Type.TIME: _TEXT,
    Type.TIMESTAMP: _TIMESTAMP,
    Type.TIMESTAMPTZ: _TIMESTAMP,
    Type.UUID: _TEXT,
    Type.BYTEA: _TEXT,
}
"""The types that a filter may compute with in Arrow."""
