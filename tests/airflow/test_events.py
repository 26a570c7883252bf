"""Captures on commits: schedules with watchers, which a triggerer can run from what Airflow stores."""

from __future__ import annotations

from fixtures.airflow import RunInAirflow

SCHEDULES = """
from airflow.dag_processing.dagbag import DagBag
from airflow.serialization.encoders import encode_trigger
from airflow.sdk.module_loading import import_string

bag = DagBag()
answer = {"errors": list(bag.import_errors.values())}
for name in ("capture__shop", "watch__shop"):
    timetable = bag.dags[name].timetable
    [asset] = timetable.asset_condition.objects
    [watcher] = asset.watchers
    stored = encode_trigger(watcher.trigger)
    again = import_string(stored["classpath"])(**{
        key: value["__var"] if isinstance(value, dict) else value for key, value in stored["kwargs"].items()
    })
    answer[name] = {
        "asset": asset.uri,
        "clock": str(timetable.timetable.delta),
        "again": again.serialize() == watcher.trigger.serialize(),
        "key": str(watcher.trigger.shared_stream_key()),
    }
"""

TRIGGER = """
import asyncio, threading
from cdc_replay.airflow import triggers
from cdc_replay.errors import ServerUnavailable

triggers.LOOK_SECONDS = 0.001
looks = [None, ServerUnavailable("restarts"), "0/10", None, "0/20"]
opened, closed, busy = [], [], threading.Event()

class Watch:
    def look(self):
        look = looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look
    def close(self):
        closed.append(True)

def open_watch(**arguments):
    opened.append(arguments)
    return Watch()

triggers._open_watch = open_watch

async def events():
    found = []
    trigger = triggers.CommitTrigger("shop", 2.0, 60.0)
    # Servers that do not answer keep other triggers, in all threads of the loop.
    others = [asyncio.get_running_loop().run_in_executor(None, busy.wait) for _ in range(100)]
    run = trigger.run()
    async for event in run:
        found.append(event.payload)
        if len(found) == 2:
            await run.aclose()
            busy.set()
            await asyncio.gather(*others)
            return found

answer = {"events": asyncio.run(events()), "opened": opened}
"""

UNKNOWN_DAG = """
from types import SimpleNamespace
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time.comms import ErrorResponse
from cdc_replay.airflow.operators.in_process import WatchOperator

def get_dag(dag_id):
    if dag_id == "replay__two":
        raise AirflowRuntimeError(
            ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": 404, "message": "unknown"})
        )
    return SimpleNamespace(is_paused=False)

watch = WatchOperator(task_id="watch", publisher="shop", groups=[])
context = {"ti": SimpleNamespace(get_dag=get_dag, get_dr_count=lambda dag_id, states: 0)}
answer = [watch._is_idle(group, context) for group in ("one", "two", "three")]
"""


def test_commits_start_captures_and_lag_starts_watches_with_a_clock_as_fallback(
    run_in_airflow: RunInAirflow,
) -> None:
    answer = run_in_airflow(SCHEDULES, CDC_REPLAY_CAPTURE_EVENTS="2-60")
    assert answer["errors"] == []
    assert answer["capture__shop"]["asset"] == "cdc-replay://commits/shop"
    assert "('cdc_replay', 'shop', 2.0, 60.0)" in answer["capture__shop"]["key"]
    assert answer["watch__shop"]["asset"] == "cdc-replay://lag/shop"
    for dag in (answer["capture__shop"], answer["watch__shop"]):
        assert dag["again"]
        assert dag["clock"] == "1:00:00"


def test_a_bad_interval_is_an_import_error_that_says_what_to_write(run_in_airflow: RunInAirflow) -> None:
    answer = run_in_airflow(
        """
        from airflow.dag_processing.dagbag import DagBag
        answer = list(DagBag().import_errors.values())
        """,
        CDC_REPLAY_CAPTURE_EVENTS="often",
    )
    assert answer
    assert all("as in 1-60" in error for error in answer)


def test_no_server_that_does_not_answer_ends_a_watch_or_keeps_it(run_in_airflow: RunInAirflow) -> None:
    """After an error the configuration is read again: it may have another password, or server."""
    answer = run_in_airflow(TRIGGER)
    assert answer["events"] == [{"to_lsn": "0/10"}, {"to_lsn": "0/20"}]
    assert answer["opened"] == 2 * [{"publisher": "shop", "least_seconds": 2.0, "greatest_seconds": 60.0}]


def test_a_group_whose_replay_airflow_does_not_know_keeps_no_other_from_being_replayed(
    run_in_airflow: RunInAirflow,
) -> None:
    assert run_in_airflow(UNKNOWN_DAG) == [True, False, True]
