"""The Spark job of one window: log → changes → routed → net changes → staging tables.

    map, one task per run of row groups      read, decode, put values in place that were looked for (R4.6);
                                             route and pack for each routing group
    shuffle                                  packed pieces
    reduce, one task per part or several     fold, revise for a backfill; COPY into the staging tables of each
                                             subscription

A small window has no shuffle: a task does both sides, for some of the groups.

A *routing group* is subscriptions that see the same changes and apply them alike. All groups share reading
and decoding the log; subscriptions of one group share everything but their staging tables. Rows do not enter
the JVM.

The same job collects the facts about the whole window that its changes cannot be grouped without
(`compact.WindowFacts`); few windows have any. Reduce tasks omit changes before a TRUNCATE. Changes to keys
that an UPDATE renames are deferred: they return with the facts, and a second, small job folds and stages
them. If they are too many, the group runs once more, with the facts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import IntegerType

from cdc_replay.errors import CdcReplayError
from cdc_replay.model.subscription import ConflictPolicy, OriginPolicy
from cdc_replay.replay.apply.staging import PARTS, StagedTable, Stager, collect_staged, stage_with
from cdc_replay.replay.compact import NO_FACTS, FoldRules, NullRule, Revision, WindowFacts, fold_rules
from cdc_replay.replay.compact.chunk_facts import ChunkFacts, chunk_facts
from cdc_replay.replay.compact.shuffle import (
    PIECES,
    PartitionAssignment,
    ShuffleWriter,
    fold_deferred,
    read_partitions,
)
from cdc_replay.replay.decode import LogReader
from cdc_replay.replay.entered_values import EnteredValues, ResolvedEntries
from cdc_replay.replay.route.group_router import GroupRouter
from cdc_replay.replay.route.route_index import DecodedChanges, RouteIndex
from cdc_replay.replay.route.routes import Routes
from cdc_replay.replay.window_size import WindowSize
from cdc_replay.spark.errors import raise_only_ours
from cdc_replay.spark.session import count_cores

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_SLICE_BITS: Final = 10
"""Bits of a chunk's number for the parts of its row group."""
_ROWS_PER_SHARE: Final = 2_000
"""Fewer deferred changes are not worth another task."""

_RESULT: Final = pa.schema([("group", pa.int32()), ("stager", pa.int32()), ("facts", pa.binary()), *PARTS])


@dataclass(frozen=True, slots=True)
class RoutingGroup:
    """Subscriptions that see the same changes and apply them alike.

    `stagers` write into the staging tables of each of them; without one, net changes are only counted. With
    `facts`, which must be those of the window, all changes are staged: values that are still unsent (R4.6)
    become what `nulls` says.
    """

    routes: Routes
    origin: OriginPolicy
    policy: ConflictPolicy
    stagers: tuple[Stager, ...]
    facts: WindowFacts = NO_FACTS
    nulls: NullRule | None = None
    revision: Revision | None = None


@dataclass(frozen=True, slots=True)
class StagedGroup:
    """The result of a window for a routing group: by stager, what is staged by target, or why it is not.

    If `facts` have unsent values (R4.6) that were not known before, what is staged does not count.
    """

    facts: ChunkFacts
    staged: tuple[Mapping[int, StagedTable] | CdcReplayError, ...]


