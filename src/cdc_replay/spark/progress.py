"""Progress of Spark's jobs, from its status tracker: executors report to the JVM, not to us."""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from typing import Final

from pyspark import SparkContext

from cdc_replay.beside import beside
from cdc_replay.model.progress import Progress, Report, Unit, unreported

WATCH_SECONDS: Final = 1.0


def report_tasks(report: Report, action: str, of: str) -> AbstractContextManager[None]:
    """Report the tasks of the jobs that run meanwhile, every second; nothing if nobody listens."""
    if report is unreported:
        return contextlib.nullcontext()
    return beside(lambda ended: _watch(report, action, of, ended))


def _watch(report: Report, action: str, of: str, ended: threading.Event) -> None:
    # A JVM that dies, in whatever way that shows here, is reported by the call that needs it.
    with contextlib.suppress(Exception):
        tasks, done = 0, 0
        while not ended.wait(WATCH_SECONDS):
            tasks, done = _count_tasks()
            if tasks:
                report(Progress(action, of, done, tasks, Unit.TASKS))
        if tasks:
            report(Progress(action, of, tasks, tasks, Unit.TASKS))


def _count_tasks() -> tuple[int, int]:
    """The tasks of all stages of the running jobs, and how many of them are done."""
    context = SparkContext._active_spark_context  # noqa: SLF001 - the job may be the one that starts Spark
    if context is None:
        return 0, 0
    tracker = context.statusTracker()
    jobs = [job for job_id in tracker.getActiveJobsIds() if (job := tracker.getJobInfo(job_id)) is not None]
    stage_ids = {int(stage_id) for job in jobs for stage_id in job.stageIds}
    stages = [stage for stage_id in stage_ids if (stage := tracker.getStageInfo(stage_id)) is not None]
    return sum(stage.numTasks for stage in stages), sum(stage.numCompletedTasks for stage in stages)
