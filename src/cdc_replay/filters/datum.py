"""Constants as a server stores them → values.

A datum is the memory of a server process: its byte order, encoding and struct layout. Little-endian and UTF-8
are assumed. What cannot be decoded is None, never a guess, and a decoded value is used only if the server
prints the same one (`PrintedFilter`), which reveals a wrong assumption about byte order, layout or encoding.

| type                                | memory                                                               |
|-------------------------------------|----------------------------------------------------------------------|
| bool, integers, oid, floats,        | by value: eight bytes, of which the type's own are the first         |
| date, time, timestamp, timestamptz  |                                                                      |
| text, varchar, bpchar, bytea        | varlena: four bytes of length and flags, or one, then the bytes      |
| numeric                             | varlena of sign, scale, weight, and digits to the base of 10000      |
| uuid                                | its sixteen bytes                                                    |
| arrays                              | varlena of dimensions, values' offset if there are NULLs, element    |
|                                     | type, lengths, bounds, a bitmap of what is not NULL, values          |
"""

from __future__ import annotations

import itertools
import math
import re
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from cdc_replay.filters.expression import Array, Constant, Expression, Type
from cdc_replay.filters.node_text import varlena

Value: TypeAlias = bool | int | float | str

_ARRAY_START: Final = struct.Struct("<4i")
_ARRAY_HEADER: Final = struct.Struct("<6i")  # varlena, dimensions, values' offset, type, length, lower bound


def decode_datum(type_oid: int, datum: bytes) -> Expression | None:
    """The constant that `datum` is, or None if its form or type is not supported."""
    if type_oid in _ARRAYS:
        return _decode_array(datum)
    layout = _LAYOUTS.get(type_oid)
    if layout is None:
        return None
    value = layout.decode(_own_bytes(datum, layout))
    return None if value is None else Constant(type_oid, value)


def _own_bytes(datum: bytes, layout: _Layout) -> bytes:
    """The datum's first bytes if it is passed by value and the others only repeat its sign."""
    if layout.width is None or not layout.is_by_value:
        return datum
    padding = set(datum[layout.width :])
    return datum[: layout.width] if padding in ({0}, {0xFF}, set()) else b""


class PrintedFilter:
    """A filter as the server prints it, to look up constants in."""

    def __init__(self, sql: str) -> None:
        self._sql = sql
        self._integers = frozenset(_INTEGERS.findall(sql))
        floats = [float(text) for text in _FLOATS.findall(sql)]
        self._floats = {
            kind: frozenset(filter(None, (_pack(kind, value) for value in floats))) for kind in _FLOAT_FORMATS
        }

    def holds(self, constant: Constant) -> bool:
        """Whether the value of `constant` is printed."""
        match constant.value:
            case None | bool():
                return True
            case float(value):
                return _pack(constant.type_oid, value) in self._floats[constant.type_oid]
            case int(value):
                return str(abs(value)) in self._integers
            case text:
                in_array = text.replace("\\", "\\\\").replace('"', '\\"')
                return any(form.replace("'", "''") in self._sql for form in (text, in_array))


_INTEGERS: Final = re.compile(r"\d+")
_FLOATS: Final = re.compile(r"[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|Infinity)|NaN")
_FLOAT_FORMATS: Final[Mapping[int, str]] = {Type.FLOAT4: "<f", Type.FLOAT8: "<d"}


def _pack(type_oid: int, value: float) -> bytes | None:
    """The value's bytes, which differ for 0 and -0 and are equal for NaN; None if it is out of range."""
    try:
        return struct.pack(_FLOAT_FORMATS[type_oid], value)
    except OverflowError:
        return None


# ---- by value


def _reader(pattern: str) -> Callable[[bytes], int | float | None]:
    form = struct.Struct(pattern)

    def read(data: bytes) -> int | float | None:
        if len(data) != form.size:
            return None
        value: int | float = form.unpack(data)[0]
        return value

    return read


def _decode_bool(data: bytes) -> bool | None:
    return {b"\0": False, b"\1": True}.get(data)


_read_int4: Final = _reader("<i")
_read_int8: Final = _reader("<q")