@dataclass(frozen=True, slots=True)
class WindowJob:
    """Stages a window of the log for its subscribers."""

    session: SparkSession
    reader: LogReader
    publisher_dsn: str
    entries: ResolvedEntries | None = None
    """Values that were not sent, and are put in place."""

    def stage(self, groups: Sequence[RoutingGroup]) -> tuple[StagedGroup, ...]:
        """Stage the window's net changes for all groups.

        Raises:
            PySparkException: if a task fails; its text is that of a `CdcReplayError`, if the task raised one:
                a filter cannot be evaluated, a row cannot be found by what was sent, the log is damaged.
        """
        assignments = self._assign_partitions([group.routes for group in groups])
        window_facts = [group.facts for group in groups]
        staged: dict[int, StagedGroup] = {}
        while waiting := [group_id for group_id in range(len(groups)) if group_id not in staged]:
            rounds = {
                group_id: _GroupRound.prepare(groups[group_id], window_facts[group_id], assignments[group_id])
                for group_id in waiting
            }
            rows = _rows_by_group(self._job(list(rounds.values())), waiting)
            deferred: dict[int, _DeferredGroup] = {}
            facts = {group_id: _join_facts(rows[group_id]) for group_id in waiting}
            for group_id, group_round in rounds.items():
                group, group_facts = groups[group_id], facts[group_id]
                window_facts[group_id] = group_facts.window_facts()
                if window_facts[group_id].unsent and not group.facts.unsent:
                    # What tasks staged without the unsent values does not count.
                    staged[group_id] = StagedGroup(group_facts, tuple({} for _ in group.stagers))
                elif group_facts.deferred:
                    deferred[group_id] = group_round.defer(group_facts, window_facts[group_id])
                elif not group_facts.is_void:
                    staged[group_id] = StagedGroup(group_facts, _collect_by_stager(rows[group_id], group))
            for group_id, deferred_rows in self._fold_deferred(deferred).items():
                facts[group_id].add(_join_facts(deferred_rows))
                tables = _collect_by_stager(rows[group_id] + deferred_rows, groups[group_id])
                staged[group_id] = StagedGroup(facts[group_id], tables)
        return tuple(staged[group_id] for group_id in range(len(groups)))

    def _fold_deferred(self, deferred: Mapping[int, _DeferredGroup]) -> dict[int, list[Row]]:
        if not deferred:
            return {}
        fold = _DeferredFold.divide(deferred.values(), cores=count_cores(self.session))
        return _rows_by_group(fold.job(self.session), list(deferred))

    def _job(self, rounds: Sequence[_GroupRound]) -> DataFrame:
        parts = rounds[0].assignment.parts
        index = RouteIndex.from_routes(
            route for group_round in rounds for route in group_round.group.routes.routes
        )
        mappers = tuple(
            group_round.mapper(index, position * parts, len(rounds))
            for position, group_round in enumerate(rounds)
        )
        map_task = _MapTask(self.reader, index, mappers, self.publisher_dsn)
        reducers = tuple((group_round.rules, group_round.group.stagers) for group_round in rounds)
        reduce_task = _ReduceTask(reducers, parts)
        size = self._size()
        if self.entries is None and (whole_tasks := size.whole_tasks(len(rounds))):
            tasks = self.session.range(0, whole_tasks, numPartitions=whole_tasks)
            whole_task = _WholeTask(map_task, reduce_task, whole_tasks)
            return tasks.mapInArrow(raise_only_ours(whole_task.run), from_arrow_schema(_RESULT))
        tasks = self.reader.task_ids(self.session)
        if self.entries is not None:
            tasks = self.entries.by_task(self.reader)
        pieces = tasks.mapInArrow(raise_only_ours(map_task.run), from_arrow_schema(PIECES))
        subscriptions = sum(max(1, len(group_round.group.stagers)) for group_round in rounds)
        count = len(rounds) * size.tasks_per_group(len(rounds), subscriptions)
        # No text of SQL here or in the schemas: a new JVM needs a tenth of a second for the first one.
        task = F.floor(F.col("part") * float(count) / (parts * len(rounds))).cast(IntegerType())
        shuffled = pieces.repartitionById(count, task) if count > 1 else pieces.coalesce(1)
        return shuffled.mapInArrow(raise_only_ours(reduce_task.run), from_arrow_schema(_RESULT))

    def _size(self) -> WindowSize:
        size_bytes = self.reader.size_bytes + (0 if self.entries is None else self.entries.size_bytes)
        return WindowSize(self.reader.rows, size_bytes, count_cores(self.session))

    def _assign_partitions(self, groups: Sequence[Routes]) -> list[PartitionAssignment]:
        """The parts of each group's targets; by their share of the log, if that matters."""
        parts = self._size().parts_per_group()
        matters = parts > 1 and any(len(routes.tables) > 1 for routes in groups)
        messages = self.reader.relations_seen() if matters else Counter[int]()
        assignments = []
        for routes in groups:
            weights = Counter(table.index for table in routes.tables)
            for relation, target in {(route.relation.id, route.target.index) for route in routes.routes}:
                weights[target] += messages[relation]
            assignments.append(PartitionAssignment.from_weights(parts, weights))
        return assignments


