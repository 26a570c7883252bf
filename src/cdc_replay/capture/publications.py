"""The publications that the slot is read with: one per publish action, and the root publications.

| name                               | publishes          | identity | read                                |
|------------------------------------|--------------------|----------|-------------------------------------|
| cdc_replay_capture_i, _u, _d, _t   | one action each    | leaf     | together, by every pull             |
| cdc_replay_capture_t0, …, _t3      | TRUNCATE           | via root | alone, by pulls that need it (R2.14)|

Which tables they hold mirrors what the subscribed publications publish (`publication.capture_set`), so that
no statement fails on the publisher that would not fail without them (R2.17, R5.6). All of them, empty ones
too, exist before the slot does and are never dropped without being created again in the same transaction: a
publication that the historic catalog lacks at some change would block the slot (15 to 17) or lose that change
(18) (R1.19).

On PostgreSQL 18 generated columns are published if one of the subscribed publications publishes any. It is
one setting for all that are read together, because publications that disagree about it cannot be (R6.9); it
makes no statement fail (R6.10), and without it the values of a published generated column would not be in
the log.

A publication is only ever changed if its comment names the same slot. One comment also tells where the log of
the slot began (`log_mark`), and keeps that when its publication is made anew.
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
"""The publication whose comment also tells where the log began."""

LOG_FROM: Final = ", log from "
"""What stands in that comment between the text that all have and the position."""

GENERATED_COLUMNS_SINCE: Final = 180000

COMMENTS: Final = """
    select p.pubname::text, obj_description(p.oid, 'pg_publication')
    from pg_publication p
    where p.pubname = any(%s)
