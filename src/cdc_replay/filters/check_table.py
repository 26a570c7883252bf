"""The temporary table in which a server evaluates filters: what is executed for one question.

Its columns are those that the filters read, and what their generated columns are computed from. They have
the published columns' types and collations, as the trees name them, but no lengths, which stored values have
passed, and no domains, whose checks would be code of their owners.

When the table is made, the filters are constraints of it for a moment: what the server has stored of them,
and of the generated columns, must mean what the published trees mean (`confirmed`).
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
from cdc_replay.filters.printed import any_of, printed, printed_filter, refused_filter
from cdc_replay.model.publication import Generated, RowFilter, TableColumn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection

_NOTHING_READS_IT: Final = sql.Identifier("pg_catalog", "text")

_STORED: Final = """
    select conname, conbin::text from pg_catalog.pg_constraint
    where conrelid = pg_catalog.to_regclass(%(table)s) and contype = 'c'
    union all
    select a.attname, d.adbin::text from pg_catalog.pg_attrdef d
    join pg_catalog.pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum
    where d.adrelid = pg_catalog.to_regclass(%(table)s)
"""

_TREE_OF_SERVER: Final = """
    select d.adbin::text from pg_catalog.pg_attrdef d
    join pg_catalog.pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum
    join pg_catalog.pg_class c on c.oid = d.adrelid
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where (n.nspname, c.relname, a.attname) = (%s, %s, %s) and pg_catalog.pg_get_expr(d.adbin, d.adrelid) = %s
"""


@dataclass(frozen=True, slots=True)
class Question:
    """Whether one of some filters of a published table is true, of rows that have `columns`.

    `number` tells the questions of one session apart.
    """

    number: int
    filters: tuple[RowFilter, ...]
    columns: tuple[TableColumn, ...]
    table: QualifiedName


@dataclass(frozen=True, slots=True)
class CheckTable:
    """The statements of a question, and which trees they must come to."""

    question: Question
    create: sql.Composed
    empty: sql.Composed
    fill: sql.Composed
    select: sql.Composed
    _names: Names
    _filters: tuple[Node, ...]
    _computed: Mapping[int, Node]

    @classmethod
    def of(cls, question: Question, connection: Connection) -> Self:
        """The table for a question to the server of `connection`.

        Raises:
            InvalidFilter: if a filter or a generated column cannot be written.
        """
        filters = tuple(read_node(each.node_tree) for each in question.filters)
        computed = {
            column.attnum: _generation_tree(column, question.table, connection)
            for column in question.columns
            if column.generated is not Generated.NO
        }
        names = Names.read(connection, (*filters, *computed.values()))
        conditions = [
            printed_filter(tree, each, question.columns, question.table, names)
            for tree, each in zip(filters, question.filters, strict=True)
        ]
        table, row = _name(question), sql.Identifier(_unused_name(question.columns))
        definitions = [
            sql.SQL("{} bigint").format(row),
            *_definitions(question, names, (*filters, *computed.values()), computed),
            *(
                sql.SQL("constraint {} check ({})").format(sql.Identifier(_constraint(number)), condition)
                for number, condition in enumerate(conditions)
            ),
        ]
        sent = [sql.Identifier(each.name) for each in question.columns if each.attnum not in computed]
        return cls(
            question,
            create=sql.SQL("create temporary table {} ({})").format(
                sql.Identifier(_table(question)), sql.SQL(", ").join(definitions)
            ),
            empty=sql.SQL("truncate {}").format(table),
            fill=sql.SQL("copy {} ({}) from stdin (format csv)").format(
                table, sql.SQL(", ").join([row, *sent])
            ),
            # CASE evaluates its operand once.
            select=sql.SQL(
                "select pg_catalog.string_agg(case {} when true then 't' when false then 'f' else 'n' end, ''"
                " order by {}) from {}"
            ).format(any_of(conditions), row, table),
            _names=names,
            _filters=filters,
            _computed=computed,
        )

    def confirm(self, connection: Connection) -> None:
        """Check what the server has made of the table, and let any row in.

        Raises:
            InvalidFilter: if it understands something else than was published.
        """
        question = self.question
        parameters = {"table": f"pg_temp.{_table(question)}"}
        stored = {name: read_node(tree) for name, tree in connection.execute(_STORED, parameters)}
        # The first column of the table is the number of the row.
        attnums = {place: column.attnum for place, column in enumerate(question.columns, start=2)}
        for number, (tree, row_filter) in enumerate(zip(self._filters, question.filters, strict=True)):
            if not mean_the_same(tree, stored[_constraint(number)], attnums, self._names):
                raise refused_filter(question.table, row_filter, "its text and its tree are not the same")
        for column in question.columns:
            computed = self._computed.get(column.attnum)
            if computed and not mean_the_same(computed, stored[column.name], attnums, self._names):
                raise _not_computed(column, question.table, "its text and its tree are not the same")
        dropped = (
            sql.SQL("drop constraint {}").format(sql.Identifier(_constraint(number)))
            for number in range(len(self._filters))
        )
        connection.execute(sql.SQL("alter table {} {}").format(_name(question), sql.SQL(", ").join(dropped)))


def _table(question: Question) -> str:
    return f"cdc_replay_check_{question.number}"


def _name(question: Question) -> sql.Identifier:
    return sql.Identifier("pg_temp", _table(question))


def _constraint(number: int) -> str:
    return f"cdc_replay_{number}"


def _unused_name(columns: Sequence[TableColumn]) -> str:
    name = "row"
    while name in {column.name for column in columns}:
        name += "_"
    return name


def _definitions(
    question: Question, names: Names, trees: Iterable[Node], computed: Mapping[int, Node]
) -> Iterator[sql.Composed]:
    read = {each.number("varattno"): each for tree in trees for each in tree.walk() if each.name == "VAR"}
    for column in question.columns:
        try:
            yield sql.SQL(" ").join(
                [
                    sql.Identifier(column.name),
                    *_type_and_collation(read.get(column.attnum), names),
                    *_generation(column, computed.get(column.attnum), question.columns, names),
                ]
            )
        except NotPrintableError as error:
            raise _not_computed(column, question.table, str(error)) from error


def _type_and_collation(variable: Node | None, names: Names) -> Iterator[sql.Composable]:
    if variable is None:
        yield _NOTHING_READS_IT
        return
    yield names.type(variable.number("vartype"))
    if collation := variable.number("varcollid"):
        yield sql.SQL("collate {}").format(names.collation(collation))


def _generation(
    column: TableColumn, tree: Node | None, columns: Iterable[TableColumn], names: Names
) -> Iterator[sql.Composable]:
    if tree is not None:
        kind = sql.SQL("virtual" if column.generated is Generated.VIRTUAL else "stored")
        expression = printed(tree, column.generation_sql or "", columns, names)
        yield sql.SQL("generated always as ({}) {}").format(expression, kind)


def _generation_tree(column: TableColumn, table: QualifiedName, connection: Connection) -> Node:
    """The column's tree; that of the server where the catalog was recorded without, if it prints the same.

    Raises:
        InvalidFilter: if there is none.
    """
    if column.generation_tree is not None:
        return read_node(column.generation_tree)
    place = (table.schema, table.name, column.name, column.generation_sql)
    for (tree,) in connection.execute(_TREE_OF_SERVER, place):
        return read_node(tree)
    raise _not_computed(
        column, table, "the change log does not have its expression, and the publisher another"
    )


def _not_computed(column: TableColumn, table: QualifiedName, reason: str) -> InvalidFilter:
    expression = f" It is generated as {column.generation_sql}." if column.generation_sql else ""
    return InvalidFilter(
        f'cannot evaluate a row filter that reads column "{column.name}" of table "{table}": {reason}',
        detail=f"Its value was not sent, and has to be computed with what is built-in.{expression}",
        hint="Publish generated columns (18: publish_generated_columns = stored), or let the filter read the"
        f" columns behind it, then copy the table again: `cdc-replay snapshot … --table {table}`.",
        rule="R3.13",
    )
