"""Windows made by hand: routed changes for tables that exist, applied as replay applies them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from cdc_replay.failpoints import failpoint
from cdc_replay.model.frames import ROUTED
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import ConflictPolicy, SubscribedTable, Subscription
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.replay.apply.session import Applied, ApplyRequest, ApplySession, open_apply_session
from cdc_replay.replay.apply.staging import StagedTable, Stager, collect_staged, stage_with
from cdc_replay.replay.compact import contingent_changes, fold_rules
from cdc_replay.replay.compact.chunk_facts import ChunkFacts, chunk_facts
from cdc_replay.replay.compact.shuffle import PartitionAssignment, ShuffleWriter, read_partitions
from cdc_replay.replay.compact.window_facts import WindowFacts
from cdc_replay.replay.route.router import ROUTED_SCHEMA
from cdc_replay.subscriber import state_schema, subscription_lock, subscription_records
from cdc_replay.subscriber.subscription_tables import set_table_state
from cdc_replay.subscriber.target_tables import read_target_tables
from fixtures.postgres import ANY_DATABASE

UNSENT = object()
"""A value that the publisher did not send: unchanged and stored out of line."""

UNKNOWN = object()
"""A value of a column that the publisher did not have yet."""


@dataclass
class Changes:
    """The changes of one window; every call is one more message, `at` gives its commit LSN."""

    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    tables: list[SubscribedTable] = field(default_factory=list)
    seq: int = 0
    lsn: int = 100

    @property
    def window(self) -> Window:
        return Window(ZERO, Lsn(self.lsn))

    def insert(self, table: str, *values: Any) -> None:
        self._add(table, "I", None, values)

    def update(self, table: str, *values: Any, old: Sequence[Any] | None = None) -> None:
        """`old` is the old key, or the old row of a table without a key; default: the key did not change."""
        self._add(table, "U", old, values)

    def delete(self, table: str, *key: Any) -> None:
        self._add(table, "D", key, None)

    @property
    def routed(self) -> pa.RecordBatch:
        """ROUTED."""
        return pa.RecordBatch.from_pylist(self.rows, schema=ROUTED_SCHEMA)

    @property
    def facts(self) -> WindowFacts:
        return chunk_facts(self.routed, 0, Counter()).window_facts()

    def truncate(self, *tables: str, restart_identity: bool = False) -> None:
        self.seq += 1
        for table in tables:
            self._row(self._table(table), "T", truncate_flags=2 if restart_identity else 0)

    def commit(self) -> None:
        """Later changes belong to the next transaction."""
        self.lsn, self.seq = self.lsn + 100, 0

    def _add(self, name: str, kind: str, old: Sequence[Any] | None, values: Sequence[Any] | None) -> None:
        self.seq += 1
        table = self._table(name)
        new_key = None
        if values is not None:
            by_name = dict(zip(table.columns, values, strict=True))
            new_key = [_text(by_name[column]) for column in table.identity]
        search_key = new_key if old is None else [_text(value) for value in old]
        self._row(
            table,
            kind,
            search_key=None if kind == "I" else search_key,
            new_key=new_key,
            values=None if values is None else [_text(value) for value in values],
            kinds=None if values is None else "".join(_kind(value) for value in values),
        )

    def _row(self, table: SubscribedTable, kind: str, **more: Any) -> None:
        self.rows.append(
            dict.fromkeys(ROUTED.names)
            | {
                "target": table.index,
                "commit_lsn": self.lsn,
                "commit_time": 0,
                "seq": self.seq,
                "kind": kind,
                "transformed": False,
            }
            | more
        )

    def _table(self, name: str) -> SubscribedTable:
        return next(table for table in self.tables if table.name.name == name)


def _text(value: object) -> str | None:
    return None if value is None or value is UNSENT or value is UNKNOWN else str(value)


def _kind(value: object) -> str:
    if value is UNSENT:
        return "u"
    if value is UNKNOWN:
        return "-"
    return "n" if value is None else "t"


def record_progress(connection: Connection, request: ApplyRequest) -> None:
    """Record that the request's tables have reached its end, as the pipeline does."""
    for table in request.tables:
        set_table_state(connection, "nsw", table.name, Ready(request.upto))


@dataclass
class Target:
    """A subscriber's database and the published columns of its tables."""

    dsn: str
    published: dict[str, tuple[str, ...]]
    policy: ConflictPolicy = ConflictPolicy.ERROR
    run_as_owner: bool = False

    def window(self) -> Changes:
        names = [QualifiedName("public", name) for name in self.published]
        with connect(self.dsn, purpose="test") as connection:
            targets = read_target_tables(connection, names)
        changes = Changes()
        for index, (name, columns) in enumerate(self.published.items()):
            identity = targets[QualifiedName("public", name)].identity
            changes.tables.append(
                SubscribedTable(
                    index,
                    QualifiedName("public", name),
                    columns,
                    identity or columns,
                    bool(identity),
                    Lsn(0),
                )
            )
        return changes

    @property
    def subscription(self) -> Subscription:
        return Subscription("nsw", "shop", ("p",), on_conflict=self.policy, run_as_owner=self.run_as_owner)

    def request(self, changes: Changes) -> ApplyRequest:
        return ApplyRequest(
            self.subscription, self.dsn, tuple(changes.tables), changes.window.upto, contingent_changes
        )

    def stage(self, changes: Changes, session: ApplySession) -> Mapping[int, StagedTable]:
        """Fold and stage the changes, as the tasks of a window do."""
        rules = fold_rules(changes.tables, changes.facts, self.policy)
        assignment = PartitionAssignment.from_weights(1, {table.index: 1 for table in changes.tables})
        writer = ShuffleWriter(rules, changes.facts, 0, assignment)
        parts = read_partitions([writer.write_partitions(changes.routed, 0, ChunkFacts())])
        net = itertools.chain.from_iterable(part.net(rules) for part in parts.values())
        stager = Stager.of(session.tables, self.dsn)
        rows = [
            row for batch in stage_with([stager], net) for row in batch.to_pylist(maps_as_pydicts="strict")
        ]
        staged = collect_staged(rows, stager.tables)
        failpoint("replay.after_staging")
        return staged

    def apply(
        self, changes: Changes, *, before_commit: Callable[[Connection, Applied], None] | None = None
    ) -> Applied:
        with connect(self.dsn, purpose="test") as connection:
            state_schema.install(connection)
            subscription_records.bind_subscription(connection, "nsw", "1", ["p"], ANY_DATABASE)
            with subscription_lock.lock(connection, "nsw"):
                return self.apply_locked(changes, before_commit)

    def apply_locked(
        self, changes: Changes, before_commit: Callable[[Connection, Applied], None] | None
    ) -> Applied:
        request = self.request(changes)

        def record(connection: Connection, applied: Applied) -> None:
            record_progress(connection, request)
            if before_commit is not None:
                before_commit(connection, applied)

        with open_apply_session(request) as session:
            staged = self.stage(changes, session)
            return session.apply(staged, changes.facts.truncations, before_commit=record)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with connect(self.dsn, purpose="test") as connection:
            connection.execute("set search_path = public")
            return connection.execute(query.encode()).fetchall()