"""


@dataclass(frozen=True, slots=True)
class PublicationPlan:
    """The statements that bring one capture publication to what it must be; none if it is that already.

    They are to be executed in one transaction.
    """

    name: str
    statements: tuple[sql.Composed, ...]


def plan_capture_publications(
    connection: Connection, catalog: PublisherCatalog, publications: Sequence[str], slot: str
) -> tuple[PublicationPlan, ...]:
    """What has to be done so that the capture publications mirror `publications`.

    Raises:
        PublisherNotReady: if a publication of that name belongs to another slot, or is not ours at all.
    """
    comments = _owned(connection, slot)
    plans = []
    for wanted in _all_wanted(catalog, publications):
        current = catalog.publications[wanted.name] if wanted.name in comments else None
        statements = _changes(catalog, current, wanted)
        if current is None or _must_recreate(catalog, current, wanted):
            comment = comments.get(wanted.name, comment_text(slot))
            statements = (*statements, comment_on(wanted.name, comment))
        plans.append(PublicationPlan(wanted.name, statements))
    return tuple(plans)


def drop_capture_publications(connection: Connection, slot: str) -> tuple[str, ...]:
    """Drop the capture publications of `slot` and return their names; those of another slot stay."""
    comments = publication_comments(connection)
    ours = tuple(name for name, comment in comments.items() if _is_of(comment, slot))
    for name in ours:
        connection.execute(sql.SQL("drop publication {}").format(sql.Identifier(name)))
    return ours


def owned_by(connection: Connection, slot: str) -> bool:
    """Whether there is a capture publication of `slot`: then the slot is of this software, too."""
    return any(_is_of(comment, slot) for comment in publication_comments(connection).values())


def comment_text(slot: str) -> str:
    """The comment that marks a publication as the capture publication of `slot`."""
    return f"created by cdc-replay for replication slot {slot}"


def publication_comments(connection: Connection) -> dict[str, str | None]:
    """The comments of the capture publications that exist, by name."""
    found: list[tuple[str, str | None]] = connection.execute(COMMENTS, (list(OUR_PUBLICATIONS),)).fetchall()
    return dict(found)


def _is_of(comment: str | None, slot: str) -> bool:
    text = comment_text(slot)
    # The separator too: the name of another slot may begin with this one's.
    return comment is not None and (comment == text or comment.startswith(text + LOG_FROM))


def _owned(connection: Connection, slot: str) -> dict[str, str]:
    """The comments of the capture publications, all of which are of `slot`."""
    comments = publication_comments(connection)
    foreign = [name for name, comment in sorted(comments.items()) if not _is_of(comment, slot)]
    if foreign:
        raise PublisherNotReady(
            f'publications {", ".join(foreign)} do not belong to replication slot "{slot}"',
            detail="; ".join(f"{name}: {comments[name] or 'no comment'}" for name in foreign),
            hint="One database is captured by one slot: let the publishers of the configuration share it,"
            " or run `cdc-replay teardown` for the other one.",
        )
    return {name: comment for name, comment in comments.items() if comment is not None}


@dataclass(frozen=True, slots=True)
class _Wanted:
    name: str
    action: PublishAction
    members: CaptureMembers
    via_root: bool
    generated: bool
    server_version: int


def _all_wanted(catalog: PublisherCatalog, publications: Sequence[str]) -> Iterator[_Wanted]:
    version = catalog.server_version
    # Row filters decide by the values of stored generated columns, also where nobody gets these (R3.13).
    generated = version >= GENERATED_COLUMNS_SINCE
    members = capture_set(catalog, publications)
    for action, name in CAPTURE_PUBLICATIONS.items():
        yield _Wanted(
            name, action, members[action], via_root=False, generated=generated, server_version=version
        )
    for name, roots in zip(ROOT_PUBLICATIONS, root_set(catalog, publications), strict=True):
        yield _Wanted(
            name, PublishAction.TRUNCATE, roots, via_root=True, generated=False, server_version=version
        )


def _changes(
    catalog: PublisherCatalog, current: Publication | None, wanted: _Wanted
) -> tuple[sql.Composed, ...]:
    if current is None:
        return (_create(wanted),)
    if _must_recreate(catalog, current, wanted):
        return (sql.SQL("drop publication {}").format(sql.Identifier(wanted.name)), _create(wanted))
    settings = () if _has_settings(current, wanted) else (_set(wanted),)
    return (*settings, *_membership_changes(catalog, current, wanted))


def _must_recreate(catalog: PublisherCatalog, current: Publication, wanted: _Wanted) -> bool:
    if not current.all_tables or not wanted.members.all_tables:
        return current.all_tables != wanted.members.all_tables
    exceptions = {catalog.tables[relation].name for relation in current.exceptions}
    return exceptions != set(wanted.members.exceptions)


def _has_settings(current: Publication, wanted: _Wanted) -> bool:
    return (
        current.actions == {wanted.action}
        and current.via_root == wanted.via_root
        and current.publish_generated == wanted.generated
    )


def _create(wanted: _Wanted) -> sql.Composed:
    return sql.SQL("create publication {}{} with ({})").format(
        sql.Identifier(wanted.name), _members(wanted.members), _settings(wanted)
    )


def _set(wanted: _Wanted) -> sql.Composed:
    return sql.SQL("alter publication {} set ({})").format(sql.Identifier(wanted.name), _settings(wanted))


def comment_on(name: str, text: str) -> sql.Composed:
    """The statement that gives a publication its comment."""
    return sql.SQL("comment on publication {} is {}").format(sql.Identifier(name), text)


def _settings(wanted: _Wanted) -> sql.Composed:
    settings = [
        sql.SQL("publish = {}").format(wanted.action.value),
        sql.SQL("publish_via_partition_root = {}").format(sql.SQL("true" if wanted.via_root else "false")),
    ]
    if wanted.server_version >= GENERATED_COLUMNS_SINCE:
        settings.append(
            sql.SQL("publish_generated_columns = {}").format(
                sql.SQL("stored") if wanted.generated else sql.SQL("none")
            )
        )
    return sql.SQL(", ").join(settings)


def _members(members: CaptureMembers) -> sql.Composed:
    if members.all_tables:
        if not members.exceptions:
            return sql.SQL(" for all tables").format()
        # As documented for 19 (R2.18).
        return sql.SQL(" for all tables except (table {})").format(_only(members.exceptions))
    objects = _objects(members.schemas, members.tables)
    return sql.SQL(" for {}").format(objects) if members.schemas or members.tables else sql.SQL("").format()


def _objects(schemas: frozenset[str], tables: Sequence[QualifiedName]) -> sql.Composed:
    parts = [sql.SQL("tables in schema {}").format(sql.Identifier(schema)) for schema in sorted(schemas)]
    # ONLY: inheritance children are members of their own (R2.16); a partitioned table's leaves come with it.
    parts += [sql.SQL("table {}").format(_only([table])) for table in sorted(tables)]
    return sql.SQL(", ").join(parts)


def _only(tables: Sequence[QualifiedName]) -> sql.Composed:
    return sql.SQL(", ").join(
        sql.SQL("only {}").format(sql.Identifier(table.schema, table.name)) for table in tables
    )


def _membership_changes(
    catalog: PublisherCatalog, current: Publication, wanted: _Wanted
) -> tuple[sql.Composed, ...]:
    """Additions before removals: what stays published must not be missing in between (R1.19)."""
    if wanted.members.all_tables:
        return ()
    has = {catalog.tables[relation].name for relation in current.memberships}
    changes = (
        ("add", wanted.members.schemas - current.schemas, set(wanted.members.tables) - has),
        ("drop", current.schemas - wanted.members.schemas, has - set(wanted.members.tables)),
    )
    return tuple(
        sql.SQL("alter publication {} {} {}").format(
            sql.Identifier(wanted.name), sql.SQL(verb), _objects(schemas, tuple(tables))
        )
        for verb, schemas, tables in changes
        if schemas or tables
    )
