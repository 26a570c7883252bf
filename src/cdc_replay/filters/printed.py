"""A stored expression (a row filter, a generation expression) → SQL, built from its node tree alone.

The text that PostgreSQL prints for an expression comes by the change stream and the change log: messages show
it, but it is never executed. The executed SQL consists of

| part                           | printed as                                                          |
|--------------------------------|---------------------------------------------------------------------|
| a column                       | its name, quoted                                                    |
| an operator, a function        | by oid: `operator(pg_catalog.=)`, `"pg_catalog"."lower"(…)` (`names`) |
| a type, a collation            | by oid, schema and name quoted; lengths are function calls of their own |
| a constant                     | a quoted text, with its type (`literals`)                           |
| everything else                | keywords of this module                                             |

All arguments have their types, so that the server resolves the same operators and functions. Printing does
not recurse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, LiteralString

from psycopg import sql

from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.expression import Truth
from cdc_replay.filters.literals import Literals
from cdc_replay.filters.names import SAME_EVERYWHERE, Names, NotPrintableError
from cdc_replay.filters.node_text import NULL, UNKNOWN, FieldValue, Node, read_node, unescape
from cdc_replay.filters.parts import Part, join_nodes
from cdc_replay.filters.printed_xml import xml_parts
from cdc_replay.model.publication import RowFilter, Table, TableColumn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection


def print_filters(
    publisher: Connection, table: Table, filters: Sequence[RowFilter] | None
) -> sql.Composed | None:
    """The OR of filters of a published table, for its publisher; None without filters.

    Raises:
        InvalidFilter: if a filter has something that PostgreSQL accepts in none.
    """
    if filters is None:
        return None
    trees = [read_node(row_filter.node_tree) for row_filter in filters]
    names = Names.read(publisher, trees)
    return any_of(
        [
            print_filter(tree, row_filter, table.columns, table.name, names)
            for tree, row_filter in zip(trees, filters, strict=True)
        ]
    )


def print_for_subscriber(
    subscriber: Connection, publisher: Connection | None, table: Table, filters: Sequence[RowFilter]
) -> sql.Composed:
    """The OR of filters for the subscriber, of objects that are built-in and the same on all servers.

    Without the publisher, which has the collations' names, few collations can be printed.

    Raises:
        NotPrintableError: if a filter cannot be printed so.
        InvalidFilter: as `printed_filters`.
    """
    trees = [read_node(row_filter.node_tree) for row_filter in filters]
    names = Names.read(subscriber, trees, same_below=SAME_EVERYWHERE)
    if publisher is not None:
        names = names.with_collations_of(Names.read(publisher, trees))
    return any_of(
        [
            print_expression(tree, row_filter.sql, table.columns, names)
            for tree, row_filter in zip(trees, filters, strict=True)
        ]
    )


def any_of(conditions: Iterable[sql.Composable]) -> sql.Composed:
    """Their OR, in parentheses."""
    return sql.SQL("({})").format(sql.SQL(" or ").join(conditions))


def print_filter(
    tree: Node, row_filter: RowFilter, columns: Iterable[TableColumn], table: QualifiedName, names: Names
) -> sql.Composed:
    """A filter as SQL.

    Raises:
        InvalidFilter: as `printed_filters`.
    """
    try:
        return print_expression(tree, row_filter.sql, columns, names)
    except NotPrintableError as error:
        raise unprintable_filter(table, row_filter, str(error), error.hint) from error


def unprintable_filter(
    table: QualifiedName, row_filter: RowFilter, reason: str, hint: str | None = None
) -> InvalidFilter:
    """The error for a filter that cannot be printed; without a `hint`, no server can have stored it."""
    return InvalidFilter(
        f'cannot evaluate a row filter of table "{table}": {reason}',
        detail=f"The filter is {row_filter.sql}.",
        hint=hint
        or "PostgreSQL stores no such filter. Check who can write the files of the change log, then copy"
        f" the table again: `cdc-replay snapshot … --table {table.argument}`.",
        rule="R5.3",
    )


def print_expression(tree: Node, text: str, columns: Iterable[TableColumn], names: Names) -> sql.Composed:
    """The expression of a tree as SQL; `text` is what the server has printed for it.

    Raises:
        NotPrintableError: if a part of it cannot be printed.
        InvalidFilter: if the tree is not one of PostgreSQL's.
    """
    return _Printer({column.attnum: column.name for column in columns}, names, Literals(text, names)).print(
        tree
    )


class _Printer:
    def __init__(self, columns: Mapping[int, str], names: Names, literals: Literals) -> None:
        self._columns = columns
        self._names = names
        self._literals = literals
        self._writers: Final[Mapping[str, Callable[[Node], list[Part]]]] = {
            "VAR": self._column,
            "CONST": self._constant,
            "OPEXPR": self._operation,
            "DISTINCTEXPR": self._distinct,
            "NULLIFEXPR": self._null_if,
            "SCALARARRAYOPEXPR": self._array_comparison,
            "FUNCEXPR": self._function,
            "NAMEDARGEXPR": self._named_argument,
            "BOOLEXPR": self._bool,
            "NULLTEST": self._null_test,
            "BOOLEANTEST": self._truth_test,
            "RELABELTYPE": self._cast,
            "COERCEVIAIO": self._cast,
            "ARRAYCOERCEEXPR": self._cast,
            "COERCETODOMAIN": self._argument,
            "COLLATEEXPR": self._collate,
            "CASEEXPR": self._case,
            "CASEWHEN": self._when,
            "ARRAYEXPR": self._array,
            "ROWEXPR": self._row,
            "ROWCOMPAREEXPR": self._row_comparison,
            "COALESCEEXPR": self._coalesce,
            "MINMAXEXPR": self._extreme,
            "SUBSCRIPTINGREF": self._subscript,
            "XMLEXPR": lambda node: xml_parts(node, names),
        }

    def print(self, tree: Node) -> sql.Composed:
        """Pop parts from the end of `pending`; replace a node by its own parts."""
        output: list[sql.Composable] = []
        pending: list[Part] = [tree]
        while pending:
            part = pending.pop()
            match part:
                case Node():
                    pending.extend(reversed(self._parts(part)))
                case str():
                    output.append(sql.SQL(part))
                case _:
                    output.append(part)
        self._literals.check_all_used()
        return sql.Composed(output)

    def _parts(self, node: Node) -> list[Part]:
        writer = self._writers.get(node.name)
        if writer is None:
            raise NotPrintableError(f"expression node {node.name} is not known")
        return writer(node)

    # ---- columns, constants, types

    def _column(self, node: Node) -> list[Part]:
        attnum = node.integer("varattno")
        if node.integer("varno") != 1 or node.integer("varlevelsup") != 0:
            raise NotPrintableError("a column is of another table")
        if attnum not in self._columns:
            raise NotPrintableError(f"the table has no column with number {attnum}")
        return [sql.Identifier(self._columns[attnum])]

    def _constant(self, node: Node) -> list[Part]:
        value = "null" if node.flag("constisnull") else sql.Literal(self._literals.text(node))
        type_oid = node.integer("consttype")
        return [value] if type_oid == UNKNOWN else ["(", value, "::", self._names.type(type_oid), ")"]

    def _cast(self, node: Node) -> list[Part]:
        return ["(", node.node("arg"), "::", self._names.type(node.integer("resulttype")), ")"]

    def _argument(self, node: Node) -> list[Part]:
        return [node.node("arg")]

    def _collate(self, node: Node) -> list[Part]:
        return ["(", node.node("arg"), " collate ", self._names.collation(node.integer("collOid")), ")"]

    # ---- operators and functions

    def _operator(self, oid: int) -> sql.Composable:
        symbol = self._names.operator(oid)
        # An operator's symbol cannot be quoted; `names` has checked its characters.
        return sql.SQL("operator(pg_catalog.{})").format(sql.SQL(symbol))

    def _operation(self, node: Node) -> list[Part]:
        operator = self._operator(node.integer("opno"))
        match node.nodes("args"):
            case [argument]:
                return ["(", operator, " ", argument, ")"]
            case [left, right]:
                return ["(", left, " ", operator, " ", right, ")"]
            case arguments:
                raise NotPrintableError(f"an operator has {len(arguments)} arguments")

    def _equality(self, node: Node) -> None:
        """Check that an operator that is not printed is the one that the server resolves."""
        if (symbol := self._names.operator(node.integer("opno"))) != "=":
            raise NotPrintableError(f"{node.name} is of operator {symbol}")

    def _distinct(self, node: Node) -> list[Part]:
        self._equality(node)
        left, right = _two(node)
        if left.name == right.name == "ROWEXPR":
            # Rows are compared field by field, except as fields themselves.
            return ["(row(", left, ") is distinct from row(", right, "))"]
        return ["(", left, " is distinct from ", right, ")"]

    def _null_if(self, node: Node) -> list[Part]:
        self._equality(node)
        left, right = _two(node)
        return ["nullif(", left, ", ", right, ")"]

    def _array_comparison(self, node: Node) -> list[Part]:
        left, right = _two(node)
        which: LiteralString = " any (" if node.flag("useOr") else " all ("
        return ["(", left, " ", self._operator(node.integer("opno")), which, right, "))"]

    def _function(self, node: Node) -> list[Part]:
        name = self._names.function(node.integer("funcid"))
        arguments = node.nodes("args")
        if node.integer("funcformat") in _CASTS and len(arguments) == 1:
            # A conversion function also serves other types with the same storage, which a call would lose.
            return ["(", arguments[0], "::", self._names.type(node.integer("funcresulttype")), ")"]
        separated: list[Part] = join_nodes(arguments)
        if node.flag("funcvariadic") and separated:
            separated.insert(len(separated) - 1, "variadic ")
        return [name, "(", *separated, ")"]

    def _named_argument(self, node: Node) -> list[Part]:
        return [sql.Identifier(unescape(node.token("name"))), " => ", node.node("arg")]

    # ---- logic

    def _bool(self, node: Node) -> list[Part]:
        arguments = node.nodes("args")
        match node.token("boolop"):
            case "not" if len(arguments) == 1:
                return ["(not ", arguments[0], ")"]
            case "and":
                return ["(", *join_nodes(arguments, " and "), ")"]
            case "or":
                return ["(", *join_nodes(arguments, " or "), ")"]
            case other:
                raise NotPrintableError(f"{other} is no operation on truth values")

    def _null_test(self, node: Node) -> list[Part]:
        test: LiteralString = " is not null)" if node.integer("nulltesttype") else " is null)"
        return ["(", node.node("arg"), test]

    def _truth_test(self, node: Node) -> list[Part]:
        test = node.integer("booltesttype")
        if test not in _TRUTHS:
            raise NotPrintableError(f"{test} is no test of a truth value")
        return ["(", node.node("arg"), _TRUTHS[test], ")"]

    # ---- choices

    def _case(self, node: Node) -> list[Part]:
        operand = node.single("arg")
        branches = node.nodes("args")
        if not isinstance(operand, Node):
            parts: list[Part] = ["(case", *branches]
        else:
            parts = ["(case ", operand]
            for branch in branches:
                parts += [" when ", self._compared_with(branch), " then ", branch.node("result")]
        return [*parts, " else ", node.node("defresult"), " end)"]

    def _compared_with(self, branch: Node) -> Node:
        """The value that the operand of a CASE is compared with: its condition is `operand = value`."""
        condition = branch.node("expr")
        if condition.name != "OPEXPR":
            raise NotPrintableError(f"a CASE with an operand has a condition {condition.name}")
        self._equality(condition)
        _, right = _two(condition)
        return right

    def _when(self, node: Node) -> list[Part]:
        return [" when ", node.node("expr"), " then ", node.node("result")]

    def _coalesce(self, node: Node) -> list[Part]:
        return ["coalesce(", *join_nodes(node.nodes("args")), ")"]

    def _extreme(self, node: Node) -> list[Part]:
        function: LiteralString = "least(" if node.integer("op") else "greatest("
        return [function, *join_nodes(node.nodes("args")), ")"]

    # ---- arrays and rows

    def _array(self, node: Node) -> list[Part]:
        type_name = self._names.type(node.integer("array_typeid"))
        return ["(array[", *join_nodes(node.nodes("elements")), "]::", type_name, ")"]

    def _row(self, node: Node) -> list[Part]:
        # With its type: rows without a type are compared field by field.
        type_name = self._names.type(node.integer("row_typeid"))
        return ["(row(", *join_nodes(node.nodes("args")), ")::", type_name, ")"]

    def _row_comparison(self, node: Node) -> list[Part]:
        symbols = {self._names.operator(oid) for oid in node.oids("opnos")}
        if len(symbols) != 1:
            raise NotPrintableError("a comparison of rows has several operators")
        operator = self._operator(node.oids("opnos")[0])
        left, right = join_nodes(node.nodes("largs")), join_nodes(node.nodes("rargs"))
        return ["(row(", *left, ") ", operator, " row(", *right, "))"]

    def _subscript(self, node: Node) -> list[Part]:
        if node.single("refassgnexpr") != NULL:
            raise NotPrintableError("a subscript is assigned to")
        uppers, lowers = node.items("refupperindexpr"), node.items("reflowerindexpr")
        parts: list[Part] = ["(", node.node("refexpr"), ")"]
        for position, upper in enumerate(uppers):
            lower: list[Part] = [*_bound(lowers[position]), ":"] if lowers else []
            parts += ["[", *lower, *_bound(upper), "]"]
        return ["(", *parts, ")"]


_CASTS: Final = (1, 2)
"""`CoercionForm` of a function that was written as `::`, or implicit."""

_TRUTHS: Final[Mapping[int, LiteralString]] = {
    Truth.TRUE.value: " is true",
    Truth.NOT_TRUE.value: " is not true",
    Truth.FALSE.value: " is false",
    Truth.NOT_FALSE.value: " is not false",
    Truth.UNKNOWN.value: " is unknown",
    Truth.NOT_UNKNOWN.value: " is not unknown",
}


def _two(node: Node) -> tuple[Node, Node]:
    arguments = node.nodes("args")
    if len(arguments) != 2:  # noqa: PLR2004 - left and right
        raise NotPrintableError(f"{node.name} has {len(arguments)} arguments")
    return arguments[0], arguments[1]


def _bound(value: FieldValue) -> list[Part]:
    return [value] if isinstance(value, Node) else []