_MICROSECONDS_PER_DAY: Final = 86_400_000_000
_DAYS_BEFORE_2000: Final = 730_425  # from 0000-03-01, with which the calendar's computation begins
_DAYS_PER_400_YEARS: Final = 146_097
_UUID_BYTES: Final = 16


def _decode_date(data: bytes) -> str | None:
    days = _read_int4(data)
    if not isinstance(days, int):
        return None
    return _infinity(days, 32) or _calendar_text(days, "")


def _decode_timestamp(data: bytes) -> str | None:
    return _timestamp_text(data, "")


def _decode_timestamptz(data: bytes) -> str | None:
    return _timestamp_text(data, "+00")


def _timestamp_text(data: bytes, zone: str) -> str | None:
    microseconds = _read_int8(data)
    if not isinstance(microseconds, int):
        return None
    days, of_day = divmod(microseconds, _MICROSECONDS_PER_DAY)
    return _infinity(microseconds, 64) or _calendar_text(days, f" {_clock_text(of_day)}{zone}")


def _decode_time(data: bytes) -> str | None:
    microseconds = _read_int8(data)
    if not isinstance(microseconds, int) or not 0 <= microseconds <= _MICROSECONDS_PER_DAY:
        return None
    return _clock_text(microseconds)


def _infinity(value: int, bits: int) -> str | None:
    return {-(1 << bits - 1): "-infinity", (1 << bits - 1) - 1: "infinity"}.get(value)


def _clock_text(microseconds: int) -> str:
    seconds, fraction = divmod(microseconds, 1_000_000)
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{clock}.{fraction:06}".rstrip("0") if fraction else clock


def _calendar_text(days: int, time: str) -> str:
    """The day `days` after 2000-01-01, as ISO 8601 but with BC, which `time` precedes."""
    era, day_of_era = divmod(days + _DAYS_BEFORE_2000, _DAYS_PER_400_YEARS)
    year_of_era = (
        day_of_era - day_of_era // 1460 + day_of_era // 36524 - day_of_era // (_DAYS_PER_400_YEARS - 1)
    ) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month_from_march = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month_from_march + 2) // 5 + 1
    month = (month_from_march + 2) % 12 + 1
    year = era * 400 + year_of_era + (month <= 2)  # noqa: PLR2004 - January and February end the year
    suffix = "" if year > 0 else " BC"
    return f"{year if year > 0 else 1 - year:04}-{month:02}-{day:02}{time}{suffix}"


# ---- varlena


def _decode_text(datum: bytes) -> str | None:
    body = varlena(datum)
    try:
        return None if body is None else body.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _decode_bytea(datum: bytes) -> str | None:
    body = varlena(datum)
    return None if body is None else rf"\x{body.hex()}"


_SPECIAL_NUMERICS: Final = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
_SHORT: Final = 0x8000
_BASE_DIGITS: Final = 4


def _decode_numeric(datum: bytes) -> str | None:
    """Sign, scale and weight share two bytes in the short form; the long one has two more for the weight."""
    body = varlena(datum)
    if body is None or len(body) < 2 or len(body) % 2:  # noqa: PLR2004 - the header's two bytes
        return None
    (header,) = struct.unpack_from("<H", body)
    if header in _SPECIAL_NUMERICS:
        return _SPECIAL_NUMERICS[header]
    if header & _SHORT:
        scale, is_negative = header >> 7 & 0x3F, bool(header & 0x2000)
        weight = (header & 0x3F) - (header & 0x40)
        digits = body[2:]
    elif len(body) >= 4:  # noqa: PLR2004 - header and weight
        scale, is_negative = header & 0x3FFF, bool(header & 0x4000)
        (weight,) = struct.unpack_from("<h", body, 2)
        digits = body[4:]
    else:
        return None
    text = _numeric_text([group for (group,) in struct.iter_unpack("<h", digits)], weight, scale)
    return f"-{text}" if is_negative and text is not None else text


