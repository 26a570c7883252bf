"""The temporary table in which a server evaluates filters: the statements for one question.

Its columns are those that the filters read, and the sources of their generated columns. They have the types
and collations that the trees name, but no lengths, which stored values satisfy, and no domains, whose checks
would run code of their owners.

Before that, a probe table without generated columns and rows has the filters and generation expressions as
its constraints: their stored trees must mean what the published trees mean (`confirmed`). PostgreSQL plans
nothing for constraints. For generated columns it does, and planning evaluates constants: a misread cast of a
user's type would run its function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from psycopg import sql

from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.confirmed import mean_the_same
from cdc_replay.filters.names import Names, NotPrintableError
from cdc_replay.filters.node_text import Node, read_node
from cdc_replay.filters.printed import any_of, print_expression, print_filter, unprintable_filter
from cdc_replay.model.publication import Generated, RowFilter, TableColumn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection

_NOTHING_READS_IT: Final = sql.Identifier("pg_catalog", "text")

_STORED: Final = """
    select conname, conbin::text from pg_catalog.pg_constraint
    where conrelid = pg_catalog.to_regclass(%s) and contype = 'c'
"""

# Materialized: printing an expression waits for locks on its table, so only that of this one is printed.
_TREE_OF_SERVER: Final = """
    with defined as materialized (
        select d.adbin, d.adrelid from pg_catalog.pg_attrdef d
        join pg_catalog.pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum
        join pg_catalog.pg_class c on c.oid = d.adrelid
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace
        where (n.nspname, c.relname, a.attname) = (%s, %s, %s)
    )
    select adbin::text from defined where pg_catalog.pg_get_expr(adbin, adrelid) = %s
"""

_NOT_RECORDED: Final = "its expression is too long, or was not recorded before the table had a row filter"


@dataclass(frozen=True, slots=True)
class Question:
    """Whether any of `filters` of a published table is true, for rows that have `columns`.

    `check_id` is unique in a session.
    """

    check_id: int
    filters: tuple[RowFilter, ...]
    columns: tuple[TableColumn, ...]
    table: QualifiedName


@dataclass(frozen=True, slots=True)
class CheckTable:
    """The statements of a question, and the trees that they must result in."""

    question: Question
    _probe: sql.Composed
    _create: sql.Composed
    empty: sql.Composed
    fill: sql.Composed
    select: sql.Composed
    _names: Names
    _filters: tuple[Node, ...]
    _computed: Mapping[int, Node]

    @classmethod
    def for_question(cls, question: Question, connection: Connection) -> Self:
        """The table for a question to the server of `connection`.

        Raises:
            InvalidFilter: if a filter or a generated column cannot be written.
        """
        filters = tuple(read_node(row_filter.node_tree) for row_filter in question.filters)
        computed = {
            column.attnum: _generation_tree(column, question.table, connection)
            for column in question.columns
            if column.generated is not Generated.NO
        }
        names = Names.read(connection, (*filters, *computed.values()))
        conditions = [
            print_filter(tree, row_filter, question.columns, question.table, names)
            for tree, row_filter in zip(filters, question.filters, strict=True)
        ]
        row = sql.Identifier(_unused_name(question.columns))
        columns = tuple(_columns(question, names, (*filters, *computed.values()), computed))
        sent = [sql.Identifier(column.name) for column in question.columns if column.attnum not in computed]
        probed = (*conditions, *(column.expression for column in columns if column.expression is not None))
        return cls(
            question,
            _create_statement(_probe(question), row, [column.plain for column in columns], probed),
            _create_statement(_table(question), row, [column.definition for column in columns]),
            empty=sql.SQL("truncate {}").format(_name(_table(question))),
            fill=sql.SQL("copy {} ({}) from stdin (format csv)").format(
                _name(_table(question)), sql.SQL(", ").join([row, *sent])
            ),
            # CASE evaluates its operand once.
            select=sql.SQL(
                "select pg_catalog.string_agg(case {} when true then 't' when false then 'f' else 'n' end, ''"
                " order by {}) from {}"
            ).format(any_of(conditions), row, _name(_table(question))),
            _names=names,
            _filters=filters,
            _computed=computed,
        )

    def create(self, connection: Connection) -> None:
        """Create the table, in the caller's transaction.

        Raises:
            InvalidFilter: if the server reads an expression differently than it was published.
        """
        connection.execute(self._probe)
        self._confirm(connection)
        connection.execute(sql.SQL("drop table {}").format(_name(_probe(self.question))))
        connection.execute(self._create)

    def _confirm(self, connection: Connection) -> None:
        question = self.question
        stored = connection.execute(_STORED, (f"pg_temp.{_probe(question)}",)).fetchall()
        # Constraints are IS NULL of each expression.
        rebuilt = {name: read_node(tree).node("arg") for name, tree in stored}
        # The first column of the table is the row's ordinal.
        attnums = {attnum: column.attnum for attnum, column in enumerate(question.columns, start=2)}
        for position, (tree, row_filter) in enumerate(zip(self._filters, question.filters, strict=True)):
            if not mean_the_same(tree, rebuilt[_constraint(position)], attnums, self._names):
                raise unprintable_filter(question.table, row_filter, _NOT_THE_SAME)
        columns = [column for column in question.columns if column.attnum in self._computed]
        for position, column in enumerate(columns, start=len(self._filters)):
            tree = self._computed[column.attnum]
            if not mean_the_same(tree, rebuilt[_constraint(position)], attnums, self._names):
                raise _not_computable(column, question.table, _NOT_THE_SAME)


_NOT_THE_SAME: Final = "its text and its tree are not the same"


def _create_statement(
    table: str, row: sql.Identifier, columns: Iterable[sql.Composed], probed: Iterable[sql.Composable] = ()
) -> sql.Composed:
    constraints = (
        sql.SQL("constraint {} check (({}) is null)").format(
            sql.Identifier(_constraint(position)), expression
        )
        for position, expression in enumerate(probed)
    )
    definitions = [sql.SQL("{} bigint").format(row), *columns, *constraints]
    return sql.SQL("create temporary table {} ({})").format(
        sql.Identifier(table), sql.SQL(", ").join(definitions)
    )


def _table(question: Question) -> str:
    return f"cdc_replay_check_{question.check_id}"


def _probe(question: Question) -> str:
    return f"cdc_replay_probe_{question.check_id}"


def _name(table: str) -> sql.Identifier:
    return sql.Identifier("pg_temp", table)


def _constraint(position: int) -> str:
    return f"cdc_replay_{position}"


def _unused_name(columns: Sequence[TableColumn]) -> str:
    name = "row"
    while name in {column.name for column in columns}:
        name += "_"
    return name


@dataclass(frozen=True, slots=True)
class _Column:
    """A column's definition without its expression, and the expression."""

    plain: sql.Composed
    kind: Generated
    expression: sql.Composed | None

    @property
    def definition(self) -> sql.Composed:
        """The definition with the expression."""
        if self.expression is None:
            return self.plain
        kind = sql.SQL("virtual" if self.kind is Generated.VIRTUAL else "stored")
        return sql.SQL("{} generated always as ({}) {}").format(self.plain, self.expression, kind)


