"""The statements of a proposal: CREATE, ALTER and DROP PUBLICATION, and nothing else.

A statement is parsed into what its grammar has (`publications`, `tables`, its WHERE clauses), and its text is
written anew from the tokens: one statement, without comments, each table with its schema. So nothing but what
was understood reaches a server.

A server reads the literals of a WHERE clause while it parses it, before it refuses user-defined types: the
input function of a composite, array or range type of a domain evaluates the checks of that domain, which are
its owner's code. With an empty search path, a name without a schema is one of pg_catalog. So a clause is
`foreign` where it could name anything else, and then only a throw-away server parses it, which has nothing
else (`publisher` checks the columns besides).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

from cdc_replay.model.relation import QualifiedName
from cdc_replay.proposal.tokens import Token, TokenKind, refused, scan

DEFAULT_SCHEMA: Final = "public"
"""The schema of a table that the script names without one."""

_QUERY_WORDS: Final = frozenset({"select", "values", "table", "with", "into"})
_CLAUSE_ENDS: Final = {"(": 1, "[": 1, ")": -1, "]": -1}


class Command(enum.Enum):
    """The three commands; the value is the tag with which the server confirms one."""

    CREATE = "CREATE PUBLICATION"
    ALTER = "ALTER PUBLICATION"
    DROP = "DROP PUBLICATION"


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement; `text` is what is executed, `line` where it begins.

    `publications` are those that it names, a new name included. `where_names` are all words and quoted names
    of its WHERE clauses. `foreign` says why a server that has objects of others must not parse it, None if it
    may. `new_owner`: it is OWNER TO.
    """

    command: Command
    text: str
    line: int
    publications: tuple[str, ...]
    tables: tuple[QualifiedName, ...] = ()
    where_names: frozenset[str] = frozenset()
    foreign: str | None = None
    new_owner: bool = False


def parse_script(script: str) -> tuple[Statement, ...]:
    """The statements of a script, in order.

    Raises:
        StatementNotAllowed: if it has none, or anything but these statements, naming the line.
    """
    statements = tuple(_Parser(tokens).statement() for tokens in _split(scan(script)))
    if not statements:
        raise refused(1, "there is no statement")
    return statements


