"""How each kind of workload is measured. Runs go one after the other; whoever is not measured is idle."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.backlogs import SIX_COLUMNS, Connection, filled
from benchmarks.beside_replay import measure_backfill, measure_many_subscriptions
from benchmarks.floors import WHOLE_SLOT, hash_both, pass_slot_through
from benchmarks.freshness import COMMITS_PER_SECOND, measure_sides
from benchmarks.memory import Peaks
from benchmarks.programs import ROOT, SUBMIT, Run, Session, fresh, sampled
from benchmarks.stand import PUBLISHER, Stand, stand
from benchmarks.workloads import (
    Backfill,
    CatchUp,
    EmptyWindow,
    Freshness,
    InitialCopy,
    ManySubscriptions,
    Validation,
    Workload,
)
from embedded.postgres import binaries

RECEIVED: Final = "received"
"""The column of the demo's subscribers that says when a row came; it differs by nature."""
ALONE: Final = "alone"
REPETITIONS: Final = 3
READERS: Final = (1, 2, 4)
NATIVE_OPTIONS: Final = {"proto_version": "4", "streaming": "parallel", "origin": "any"}
"""What a subscription of PostgreSQL 18 asks pgoutput for."""


@dataclass(frozen=True)
class Measured:
    """Seconds of each run, the memory of each, and whether the subscribers hold the same.

    `runs` and `peaks` have the names of the runs as keys: `pg_recvlogical`, `native`, `cold`, `warm` and
    what the workload has besides. `details` are the seconds of our stages, by run; of `freshness` the
    percentiles of commit to visible, of which `runs` has the 95th.
    """

    workload: str
    subscriptions: int
    changes: int
    size_mib: float
    runs: Mapping[str, float]
    peaks: Mapping[str, Peaks]
    details: Mapping[str, Mapping[str, float]]
    differences: tuple[str, ...]


def measure(workload: Workload, size: int) -> Measured:
    """Measure a workload with `size` changes, or rows, on a stand of its own."""
    match workload:
        case CatchUp():
            return _catch_up(workload, size)
        case InitialCopy():
            return _initial_copy(workload, size)
        case EmptyWindow():
            return _empty_window(workload, size)
        case Freshness():
            return _freshness(workload, size)
        case Validation():
            return _validation(workload, size)
        case Backfill() | ManySubscriptions():
            return _beside_replay(workload, size)


def _catch_up(workload: CatchUp, size: int) -> Measured:
    with stand(workload.subscriptions) as at, Session(at.folder, at.servers) as session:
        sides = ("cold", "warm", ALONE) if workload.shows_capture else ("cold", "warm")
        _bring_together(workload, size, at, session, sides)
        end, size_mib = _build(workload, size, at)
        publications = sorted({name for names in workload.subscriptions for name in names})
        runs = {"pg_recvlogical": fresh(_recvlogical(at, end, publications), at.folder, at.servers)}
        at.write_out()
        with sampled(None, at.servers) as sampler:
            seconds = at.drain_natively(end)
        runs["native"] = Run(seconds, sampler.peaks, {})
        at.pause_natives()
        if workload.shows_capture:
            runs["capture"] = fresh(at.command("capture", ALONE), at.folder, at.servers)
        at.write_out()
        runs["cold"] = fresh(at.command("sync", *at.names("cold")), at.folder, at.servers)
        at.write_out()
        runs["warm"] = session.run(at.line("sync", *at.names("warm")))
        if workload.shows_floor:
            runs["cold floor"], runs["floor"] = pass_slot_through(at, end)
        return _measured(workload, runs, _changes_read(runs["cold"].result), size_mib, at)


def _bring_together(workload: CatchUp, size: int, at: Stand, session: Session, sides: Sequence[str]) -> None:
    """All sides hold the same, have done a little of the same work, and stand still."""
    backlog = workload.backlog
    at.create_databases(backlog.publisher_script, backlog.subscriber_script, ["native", *sides])
    with at.publisher_connection() as connection:
        backlog.prepare(connection, size)
    at.set_up(sides, session.run)
    at.subscribe_natively()
    with at.publisher_connection() as connection:
        _step(at, session, sides)
        backlog.warm_up(connection, size)
        _step(at, session, sides)
        at.drain_natively(_position(connection))
        at.pause_natives()
        for slot in ("drained", WHOLE_SLOT) if workload.shows_floor else ("drained",):
            connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    for side in ("native", *sides):
        for name in at.names(side):
            with at.subscriber_connection(name) as connection:
                connection.execute("analyze")