def _rows_by_group(job: DataFrame, group_ids: Sequence[int]) -> dict[int, list[Row]]:
    """The rows (`_RESULT`) of a job by group id; their `group` is a position in `group_ids`."""
    by_group: dict[int, list[Row]] = {group_id: [] for group_id in group_ids}
    for row in job.collect():
        by_group[group_ids[row["group"]]].append(row)
    return by_group


def _join_facts(rows: Iterable[Row]) -> ChunkFacts:
    return ChunkFacts.merge_dumps(row["facts"] for row in rows if row["facts"] is not None)


def _collect_by_stager(
    rows: Sequence[Row], group: RoutingGroup
) -> tuple[Mapping[int, StagedTable] | CdcReplayError, ...]:
    by_stager: list[Mapping[int, StagedTable] | CdcReplayError] = []
    for position, stager in enumerate(group.stagers):
        try:
            staged = collect_staged([row for row in rows if row["stager"] == position], stager.tables)
        except CdcReplayError as error:
            by_stager.append(error)
        else:
            by_stager.append(staged)
    return tuple(by_stager)


@dataclass(frozen=True, slots=True)
class _GroupRound:
    """A routing group in one round of the job; on the driver."""

    group: RoutingGroup
    facts: WindowFacts
    assignment: PartitionAssignment
    rules: FoldRules

    @classmethod
    def prepare(cls, group: RoutingGroup, facts: WindowFacts, assignment: PartitionAssignment) -> _GroupRound:
        rules = fold_rules(group.routes.tables, facts, group.policy)
        # Net changes that apply does not fold again, of tables that only apply can fold, are of whole rows.
        if group.nulls is not None:
            rules = replace(rules, by_leaf=rules.by_leaf - group.nulls.targets, nulls=group.nulls)
        if group.revision is not None:
            rules = replace(rules, by_leaf=frozenset(), revision=group.revision)
        return cls(group, facts, assignment, rules)

    def mapper(self, index: RouteIndex, first_part: int, groups: int) -> _GroupMapper:
        router = GroupRouter.from_routes(self.group.routes, self.group.origin, index)
        return _GroupMapper(
            router, ShuffleWriter(self.rules, self.facts, first_part, self.assignment, groups)
        )

    def defer(self, chunk_facts: ChunkFacts, facts: WindowFacts) -> _DeferredGroup:
        return _DeferredGroup(chunk_facts, facts, self.rules, self.group.stagers)


@dataclass(frozen=True, slots=True)
class _GroupMapper:
    """A routing group's map side; picklable."""

    router: GroupRouter
    writer: ShuffleWriter

    def write(
        self, routed: pa.RecordBatch, chunk: int, facts: ChunkFacts, task_facts: ChunkFacts
    ) -> Iterator[pa.RecordBatch]:
        """The pieces (PIECES) of a row group, unless the round is void; its facts join those of the task."""
        if not (self.writer.is_void(facts) or self.writer.is_void(task_facts)):
            yield self.writer.write_partitions(routed, chunk, facts)
        task_facts.add(facts)