def _split(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    statement: list[Token] = []
    for token in tokens:
        if token.is_symbol(";"):
            if statement:
                yield statement
            statement = []
        else:
            statement.append(token)
    if statement:
        yield statement


@dataclass(slots=True)
class _Parser:
    """Parses one statement; `_written` are the parts of its text so far."""

    tokens: list[Token]
    _at: int = 0
    _written: list[str] = field(default_factory=list)
    _tables: list[QualifiedName] = field(default_factory=list)
    _where: list[Token] = field(default_factory=list)

    def statement(self) -> Statement:
        """The whole statement.

        Raises:
            StatementNotAllowed: if it is none of the three, or goes on.
        """
        line = self.tokens[0].line
        command = Command[self._keyword("create", "alter", "drop").upper()]
        self._keyword("publication")
        action = ""
        match command:
            case Command.CREATE:
                publications = [self._name()]
                self._create()
            case Command.ALTER:
                publications = [self._name()]
                action = self._alter(publications)
            case Command.DROP:
                publications = self._drop()
            case _:
                assert_never(command)
        if (token := self._peek()) is not None:
            raise refused(token.line, f"{command.value} goes on with {token.text!r}")
        return Statement(
            command=command,
            text="".join(self._written).strip(),
            line=line,
            publications=tuple(publications),
            tables=tuple(self._tables),
            where_names=frozenset(token.value for token in self._where if token.is_name),
            foreign=_foreign(self._where, self._tables),
            new_owner=action == "owner",
        )

    def _create(self) -> None:
        if self._accept("for"):
            if self._accept("all"):
                self._keyword("tables")
            else:
                self._objects()
        if self._accept("with"):
            self._parameters()

    def _alter(self, publications: list[str]) -> str:
        """The rest of ALTER PUBLICATION name, and its first word; a new name is added to `publications`."""
        action = self._keyword("add", "set", "drop", "rename", "owner")
        if action in {"rename", "owner"}:
            self._keyword("to")
            name = self._name()
            publications += [name] if action == "rename" else []
        elif action == "set" and self._next_is("("):
            self._parameters()
        else:
            self._objects()
        return action

    def _drop(self) -> list[str]:
        if self._accept("if"):
            self._keyword("exists")
        names = [self._name()]
        while self._symbol(","):
            names.append(self._name())
        if not self._accept("cascade"):
            self._accept("restrict")
        return names

    def _objects(self) -> None:
        """`TABLE …`, `TABLES IN SCHEMA …`, and further ones of the same kind without the keywords."""
        is_table = True
        first = True
        while first or self._symbol(","):
            following = self.tokens[self._at + 1] if self._at + 1 < len(self.tokens) else None
            if following is not None and following.is_word("in") and self._accept("tables"):
                self._keyword("in")
                self._keyword("schema")
                is_table = False
            elif self._accept("table"):
                is_table = True
            elif first:
                raise self._unexpected("TABLE or TABLES IN SCHEMA")
            first = False
            self._table() if is_table else self._schema()

    def _schema(self) -> None:
        token = self._peek()
        if token is not None and token.is_word("current_schema"):
            raise refused(token.line, "CURRENT_SCHEMA depends on the session: name the schema")
        self._name()

    def _table(self) -> None:
        self._accept("only")
        start = len(self._written)
        names = [self._name()]
        while self._symbol("."):
            names.append(self._name())
        if len(names) > 2:  # noqa: PLR2004 - schema and table
            raise refused(self.tokens[self._at - 1].line, f"{'.'.join(names)} has too many parts")
        if len(names) == 1:
            self._written.insert(start, f' "{DEFAULT_SCHEMA}".')
            self._written[start + 1] = self._written[start + 1].lstrip()
            names.insert(0, DEFAULT_SCHEMA)
        self._tables.append(QualifiedName(*names))
        self._symbol("*")
        if self._next_is("("):
            self._columns()
        if self._accept("where"):
            self._clause()

    def _columns(self) -> None:
        self._symbol("(")
        self._name()
        while self._symbol(","):
            self._name()
        if not self._symbol(")"):
            raise self._unexpected("a comma or )")

    def _clause(self) -> None:
        """A WHERE clause, up to the parenthesis that closes it."""
        if not self._next_is("("):
            raise self._unexpected("a parenthesis")
        self._where.extend(self._balanced()[1:-1])

    def _parameters(self) -> None:
        if not self._next_is("("):
            raise self._unexpected("a parenthesis")
        self._balanced()

    def _balanced(self) -> list[Token]:
        start, depth = self._at, 0
        while (token := self._peek()) is not None:
            depth += _CLAUSE_ENDS.get(token.text, 0) if token.kind is TokenKind.SYMBOL else 0
            self._take()
            if depth == 0:
                return self.tokens[start : self._at]
        raise refused(self.tokens[start].line, "a parenthesis is not closed")

    # ---- tokens

    def _peek(self) -> Token | None:
        return self.tokens[self._at] if self._at < len(self.tokens) else None

    def _next_is(self, symbol: str) -> bool:
        token = self._peek()
        return token is not None and token.is_symbol(symbol)

    def _take(self) -> Token:
        token = self.tokens[self._at]
        self._written.append(f" {token.text}" if token.spaced else token.text)
        self._at += 1
        return token

    def _accept(self, word: str) -> bool:
        token = self._peek()
        if token is None or not token.is_word(word):
            return False
        self._take()
        return True

    def _symbol(self, symbol: str) -> bool:
        if not self._next_is(symbol):
            return False
        self._take()
        return True

    def _keyword(self, *words: str) -> str:
        token = self._peek()
        if token is None or not token.is_word(*words):
            raise self._unexpected(" or ".join(word.upper() for word in words))
        return self._take().value

    def _name(self) -> str:
        token = self._peek()
        if token is None or not token.is_name:
            raise self._unexpected("a name")
        return self._take().value

    def _unexpected(self, expected: str) -> Exception:
        token = self._peek()
        if token is None:
            return refused(self.tokens[-1].line, f"the statement ends where {expected} is expected")
        return refused(token.line, f"{token.text!r} where {expected} is expected")


def _foreign(where: Sequence[Token], tables: Sequence[QualifiedName]) -> str | None:
    """Why a WHERE clause could name objects outside of pg_catalog and the columns of its table."""
    for before, token in zip([None, *where], where, strict=False):
        is_builtin = before is not None and before.is_name and before.value == "pg_catalog"
        if token.is_symbol(".") and not is_builtin:
            return "a WHERE clause has a qualified name"
        if token.is_word(*_QUERY_WORDS):
            return "a WHERE clause has a query"
        if token.is_name and token.value in {table.name for table in tables}:
            return "a WHERE clause has the name of a table, which is the type of its rows"
    return None
