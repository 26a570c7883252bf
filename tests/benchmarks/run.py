"""`make bench`: how fast this project drains a backlog, beside native replication and the slot's own limit.

    make bench [WORKLOADS="churn flights*"] [ROWS=1000000] [QUICK=1] [OUT=folder]

Per workload two servers are started, the same backlog is committed while all slots are idle, and then it is
drained once by each, one after the other: `pg_recvlogical` to /dev/null; a native subscription, until it has
confirmed the end; `cdc-replay sync` as a fresh process, and in a process that has its Spark session. The
subscribers must then hold the same rows. Exits 1 if they do not, or if a bound of `bounds.py` is broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import traceback
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.bounds import judged
from benchmarks.measures import measure
from benchmarks.programs import ROOT
from benchmarks.report import Report, details, machine_facts, say, table, verdict_line
from benchmarks.workloads import WORKLOADS, Workload, size_of


def chosen(patterns: Sequence[str]) -> list[Workload]:
    """The workloads whose names match one of the patterns, in their order.

    Raises:
        SystemExit: naming the patterns that match none.
    """
    lost = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in WORKLOADS)]
    if lost:
        raise SystemExit(f"no workload is named {', '.join(lost)}; there are {', '.join(WORKLOADS)}")
    return [
        workload for name, workload in WORKLOADS.items() if any(fnmatchcase(name, each) for each in patterns)
    ]


def run(workloads: Sequence[Workload], *, rows: int | None, is_quick: bool, out: Path) -> Report:
    """Measure, printing each result as it comes; what has been measured is written after each workload.

    One that cannot be measured does not keep the others from it.
    """
    machine = machine_facts()
    say(", ".join(f"{name}: {value}" for name, value in machine.items() if not isinstance(value, dict)))
    report = Report(machine)
    for workload in workloads:
        size = size_of(workload, rows=rows, is_quick=is_quick)
        say(f"\n{workload.name}: {workload.about}, about {size:,}")
        try:
            measured = measure(workload, size)
        except Exception as error:  # noqa: BLE001 - it is told, and makes the run a failed one
            say(traceback.format_exc())
            failures = {**report.failures, workload.name: f"{type(error).__name__}: {error}"}
            report = dataclasses.replace(report, failures=failures)
            report.write(out)
            continue
        verdicts = list(judged(measured, size))
        report = dataclasses.replace(
            report, measured=[*report.measured, measured], verdicts=[*report.verdicts, *verdicts]
        )
        report.write(out)
        say("\n".join([table([measured]), details(measured), *map(verdict_line, verdicts)]))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if all is equal and within its bounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=[], help="names or patterns; default: all")
    parser.add_argument("--rows", type=int, help="changes, or rows, of the large workloads")
    parser.add_argument("--quick", action="store_true", help="a hundredth of everything; for a look")
    parser.add_argument("--out", type=Path, default=ROOT / "bench_results", help="folder of the results")
    given = parser.parse_args(arguments)
    # What has been started is stopped at the end of its context, also when a signal ends the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    workloads = chosen(given.workloads or ["*"])
    report = run(workloads, rows=given.rows, is_quick=given.quick, out=given.out)
    say(f"\n{table(report.measured)}\n")
    say("\n".join(map(verdict_line, report.verdicts)))
    say("\n".join(f"FAILED {name}: {why}" for name, why in report.failures.items()))
    say(f"\n{'All subscribers are equal, and' if report.is_good else 'NOT GOOD:'} see {given.out}/bench.json")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