def _step(at: Stand, session: Session, sides: Sequence[str]) -> None:
    for side in sides:
        line = at.line("capture", side) if side == ALONE else at.line("sync", *at.names(side))
        session.run(line)


def _build(workload: CatchUp, size: int, at: Stand) -> tuple[str, float]:
    """Commit the backlog; where it ends, and its WAL in MiB."""
    with at.publisher_connection() as connection:
        begin = _position(connection)
        workload.backlog.run(connection, size)
        end = _position(connection)
        found = connection.execute("select (%s::pg_lsn - %s::pg_lsn)::float8", (end, begin)).fetchone()
        connection.execute("checkpoint")
    assert found is not None
    return end, found[0] / 2**20


def _position(connection: Connection) -> str:
    """A position behind all that is committed, which a subscriber confirms."""
    row = connection.execute("select pg_logical_emit_message(true, 'bench', '')::text").fetchone()
    assert row is not None
    return str(row[0])


def _recvlogical(at: Stand, end: str, publications: Sequence[str]) -> list[str]:
    """Read the slot as a native subscription does, and throw away what comes."""
    options = NATIVE_OPTIONS | {"publication_names": ",".join(f'"{name}"' for name in publications)}
    return [
        str(binaries() / "pg_recvlogical"), "--dbname", at.publisher.dsn(PUBLISHER), "--slot", "drained",
        "--start", "--no-loop", "--file", "/dev/null", "--endpos", end,
        *(word for name, value in options.items() for word in ("--option", f"{name}={value}")),
    ]  # fmt: skip


def _initial_copy(workload: InitialCopy, size: int) -> Measured:
    with stand(workload.subscriptions) as at, Session(at.folder, at.servers) as session:
        readers = [f"readers_{count}" for count in READERS] if workload.shows_readers else []
        at.create_databases(
            workload.publisher_script, workload.tables, ["native", "cold", "warm", "first", *readers]
        )
        with at.publisher_connection() as connection:
            for statement in workload.fill(size):
                connection.execute(statement.encode())
            connection.execute("vacuum (analyze)")
            connection.execute("checkpoint")
            found = connection.execute("select pg_database_size(current_database())::float8").fetchone()
        assert found is not None
        at.set_up(("first", "cold", "warm", *readers), session.run)
        # The session is warm when it has copied the tables once.
        session.run(at.line("snapshot", "first_0"))
        at.write_out()
        with sampled(None, at.servers) as sampler:
            seconds = at.subscribe_natively()
        runs = {"native": Run(seconds, sampler.peaks, {})}
        at.pause_natives()
        at.write_out()
        runs["cold"] = fresh(at.command("snapshot", "cold_0"), at.folder, at.servers)
        at.write_out()
        runs["warm"] = session.run(at.line("snapshot", "warm_0"))
        for count, name in zip(READERS, readers, strict=False):
            at.write_out()
            runs[name] = _with_readers(at, count, name)
        return _measured(workload, runs, size, found[0] / 2**20, at)


def _with_readers(at: Stand, count: int, side: str) -> Run:
    """Copy with so many readers; what counts is the time that the snapshot says it took."""
    job = str(ROOT / "jobs" / "snapshot.py")
    command = [
        SUBMIT, "--master", f"local[{count}]", "--conf", "spark.ui.enabled=false", job,
        "--config", str(at.file), f"{side}_0",
    ]  # fmt: skip
    run = fresh(command, at.folder, at.servers)
    return Run(run.result["seconds"], run.peaks, run.result)


def _empty_window(workload: EmptyWindow, size: int) -> Measured:
    with stand(workload.subscriptions) as at, Session(at.folder, at.servers) as session:
        catch_up = CatchUp(workload.name, workload.about, size, workload.backlog, workload.subscriptions)
        _bring_together(catch_up, size, at, session, ("cold", "warm"))
        end = _position_of(at)
        at.drain_natively(end)
        for side in ("cold", "warm"):
            session.run(at.line("sync", *at.names(side)))
        cold = partial(fresh, at.command("sync", *at.names("cold")), at.folder, at.servers)
        warm = partial(session.run, at.line("sync", *at.names("warm")))
        runs = {
            name: _median([run() for _ in range(REPETITIONS)])
            for name, run in {"cold": cold, "warm": warm}.items()
        }
        return _measured(workload, runs, 0, 0.0, at)


