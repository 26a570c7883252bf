r"""The constants of a stored expression as texts for their types' input functions.

| type                                   | its text is                                                       |
|----------------------------------------|-------------------------------------------------------------------|
| texts, those of `datum`, and some more | decoded from the datum, which does not depend on any setting      |
| any other: ranges, jsonb, arrays       | that of a literal in the SQL that the server has printed          |

In that SQL such a constant is `'…'::type`; those of one type are in the tree's order, and as many. Only
values are taken from it: they are quoted again before they are executed. The server confirms that a value is
the right one if that matters (`confirmed`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from cdc_replay.filters.datum import decode_datum
from cdc_replay.filters.expression import Constant
from cdc_replay.filters.names import Names, NotPrintableError
from cdc_replay.filters.node_text import TEXTS, UNKNOWN, Node, datum_of, text_datum, varlena

# A backslash is a character like any other: sessions have standard_conforming_strings.
_TOKENS: Final = re.compile(r"""\"(?:[^"]|"")*\"|'(?P<body>(?:[^']|'')*)'""")
_TYPMOD: Final = r"(?:\([\d,]+\))?"


class Literals:
    """The constants of one expression, to be read in the order of the tree."""

    def __init__(self, printed: str, names: Names) -> None:
        self._printed = printed
        self._names = names
        self._of_type: dict[int, Iterator[str]] = {}

    def text(self, constant: Node) -> str:
        """The text of the next constant, which is not NULL.

        Raises:
            NotPrintableError: if it is not known, or is no valid text.
        """
        type_oid = constant.integer("consttype")
        if type_oid in TEXTS:
            data = text_datum(constant)
            text = None if data is None else self._names.characters(data)
        elif type_oid in _DECODED:
            text = _decode(type_oid, datum_of(constant))
        else:
            text = self._printed_text(type_oid)
        if text is None or "\0" in text or not _is_unicode(text):
            raise NotPrintableError(
                f"the value of a constant of {self._describe_type(type_oid)} is not known"
            )
        return text

    def check_all_used(self) -> None:
        """Raise unless all literals of the types that were read are used.

        Raises:
            NotPrintableError: if there are more of them than constants.
        """
        for type_oid, literals in self._of_type.items():
            if next(literals, None) is not None:
                raise NotPrintableError(f"constants of {self._describe_type(type_oid)} cannot be told apart")

    def _printed_text(self, type_oid: int) -> str | None:
        if type_oid not in self._of_type:
            self._of_type[type_oid] = _literals(self._printed, self._names.label(type_oid))
        return next(self._of_type[type_oid], None)

    def _describe_type(self, type_oid: int) -> str:
        return "no type" if type_oid == UNKNOWN else f"type {self._names.label(type_oid)}"


def _literals(printed: str, label: str) -> Iterator[str]:
    """The values of `'…'::label`, in order."""
    # Some types have a length within their name: time(3) with time zone.
    first, *others = label.split(" ")
    name = " ".join([re.escape(first) + _TYPMOD, *map(re.escape, others)]) + _TYPMOD
    if label.endswith("[]"):
        name = re.escape(label)
    typed = re.compile(rf"::{name}(?![\w$\[(.\"]| varying| with| without)")
    for token in _TOKENS.finditer(printed):
        if token["body"] is not None and typed.match(printed, token.end()):
            yield token["body"].replace("''", "'")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- by datum


def _decode(type_oid: int, datum: bytes) -> str | None:
    decode = _DECODERS.get(type_oid)
    if decode is not None:
        return decode(datum)
    constant = decode_datum(type_oid, datum)
    if not isinstance(constant, Constant) or constant.value is None:
        return None
    return str(constant.value).lower() if isinstance(constant.value, bool) else str(constant.value)


def _oid(datum: bytes) -> str | None:
    return str(int.from_bytes(datum[:4], "little")) if len(datum) in _BY_VALUE else None


_BY_VALUE: Final = (4, 8)
_INTERVAL: Final = struct.Struct("<qii")
_ENDLESS: Final = {
    (2**63 - 1, 2**31 - 1, 2**31 - 1): "infinity",
    (-(2**63), -(2**31), -(2**31)): "-infinity",
}


def _interval(datum: bytes) -> str | None:
    """In a form that PostgreSQL reads under any `IntervalStyle`."""
    if len(datum) != _INTERVAL.size:
        return None
    microseconds, days, months = _INTERVAL.unpack(datum)
    if (endless := _ENDLESS.get((microseconds, days, months))) is not None:
        return endless
    seconds, fraction = divmod(abs(microseconds), 1_000_000)
    clock = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}.{fraction:06}"
    return f"{months} mons {days} days {'-' if microseconds < 0 else '+'}{clock}"


def _bits(datum: bytes) -> str | None:
    body = varlena(datum)
    if body is None or len(body) < _BY_VALUE[0]:
        return None
    count = int.from_bytes(body[:4], "little")
    digits = "".join(f"{byte:08b}" for byte in body[4:])
    return digits[:count] if len(digits) - 8 < count <= len(digits) else None


_OIDS: Final = (24, 26, 28, 29, 2202, 2203, 2204, 2205, 2206, 3734, 3769, 4089, 4096, 4191)
"""regproc, oid, xid, cid, regprocedure, regoper, regoperator, regclass, regtype, regconfig, regdictionary,
regnamespace, regrole, regcollation: their input functions read numbers."""

_DECODERS: Final[Mapping[int, Callable[[bytes], str | None]]] = {
    **dict.fromkeys(_OIDS, _oid),
    1186: _interval,
    1560: _bits,  # bit
    1562: _bits,  # varbit
}
_DATUM: Final = (16, 17, 20, 21, 23, 700, 701, 1082, 1083, 1114, 1184, 1700, 2950)
_DECODED: Final = frozenset({*_DATUM, *_DECODERS})
