"""A window on its way through Spark: log → changes → routed → net → staging tables, in one job.

    map, one task per run of row groups      read, decode; ask the row filters; route and pack, lane by lane
    shuffle                                  packed pieces
    reduce, one task per part or several     fold; COPY into the staging tables of each subscription

A *lane* is what subscriptions have in common that see the same changes and apply them alike. All lanes share
the reading and decoding of the log; subscriptions of one lane share everything but their staging tables.

Rows do not enter the JVM, but for the values that Spark's row filters read. Those are asked first: the
answers come back to a second Python process of the same task, which decodes the row groups again.

What has to be known of a whole window before its changes can be grouped (`compact.Survey`) is noted by the
same job. Few windows have anything to note. What came before a TRUNCATE is left out by the parts. Changes of
keys that rows have left or reached come back with the notes, are folded together and staged by a small job of
their own; where they are many, the lane runs once more, with what was noted.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from cdc_replay.errors import CdcReplayError
from cdc_replay.model.subscription import ConflictPolicy, OriginPolicy
from cdc_replay.replay.apply.staging import PARTS, PARTS_DDL, StagedTable, Stager, collect_staged, stage_with
from cdc_replay.replay.compact import FoldRules, WindowFacts, fold_rules
from cdc_replay.replay.compact.chunk_facts import ChunkFacts, chunk_facts
from cdc_replay.replay.compact.shuffle import (
    BYTES_PER_PART,
    PIECES_DDL,
    ROWS_PER_PART,
    PartitionAssignment,
    ShuffleWriter,
    fold_deferred,
    read_partitions,
)
from cdc_replay.replay.decode import LogReader
from cdc_replay.replay.route.filter_evaluation import (
    FILTER_INPUT,
    QUESTIONS_DDL,
    FilterEvaluator,
    RouteFilters,
    SparkFilterInput,
    SparkFilterPlan,
    SparkFilterResults,
)
from cdc_replay.replay.route.router import FilterResults, RouteIndex, Router
from cdc_replay.replay.route.routes import Routes
from cdc_replay.replay.route.tuples import Tuples
from cdc_replay.spark.session import SMALL_WINDOW_ROWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_NOTHING: Final = WindowFacts((), ())
_PARTS_HELD: Final = 3
"""So many parts' texts a task holds at most, for subscriptions that they are written to in turn."""
_ROWS_PER_SHARE: Final = 2_000
"""Fewer changes that were set aside are not worth another task."""

_ASKED: Final = pa.schema([("chunk", pa.int32()), *FILTER_INPUT])
_ASKED_DDL: Final = f"chunk int, {QUESTIONS_DDL}"
_HEADER: Final = -1
"""The number of the row that comes before a task's questions, with the number of the task as its chunk."""

_RESULT: Final = pa.schema([("lane", pa.int32()), ("stager", pa.int32()), ("notes", pa.binary()), *PARTS])
_RESULT_DDL: Final = f"lane int, stager int, notes binary, {PARTS_DDL}"


@dataclass(frozen=True, slots=True)
class RoutingGroup:
    """What subscriptions have in common that see the same changes and apply them alike.

    `stagers` write into the staging tables of each of them.
    """

    routes: Routes
    origin: OriginPolicy
    policy: ConflictPolicy
    stagers: tuple[Stager, ...]


@dataclass(frozen=True, slots=True)
class StagedGroup:
    """What a window has come to for a lane: by stager, what is staged by target, or why it is not.

    Where `notes` have unsent values (R4.6), it is as if nothing was.
    """

    notes: ChunkFacts
    staged: tuple[Mapping[int, StagedTable] | CdcReplayError, ...]


