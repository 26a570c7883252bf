"""The publications that the slot is read with: one per publish action, and the root publications.

| name                               | publishes       | identity | read                                 |
|------------------------------------|-----------------|----------|--------------------------------------|
| cdc_replay_capture_i, _u, _d, _t   | one action each | leaf     | together, by every pull              |
| cdc_replay_capture_t0, …, _t3      | TRUNCATE        | via root | alone, by pulls that need it (R2.14) |

Their tables mirror the subscribed publications (`publication.capture_set`), so that no statement fails on the
publisher because of them (R2.17, R5.6). All of them, even empty ones, are created before the slot, and are
only dropped in a transaction that creates them again: a publication that is missing in the historic catalog
at some change blocks the slot (15 to 17) or loses that change (18) (R1.19).

On PostgreSQL 18 stored generated columns are published. All publications that are read together must agree on
that (R6.9); it makes no statement fail (R6.10).

A publication is only changed if its comment names the same slot. One comment also records the start of the
log (`log_start`), and keeps it when its publication is recreated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.errors import PublisherNotReady
from cdc_replay.model.publication import Publication, PublishAction, PublisherCatalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.capture_set import (
    CAPTURE_PUBLICATIONS,
    ROOT_DEPTHS,
    CaptureMembers,
    capture_set,
    root_set,
)

ROOT_PUBLICATIONS: Final = tuple(f"cdc_replay_capture_t{depth}" for depth in range(ROOT_DEPTHS))
"""The root publications, by depth in the partition tree."""

OUR_PUBLICATIONS: Final = (*CAPTURE_PUBLICATIONS.values(), *ROOT_PUBLICATIONS)

MARKED_PUBLICATION: Final = CAPTURE_PUBLICATIONS[PublishAction.INSERT]
"""The publication whose comment also records the start of the log."""

LOG_FROM: Final = ", log from "
"""Separates the common text of that comment from the position."""

GENERATED_COLUMNS_SINCE: Final = 180000

COMMENTS: Final = """
    select p.pubname::text, obj_description(p.oid, 'pg_publication')
    from pg_publication p
    where p.pubname = any(%s)
"""


@dataclass(frozen=True, slots=True)
class PublicationPlan:
    """The statements that create or change a capture publication, to be executed in one transaction."""

    name: str
    statements: tuple[sql.Composed, ...]


def plan_capture_publications(
    connection: Connection, catalog: PublisherCatalog, publications: Sequence[str], slot: str
) -> tuple[PublicationPlan, ...]:
    """The statements that make the capture publications mirror `publications`.

    Raises:
        PublisherNotReady: if a publication of that name belongs to another slot or program.
    """
    comments = _read_own_comments(connection, slot)
    plans = []
    for spec in _specify(catalog, publications):
        # One that is younger than the catalog is not adopted: its creation fails.
        current = catalog.publications.get(spec.name) if spec.name in comments else None
        statements = _plan_statements(catalog, current, spec)
        if current is None or _must_recreate(catalog, current, spec):
            comment = comments.get(spec.name, comment_text(slot))
            statements = (*statements, comment_on(spec.name, comment))
        plans.append(PublicationPlan(spec.name, statements))
    return tuple(plans)


def drop_capture_publications(connection: Connection, slot: str) -> tuple[str, ...]:
    """Drop the capture publications of `slot` and return their names; those of another slot stay."""
    comments = publication_comments(connection)
    ours = tuple(name for name, comment in comments.items() if _names_slot(comment, slot))
    for name in ours:
        connection.execute(sql.SQL("drop publication {}").format(sql.Identifier(name)))
    return ours


def owned_by(connection: Connection, slot: str) -> bool:
    """Whether a capture publication of `slot` exists; then the slot is ours, too."""
    return any(_names_slot(comment, slot) for comment in publication_comments(connection).values())


def comment_text(slot: str) -> str:
    """The comment that marks a publication as the capture publication of `slot`."""
    return f"created by cdc-replay for replication slot {slot}"


def publication_comments(connection: Connection) -> dict[str, str | None]:
    """The comments of the capture publications that exist, by name."""
    rows: list[tuple[str, str | None]] = connection.execute(COMMENTS, (list(OUR_PUBLICATIONS),)).fetchall()
    return dict(rows)


def _names_slot(comment: str | None, slot: str) -> bool:
    text = comment_text(slot)
    # With the separator: another slot's name may begin with this one's.
    return comment is not None and (comment == text or comment.startswith(text + LOG_FROM))


def _read_own_comments(connection: Connection, slot: str) -> dict[str, str]:
    """The comments of the existing capture publications; an error if one does not name `slot`."""
    comments = publication_comments(connection)
    foreign = [name for name, comment in sorted(comments.items()) if not _names_slot(comment, slot)]
    if foreign:
        raise PublisherNotReady(
            f'publications {", ".join(foreign)} do not belong to replication slot "{slot}"',
            detail="; ".join(f"{name}: {comments[name] or 'no comment'}" for name in foreign),
            hint="A database is captured by one slot: let the publishers of the configuration share it,"
            " or run `cdc-replay teardown` for the other one.",
        )
    return {name: comment for name, comment in comments.items() if comment is not None}


@dataclass(frozen=True, slots=True)
class _PublicationSpec:
    name: str
    action: PublishAction
    members: CaptureMembers
    via_root: bool
    generated: bool
    server_version: int


def _specify(catalog: PublisherCatalog, publications: Sequence[str]) -> Iterator[_PublicationSpec]:
    version = catalog.server_version
    # Row filters may refer to stored generated columns that no subscriber receives (R3.13).
    generated = version >= GENERATED_COLUMNS_SINCE
    members = capture_set(catalog, publications)
    for action, name in CAPTURE_PUBLICATIONS.items():
        yield _PublicationSpec(
            name, action, members[action], via_root=False, generated=generated, server_version=version
        )
    for name, roots in zip(ROOT_PUBLICATIONS, root_set(catalog, publications), strict=True):
        yield _PublicationSpec(
            name, PublishAction.TRUNCATE, roots, via_root=True, generated=False, server_version=version
        )


def _plan_statements(
    catalog: PublisherCatalog, current: Publication | None, spec: _PublicationSpec
) -> tuple[sql.Composed, ...]:
    if current is None:
        return (_create_statement(spec),)
    if _must_recreate(catalog, current, spec):
        return (sql.SQL("drop publication {}").format(sql.Identifier(spec.name)), _create_statement(spec))
    options = () if _settings_match(current, spec) else (_alter_settings(spec),)
    return (*options, *_membership_changes(catalog, current, spec))


def _must_recreate(catalog: PublisherCatalog, current: Publication, spec: _PublicationSpec) -> bool:
    if not current.all_tables or not spec.members.all_tables:
        return current.all_tables != spec.members.all_tables
    exceptions = {catalog.tables[relation].name for relation in current.exceptions}
    return exceptions != set(spec.members.exceptions)


def _settings_match(current: Publication, spec: _PublicationSpec) -> bool:
    return (
        current.actions == {spec.action}
        and current.via_root == spec.via_root
        and current.publish_generated == spec.generated
    )


def _create_statement(spec: _PublicationSpec) -> sql.Composed:
    return sql.SQL("create publication {}{} with ({})").format(
        sql.Identifier(spec.name), _members_clause(spec.members), _settings_clause(spec)
    )


def _alter_settings(spec: _PublicationSpec) -> sql.Composed:
    return sql.SQL("alter publication {} set ({})").format(sql.Identifier(spec.name), _settings_clause(spec))


def comment_on(name: str, text: str) -> sql.Composed:
    """The statement that sets a publication's comment."""
    return sql.SQL("comment on publication {} is {}").format(sql.Identifier(name), text)


