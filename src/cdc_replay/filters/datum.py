"""Constants as a server stores them → values.

A datum is the memory of a server process: its byte order, its encoding, its struct layout. Little-endian is
assumed, and checked where the form is redundant. Text that is not plain ASCII is left to the server, because
its characters depend on the database's encoding, which the stored tree does not tell. What is not understood
is None, never a guess.

| type                  | memory                                                                             |
|-----------------------|------------------------------------------------------------------------------------|
| bool, integers, date  | by value: eight bytes, sign-extended                                               |
| text, varchar, bpchar | varlena: four bytes of length and flags, or one, then the characters               |
| uuid                  | its sixteen bytes                                                                  |
| arrays                | varlena of dimensions, NULL bitmap's offset, element type, lengths, bounds, values |
"""

from __future__ import annotations

import datetime as dt
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from cdc_replay.filters.expression import Array, Constant, Expression, Type

_EPOCH: Final = dt.date(2000, 1, 1)
_BY_VALUE: Final = struct.Struct("<q")
_ARRAY_START: Final = struct.Struct("<4i")
_ARRAY_HEADER: Final = struct.Struct("<6i")  # varlena, dimensions, NULLs' offset, type, length, lower bound


def decode_datum(type_oid: int, datum: bytes) -> Expression | None:
    """The constant that `datum` is, or None where its form or its type is not understood here."""
    decoder = _DECODERS.get(type_oid)
    return None if decoder is None else decoder(type_oid, datum)


def _decode_integer(type_oid: int, datum: bytes) -> Expression | None:
    if len(datum) != _BY_VALUE.size:
        return None
    (value,) = _BY_VALUE.unpack(datum)
    limit = {Type.INT2: 1 << 15, Type.INT4: 1 << 31, Type.INT8: 1 << 63}[Type(type_oid)]
    return Constant(type_oid, value) if -limit <= value < limit else None


def _decode_bool(type_oid: int, datum: bytes) -> Expression | None:
    value = int.from_bytes(datum, "little")
    return Constant(type_oid, value == 1) if value in {0, 1} else None


def _decode_text(type_oid: int, datum: bytes) -> Expression | None:
    body = _varlena(datum)
    return Constant(type_oid, body.decode("ascii")) if body is not None and body.isascii() else None


def _varlena(datum: bytes) -> bytes | None:
    """What a plain varlena holds; None if it is compressed or stored elsewhere."""
    if datum and datum[0] & 1:
        return datum[1:] if datum[0] >> 1 == len(datum) else None
    return datum[4:] if int.from_bytes(datum[:4], "little") == len(datum) << 2 else None


def _decode_date(type_oid: int, datum: bytes) -> Expression | None:
    number = _decode_integer(Type.INT4, datum)
    if not isinstance(number, Constant) or not isinstance(number.value, int):
        return None
    try:
        day = _EPOCH + dt.timedelta(days=number.value)
    except OverflowError:  # infinity, BC, or after 9999
        return None
    return Constant(type_oid, day.isoformat())


def _decode_uuid(type_oid: int, datum: bytes) -> Expression | None:
    return Constant(type_oid, str(uuid.UUID(bytes=datum)))


def _decode_array(_type_oid: int, datum: bytes) -> Expression | None:
    """An array of one dimension without NULLs, or an empty one."""
    if len(datum) < _ARRAY_START.size or datum[0] & 3:
        return None
    _, dimensions, nulls, element = _ARRAY_START.unpack_from(datum)
    if dimensions == 0:
        return Array(())
    if dimensions != 1 or nulls != 0:
        return None
    count = _ARRAY_HEADER.unpack_from(datum)[4]
    elements = tuple(_elements(element, datum[_ARRAY_HEADER.size :], count))
    return Array(elements) if len(elements) == count else None


_ELEMENT_FORMATS: Final = {Type.INT2: "<h", Type.INT4: "<i", Type.INT8: "<q"}


def _elements(type_oid: int, data: bytes, count: int) -> Iterator[Expression]:
    """The elements as far as they are understood."""
    if type_oid in _ELEMENT_FORMATS:
        width = struct.calcsize(_ELEMENT_FORMATS[Type(type_oid)])
        numbers = struct.iter_unpack(_ELEMENT_FORMATS[Type(type_oid)], data[: width * count])
        yield from (Constant(type_oid, value) for (value,) in numbers)
    elif type_oid == Type.TEXT:
        yield from _text_elements(data)


def _text_elements(data: bytes) -> Iterator[Expression]:
    while data:
        length = int.from_bytes(data[:4], "little") >> 2
        text = None if data[0] & 3 else _decode_text(Type.TEXT, data[:length])
        if text is None:
            return
        yield text
        data = data[(length + 3) & ~3 :]  # varlenas in an array start at multiples of four


_DECODERS: Final[Mapping[int, Callable[[int, bytes], Expression | None]]] = {
    Type.BOOL: _decode_bool,
    Type.INT2: _decode_integer,
    Type.INT4: _decode_integer,
    Type.INT8: _decode_integer,
    Type.TEXT: _decode_text,
    Type.VARCHAR: _decode_text,
    Type.BPCHAR: _decode_text,
    Type.DATE: _decode_date,
    Type.UUID: _decode_uuid,
    Type.INT2_ARRAY: _decode_array,
    Type.INT4_ARRAY: _decode_array,
    Type.INT8_ARRAY: _decode_array,
    Type.TEXT_ARRAY: _decode_array,
}
