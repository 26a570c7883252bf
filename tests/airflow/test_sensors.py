"""The sensors, and their trigger, which runs in a triggerer."""

from __future__ import annotations

from fixtures.airflow import RunInAirflow

WAIT = """
import asyncio
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred
from airflow.sdk.module_loading import import_string
from cdc_replay.airflow import LagSensor
from cdc_replay.airflow import conditions
from cdc_replay.airflow.triggers import ConditionTrigger
from cdc_replay.errors import InvalidConfiguration, ServerUnavailable

asked = []

def answers(*outcomes):
    outcomes = list(outcomes)
    def is_met(self):
        asked.append(self)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
    conditions.LagBelow.is_met = is_met

async def first_event(trigger):
    async for event in trigger.run():
        return event.payload

def wait(trigger):
    # What Airflow stores is all that another triggerer needs.
    path, arguments = trigger.serialize()
    return asyncio.run(first_event(import_string(path)(**arguments)))

trigger = ConditionTrigger("LagBelow", {"subscription": "nsw", "seconds": 5.0}, 0.001)
answers(False, ServerUnavailable("no answer"), True)
answer = {"met": wait(trigger), "asked": len(asked), "condition": str(asked[0])}
answers(False, InvalidConfiguration("not configured"))
answer["failed"] = wait(trigger)

sensor = LagSensor(task_id="lag", subscription="nsw", seconds=5.0, timeout=60, poke_interval=7)
answers(True, False, ServerUnavailable("no answer"), InvalidConfiguration("not configured"))

def outcome():
    try:
        return sensor.execute({})
    except (TaskDeferred, AirflowFailException) as raised:
        return type(raised).__name__

answer["outcomes"] = [outcome() for _ in range(4)]
answers(False)
try:
    sensor.execute({})
except TaskDeferred as deferred:
    answer["deferred"] = [deferred.timeout.total_seconds(), *deferred.trigger.serialize()]
    sensor.resume_execution(deferred.method_name, {"event": None}, {})
    try:
        sensor.resume_execution(deferred.method_name, {"event": "not configured"}, {})
    except AirflowFailException as error:
        answer["raised"] = str(error)
"""


def test_a_trigger_asks_until_the_condition_is_met_or_cannot_be(run_in_airflow: RunInAirflow) -> None:
    answer = run_in_airflow(WAIT)
    assert (answer["met"], answer["asked"]) == (None, 3)
    assert answer["condition"] == "LagBelow(subscription='nsw', seconds=5.0)"
    assert answer["failed"] == answer["raised"] == "not configured"
    assert answer["outcomes"] == [None, "TaskDeferred", "TaskDeferred", "AirflowFailException"]
    assert answer["deferred"] == [
        60,
        "cdc_replay.airflow.triggers.ConditionTrigger",
        {"kind": "LagBelow", "arguments": {"subscription": "nsw", "seconds": 5.0}, "poll_seconds": 7},
    ]