@dataclass(frozen=True, slots=True)
class _MapTask:
    """The map side; picklable."""

    reader: LogReader
    index: RouteIndex
    groups: tuple[_GroupMapper, ...]
    publisher_dsn: str

    def run(self, partition: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if (task := EnteredValues.of_partition(partition)) is not None:
            yield from self._run_task(*task)

    def run_all(self) -> Iterator[pa.RecordBatch]:
        """The pieces and facts (PIECES) of all tasks of the reader."""
        for task_id in range(len(self.reader.tasks)):
            yield from self._run_task(task_id, EnteredValues(iter(())))

    def _run_task(self, task_id: int, values: EnteredValues) -> Iterator[pa.RecordBatch]:
        facts = [ChunkFacts() for _ in self.groups]
        with contextlib.ExitStack() as stack:
            sessions = [
                stack.enter_context(group.router.open_session(self.publisher_dsn)) for group in self.groups
            ]
            for chunk, batch in self._chunks(task_id, values):
                changes = DecodedChanges.from_batch(batch, self.index)
                for group, session, group_facts in zip(self.groups, sessions, facts, strict=True):
                    routed, counts = group.router.route(changes, session)
                    yield from group.write(routed, chunk, chunk_facts(routed, chunk, counts), group_facts)
        for group, group_facts in zip(self.groups, facts, strict=True):
            yield from group.writer.write_facts(group_facts)

    def _chunks(self, task_id: int, values: EnteredValues) -> Iterator[tuple[int, pa.RecordBatch]]:
        for row_group, batch in self.reader.chunks(task_id):
            for part, changes in enumerate(values.complete(batch)):
                yield (row_group << _SLICE_BITS) + part, changes


@dataclass(frozen=True, slots=True)
class _ReduceTask:
    """The reduce side: each group's rules and stagers; picklable. Group `i` has parts from `i * parts` on."""

    groups: tuple[tuple[FoldRules, tuple[Stager, ...]], ...]
    parts: int

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Fold and stage the parts in `batches`; what was staged, and the facts (`_RESULT`)."""
        partitions = read_partitions(batches)
        for group, part_ids in itertools.groupby(sorted(partitions), key=lambda part: part // self.parts):
            rules, stagers = self.groups[group]
            parts = [partitions[part_id] for part_id in part_ids]
            net = itertools.chain.from_iterable(part.net(rules, groups=len(self.groups)) for part in parts)
            yield from _stage(group, stagers, net)
            facts = [{"group": group, "facts": part.notes.dump()} for part in parts]
            yield pa.RecordBatch.from_pylist(facts, schema=_RESULT)


@dataclass(frozen=True, slots=True)
class _WholeTask:
    """Both sides of a small window for some of the groups, which are divided among `tasks`; picklable.

    Each task reads the whole window. Without a shuffle it takes a tenth less CPU all the same.
    """

    map_task: _MapTask
    reduce_task: _ReduceTask
    tasks: int

    def run(self, partition: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in partition:
            for task_id in batch["id"].to_pylist():
                groups = self.map_task.groups[task_id :: self.tasks]
                yield from self.reduce_task.run(replace(self.map_task, groups=groups).run_all())


@dataclass(frozen=True, slots=True)
class _DeferredGroup:
    """What a group has deferred until all moves of the window are known; picklable."""

    chunk_facts: ChunkFacts
    facts: WindowFacts
    rules: FoldRules
    stagers: tuple[Stager, ...]


@dataclass(frozen=True, slots=True)
class _DeferredFold:
    """Folds and stages what groups have deferred, in `shares` tasks for each; picklable."""

    groups: tuple[_DeferredGroup, ...]
    shares: int

    @classmethod
    def divide(cls, groups: Iterable[_DeferredGroup], *, cores: int) -> _DeferredFold:
        """In as many shares as cores, if a group has enough changes."""
        deferred = tuple(groups)
        most = max(sum(changes.rows for changes in group.chunk_facts.deferred) for group in deferred)
        return cls(deferred, min(cores, -(-most // _ROWS_PER_SHARE)))

    def job(self, session: SparkSession) -> DataFrame:
        count = len(self.groups) * self.shares
        return session.range(0, count, numPartitions=count).mapInArrow(
            raise_only_ours(self.run), from_arrow_schema(_RESULT)
        )

    def run(self, tasks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in tasks:
            for task_id in batch.column("id").to_pylist():
                position, share = divmod(task_id, self.shares)
                group = self.groups[position]
                net = fold_deferred(
                    group.chunk_facts, group.facts, group.rules, share=share, shares=self.shares
                )
                yield from _stage(position, group.stagers, net)


def _stage(group: int, stagers: Sequence[Stager], net: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Stage net changes (NET) of a group by each of its stagers; what was staged (`_RESULT`).

    Without a stager they are counted.
    """
    if not stagers:
        kinds = Counter(kind for batch in net for kind in batch["kind"].to_pylist())
        row = {"group": group, "facts": ChunkFacts(net=kinds).dump()}
        yield pa.RecordBatch.from_pylist([row], schema=_RESULT)
        return
    for stager, staged in enumerate(stage_with(stagers, net)):
        ids = [pa.repeat(pa.scalar(position, pa.int32()), staged.num_rows) for position in (group, stager)]
        no_facts = pa.nulls(staged.num_rows, pa.binary())
        yield pa.RecordBatch.from_arrays([*ids, no_facts, *staged.columns], schema=_RESULT)
