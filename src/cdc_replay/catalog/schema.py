"""Pydantic models of catalog messages and stored catalogs.

Both are external input: messages come through the change stream, catalogs from the files of the log. Strict
mode rejects other types and unknown keys, and the models bound the depth. Callers translate
`ValidationError` into their own error.

| value  | allowed                                                             |
|--------|---------------------------------------------------------------------|
| name   | 1 to 63 bytes of UTF-8 without NUL: what fits into the type `name`  |
| oid    | from 1 to 2^32 - 1                                                  |
| attnum | from 1 to 1600                                                      |
| text   | without NUL; for types and collations, up to 1000 characters        |
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NotRequired, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from typing_extensions import TypedDict

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Of one message in the log; the limit for the stream is smaller (`postgres.peek`)."""

MAX_CATALOG_BYTES: Final = 1 << 30
"""Of one stored catalog: enough for more than a million tables."""

_MAX_NAME_BYTES: Final = 63


def _fits_into_name(text: str) -> str:
    if len(text.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"a name has up to {_MAX_NAME_BYTES} bytes")
    return text


_Ascii: TypeAlias = Annotated[str, StringConstraints(max_length=_MAX_NAME_BYTES, pattern=r"^[\x01-\x7f]+$")]
_NonAscii: TypeAlias = Annotated[
    str, StringConstraints(max_length=_MAX_NAME_BYTES, pattern=r"^[^\x00]+$"), AfterValidator(_fits_into_name)
]
Name: TypeAlias = Annotated[_Ascii | _NonAscii, Field(union_mode="left_to_right")]
"""Nearly all names are ASCII, which pydantic validates without a call to Python."""

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

ColumnRow: TypeAlias = tuple[
    Oid, Attnum, Name, Oid, Typmod, ShortText, ShortText | None, Attgenerated, Text | None, Text | None
]
"""Of `reader.COLUMNS`."""

PublicationRow: TypeAlias = tuple[Oid, Name, bool, bool, bool, bool, bool, bool, tuple[Name, ...], bool]
"""Of `reader.PUBLICATIONS`."""

MembershipRow: TypeAlias = tuple[Oid, Oid, Text | None, Text | None, Attnums | None, bool]
"""Of `reader.MEMBERSHIPS`."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class DdlChangeContent(_Strict):
    """The content of a message with `CATALOG_PREFIX`."""

    format: Literal[1]
    whole: bool = False
    touched_tables: tuple[Oid, ...] = ()
    partitions: tuple[Oid, ...] = ()
    written_columns: tuple[tuple[Oid, Attnum], ...] = ()
    respelled_tables: tuple[Oid, ...] = ()
    rekeyed_tables: tuple[Oid, ...] = ()
    described_tables: tuple[Oid, ...] = ()
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
    """A column of a stored catalog; a dictionary, which is faster for many columns."""

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
    """A catalog as `json_form` writes it."""

    format: Literal[1]
    lsn: Annotated[str, StringConstraints(pattern=r"^[0-9A-F]{1,8}/[0-9A-F]{1,8}$")]
    server_version: Annotated[int, Field(ge=0, lt=2**31)]
    publications: tuple[StoredPublication, ...]
    tables: tuple[StoredTable, ...]