def _columns(
    question: Question, names: Names, trees: Iterable[Node], computed: Mapping[int, Node]
) -> Iterator[_Column]:
    read = {node.integer("varattno"): node for tree in trees for node in tree.walk() if node.name == "VAR"}
    for column in question.columns:
        tree = computed.get(column.attnum)
        try:
            plain = [sql.Identifier(column.name), *_type_and_collation(read.get(column.attnum), names)]
            text = column.generation_sql or ""
            expression = None if tree is None else print_expression(tree, text, question.columns, names)
        except NotPrintableError as error:
            raise _not_computable(column, question.table, str(error)) from error
        yield _Column(sql.SQL(" ").join(plain), column.generated, expression)


def _type_and_collation(variable: Node | None, names: Names) -> Iterator[sql.Composable]:
    if variable is None:
        yield _NOTHING_READS_IT
        return
    yield names.type(variable.integer("vartype"))
    if collation := variable.integer("varcollid"):
        yield sql.SQL("collate {}").format(names.collation(collation))


def _generation_tree(column: TableColumn, table: QualifiedName, connection: Connection) -> Node:
    """The column's tree; if the catalog was recorded without it, the server's, provided it prints the same.

    Raises:
        InvalidFilter: if there is none.
    """
    if column.generation_tree is not None:
        return read_node(column.generation_tree)
    if column.generation_sql is None:
        raise _not_computable(column, table, _NOT_RECORDED)
    key = (table.schema, table.name, column.name, column.generation_sql)
    for (tree,) in connection.execute(_TREE_OF_SERVER, key):
        return read_node(tree)
    raise _not_computable(
        column, table, "the change log does not have its expression, and the publisher another"
    )


def _not_computable(column: TableColumn, table: QualifiedName, reason: str) -> InvalidFilter:
    expression = f" It is generated as {column.generation_sql}." if column.generation_sql else ""
    return InvalidFilter(
        f'cannot evaluate a row filter that reads column "{column.name}" of table "{table}": {reason}',
        detail=f"Its value was not sent, and has to be computed with what is built-in.{expression}",
        hint="Publish generated columns (18: publish_generated_columns = stored), or let the filter read the"
        f" columns behind it, then copy the table again: `cdc-replay snapshot … --table {table.argument}`.",
        rule="R3.13",
    )