def _validation(workload: Validation, size: int) -> Measured:
    """The floor is what the two servers need to hash every key and row of their tables, side by side."""
    with stand(workload.subscriptions) as at, Session(at.folder, at.servers) as session:
        at.create_databases(f"{SIX_COLUMNS}; create publication p for table t", SIX_COLUMNS, ["warm"])
        with at.publisher_connection() as connection:
            connection.execute(filled("t", str(size)).encode())
            connection.execute("vacuum (analyze)")
            connection.execute("checkpoint")
            found = connection.execute("select pg_table_size('t')::float8 / 2^20").fetchone()
        assert found is not None
        at.set_up(("warm",), session.run)
        session.run(at.line("sync", *at.names("warm")))
        with at.subscriber_connection("warm_0") as connection:
            connection.execute("vacuum (analyze)")
        # The process is warm when it has loaded Great Expectations.
        session.run(at.line("validate", *at.names("warm"), "--sample", "1%"))
        at.write_out()
        runs = {"floor": hash_both(at)}
        for name, options in (("warm", ()), ("sample", ("--sample", "5%"))):
            # Nothing is left to replay: what is measured is the comparison.
            session.run(at.line("sync", *at.names("warm")))
            at.write_out()
            runs[name] = session.run(at.line("validate", *at.names("warm"), *options))
        wrong = [name for name, run in runs.items() if run.result.get("success") is False]
        return Measured(
            workload=workload.name,
            subscriptions=len(workload.subscriptions),
            changes=size,
            size_mib=round(found[0], 1),
            runs={name: round(run.seconds, 3) for name, run in runs.items()},
            peaks={name: run.peaks for name, run in runs.items()},
            details={
                name: {"compare": round(run.result["tables"][0]["seconds"], 3)}
                for name, run in runs.items()
                if run.result
            },
            differences=tuple(f"{name} found a difference" for name in wrong),
        )


def _freshness(workload: Freshness, seconds: int) -> Measured:
    sides, differences = measure_sides(seconds)
    return Measured(
        workload=workload.name,
        subscriptions=1,
        changes=seconds * COMMITS_PER_SECOND,
        size_mib=0.0,
        runs={side: values["p95"] for side, values in sides.items()},
        peaks={},
        details=sides,
        differences=differences,
    )


def _beside_replay(workload: Backfill | ManySubscriptions, size: int) -> Measured:
    if isinstance(workload, Backfill):
        changes, subscriptions = size, 1
        runs, differences = measure_backfill(size)
    else:
        changes, subscriptions = 0, size
        runs, differences = measure_many_subscriptions(size), ()
    return Measured(
        workload=workload.name,
        subscriptions=subscriptions,
        changes=changes,
        size_mib=0.0,
        runs={name: round(run.seconds, 3) for name, run in runs.items()},
        peaks={name: run.peaks for name, run in runs.items()},
        details={},
        differences=differences,
    )


def _position_of(at: Stand) -> str:
    with at.publisher_connection() as connection:
        return _position(connection)


def _median(runs: Sequence[Run]) -> Run:
    middle = statistics.median_low(run.seconds for run in runs)
    return next(run for run in runs if run.seconds == middle)


def _measured(
    workload: Workload, runs: Mapping[str, Run], changes: int, size_mib: float, at: Stand
) -> Measured:
    ours = [name for name in runs if name in {"cold", "warm"} or name.startswith("readers_")]
    return Measured(
        workload=workload.name,
        subscriptions=len(workload.subscriptions),
        changes=changes,
        size_mib=round(size_mib, 1),
        runs={name: round(run.seconds, 3) for name, run in runs.items()},
        peaks={name: run.peaks for name, run in runs.items()},
        details={name: _stages(run.result) for name, run in runs.items() if run.result},
        differences=tuple(at.differences(ours, without=[RECEIVED])),
    )


def _results(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """One result per subscription: a command of several has them in a list."""
    found: Sequence[Mapping[str, Any]] = result.get("results", [result])
    return found


def _stages(result: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of capture and replay, which overlap."""
    return {
        stage: round(max(each[stage]["seconds"] for each in _results(result) if stage in each), 3)
        for stage in ("snapshot", "capture", "replay")
        if any(stage in each for each in _results(result))
    }


def _changes_read(result: Mapping[str, Any]) -> int:
    return int(max(each["replay"]["changes_read"] for each in _results(result)))
