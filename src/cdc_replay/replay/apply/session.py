"""One window into the subscriber: stage, merge every target, record progress, commit.

    executors                             driver, one connection for the whole window
                                          drop the staging tables of killed runs
    COPY net changes into staging         wait
                                          begin, under the subscription's origin (subscriber.origin)
                                            TRUNCATE, then each target's rows   (apply.merge)
                                            the caller's record: result, applied LSNs
                                          commit
                                          drop the staging tables

Killed before the commit: the subscriber is unchanged, and the window is applied again from its start. Killed
after it: the tables' applied LSN says so, and the next window does not contain these changes. Staging is
unlogged: a crash of the server empties it, but also ends the connection that would merge it.

If other sessions hold locks that the transaction needs, it is retried with the same staged rows
(`replay.apply.lock_retry`).

Triggers and foreign keys behave as in a native apply worker: `session_replication_role` is replica, and FOR
EACH STATEMENT triggers are disabled (`subscriber.triggers`, R8.13).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import psycopg
from psycopg import sql

from cdc_replay.errors import ApplyConflict, SubscriberNotReady
from cdc_replay.failpoints import failpoint
from cdc_replay.model.frames import Truncation
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.progress import Report, each_table, unreported
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import SubscribedTable, Subscription
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.postgres.identifiers import commas
from cdc_replay.replay.apply.conflicts import apply_errors
from cdc_replay.replay.apply.linked_tables import merge_group
from cdc_replay.replay.apply.lock_retry import retry_on_lock
from cdc_replay.replay.apply.merge import MergeResult, TableMerge, begin_merge
from cdc_replay.replay.apply.refused_rows import name_refused_row
from cdc_replay.replay.apply.stage_table import StageTable, drop_staging, stage_table
from cdc_replay.replay.apply.staging import StagedTable
from cdc_replay.replay.contingent_changes import Refold
from cdc_replay.subscriber.apply_connection import connect_as_apply_worker, set_lock_timeout
from cdc_replay.subscriber.as_owner import TargetSession, TargetSessions, act_on
from cdc_replay.subscriber.firing_foreign_keys import group_tables
from cdc_replay.subscriber.replication_origin import replication_origin
from cdc_replay.subscriber.target_checks import check_names, check_targets, renamed_target
from cdc_replay.subscriber.target_statements import target_reference
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables
from cdc_replay.subscriber.triggers import disable_statement_triggers

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ApplyRequest:
    """Where a window goes: `tables` take part in it, up to `upto`.

    `refold` folds contingent changes again (`replay.apply.contingent`). `relations` are the tables' oids as
    the caller found them; a table without one is looked up by name.

    If it `repairs`, a TRUNCATE deletes the rows that are not staged: the others have been inserted since, and
    keep what only the subscriber has. `shared` has, by table, another subscription that feeds it: a deleted
    row may be one that has moved there, so none is deleted.
    """

    subscription: Subscription
    dsn: str
    tables: tuple[SubscribedTable, ...]
    upto: Lsn
    refold: Refold | None = None
    relations: Mapping[QualifiedName, int] = field(default_factory=dict)
    report: Report = unreported
    repairs: bool = False
    shared: Mapping[QualifiedName, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Applied:
    """Rows changed on the subscriber, tables truncated, and conflicts by `ConflictKind` value.

    `conflict_keys` has the table and the row's key, for the first conflict of each kind and table.
    """

    insert: int = 0
    update: int = 0
    delete: int = 0
    truncate: int = 0
    conflicts: Mapping[str, int] = field(default_factory=dict)
    conflict_keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def counts(self) -> dict[str, int]:
        """What was applied, with the keys of results."""
        return {
            "insert": self.insert,
            "update": self.update,
            "delete": self.delete,
            "truncate": self.truncate,
        }


BeforeCommit: TypeAlias = Callable[[Connection, Applied], None]
"""Records the window's result and the tables' applied LSNs inside its transaction."""


@dataclass(frozen=True, slots=True)
class ApplySession:
    """A window that is ready to be staged into `tables` and then applied.

    `run` is part of the names of its staging tables only.
    """

    request: ApplyRequest
    run: str
    connection: Connection
    targets: Mapping[QualifiedName, TargetTable]
    tables: tuple[StageTable, ...]

    def apply(
        self,
        staged: Mapping[int, StagedTable],
        truncations: Sequence[Truncation],
        *,
        before_commit: BeforeCommit | None = None,
    ) -> Applied:
        """Apply `truncations` in order, then the staged changes by target, in one transaction.

        Raises:
            ApplyConflict: if the subscriber's rows or constraints do not allow a change.
            TargetMismatch: if its tables have changed since the session was opened.
            SubscriberLocked: if other sessions hold needed locks, at every try.
            SubscriberNotReady: if a row of a shared table would be deleted.
            SubscriberNotWritable: if it is read-only, or has no space.
            ServerUnavailable: if the connection is lost.
        """
        started = time.monotonic()

        def attempt() -> Applied:
            with apply_errors(None), _transaction(self.connection, self.request):
                applied = self._merge_all(staged, truncations, started)
                check_names(self.connection, {name: table.oid for name, table in self.targets.items()})
                _before_commit(self.connection, applied, before_commit)
            return applied

        try:
            applied = _retry_on_lock(attempt, self.connection, self.request)
        except ApplyConflict as error:
            refused = name_refused_row(self.connection, error, staged.values(), self.targets)
            raise refused from error.__cause__
        failpoint("replay.after_commit")
        for kind, count in applied.conflicts.items():
            keys = ", ".join(applied.conflict_keys.get(kind, ())) or "no key to show"
            logger.info("subscription %s: %d x %s: %s", self.request.subscription.name, count, kind, keys)
        logger.info(
            "subscription %s: applied up to %s: %d inserts, %d updates, %d deletes, %d truncates, %.1f s",
            *(self.request.subscription.name, self.request.upto, *applied.counts.values(), applied.seconds),
        )
        return applied

    def _merge_all(
        self, staged: Mapping[int, StagedTable], truncations: Sequence[Truncation], started: float
    ) -> Applied:
        names = {table.index: table.name for table in self.request.tables}
        total = MergeResult()
        changes = {names[index]: table for index, table in staged.items()}
        merged_into = [self.targets[name] for name in changes]
        truncated = [self.targets[names[truncation.target]] for truncation in truncations]
        cleared = {target.name: target for target in truncated} if self.request.repairs else {}
        with act_on(self.connection, [*merged_into, *truncated]) as sessions:
            if not self.request.repairs:
                self._truncate(sessions, truncations)
            unstaged = [target for name, target in cleared.items() if name not in changes]
            with disable_statement_triggers(self.connection, sessions, [*merged_into, *unstaged]):
                for target in unstaged:
                    delete = sql.SQL("delete from {}").format(target_reference(target))
                    total.delete += sessions.session_for(target).execute(delete)
                for group in self._reported(group_tables(merged_into)):
                    self._merge(sessions, group, changes, cleared.keys(), total)
        return Applied(
            total.insert,
            total.update,
            total.delete,
            len(truncations),
            dict(total.conflicts),
            dict(total.conflict_keys),
            time.monotonic() - started,
        )

    def _reported(self, groups: Sequence[Sequence[TargetTable]]) -> Iterator[Sequence[TargetTable]]:
        request = self.request
        return each_table(
            request.report, "merge", request.subscription.name, groups, lambda group: group[0].name
        )

    def _merge(
        self,
        sessions: TargetSessions,
        group: Sequence[TargetTable],
        changes: Mapping[QualifiedName, StagedTable],
        cleared: Collection[QualifiedName],
        total: MergeResult,
    ) -> None:
        policy, refold = self.request.subscription.on_conflict, self.request.refold

        def begin(target: TargetTable, session: TargetSession) -> TableMerge:
            merging = begin_merge(self.connection, session, target, changes[target.name], policy, refold)
            if target.name in cleared:
                merging.delete_unstaged()
            return merging

        for name, merged in merge_group(self.connection, sessions, group, begin).items():
            if merged.delete and (feed := self.request.shared.get(name)) is not None:
                raise _deletes_shared_rows(self.request.subscription.name, name, feed)
            total.insert += merged.insert
            total.update += merged.update
            total.delete += merged.delete
            total.conflicts.update(merged.conflicts)
            for kind, keys in merged.conflict_keys.items():
                total.conflict_keys.setdefault(kind, []).extend(f"{name} {key}" for key in keys)
            failpoint("replay.mid_merge")

    def _truncate(self, sessions: TargetSessions, truncations: Sequence[Truncation]) -> None:
        """The subscribed tables of each TRUNCATE statement together, without CASCADE (R8.15).

        TRUNCATE triggers run with the rights of the table's owner: tables with triggers are truncated owner
        by owner.
        """
        names = {table.index: table.name for table in self.request.tables}
        statements = itertools.groupby(
            truncations, key=lambda truncation: (truncation.commit_lsn, truncation.seq)
        )
        executed: set[tuple[frozenset[QualifiedName], bool]] = set()
        for _, group in statements:
            statement = list(group)
            restart = any(truncation.restart_identity for truncation in statement)
            tables = frozenset(names[truncation.target] for truncation in statement)
            if (tables, restart) in executed:
                continue
            executed.add((tables, restart))
            with apply_errors(min(tables)):
                for session, targets in sessions.group_by_session(
                    self.targets[name] for name in sorted(tables)
                ):
                    session.execute(
                        sql.SQL("truncate table {}{}").format(
                            commas(map(target_reference, targets)),
                            sql.SQL(" restart identity" if restart else ""),
                        )
                    )


@contextlib.contextmanager
def open_apply_session(
    request: ApplyRequest, *, previous: ApplySession | None = None
) -> Iterator[ApplySession]:
    """Prepare a window for staging; on exit, drop its staging tables.

    The caller holds the subscription's lock (`subscriber.state.lock`). `previous` is the session of the
    window before, if that is still open.

    Raises:
        TargetMismatch: if a target is missing or cannot receive its columns.
        MissingPrivilege: if the role may not apply changes.
        SubscriberLocked, SubscriberNotWritable, ServerUnavailable: as for `ApplySession.apply`.
    """
    name = request.subscription.name
    with _connect_to_apply(request) as connection:

        def prepare() -> dict[QualifiedName, TargetTable]:
            with apply_errors(None):
                # The server may not have ended the session of a killed run yet.
                drop_staging(connection, name, except_run=None if previous is None else previous.run)
                return _targets(connection, request)

        targets = _retry_on_lock(prepare, connection, request)
        run = uuid.uuid4().hex[:8]
        tables = tuple(stage_table(name, run, table, targets[table.name]) for table in request.tables)
        try:
            yield ApplySession(request, run, connection, targets, tables)
        finally:
            # If this fails, the next run finds the tables by name.
            with contextlib.suppress(psycopg.Error):
                drop_staging(connection, name, run=run)


def _deletes_shared_rows(subscription: str, table: QualifiedName, feed: str) -> SubscriberNotReady:
    return SubscriberNotReady(
        f'rows of table {table} would be deleted, and subscription "{feed}" feeds it, too',
        detail="A row that has moved to the other subscription cannot be told from one that was deleted.",
        hint="Choose other tables with `--table`, or repair this one with"
        f" `cdc-replay validate {subscription} --tables {table.argument} --repair`.",
    )


def advance_only(request: ApplyRequest, before_commit: BeforeCommit) -> None:
    """Record that a window without any change for the subscription is applied; needs no Spark.

    The caller holds the subscription's lock.
    """
    with connect(request.dsn, purpose=f"apply {request.subscription.name}") as connection:

        def attempt() -> None:
            with apply_errors(None), _transaction(connection, request):
                _before_commit(connection, Applied(), before_commit)

        _retry_on_lock(attempt, connection, request)


@contextlib.contextmanager
def _connect_to_apply(request: ApplyRequest) -> Iterator[Connection]:
    with connect_as_apply_worker(request.dsn, purpose=f"apply {request.subscription.name}") as connection:
        set_lock_timeout(connection, request.subscription.lock_timeout)
        # Statistics of staged rows serve for their number and kinds: a tenth of the usual sample is enough.
        connection.execute("set default_statistics_target = 10")
        yield connection


def _transaction(connection: Connection, request: ApplyRequest) -> contextlib.AbstractContextManager[None]:
    return replication_origin(connection, request.subscription.name, request.upto)


def _retry_on_lock(attempt: Callable[[], _T], connection: Connection, request: ApplyRequest) -> _T:
    subscription = request.subscription
    return retry_on_lock(
        attempt,
        connection,
        subscription=subscription.name,
        dsn=request.dsn,
        lock_timeout=subscription.lock_timeout,
    )


def _targets(connection: Connection, request: ApplyRequest) -> dict[QualifiedName, TargetTable]:
    names = [table.name for table in request.tables]
    targets = read_target_tables(connection, names, run_as_owner=request.subscription.run_as_owner)
    check_targets({table.name: table.columns for table in request.tables}, targets)
    for name in targets.keys() & request.relations.keys():
        if targets[name].oid != request.relations[name]:
            raise renamed_target(name)
    return targets


def _before_commit(connection: Connection, applied: Applied, before_commit: BeforeCommit | None) -> None:
    if before_commit is not None:
        before_commit(connection, applied)
    failpoint("replay.before_commit")
