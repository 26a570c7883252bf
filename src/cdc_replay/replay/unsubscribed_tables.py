"""Published names against the subscriber's tables: which table a change reaches, and what it does not reach.

A native worker looks up the table that has the published name at that moment, and then its oid among those
that are subscribed to:

| a table of that name                 | native                        | here                              |
|--------------------------------------|-------------------------------|-----------------------------------|
| is subscribed to                     | applies the change            | the same                          |
| is there, with the published columns | ignores it until REFRESH      | the same, and the result names it |
| is there, and lacks a column (R8.1)  | stops                         | the window ends before the change |
| is not there (R7.12, R8.1)           | stops                         | the window ends before the change |

A native worker has applied what was sent before the subscriber renames a table. Here that may still be in the
log, under the old name. So where a publisher's table went from the name by which a table of the subscriber is
recorded to the one that it has now, both were renamed alike, and all its changes go to that table:

    publisher     t ──── changes ──── RENAME TO u ──── changes ────▶ log
    subscriber    recorded as t, called u now                        both reach u
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.arrow.version_index import CatalogVersions
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.queries import SentChanges
from cdc_replay.errors import TargetMismatch
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.pgoutput.messages import MessageType
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.route.routes import Unrouted
from cdc_replay.subscriber.owners import ActingRole, Rights
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.subscription_tables import KnownTable
from cdc_replay.subscriber.target_checks import check_targets
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables

_KINDS: Final = {
    PublishAction.INSERT: MessageType.INSERT.value,
    PublishAction.UPDATE: MessageType.UPDATE.value,
    PublishAction.DELETE: MessageType.DELETE.value,
}


def renamed_alike(
    change_log: ChangeLog, after: Lsn, known: Iterable[KnownTable]
) -> Mapping[RelationId, QualifiedName]:
    """The publisher's tables that were renamed as the subscriber's were, each with its name now."""
    moved = {each.recorded_name: each.name for each in known if each.is_renamed}
    if not moved:
        return {}
    return {
        relation: had[-1]
        for relation, had in _names_since(change_log, after).items()
        if any(moved.get(name) == had[-1] for name in had)
    }


def called_otherwise_before(
    change_log: ChangeLog, after: Lsn, names: Collection[QualifiedName]
) -> Mapping[RelationId, QualifiedName]:
    """The publisher's tables that have one of `names` now, and earlier had none of them, with that name."""
    return {
        relation: had[-1]
        for relation, had in _names_since(change_log, after).items()
        if had[-1] in names and all(name == had[-1] or name not in names for name in had)
    }


def _names_since(change_log: ChangeLog, after: Lsn) -> dict[RelationId, list[QualifiedName]]:
    """What each of the publisher's tables was called, in order."""
    names: dict[RelationId, list[QualifiedName]] = {}
    for catalog in catalog_history(change_log).within(Window(after, change_log.end_lsn)).values():
        for relation, table in catalog.tables.items():
            names.setdefault(relation, []).append(table.name)
    return names


@dataclass(frozen=True, slots=True)
class Strangers:
    """What a window has for tables that the subscription does not know.

    The window must end at `upto`, before a change that native stops at. `wanted` are the columns that the
    tables in the way must have, `targets` those of them that are there.
    """

    passed_over: tuple[QualifiedName, ...]
    upto: Lsn
    wanted: Mapping[QualifiedName, tuple[str, ...]]
    targets: Mapping[QualifiedName, TargetTable]


def strangers(
    session: SubscriptionSession,
    change_log: ChangeLog,
    window: Window,
    elsewhere: Sequence[Unrouted],
    known: Collection[QualifiedName],
) -> Strangers:
    """What becomes of changes that have no route because their table is not among those that are `known`."""
    unknown = [each for each in elsewhere if each.name not in known]
    if not unknown:
        return Strangers((), window.upto, {}, {})
    names = dict.fromkeys(each.name for each in unknown)
    targets = {
        # Whether it could be written to is not asked where nothing is written.
        name: dataclasses.replace(table, row_security=False, rules=(), acting=ActingRole("", Rights.OWN))
        for name, table in read_target_tables(session.connection, names).items()
    }
    in_the_way = [each for each in unknown if not _could_take(each, targets)]
    upto = _end_before(change_log, window, in_the_way)
    return Strangers(tuple(sorted(targets)), upto, {each.name: each.columns for each in in_the_way}, targets)


def _could_take(unrouted: Unrouted, targets: Mapping[QualifiedName, TargetTable]) -> bool:
    try:
        check_targets({unrouted.name: unrouted.columns}, targets)
    except TargetMismatch:
        return False
    return True


def _end_before(change_log: ChangeLog, window: Window, in_the_way: Sequence[Unrouted]) -> Lsn:
    if not in_the_way:
        return window.upto
    sent = SentChanges(dict(_kinds(in_the_way)), frozenset(_truncated(in_the_way)))
    catalogs = CatalogVersions.from_positions(catalog_history(change_log).positions)
    return change_log.end_before(window, sent, catalogs)


def _kinds(unrouted: Iterable[Unrouted]) -> Iterator[tuple[tuple[int, int], frozenset[str]]]:
    for each in unrouted:
        kinds = frozenset(_KINDS[action] for action in each.actions if action in _KINDS)
        yield (each.relation.version, each.catalog_version), kinds


def _truncated(unrouted: Iterable[Unrouted]) -> Iterator[tuple[RelationId, int]]:
    return (
        (each.relation.id, each.catalog_version)
        for each in unrouted
        if PublishAction.TRUNCATE in each.actions
    )
