"""Random filters over the table of `generated_values`, every part of which has an exact rule.

source = Source(random.Random(seed))     # the same seed gives the same filters
condition(source, depth=3)               # "((i4 % 7) = any (array[1, null])) is not true"
systematic(source)                       # one filter for each operator on each pair of types

Nothing here can fail in PostgreSQL: integer arithmetic is made of remainders, of which sums and products fit
every type.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from cdc_replay.filters.operators import COMPARISON_SYMBOLS
from integration.filters.generated_values import COLUMNS, Values, quoted

INTEGERS: Final = ("int2", "int4", "int8")
TEXTS: Final = ("text", "varchar", "bpchar")
ORDERED: Final = tuple(kind for kind in COLUMNS if kind not in TEXTS)

COMPARABLE: Final = (
    *((kind, kind) for kind in ORDERED),
    *((left, right) for left in INTEGERS for right in INTEGERS),
    *(("numeric", kind) for kind in INTEGERS),
    *(("float8", kind) for kind in INTEGERS),
    *(("float4", "float8"), ("float8", "float4"), ("date", "timestamp"), ("timestamp", "date")),
)
CASTS: Final[Mapping[str, tuple[str, ...]]] = {
    "int4": ("int2",),
    "int8": ("int2", "int4", "oid"),
    "numeric": INTEGERS,
    "float4": INTEGERS,
    "float8": (*INTEGERS, "float4"),
    "oid": ("int4",),
    "date": ("timestamp",),
}
"""Type → the types whose every value has one of it."""

PATTERNS: Final = ("", "%", "a%", "%b", "%b%", "a%b", "%a%b%", "abc", "a\\%b", "a\\_b", "a\\\\b%", "%\n%",
                   "%é%", "%.com", "\\%%", "'%", "é", "%%", "ab%cd%ef")  # fmt: skip
WORDS: Final = ("", "a", "ab", "abc", "abc ", "é", "𝄞", "a'b", "a\\b", "%", " ", "NaN")
TEXT_OPERATIONS: Final = (
    "(s like 'a%')",
    "(s not like 'a%')",
    "(s ^@ 'a')",
    "starts_with(v, 'a')",
    "(s || v = 'aab')",
    "(c <> 'abc'::char(2))",
    "(v = 'abc'::varchar(2))",
    "(c::text = 'a')",
    "(s::bpchar = 'a'::bpchar)",
    "(v::bpchar = 'a'::bpchar)",
    "(s::varchar = 'a'::varchar)",
    "(n < (1.005)::numeric(8, 2))",
)
ASCII_WORDS: Final = ("", "a", "ab", "abc ", "B", "~", "0", " ")


@dataclass(frozen=True)
class Source:
    """Where all choices come from."""

    choice: random.Random
    orders_utf8: bool = True
    """Whether the server has `ucs_basic` as 16 and later have it."""

    @property
    def values(self) -> Values:
        return Values(self.choice)

    def one(self, *things: str) -> str:
        return self.choice.choice(things)

    def chance(self, probability: float) -> bool:
        return self.choice.random() < probability


# ---- values


def column(source: Source, kind: str) -> str:
    return source.one(*COLUMNS[kind])


def constant(source: Source, kind: str) -> str:
    """A constant of the type: a literal, a NULL, or a number that is cast to the type."""
    if kind in TEXTS:
        return f"{quoted(source.one(*WORDS))}::{kind}"
    if source.chance(0.04):
        return f"null::{kind}"
    if kind in _NUMBERS and source.chance(0.5):
        return f"({source.one(*_NUMBERS[kind])})::{kind}"
    return source.values.literal(kind)


_NUMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "int2": ("7", "-1", "32767", "-32768", "7::int8"),
    "int4": ("7", "-1", "32768", "7::int2", "2147483647::int8"),
    "int8": ("7", "-1", "2147483648", "7::int2"),
    "oid": ("7", "-10", "4294967295", "0"),
    "numeric": ("7", "-1.50", "0.00", "7::int2", "9223372036854775807", "1e400", "-0.0001"),
    "float4": ("1.5", "100.25", "-2", "0.0"),
    "float8": ("1.5", "0.1", "-2", "9223372036854775807", "7::int2", "1e300", "1e-300", "0.0"),
}


def operand(source: Source, kind: str) -> str:
    """A column, and less often a constant."""
    return column(source, kind) if source.chance(0.7) else constant(source, kind)


def value(source: Source, kind: str, depth: int) -> str:
    """An expression of the type, at most `depth` deep."""
    if depth <= 0:
        return operand(source, kind)
    return source.choice.choice((*_COMPUTED.get(kind, ()), *_CHOSEN))(source, kind, depth - 1)


def _coalesce(source: Source, kind: str, depth: int) -> str:
    return f"coalesce({value(source, kind, depth)}, {operand(source, kind)})"


def _case(source: Source, kind: str, depth: int) -> str:
    then, otherwise = value(source, kind, depth), operand(source, kind)
    return f"case when {condition(source, depth)} then {then} else {otherwise} end"


def _switch(source: Source, kind: str, depth: int) -> str:
    first = f"when {constant(source, kind)} then {value(source, kind, depth)}"
    second = f"when {operand(source, kind)} then {operand(source, kind)}"
    return f"case {operand(source, kind)} {first} {second} end"


def _null_if(source: Source, kind: str, depth: int) -> str:
    return f"nullif({value(source, kind, depth)}, {operand(source, kind)})"


def _extreme(source: Source, kind: str, depth: int) -> str:
    others = [operand(source, kind) for _ in range(source.choice.randrange(3))]
    return f"{source.one('greatest', 'least')}({', '.join([value(source, kind, depth), *others])})"


def _itself(source: Source, kind: str, _depth: int) -> str:
    return operand(source, kind)


def small(source: Source, kind: str) -> str:
    """An integer of at most two digits."""
    if source.chance(0.3):
        return f"({source.choice.randrange(1, 100)})::{kind}"
    divisor = f"({source.one('2', '3', '7', '10', '100', '-2', '-7', '-1')})::{kind}"
    name = column(source, kind)
    return source.one(f"({name} % {divisor})", f"mod({name}, {divisor})")


def _arithmetic(source: Source, kind: str, _depth: int) -> str:
    """An operation whose wider argument is of the type."""
    other = source.one(*INTEGERS[: INTEGERS.index(kind) + 1])
    left, right = source.choice.sample((kind, other), 2)
    symbol = source.one("+", "-", "*", "/")
    divisor = f"({source.one('1', '2', '3', '10', '-3')})::{right}"
    return f"({small(source, left)} {symbol} {divisor if symbol == '/' else small(source, right)})"


def _wide(source: Source, kind: str, _depth: int) -> str:
    """Arithmetic on all values of a type that is narrower."""
    narrower = source.one(*INTEGERS[: max(INTEGERS.index(kind), 1)])
    if narrower == kind:
        return f"({column(source, kind)} / {source.one('2', '-3')}::{kind})"
    name = f"{column(source, narrower)}::{kind}"
    return source.one(f"(- {name})", f"({name} + {small(source, kind)})", f"({name} * 7::{kind})", name)


def _bits(source: Source, kind: str, depth: int) -> str:
    left, right = value(source, kind, depth), operand(source, kind)
    return source.one(f"(~ {left})", f"({left} & {right})", f"({left} | {right})", f"({left} # {right})")


def _narrowed(source: Source, kind: str, _depth: int) -> str:
    return f"({small(source, source.one(*INTEGERS))})::{kind}"


def _of_integer(source: Source, kind: str, depth: int) -> str:
    return f"({value(source, source.one(*INTEGERS), depth)})::{kind}"


def _of_float4(source: Source, kind: str, depth: int) -> str:
    return f"({value(source, 'float4', depth)})::{kind}"


def _rounded(source: Source, _kind: str, _depth: int) -> str:
    number = source.one("1.005", "-1.005", "0", "99.994", "-0.001", "12345.678", "250")
    return f"({number})::numeric({source.one('8, 2', '8, 0', '8, -2', '20, 10')})"


def _of_timestamp(source: Source, kind: str, depth: int) -> str:
    return f"({value(source, 'timestamp', depth)})::{kind}"


def _of_int4(source: Source, kind: str, depth: int) -> str:
    return f"({value(source, 'int4', depth)})::{kind}"


def _of_oid(source: Source, kind: str, depth: int) -> str:
    return f"({value(source, 'oid', depth)})::{kind}"


def _through_int8(source: Source, kind: str, _depth: int) -> str:
    return f"({column(source, kind)}::int8 / 2)::{kind}"


Maker: TypeAlias = Callable[[Source, str, int], str]

_CHOSEN: Final[tuple[Maker, ...]] = (_coalesce, _case, _switch, _null_if, _extreme, _itself)
_COMPUTED: Final[Mapping[str, tuple[Maker, ...]]] = {
    "int2": (_arithmetic, _wide, _bits, _narrowed),
    "int4": (_arithmetic, _wide, _bits, _narrowed),
    "int8": (_arithmetic, _wide, _bits, _narrowed, _of_oid),
    "oid": (_of_int4, _through_int8),
    "numeric": (_of_integer, _rounded),
    "float4": (_of_integer,),
    "float8": (_of_integer, _of_float4),
    "date": (_of_timestamp,),
}


# ---- conditions


def condition(source: Source, depth: int) -> str:
    """A boolean expression, at most `depth` deep."""
    if depth <= 0:
        return source.choice.choice(_SIMPLE)(source, 0)
    return source.choice.choice((*_SIMPLE, *_CONNECTIVES))(source, depth - 1)


def _comparison(source: Source, depth: int) -> str:
    left, right = source.choice.choice(COMPARABLE)
    symbol = source.one(*COMPARISON_SYMBOLS, "is distinct from", "is not distinct from")
    return f"({value(source, left, depth)} {symbol} {value(source, right, depth)})"


def _between(source: Source, depth: int) -> str:
    kind = source.one(*ORDERED)
    words = f"{source.one('', 'not ')}between {source.one('', 'symmetric ')}"
    bounds = f"{operand(source, kind)} and {operand(source, kind)}"
    return f"({value(source, kind, depth)} {words}{bounds})"


def _membership(source: Source, depth: int) -> str:
    kind = source.one(*ORDERED, "text", "bpchar")
    left = column(source, kind) if kind in TEXTS else value(source, kind, depth)
    elements = [
        constant(source, kind) if kind in TEXTS or source.chance(0.8) else column(source, kind)
        for _ in range(source.choice.randrange(1, 14))
    ]
    if source.chance(0.4):
        return f"({left} {source.one('in', 'not in')} ({', '.join(elements)}))"
    symbol = source.one("=", "<>") if kind in TEXTS else source.one(*COMPARISON_SYMBOLS)
    array = f"array[{', '.join(elements)}]" if source.chance(0.5) else _array_constant(source, kind)
    return f"({left} {symbol} {source.one('any', 'all')} ({array}))"


def _array_constant(source: Source, kind: str) -> str:
    words: Sequence[str] = WORDS if kind in TEXTS else [source.values.value(kind) for _ in range(4)]
    elements = [_array_element(source.one(*words)) for _ in range(source.choice.randrange(6))]
    if source.chance(0.3):
        elements.append("null")
    return f"{quoted('{' + ','.join(elements) + '}')}::{kind}[]"


def _array_element(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(source: Source, depth: int) -> str:
    kind = source.one(*TEXTS)
    word, name = constant(source, kind), column(source, kind)
    chosen = f"case when {condition(source, depth - 1)} then {name} else {word} end"
    left = name if depth <= 0 else source.one(f"coalesce({name}, {word})", chosen)
    return source.one(
        f"({left} {source.one('=', '<>', 'is distinct from')} {constant(source, kind)})",
        f"(nullif({left}, {constant(source, kind)}) is null)",
        f"({source.one('s', 'v')} || {source.one('s2', 'v2')} = {quoted(source.one('aab', '', 'a é'))})",
        f"({column(source, 'bpchar')}::text = {constant(source, 'text')})",
        f"({column(source, 'bpchar')} = {constant(source, 'text')}::bpchar)",
        f"({source.one('s', 'v')}::bpchar = {constant(source, 'bpchar')})",
        f"({column(source, 'text')}::varchar = {constant(source, 'varchar')})",
        f"({column(source, 'varchar')}::text = {constant(source, 'varchar')}::text)",
        f"({source.one('v', 'c')} = {_cut(source)})",
    )


def _cut(source: Source) -> str:
    word = quoted(source.one("abcdef", "a", "", "a b "))
    return f"{word}::{source.one('varchar', 'char')}({source.choice.randrange(1, 5)})"


def _text_order(source: Source, _depth: int) -> str:
    word = quoted(source.one(*ASCII_WORDS))
    symbol = source.one(*COMPARISON_SYMBOLS)
    name = source.one("cc", "cp", 's collate "C"', 'v collate "POSIX"', 'c collate "C"')
    extreme = f"{source.one('greatest', 'least')}({name}, {word})"
    in_utf8 = (
        f"(s collate ucs_basic {symbol} s2 collate ucs_basic)",
        f"(c collate ucs_basic {symbol} c2 collate ucs_basic)",
        f"(s collate ucs_basic {symbol} {constant(source, 'text')})",
    )
    return source.one(
        f"({name} {symbol} {word})",
        f"({extreme} = {constant(source, 'text')})",
        f"({name} {symbol} any (array[{word}, 'abc']))",
        f"(row({name}, i4) {source.one('<', '<=', '>', '>=')} row({word}, 7))",
        *(in_utf8 if source.orders_utf8 else ()),
    )


def _pattern(source: Source, _depth: int) -> str:
    name = source.one("s", "v", "cc", "c::text")
    pattern, other, prefix = (quoted(source.one(*each)) for each in (PATTERNS, PATTERNS, WORDS))
    return source.one(
        f"({name} like {pattern})",
        f"({name} not like {pattern})",
        f"({name} like any (array[{pattern}, {other}]))",
        f"({name} not like all (array[{pattern}, {other}]))",
        f"({name} ^@ {prefix})",
        f"starts_with({name}, {prefix})",
    )


def _rows(source: Source, depth: int) -> str:
    kinds = [source.one(*ORDERED) for _ in range(source.choice.randrange(1, 4))]
    left, right = (", ".join(operand(source, kind) for kind in kinds) for _ in range(2))
    fields = ", ".join(value(source, kind, depth) for kind in kinds)
    return source.one(
        f"(row({left}) {source.one(*COMPARISON_SYMBOLS)} row({right}))",
        f"(row({fields}) is {source.one('', 'not ')}null)",
    )


def _null_test(source: Source, depth: int) -> str:
    kind = source.one(*COLUMNS)
    tested = value(source, kind, depth) if kind in ORDERED else column(source, kind)
    return f"(({tested}) is {source.one('', 'not ')}null)"


def _flag(source: Source, _depth: int) -> str:
    return source.one("b", "b2", "true", "false", "null::boolean")


def _truth(source: Source, depth: int) -> str:
    words = f"{source.one('', 'not ')}{source.one('true', 'false', 'unknown')}"
    return f"({condition(source, depth)} is {words})"


def _junction(source: Source, depth: int) -> str:
    parts = [condition(source, depth) for _ in range(source.choice.randrange(2, 4))]
    return f"({source.one(' and ', ' or ').join(parts)})"


def _negation(source: Source, depth: int) -> str:
    return f"(not {condition(source, depth)})"


def _chosen_condition(source: Source, depth: int) -> str:
    first, second = condition(source, depth), condition(source, depth)
    return f"(case when {first} then {second} when {condition(source, 0)} then {condition(source, 0)} end)"


def _compared_conditions(source: Source, depth: int) -> str:
    return f"({condition(source, depth)} {source.one(*COMPARISON_SYMBOLS)} {condition(source, 0)})"


_SIMPLE: Final[tuple[Callable[[Source, int], str], ...]] = (
    _comparison,
    _comparison,
    _comparison,
    _between,
    _membership,
    _membership,
    _text,
    _text_order,
    _pattern,
    _rows,
    _null_test,
    _flag,
)
_CONNECTIVES: Final[tuple[Callable[[Source, int], str], ...]] = (
    _truth,
    _junction,
    _junction,
    _negation,
    _chosen_condition,
    _compared_conditions,
)


# ---- everything once


def systematic(source: Source) -> list[str]:
    """A filter for each operator on each pair of types, each cast, and constants and arrays of each type."""
    return [
        *(
            f"({column(source, left)} {symbol} {column(source, right)})"
            for left, right in COMPARABLE
            for symbol in COMPARISON_SYMBOLS
        ),
        *_arithmetic_of_each_type(source),
        *(f"({name} {symbol} 'ab')" for name in ("cc", "cp") for symbol in COMPARISON_SYMBOLS),
        *TEXT_OPERATIONS,
        *(
            f"({small(source, wide)}::{kind} = {small(source, kind)})"
            for wide in INTEGERS
            for kind in INTEGERS
        ),
        *(
            f"({column(source, kind)}::{target} <= {column(source, target)})"
            for target, kinds in CASTS.items()
            for kind in kinds
        ),
        *(f"({column(source, kind)} > ({number})::{kind})" for kind in _NUMBERS for number in _NUMBERS[kind]),
        *(f"({column(source, kind)} <= {source.values.literal(kind)})" for kind in ORDERED for _ in range(3)),
        *(
            f"({column(source, kind)} = any ({_array_constant(source, kind)}))"
            for kind in (*ORDERED, "text", "bpchar")
            for _ in range(3)
        ),
        *(
            f"({column(source, 'int4')} {symbol} {quantifier} (array[{column(source, 'int4')}, 7, null]))"
            for symbol in COMPARISON_SYMBOLS
            for quantifier in ("any", "all")
        ),
    ]


def _arithmetic_of_each_type(source: Source) -> list[str]:
    pairs = [(left, right) for left in INTEGERS for right in INTEGERS]
    return [
        *(
            f"({small(source, left)} {symbol} {small(source, right)} > 2)"
            for left, right in pairs
            for symbol in ("+", "-", "*")
        ),
        *(f"({column(source, left)} / 3::{right} >= -2)" for left, right in pairs),
        *(
            f"({column(source, kind)} {symbol} 7::{kind} > 2)"
            for kind in INTEGERS
            for symbol in ("%", "&", "|", "#")
        ),
        *(f"(mod({column(source, kind)}, (-7)::{kind}) < 2)" for kind in INTEGERS),
        *(f"((~ {column(source, kind)}) < 2)" for kind in INTEGERS),
        *(f"((- {small(source, kind)}) < 2)" for kind in INTEGERS),
    ]