@dataclass(frozen=True, slots=True)
class WindowJob:
    """A window of the log on its way to the subscribers."""

    session: SparkSession
    reader: LogReader
    publisher_dsn: str

    def staged(self, lanes: Sequence[RoutingGroup]) -> tuple[StagedGroup, ...]:
        """Stage the window's net changes for all lanes.

        Raises:
            PySparkException: if a task fails; its text is that of an error of ours, if it was one: a filter
                cannot be evaluated, a row cannot be found by what was sent, the log is damaged.
        """
        spreads = self._spreads([lane.routes for lane in lanes])
        surveys = [_NOTHING] * len(lanes)
        found: dict[int, StagedGroup] = {}
        while waiting := [number for number in range(len(lanes)) if number not in found]:
            works = [_GroupRound.of(lanes[number], surveys[number], spreads[number]) for number in waiting]
            results = _by_lane(self._job(works), waiting)
            notes = {number: _notes_of(results[number]) for number in waiting}
            aside: dict[int, _DeferredGroup] = {}
            for number, work in zip(waiting, works, strict=True):
                surveys[number] = notes[number].window_facts()
                if surveys[number].unsent:
                    # What tasks have made of values that nobody has looked for yet does not count.
                    found[number] = StagedGroup(notes[number], tuple({} for _ in lanes[number].stagers))
                elif notes[number].deferred:
                    aside[number] = work.aside(notes[number], surveys[number])
                elif not notes[number].is_void:
                    found[number] = StagedGroup(notes[number], _by_stager(results[number], lanes[number]))
            if aside:
                cores = self.session.sparkContext.defaultParallelism
                folding = _DeferredFold.of(aside.values(), cores=cores)
                for number, rows in _by_lane(folding.job(self.session), list(aside)).items():
                    staged = _by_stager(results[number] + rows, lanes[number])
                    found[number] = StagedGroup(notes[number], staged)
        return tuple(found[number] for number in range(len(lanes)))

    def _job(self, works: Sequence[_GroupRound]) -> DataFrame:
        parts = works[0].spread.parts
        places = RouteIndex.of(item for work in works for item in work.lane.routes.routes)
        questionnaire = SparkFilterPlan([work.filters for work in works], places)
        packing = _MapTask(
            self.reader,
            places,
            questionnaire.inquiry(),
            tuple(work.packing(places, number * parts, len(works)) for number, work in enumerate(works)),
            self.publisher_dsn,
        )
        folding = _ReduceTask(tuple((work.rules, work.lane.stagers) for work in works), parts)
        pieces = self._pieces(packing, questionnaire)
        subscriptions = sum(len(work.lane.stagers) for work in works)
        tasks = len(works) * self._tasks_per_lane(parts, len(works), subscriptions)
        task = F.expr(f"cast(part as bigint) * {tasks} div {parts * len(works)}").cast("int")
        spread = pieces.repartitionById(tasks, task) if tasks > 1 else pieces.coalesce(1)
        return spread.mapInArrow(folding.staged, _RESULT_DDL)

    def _tasks_per_lane(self, parts: int, lanes: int, subscriptions: int) -> int:
        """Over how many tasks the parts of a lane are shared out.

        Where there are many lanes each sees little of the window, as a rule: what they see is not more than
        a window or two. A task costs as much as thousands of changes, and a connection for each subscription
        of its lane, with a COPY for each target: where these are many, no core has more tasks than it must.
        """
        cores = self.session.sparkContext.defaultParallelism
        tasks = max(-(-cores // lanes), -(-max(parts, 2 * cores) // subscriptions))
        if subscriptions > lanes:
            tasks = max(tasks, -(-parts // _PARTS_HELD))
        return min(parts, tasks)

    def _parts_per_lane(self) -> int:
        rows, size_bytes = self.reader.rows, self.reader.size_bytes
        if rows < SMALL_WINDOW_ROWS and size_bytes < BYTES_PER_PART:
            return 1
        cores = self.session.sparkContext.defaultParallelism
        return max(cores, -(-rows // ROWS_PER_PART), -(-size_bytes // BYTES_PER_PART))

    def _spreads(self, lanes: Sequence[Routes]) -> list[PartitionAssignment]:
        """How the changes of each lane are shared out; by what is in the log, where that matters."""
        parts = self._parts_per_lane()
        matters = parts > 1 and any(len(routes.tables) > 1 for routes in lanes)
        seen = self.reader.relations_seen() if matters else Counter[int]()
        spreads = []
        for routes in lanes:
            weights = Counter(table.index for table in routes.tables)
            for relation, target in {(each.relation.id, each.target.index) for each in routes.routes}:
                weights[target] += seen[relation]
            spreads.append(PartitionAssignment.from_weights(parts, weights))
        return spreads

    def _pieces(self, packing: _MapTask, questionnaire: SparkFilterPlan) -> DataFrame:
        numbers = self.reader.numbers(self.session)
        if not any(lane.evaluator.uses_spark for lane in packing.lanes):
            return numbers.mapInArrow(packing.packed, PIECES_DDL)
        old, new = questionnaire.answers()
        answered = numbers.mapInArrow(packing.questions, _ASKED_DDL).select(
            "chunk", "number", old.alias("old_passes"), new.alias("new_passes")
        )
        return answered.mapInArrow(packing.packed_with_answers, PIECES_DDL)


def _by_lane(job: DataFrame, lanes: Sequence[int]) -> dict[int, list[Row]]:
    """The rows (`_RESULT`) of a job by the number of the lane; theirs are places in `lanes`."""
    found: dict[int, list[Row]] = {number: [] for number in lanes}
    for row in job.collect():
        found[lanes[row["lane"]]].append(row)
    return found


def _notes_of(rows: Iterable[Row]) -> ChunkFacts:
    return ChunkFacts.merge_dumps(row["notes"] for row in rows if row["notes"] is not None)


def _by_stager(
    rows: Sequence[Row], lane: RoutingGroup
) -> tuple[Mapping[int, StagedTable] | CdcReplayError, ...]:
    found: list[Mapping[int, StagedTable] | CdcReplayError] = []
    for number, stager in enumerate(lane.stagers):
        try:
            found.append(collect_staged([row for row in rows if row["stager"] == number], stager.tables))
        except CdcReplayError as error:
            found.append(error)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _GroupRound:
    """A lane in one round of the job; on the driver."""

    lane: RoutingGroup
    survey: WindowFacts
    spread: PartitionAssignment
    rules: FoldRules
    filters: RouteFilters

    @classmethod
    def of(cls, lane: RoutingGroup, survey: WindowFacts, spread: PartitionAssignment) -> _GroupRound:
        rules = fold_rules(lane.routes.tables, survey, lane.policy)
        return cls(lane, survey, spread, rules, RouteFilters(lane.routes))

    def packing(self, places: RouteIndex, first_part: int, lanes: int) -> _GroupMapper:
        """Its map side, beside that of the other `lanes`."""
        packer = ShuffleWriter(self.rules, self.survey, first_part, self.spread, lanes)
        return _GroupMapper(
            Router.of(self.lane.routes, self.lane.origin, places), self.filters.evaluator(), packer
        )

    def aside(self, notes: ChunkFacts, survey: WindowFacts) -> _DeferredGroup:
        """What the round has set aside, to be folded now that the window's moves are known."""
        return _DeferredGroup(notes, survey, self.rules, self.lane.stagers)


@dataclass(frozen=True, slots=True)
class _GroupMapper:
    """A lane's map side; picklable."""

    router: Router
    evaluator: FilterEvaluator
    packer: ShuffleWriter


@dataclass(frozen=True, slots=True)
class _MapTask:
    """The map side; picklable."""

    reader: LogReader
    places: RouteIndex
    inquiry: SparkFilterInput
    lanes: tuple[_GroupMapper, ...]
    publisher_dsn: str

    def packed(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The pieces of the tasks, where Spark is not asked."""
        for batch in numbers:
            for number in batch.column("id").to_pylist():
                yield from self._packed(number, None)

    def questions(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What Spark is asked, chunk by chunk, after a header for each task."""
        for batch in numbers:
            for task in batch.column("id").to_pylist():
                header = {"chunk": task, "number": _HEADER, "asked": [False] * len(self.lanes)}
                yield pa.RecordBatch.from_pylist([header], schema=_ASKED)
                for chunk, changes in self.reader.chunks(task):
                    places = self.places.found(changes)
                    asked = [
                        lane.evaluator.asked(changes, lane.router.routes_of(changes, places))
                        for lane in self.lanes
                    ]
                    questions = self.inquiry.questions(changes, Tuples.of(changes), places, asked)
                    marks = pa.repeat(pa.scalar(chunk, pa.int32()), questions.num_rows)
                    yield pa.RecordBatch.from_arrays([marks, *questions.columns], schema=_ASKED)

    def packed_with_answers(self, answers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The pieces of the task whose answers these are."""
        found = _AnswersInOrder(iter(answers), len(self.lanes))
        yield from self._packed(found.task(), found)

    def _packed(self, task: int, answers: _AnswersInOrder | None) -> Iterator[pa.RecordBatch]:
        notes = [ChunkFacts() for _ in self.lanes]
        with contextlib.ExitStack() as opened:
            sessions = [
                opened.enter_context(lane.evaluator.session(self.publisher_dsn)) for lane in self.lanes
            ]
            for chunk, changes in self.reader.chunks(task):
                answered = None if answers is None else answers.of(chunk)
                places, tuples, count = self.places.found(changes), Tuples.of(changes), changes.num_rows
                for number, (lane, session) in enumerate(zip(self.lanes, sessions, strict=True)):
                    mine = (
                        FilterResults.all_pass(count)
                        if answered is None
                        else answered.verdicts(number, count)
                    )
                    routes = lane.router.routes_of(changes, places)
                    verdicts = lane.evaluator.verdicts(changes, tuples, routes, mine, session)
                    routed, counts = lane.router.routed(changes, tuples, routes, verdicts)
                    own = chunk_facts(routed, chunk, counts)
                    if not (lane.packer.is_void(own) or lane.packer.is_void(notes[number])):
                        yield lane.packer.write_partitions(routed, chunk, own)
                    notes[number].add(own)
        for lane, note in zip(self.lanes, notes, strict=True):
            yield from lane.packer.write_facts(note)


class _AnswersInOrder:
    """Spark's answers, which come in the order of the questions."""

    def __init__(self, batches: Iterator[pa.RecordBatch], lanes: int) -> None:
        self._batches = batches
        self._lanes = lanes
        self._waiting: list[pa.RecordBatch] = []
        self._schema: pa.Schema | None = None

    def task(self) -> int:
        """The number of the task that has asked."""
        first = next(batch for batch in self._batches if batch.num_rows)
        self._schema = first.schema
        self._waiting.append(first.slice(1))
        return int(first["chunk"][0].as_py())

    def of(self, chunk: int) -> SparkFilterResults:
        """The answers to the questions of that chunk; chunks come in order."""
        while (batch := None if self._reaches_beyond(chunk) else next(self._batches, None)) is not None:
            self._waiting.append(batch)
        known = pa.Table.from_batches(self._waiting, self._schema)
        self._waiting = known.filter(pc.greater(known["chunk"], chunk)).to_batches()
        return SparkFilterResults.of(known.filter(pc.equal(known["chunk"], chunk)), self._lanes)

    def _reaches_beyond(self, chunk: int) -> bool:
        return any(batch.num_rows and batch["chunk"][-1].as_py() > chunk for batch in self._waiting)


@dataclass(frozen=True, slots=True)
class _ReduceTask:
    """The reduce side: each lane's rules and stagers; picklable. Lane `i` has parts from `i * parts` on."""

    lanes: tuple[tuple[FoldRules, tuple[Stager, ...]], ...]
    parts: int

    def staged(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Fold and stage what has come; what was staged, and noted (`_RESULT`)."""
        found = read_partitions(batches)
        for lane, its_parts in itertools.groupby(sorted(found), key=lambda part: part // self.parts):
            rules, stagers = self.lanes[lane]
            parts = [found[number] for number in its_parts]
            net = itertools.chain.from_iterable(part.net(rules, groups=len(self.lanes)) for part in parts)
            yield from _staged(lane, stagers, net)
            notes = [{"lane": lane, "notes": part.notes.dump()} for part in parts]
            yield pa.RecordBatch.from_pylist(notes, schema=_RESULT)


@dataclass(frozen=True, slots=True)
class _DeferredGroup:
    """What a lane has set aside until all moves of the window are known; picklable."""

    notes: ChunkFacts
    survey: WindowFacts
    rules: FoldRules
    stagers: tuple[Stager, ...]


@dataclass(frozen=True, slots=True)
class _DeferredFold:
    """What lanes have set aside on its way to their subscribers, in `shares` for each; picklable."""

    lanes: tuple[_DeferredGroup, ...]
    shares: int

    @classmethod
    def of(cls, lanes: Iterable[_DeferredGroup], *, cores: int) -> _DeferredFold:
        """In as many shares as cores, where a lane has enough for it."""
        found = tuple(lanes)
        most = max(sum(each.rows for each in lane.notes.deferred) for lane in found)
        return cls(found, min(cores, -(-most // _ROWS_PER_SHARE)))

    def job(self, session: SparkSession) -> DataFrame:
        """What is staged (`_RESULT`), by the places of the lanes."""
        count = len(self.lanes) * self.shares
        return session.range(0, count, numPartitions=count).mapInArrow(self.staged, _RESULT_DDL)

    def staged(self, tasks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Fold and stage these shares of what the lanes have set aside."""
        for batch in tasks:
            for task in batch.column("id").to_pylist():
                place, share = divmod(task, self.shares)
                lane = self.lanes[place]
                net = fold_deferred(lane.notes, lane.survey, lane.rules, share=share, shares=self.shares)
                yield from _staged(place, lane.stagers, net)


def _staged(lane: int, stagers: Sequence[Stager], net: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Stage net changes (NET) of a lane by each of its stagers; what was staged (`_RESULT`)."""
    for place, staged in enumerate(stage_with(stagers, net)):
        marks = [pa.repeat(pa.scalar(each, pa.int32()), staged.num_rows) for each in (lane, place)]
        nothing = pa.nulls(staged.num_rows, pa.binary())
        yield pa.RecordBatch.from_arrays([*marks, nothing, *staged.columns], schema=_RESULT)
