"""What the JSON of catalog messages and stored catalogs may consist of, value by value.

Both come from elsewhere: messages through the change stream, catalogs through the files of the log. They are
read by pydantic in strict mode, which knows no value of another type, no key that is not named here, and no
depth without end. What has not the form is a `ValidationError`, which callers tell as their own.

| is       | may be                                                                               |
|----------|--------------------------------------------------------------------------------------|
| a name   | 1 to 63 bytes of UTF-8, without NUL: what fits into the type `name`                  |
| an oid   | from 1 to 2^32 - 1                                                                   |
| a number | of a column: from 1 to 1600                                                          |
| a text   | without NUL; of types and collations, up to 1000 characters                          |
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NotRequired, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from typing_extensions import TypedDict

MOST_MESSAGE_BYTES: Final = 64 << 20
"""Of one message, as it is kept in the log; what is read from the stream is smaller (`postgres.peek`)."""

MOST_CATALOG_BYTES: Final = 1 << 30
"""Of one stored catalog: of more than a million tables."""

_LONGEST_NAME: Final = 63


def _fits_into_name(text: str) -> str:
    if len(text.encode()) > _LONGEST_NAME:
        raise ValueError(f"a name has up to {_LONGEST_NAME} bytes")
    return text


_Ascii: TypeAlias = Annotated[str, StringConstraints(max_length=_LONGEST_NAME, pattern=r"^[\x01-\x7f]+$")]
_Wide: TypeAlias = Annotated[
    str,
    StringConstraints(max_length=_LONGEST_NAME, pattern=r"^[^\x00]+$"),
    AfterValidator(_fits_into_name),
]
Name: TypeAlias = Annotated[_Ascii | _Wide, Field(union_mode="left_to_right")]
"""Nearly all are ASCII, for which nothing of Python is called."""

Text: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
ShortText: TypeAlias = Annotated[str, StringConstraints(max_length=1000, pattern=r"^[^\x00]+$")]
Oid: TypeAlias = Annotated[int, Field(ge=1, le=2**32 - 1)]
Attnum: TypeAlias = Annotated[int, Field(ge=1, le=1600)]
Width: TypeAlias = Annotated[int, Field(ge=0, le=1600)]
Typmod: TypeAlias = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Identity: TypeAlias = Literal["d", "n", "f", "i"]
Attgenerated: TypeAlias = Literal["", "s", "v"]
Attnums: TypeAlias = tuple[Attnum, ...]

TableRow: TypeAlias = tuple[
    Oid, Name, Name, bool, bool, Oid | None, Identity, Attnums | None, Attnums | None, Width
]
"""Of `reader.TABLES`."""

_EarlierColumnRow: TypeAlias = tuple[
    Oid, Attnum, Name, Oid, Typmod, ShortText, ShortText | None, Attgenerated, Text | None
]
_ColumnRow: TypeAlias = tuple[
    Oid, Attnum, Name, Oid, Typmod, ShortText, ShortText | None, Attgenerated, Text | None, Text | None
]
ColumnRow: TypeAlias = Annotated[_ColumnRow | _EarlierColumnRow, Field(union_mode="left_to_right")]
"""Of `reader.COLUMNS`; an earlier release did not tell the tree of a generation expression."""

PublicationRow: TypeAlias = tuple[Oid, Name, bool, bool, bool, bool, bool, bool, tuple[Name, ...], bool]
"""Of `reader.PUBLICATIONS`."""

_EarlierMembershipRow: TypeAlias = tuple[Oid, Oid, Text | None, Text | None, Attnums | None]
_MembershipRow: TypeAlias = tuple[Oid, Oid, Text | None, Text | None, Attnums | None, bool]
MembershipRow: TypeAlias = Annotated[
    _MembershipRow | _EarlierMembershipRow, Field(union_mode="left_to_right")
]
"""Of `reader.MEMBERSHIPS`; an earlier release did not tell of exceptions."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class DeltaContent(_Strict):
    """The content of a message with `CATALOG_PREFIX`."""

    format: Literal[1]
    whole: bool = False
    touched_tables: tuple[Oid, ...] = ()
    partitions: tuple[Oid, ...] = ()
    written_columns: tuple[tuple[Oid, Attnum], ...] = ()
    respelled_tables: tuple[Oid, ...] = ()
    touched_publications: tuple[Oid, ...] = ()
    removed_memberships: tuple[tuple[Oid, Oid], ...] = ()
    schemas_of: tuple[Oid, ...] = ()
    added_schemas: tuple[tuple[Oid, Name], ...] = ()
    removed_schemas: tuple[tuple[Oid, Name], ...] = ()
    tables: tuple[TableRow, ...]
    columns: tuple[ColumnRow, ...]
    publications: tuple[PublicationRow, ...]
    memberships: tuple[MembershipRow, ...]


class RewriteContent(_Strict):
    """The content of a message with `REWRITE_PREFIX`."""

    format: Literal[1]
    relations: tuple[Oid, ...]


class StoredFilter(_Strict):
    """A row filter of a stored catalog."""

    node_tree: Text
    sql: Text


class StoredMembership(_Strict):
    """A membership of a stored catalog."""

    relation: Oid
    row_filter: StoredFilter | None
    columns: tuple[Name, ...] | None
    is_exception: bool = False


class StoredPublication(_Strict):
    """A publication of a stored catalog."""

    oid: Annotated[int, Field(ge=0, le=2**32 - 1)]
    name: Name
    all_tables: bool
    via_root: bool
    actions: tuple[Literal["insert", "update", "delete", "truncate"], ...]
    schemas: tuple[Name, ...]
    publish_generated: bool
    memberships: tuple[StoredMembership, ...]


class StoredColumn(TypedDict):
    """A column of a stored catalog; a dictionary, because there are so many."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    attnum: Attnum
    name: Name
    type_oid: Oid
    typmod: Typmod
    type_sql: ShortText
    collation_sql: ShortText | None
    generated: Attgenerated
    generation_sql: Text | None
    generation_tree: NotRequired[Text | None]


class StoredTable(_Strict):
    """A table of a stored catalog."""

    id: Oid
    schema_name: Annotated[Name, Field(alias="schema")]
    name: Name
    is_partitioned: bool
    parent: Oid | None
    replica_identity: Identity
    key_columns: tuple[Name, ...]
    primary_key: tuple[Name, ...]
    dropped_columns: Width
    is_publishable: bool
    columns: tuple[StoredColumn, ...]


class StoredCatalog(_Strict):
    """A catalog as `history` writes it."""

    format: Literal[1]
    lsn: Annotated[str, StringConstraints(pattern=r"^[0-9A-F]{1,8}/[0-9A-F]{1,8}$")]
    server_version: Annotated[int, Field(ge=0, lt=2**31)]
    publications: tuple[StoredPublication, ...]
    tables: tuple[StoredTable, ...]