def _numeric_text(groups: list[int], weight: int, scale: int) -> str | None:
    """The number whose first group of four digits counts 10000 to the power of `weight`."""
    if not all(0 <= group < 10**_BASE_DIGITS for group in groups):
        return None
    written = "".join(f"{group:0{_BASE_DIGITS}}" for group in groups)
    point = (weight + 1) * _BASE_DIGITS
    whole = written[: max(point, 0)].ljust(max(point, 0), "0").lstrip("0") or "0"
    fraction = ("0" * max(-point, 0) + written[max(point, 0) :])[:scale].ljust(scale, "0")
    return f"{whole}.{fraction}" if scale else whole


# ---- other types


def _decode_uuid(datum: bytes) -> str | None:
    return str(uuid.UUID(bytes=datum)) if len(datum) == _UUID_BYTES else None


@dataclass(frozen=True, slots=True)
class _Layout:
    """A type's layout in memory; `width` is None for a varlena, `alignment` is that in an array."""

    decode: Callable[[bytes], Value | None]
    width: int | None
    alignment: int
    is_by_value: bool = True


_LAYOUTS: Final[Mapping[int, _Layout]] = {
    Type.BOOL: _Layout(_decode_bool, 1, 1),
    Type.INT2: _Layout(_reader("<h"), 2, 2),
    Type.INT4: _Layout(_read_int4, 4, 4),
    Type.INT8: _Layout(_read_int8, 8, 8),
    Type.OID: _Layout(_reader("<I"), 4, 4),
    Type.FLOAT4: _Layout(_reader("<f"), 4, 4),
    Type.FLOAT8: _Layout(_reader("<d"), 8, 8),
    Type.DATE: _Layout(_decode_date, 4, 4),
    Type.TIME: _Layout(_decode_time, 8, 8),
    Type.TIMESTAMP: _Layout(_decode_timestamp, 8, 8),
    Type.TIMESTAMPTZ: _Layout(_decode_timestamptz, 8, 8),
    Type.UUID: _Layout(_decode_uuid, 16, 1, is_by_value=False),
    Type.TEXT: _Layout(_decode_text, None, 4, is_by_value=False),
    Type.VARCHAR: _Layout(_decode_text, None, 4, is_by_value=False),
    Type.BPCHAR: _Layout(_decode_text, None, 4, is_by_value=False),
    Type.BYTEA: _Layout(_decode_bytea, None, 4, is_by_value=False),
    Type.NUMERIC: _Layout(_decode_numeric, None, 4, is_by_value=False),
}
_ARRAYS: Final = frozenset(member for member in Type if member.name.endswith("_ARRAY"))


# ---- arrays


def _decode_array(datum: bytes) -> Expression | None:
    """An array of one dimension, or an empty one."""
    if len(datum) < _ARRAY_START.size or datum[0] & 3:
        return None
    _, dimensions, values_at, element = _ARRAY_START.unpack_from(datum)
    if dimensions == 0:
        return Array(())
    layout = _LAYOUTS.get(element)
    if dimensions != 1 or layout is None or len(datum) < _ARRAY_HEADER.size:
        return None
    count = _ARRAY_HEADER.unpack_from(datum)[4]
    bitmap = datum[_ARRAY_HEADER.size : values_at] if values_at else None
    present = [bitmap is None or bool(bitmap[n >> 3] >> (n & 7) & 1) for n in range(count)]
    data = datum[values_at or _ARRAY_HEADER.size :]
    values = list(itertools.islice(_elements(data, layout), sum(present)))
    if len(values) != sum(present) or None in values:
        return None
    following = iter(values)
    return Array(tuple(Constant(element, next(following) if is_there else None) for is_there in present))


def _elements(data: bytes, layout: _Layout) -> Iterator[Value | None]:
    """The consecutive values; they end with None at the first that cannot be decoded."""
    offset = 0
    while offset < len(data):
        offset = math.ceil(offset / layout.alignment) * layout.alignment
        width = layout.width or int.from_bytes(data[offset : offset + 4], "little") >> 2
        if width == 0 or (layout.width is None and data[offset] & 3):
            yield None
            return
        yield layout.decode(data[offset : offset + width])
        offset += width
