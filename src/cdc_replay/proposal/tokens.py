"""A script of statements → tokens, as PostgreSQL's scanner divides it.

The script is hostile input. Where this scanner and PostgreSQL's could divide a text differently, it is
refused: what is no token here is an error, never guessed at.

| refused                                         | because                                                |
|-------------------------------------------------|--------------------------------------------------------|
| `E'…'`, `B'…'`, `X'…'`, `N'…'`, `U&'…'`, `U&"…"` | escapes could hide the end of a string                 |
| `$…$`, `$1`                                     | a dollar quote could hide it too                       |
| two strings side by side                        | they are one, if they are on two lines                 |
| a backslash outside of strings, control         | psql's commands; characters that versions of           |
| characters, NUL                                 | PostgreSQL read differently                            |
| names longer than 63 bytes                      | PostgreSQL cuts them                                   |

In a plain string a backslash is an ordinary character: sessions are pinned to standard_conforming_strings.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cdc_replay.errors import StatementNotAllowed

LONGEST_NAME: Final = 63
"""Bytes; NAMEDATALEN - 1."""

_SPACE: Final = re.compile(r"[ \t\r\n]+|--[^\r\n]*")
_WORD: Final = re.compile(r"[A-Za-z_\u0080-\U0010ffff][A-Za-z0-9_$\u0080-\U0010ffff]*")
_CONSTANT: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_STRING: Final = re.compile(r"'(?:[^']|'')*'")
_QUOTED: Final = re.compile(r'"(?:[^"]|"")*"')
_IN_COMMENT: Final = re.compile(r"/\*|\*/|\n")
_OPERATOR: Final = re.compile(r"[-+*/<>=~!@#%^&|`?]")
_PREFIXES: Final = frozenset({"e", "b", "x", "n"})
"""Words that change the meaning of a string right after them; with `U&` an operator is in between."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class TokenKind(enum.Enum):
    """What a token is."""

    WORD = "word"
    """An unquoted name or keyword; `value` is in lower case, as PostgreSQL folds it."""
    NAME = "quoted name"
    STRING = "string"
    NUMERIC = "constant"
    SYMBOL = "symbol"
    """An operator, a type cast, or one of `( ) [ ] , ; .`."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token; `text` as it is written, `value` what it means, `line` from 1.

    `spaced`: something separates it from the token before.
    """

    kind: TokenKind
    text: str
    value: str
    line: int
    spaced: bool

    def is_word(self, *words: str) -> bool:
        """Whether it is one of these keywords, in lower case."""
        return self.kind is TokenKind.WORD and self.value in words

    def is_symbol(self, symbol: str) -> bool:
        """Whether it is this symbol."""
        return self.kind is TokenKind.SYMBOL and self.text == symbol

    @property
    def is_name(self) -> bool:
        """Whether it can be a name."""
        return self.kind in {TokenKind.WORD, TokenKind.NAME}


def scan(script: str) -> tuple[Token, ...]:
    """The tokens of a script, without spaces and comments.

    Raises:
        StatementNotAllowed: if a part of it is no token, naming the line.
    """
    tokens: list[Token] = []
    for token in _Scanner(script).tokens():
        if tokens and tokens[-1].kind is token.kind is TokenKind.STRING:
            raise refused(token.line, "two strings side by side")
        tokens.append(token)
    return tuple(tokens)


def refused(line: int, reason: str) -> StatementNotAllowed:
    """The error for a part of a script that is not executed."""
    return StatementNotAllowed(
        f"line {line} of the proposal: {reason}",
        hint="A proposal has CREATE, ALTER and DROP PUBLICATION statements, with comments, plain strings and"
        " names, and nothing else. Nothing was executed.",
    )


class _Scanner:
    def __init__(self, script: str) -> None:
        self._script = script
        self._at = 0
        self._line = 1
        for number_of_line, line in enumerate(re.split(r"\r\n|\r|\n", script), 1):
            if _CONTROL.search(line) is not None:
                raise refused(number_of_line, "a control character")

    def tokens(self) -> Iterator[Token]:
        """In order."""
        while True:
            spaced = self._skip_space()
            if self._at == len(self._script):
                return
            start, line = self._at, self._line
            kind, value = self._next()
            text = self._script[start : self._at]
            self._line += text.count("\n")
            yield Token(kind, text, value, line, spaced)

    def _skip_space(self) -> bool:
        start = self._at
        while True:
            if (space := _SPACE.match(self._script, self._at)) is not None:
                self._line += space[0].count("\n")
                self._at = space.end()
            elif self._script.startswith("/*", self._at):
                self._skip_comment()
            else:
                return self._at > start

    def _skip_comment(self) -> None:
        """Past a comment; comments can be nested."""
        first, depth = self._line, 0
        for mark in _IN_COMMENT.finditer(self._script, self._at):
            match mark[0]:
                case "\n":
                    self._line += 1
                case "/*":
                    depth += 1
                case _:
                    depth -= 1
            if depth == 0:
                self._at = mark.end()
                return
        raise refused(first, "a comment without an end")

    def _next(self) -> tuple[TokenKind, str]:
        script, at = self._script, self._at
        if script[at] in "'\"":
            return self._quoted(script[at])
        if (word := _WORD.match(script, at)) is not None:
            return self._word(word)
        if (constant := _CONSTANT.match(script, at)) is not None:
            self._at = constant.end()
            if script[self._at : self._at + 1] == "." or _WORD.match(script, self._at):
                raise refused(self._line, f"{constant[0]!r} goes on with letters or a dot")
            return TokenKind.NUMERIC, constant[0]
        if script[at] in "()[],;.":
            self._at += 1
            return TokenKind.SYMBOL, script[at]
        if script.startswith("::", at):
            self._at += 2
            return TokenKind.SYMBOL, "::"
        return self._operator()

    def _quoted(self, quote: str) -> tuple[TokenKind, str]:
        pattern, kind = (_STRING, TokenKind.STRING) if quote == "'" else (_QUOTED, TokenKind.NAME)
        quoted = pattern.match(self._script, self._at)
        if quoted is None:
            raise refused(self._line, f"a {kind.value} without an end")
        self._at = quoted.end()
        value = quoted[0][1:-1].replace(quote * 2, quote)
        if kind is TokenKind.NAME:
            self._check_length(value)
        return kind, value

    def _word(self, word: re.Match[str]) -> tuple[TokenKind, str]:
        self._at = word.end()
        after = self._script[self._at : self._at + 2]
        value = "".join(letter.lower() if letter.isascii() else letter for letter in word[0])
        if (value in _PREFIXES and after[:1] == "'") or (value == "u" and re.fullmatch("&['\"]", after)):
            raise refused(self._line, f"strings and names with the prefix {word[0]}")
        self._check_length(value)
        return TokenKind.WORD, value

    def _check_length(self, name: str) -> None:
        if not name or len(name.encode()) > LONGEST_NAME:
            raise refused(self._line, f"a name must have 1 to {LONGEST_NAME} bytes")

    def _operator(self) -> tuple[TokenKind, str]:
        start = self._at
        while self._at < len(self._script) and _OPERATOR.match(self._script, self._at):
            if self._script.startswith(("--", "/*"), self._at):
                break
            self._at += 1
        if self._at == start:
            raise refused(self._line, f"the character {self._script[start]!r}")
        return TokenKind.SYMBOL, self._script[start : self._at]
