"""Published names against the subscriber's tables: which table a change reaches, and what becomes of others.

A native worker looks up the table that has the published name at that moment, and then its oid among the
subscribed tables:

| a table of that name                    | native                      | here                              |
|-----------------------------------------|-----------------------------|-----------------------------------|
| is subscribed to                        | applies the change          | the same                          |
| exists, with the published columns      | skips it until REFRESH      | the same, and the result names it |
| exists, and lacks a column (R8.1)       | stops                       | the window ends before the change |
| does not exist (R7.12, R8.1)            | stops                       | the window ends before the change |

A native worker has applied what was sent before the subscriber renames a table. Here these changes may still
be in the log, under the old name. So if a publisher's table was renamed from the name under which a table of
the subscriber is recorded to that table's present name, both were renamed alike, and all changes go there:

    publisher     t ──── changes ──── RENAME TO u ──── changes ────▶ log
    subscriber    recorded as t, now named u                         both reach u
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.queries import SentChanges
from cdc_replay.errors import TargetMismatch
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.pgoutput.messages import MessageType
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.route.routes import Unrouted
from cdc_replay.replay.window_end import EndReason, Limit
from cdc_replay.subscriber.owners import ActingRole, Rights
from cdc_replay.subscriber.subscription_tables import KnownTable
from cdc_replay.subscriber.target_checks import check_targets
from cdc_replay.subscriber.target_tables import TargetTable

_MESSAGE_TYPES: Final = {
    PublishAction.INSERT: MessageType.INSERT.value,
    PublishAction.UPDATE: MessageType.UPDATE.value,
    PublishAction.DELETE: MessageType.DELETE.value,
}


def tables_renamed_alike(
    change_log: ChangeLog, after: Lsn, known: Iterable[KnownTable]
) -> Mapping[RelationId, QualifiedName]:
    """The publisher's tables that were renamed as the subscriber's were, each with its present name."""
    renamed = {table.recorded_name: table.name for table in known if table.is_renamed}
    if not renamed:
        return {}
    return {
        relation: names[-1]
        for relation, names in _names_since(change_log, after).items()
        if any(renamed.get(name) == names[-1] for name in names)
    }


def tables_renamed_to(
    change_log: ChangeLog, after: Lsn, names: Collection[QualifiedName]
) -> Mapping[RelationId, QualifiedName]:
    """The publisher's tables that have one of `names` now, and had none of them before, with that name.

    Not one that has taken the name over from another table: that one's changes were sent under it.
    """
    histories = _names_since(change_log, after)
    holders = Counter(name for history in histories.values() for name in set(history))
    return {
        relation: history[-1]
        for relation, history in histories.items()
        if history[-1] in names
        and holders[history[-1]] == 1
        and all(name == history[-1] or name not in names for name in history)
    }


def _names_since(change_log: ChangeLog, after: Lsn) -> dict[RelationId, list[QualifiedName]]:
    names: dict[RelationId, list[QualifiedName]] = {}
    for catalog in catalog_history(change_log).within(Window(after, change_log.end_lsn)).values():
        for relation, table in catalog.tables.items():
            names.setdefault(relation, []).append(table.name)
    return names


def find_unfit(
    unrouted: Iterable[Unrouted], targets: Mapping[QualifiedName, TargetTable]
) -> tuple[Unrouted, ...]:
    """Those whose table does not exist on the subscriber, or lacks a column: a native worker stops."""
    return tuple(relation for relation in unrouted if not _could_take(relation, targets))


def unsubscribed_limit(window: Window, unfit: Sequence[Unrouted]) -> Limit:
    """The changes at which a native worker stops."""
    sent = SentChanges(frozenset(_row_changes(unfit)), frozenset(_truncated(unfit)))
    return Limit(EndReason.UNSUBSCRIBED, window, sent=sent)


def _could_take(unrouted: Unrouted, targets: Mapping[QualifiedName, TargetTable]) -> bool:
    try:
        check_targets({unrouted.name: unrouted.columns}, targets)
    except TargetMismatch:
        return False
    return True


def without_rights(table: TargetTable) -> TargetTable:
    """The table of a change that is not applied: whether it is writable does not matter."""
    return dataclasses.replace(table, row_security=False, rules=(), acting=ActingRole("", Rights.OWN))


def _row_changes(unrouted: Iterable[Unrouted]) -> Iterator[tuple[int, int, str]]:
    for versioned in unrouted:
        for action in versioned.actions & _MESSAGE_TYPES.keys():
            yield versioned.relation.version, versioned.catalog_version, _MESSAGE_TYPES[action]


def _truncated(unrouted: Iterable[Unrouted]) -> Iterator[tuple[RelationId, int]]:
    return (
        (versioned.relation.id, versioned.catalog_version)
        for versioned in unrouted
        if PublishAction.TRUNCATE in versioned.actions
    )
