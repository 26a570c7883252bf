"""A row filter as a typed expression tree.

The nodes are those of PostgreSQL's parse tree that a row filter may have (R5.2) and that rules exist for,
with everything resolved: operators and functions by oid, types, collations. Built-in oids are the same in
every database and version. Any other node is `Unmodelled`; it has the columns that it reads, so that
PostgreSQL can evaluate the filter.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

FIRST_UNRESERVED_OID: Final = 16384
"""Lower oids are PostgreSQL's own objects, the only ones that a row filter may use (R5.3)."""


class Type(enum.IntEnum):
    """The supported built-in types; the value is the oid."""

    BOOL = 16
    BYTEA = 17
    INT8 = 20
    INT2 = 21
    INT4 = 23
    TEXT = 25
    OID = 26
    FLOAT4 = 700
    FLOAT8 = 701
    BPCHAR = 1042
    VARCHAR = 1043
    DATE = 1082
    TIME = 1083
    TIMESTAMP = 1114
    TIMESTAMPTZ = 1184
    NUMERIC = 1700
    UUID = 2950
    BOOL_ARRAY = 1000
    BYTEA_ARRAY = 1001
    INT2_ARRAY = 1005
    INT4_ARRAY = 1007
    TEXT_ARRAY = 1009
    BPCHAR_ARRAY = 1014
    VARCHAR_ARRAY = 1015
    INT8_ARRAY = 1016
    FLOAT4_ARRAY = 1021
    FLOAT8_ARRAY = 1022
    OID_ARRAY = 1028
    TIMESTAMP_ARRAY = 1115
    DATE_ARRAY = 1182
    TIME_ARRAY = 1183
    TIMESTAMPTZ_ARRAY = 1185
    NUMERIC_ARRAY = 1231
    UUID_ARRAY = 2951

    @property
    def sql_name(self) -> str:
        """The name as `pg_type.typname` has it, arrays with brackets."""
        name = self.name.lower()
        return name.removesuffix("_array") + "[]" if name.endswith("_array") else name


class BoolOp(enum.Enum):
    """The value is the word of the stored tree."""

    AND = "and"
    OR = "or"
    NOT = "not"


class Truth(enum.IntEnum):
    """What IS asks of a boolean; the value is PostgreSQL's `BoolTestType`."""

    TRUE = 0
    NOT_TRUE = 1
    FALSE = 2
    NOT_FALSE = 3
    UNKNOWN = 4
    NOT_UNKNOWN = 5


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table, by attribute number."""

    attnum: int
    type_oid: int
    collation: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal, already converted to its type when the publication was defined (R3.15).

    `value` is None for NULL, an int for the integer types and oid, a bool, a float, and otherwise the text
    that the server prints.
    """

    type_oid: int
    value: bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator on one or two arguments; `collation` is the one that it compares by."""

    operator: int
    collation: int
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Distinct:
    """`left IS DISTINCT FROM right`; `operator` is its equality."""

    operator: int
    collation: int
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class NullIf:
    """`NULLIF(left, right)`; `operator` is its equality."""

    operator: int
    collation: int
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class ArrayComparison:
    """`left operator ANY (array)`, or ALL; also IN and NOT IN lists."""

    operator: int
    collation: int
    is_any: bool
    left: Expression
    array: Expression


@dataclass(frozen=True, slots=True)
class Array:
    """`ARRAY[…]` of one dimension, or a constant of an array type."""

    elements: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function call, or a cast that has a function."""

    function: int
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Bool:
    """AND and OR of any number of arguments, NOT of one."""

    operation: BoolOp
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class NullTest:
    """`argument IS NULL`, or IS NOT NULL."""

    argument: Expression
    negated: bool


@dataclass(frozen=True, slots=True)
class TruthTest:
    """`argument IS TRUE`, and the five like it."""

    argument: Expression
    truth: Truth


@dataclass(frozen=True, slots=True)
class Relabel:
    """A binary-compatible cast: the same bytes under another type."""

    argument: Expression
    source_type: int
    type_oid: int


@dataclass(frozen=True, slots=True)
class Collate:
    """`argument COLLATE …`; the parent node names the collation itself."""

    argument: Expression


@dataclass(frozen=True, slots=True)
class Coalesce:
    """`COALESCE(…)`."""

    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """`CASE WHEN condition THEN result … ELSE otherwise END`."""

    branches: tuple[tuple[Expression, Expression], ...]
    otherwise: Expression


@dataclass(frozen=True, slots=True)
class Extreme:
    """`GREATEST(…)` or `LEAST(…)` of the arguments that are not NULL."""

    is_greatest: bool
    type_oid: int
    collation: int
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Unmodelled:
    """A node that no rule exists for: its description, and the columns in it."""

    description: str
    attnums: frozenset[int]


Expression: TypeAlias = (
    Column
    | Constant
    | Operator
    | Distinct
    | NullIf
    | ArrayComparison
    | Array
    | Function
    | Bool
    | NullTest
    | TruthTest
    | Relabel
    | Collate
    | Coalesce
    | Case
    | Extreme
    | Unmodelled
)


def children(expression: Expression) -> tuple[Expression, ...]:
    """The direct arguments, in the order of evaluation; the elements of an array comparison."""
    match expression:
        case Column() | Constant() | Unmodelled():
            return ()
        case Array(elements):
            return elements
        case ArrayComparison(left=left, array=array):
            return (left, *(array.elements if isinstance(array, Array) else (array,)))
        case NullTest(argument) | TruthTest(argument) | Relabel(argument) | Collate(argument):
            return (argument,)
        case Case(branches, otherwise):
            return (*(part for branch in branches for part in branch), otherwise)
        case _:
            return expression.arguments


def walk(expression: Expression) -> Iterator[Expression]:
    """The expression and everything below it, parents first."""
    yield expression
    for child in children(expression):
        yield from walk(child)


def attnums_read(expression: Expression) -> frozenset[int]:
    """The attribute numbers of all columns that the expression reads."""
    attnums: set[int] = set()
    for node in walk(expression):
        match node:
            case Column(attnum=attnum):
                attnums.add(attnum)
            case Unmodelled(attnums=read):
                attnums |= read
            case _:
                pass
    return frozenset(attnums)
