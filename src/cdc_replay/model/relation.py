"""Relations as the change stream describes them."""

from __future__ import annotations

import enum
import re
import shlex
from dataclasses import dataclass
from typing import Final, NewType

from cdc_replay.errors import InvalidConfiguration

_QUOTED: Final = re.compile(r'"((?:[^"]|"")+)"\.(.+)', re.DOTALL)

RelationId = NewType("RelationId", int)
"""The oid of a table on the publisher."""


@dataclass(frozen=True, slots=True, order=True)
class QualifiedName:
    """Schema and name of a table, case-sensitive, unquoted.

    No two tables have the same text: a schema with a dot, which ends a schema, is quoted as in SQL.
    """

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> QualifiedName:
        """The table of `SCHEMA.TABLE`.

        Raises:
            InvalidConfiguration: if it has another form.
        """
        if quoted := _QUOTED.fullmatch(text):
            return cls(quoted[1].replace('""', '"'), quoted[2])
        schema, dot, name = text.partition(".")
        if not dot or not schema or not name:
            raise InvalidConfiguration(f'"{text}" is not a table name', hint="Give it as SCHEMA.TABLE.")
        return cls(schema, name)

    def __str__(self) -> str:
        schema = self.schema
        if "." in schema or schema.startswith('"'):
            schema = '"{}"'.format(schema.replace('"', '""'))
        return f"{schema}.{self.name}"

    @property
    def argument(self) -> str:
        """Its text as one word of a shell: people copy commands, and owners of tables choose names."""
        return shlex.quote(str(self))


class ReplicaIdentity(enum.Enum):
    """Which old column values an UPDATE or DELETE carries; the value is `pg_class.relreplident`."""

    DEFAULT = "d"
    """The primary key, if there is one that is not deferrable (R1.8)."""
    NOTHING = "n"
    """No old values: UPDATE and DELETE cannot be published."""
    FULL = "f"
    """The whole old row."""
    INDEX = "i"
    """The columns of one unique index."""


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """One column of a Relation message (R1.1)."""

    name: str
    type_oid: int
    typmod: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """A Relation message: the shape of the tuples that follow it.

    `version` is a hash of the message, signed 64 bit: the same shape has the same version in every pull.
    """

    id: RelationId
    version: int
    name: QualifiedName
    replica_identity: ReplicaIdentity
    columns: tuple[RelationColumn, ...]

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names in the order of the tuples' values."""
        return tuple(column.name for column in self.columns)
