"""How fast a backlog is captured, beside `pg_recvlogical` that throws it away.

    make env && PYTHONPATH=tools:tests .venv/bin/python -m benchmarks.capture [--share 0.1] [backlog …]

Each backlog is built once, in a database of its own, while two slots wait. Then `pg_recvlogical` drains its
slot to /dev/null, and `cdc-replay capture`, a fresh process, drains the other one into a change log. The
peak is the resident memory of that process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
import yaml

from benchmarks.backlogs import BACKLOGS, Backlog
from cdc_replay.capture.publications import CAPTURE_PUBLICATIONS
from cdc_replay.postgres.peek import identifier_list
from embedded.postgres import Cluster, binaries

SLOT: Final = "drained"
# Checkpoints in the middle would be measured with whatever runs at that moment.
SETTINGS: Final = {"max_wal_size": "20GB", "checkpoint_timeout": "1h", "shared_buffers": "512MB"}


@dataclass(frozen=True)
class Drained:
    """One reader's figures."""

    seconds: float
    cpu_seconds: float
    peak_mib: float


@dataclass(frozen=True)
class Comparison:
    """Both readers over one backlog of `rows` changes."""

    backlog: str
    rows: int
    wal_mib: float
    pg_recvlogical: Drained
    capture: Drained

    @property
    def ratio(self) -> float:
        """Time of the capture as a multiple of pg_recvlogical's."""
        return self.capture.seconds / self.pg_recvlogical.seconds


def measured(command: Sequence[str]) -> Drained:
    """Run a command to its end; its processes are not counted if they are no children of its own."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed: {said}")
    seconds = time.monotonic() - began
    return Drained(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def compare(cluster: Cluster, folder: Path, name: str, backlog: Backlog) -> Comparison:
    """Build the backlog in a new database, drain it twice."""
    with psycopg.connect(cluster.dsn(), autocommit=True) as connection:
        connection.execute(f"create database {name}")
    configuration = folder / f"{name}.yaml"
    publisher = {"dsn": cluster.dsn(name), "slot": f"captured_{name}", "change_log": str(folder / name)}
    subscription = {"publisher": "bench", "publications": ["p"], "dsn": cluster.dsn(name)}
    configuration.write_text(
        yaml.safe_dump({"publishers": {"bench": publisher}, "subscriptions": {"s": subscription}})
    )
    replay = [str(Path(sys.executable).with_name("cdc-replay")), "--config", str(configuration)]
    with psycopg.connect(cluster.dsn(name), autocommit=True) as connection:
        for statement in (backlog.tables, backlog.procedure):
            connection.execute(statement)
        subprocess.run([replay[0], "setup", "bench", *replay[1:]], check=True, capture_output=True)
        slot = f"{SLOT}_{name}"
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
        before = connection.execute("select pg_current_wal_flush_lsn()").fetchone()
        connection.execute(f"call {name}({backlog.rows})")
        [(end, wal_bytes)] = connection.execute(
            "select pg_current_wal_flush_lsn()::text, pg_current_wal_flush_lsn() - %s::pg_lsn", before
        ).fetchall()
    publications = identifier_list(tuple(CAPTURE_PUBLICATIONS.values()))
    theirs = measured([
        str(binaries() / "pg_recvlogical"), "--dbname", cluster.dsn(name), "--slot", slot,
        "--start", "--no-loop", "--file", "/dev/null", "--endpos", end,
        "--option", "proto_version=1", "--option", "messages=true",
        "--option", f"publication_names={publications}",
    ])  # fmt: skip
    ours = measured([replay[0], "capture", "bench", *replay[1:]])
    return Comparison(name, backlog.rows, float(wal_bytes) / 2**20, theirs, ours)


def main() -> None:
    """Compare, print a line for each backlog, and one JSON array at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backlogs", nargs="*", choices=[[], *BACKLOGS], metavar="backlog")
    parser.add_argument("--share", type=float, default=1.0, help="of the rows of each backlog")
    arguments = parser.parse_args()
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="cdc_replay_bench_") as folder,
        Cluster(Path(folder), "publisher", settings=SETTINGS) as cluster,
    ):
        Path(folder).chmod(0o755)
        for name in arguments.backlogs or BACKLOGS:
            backlog = BACKLOGS[name]
            rows = int(backlog.rows * arguments.share)
            one = compare(cluster, Path(folder), name, Backlog(backlog.tables, backlog.procedure, rows))
            found.append(one)
            sys.stdout.write(f"{described(one)}\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps([as_json(one) for one in found], indent=2) + "\n")


def described(one: Comparison) -> str:
    """The comparison in a line."""
    return (
        f"{one.backlog}: {one.rows} changes, {one.wal_mib:.0f} MiB of WAL;"
        f" pg_recvlogical {one.pg_recvlogical.seconds:.1f} s, capture {one.capture.seconds:.1f} s"
        f" (CPU {one.capture.cpu_seconds:.1f} s, peak {one.capture.peak_mib:.0f} MiB): {one.ratio:.2f}"
    )


def as_json(one: Comparison) -> dict[str, object]:
    """The comparison and its ratio."""
    return {**dataclasses.asdict(one), "ratio": round(one.ratio, 3)}


if __name__ == "__main__":
    main()