def _settings_clause(spec: _PublicationSpec) -> sql.Composed:
    options = [
        sql.SQL("publish = {}").format(spec.action.value),
        sql.SQL("publish_via_partition_root = {}").format(sql.SQL("true" if spec.via_root else "false")),
    ]
    if spec.server_version >= GENERATED_COLUMNS_SINCE:
        options.append(
            sql.SQL("publish_generated_columns = {}").format(
                sql.SQL("stored") if spec.generated else sql.SQL("none")
            )
        )
    return sql.SQL(", ").join(options)


def _members_clause(members: CaptureMembers) -> sql.Composed:
    if members.all_tables:
        if not members.exceptions:
            return sql.SQL(" for all tables").format()
        # As documented for 19 (R2.18).
        return sql.SQL(" for all tables except (table {})").format(_table_list(members.exceptions))
    objects = _object_list(members.schemas, members.tables)
    return sql.SQL(" for {}").format(objects) if members.schemas or members.tables else sql.SQL("").format()


def _object_list(schemas: frozenset[str], tables: Sequence[QualifiedName]) -> sql.Composed:
    parts = [sql.SQL("tables in schema {}").format(sql.Identifier(schema)) for schema in sorted(schemas)]
    # ONLY: inheritance children are separate members (R2.16); a partitioned table includes its leaves.
    parts += [sql.SQL("table {}").format(_table_list([table])) for table in sorted(tables)]
    return sql.SQL(", ").join(parts)


def _table_list(tables: Sequence[QualifiedName]) -> sql.Composed:
    return sql.SQL(", ").join(
        sql.SQL("only {}").format(sql.Identifier(table.schema, table.name)) for table in tables
    )


def _membership_changes(
    catalog: PublisherCatalog, current: Publication, spec: _PublicationSpec
) -> tuple[sql.Composed, ...]:
    """Additions before removals, so that no table is missing in between (R1.19)."""
    if spec.members.all_tables:
        return ()
    current_tables = {catalog.tables[relation].name for relation in current.memberships}
    changes = (
        ("add", spec.members.schemas - current.schemas, set(spec.members.tables) - current_tables),
        ("drop", current.schemas - spec.members.schemas, current_tables - set(spec.members.tables)),
    )
    return tuple(
        sql.SQL("alter publication {} {} {}").format(
            sql.Identifier(spec.name), sql.SQL(verb), _object_list(schemas, tuple(tables))
        )
        for verb, schemas, tables in changes
        if schemas or tables
    )
