"""The Params of the manual DAGs: valid and invalid values, and the arguments of the job."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.airflow import RunInAirflow

RESOLVE = """
import copy
import dataclasses
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.exceptions import ParamValidationError

dags = DagBag().dags

class TaskInstance:
    def xcom_pull(self, task_ids):
        assert task_ids == "plan"
        return {"from_lsn": "0/AA", "to_lsn": "0/BB"}

def resolve(kind, given):
    dag = copy.deepcopy(dags[kind + ("__shop" if kind in ("replay", "capture") else "__nsw")])
    declared = dag.params
    try:
        for name, value in given.items():
            declared[name] = value
        declared.validate()
    except ParamValidationError as error:
        return {"refused": str(error)}
    context = {"params": declared.dump(), "ti": TaskInstance()}
    for task in dag.tasks:
        task.render_template_fields(context)
    task = dag.get_task(kind)
    answer = {}
    if kind == "backfill":
        plan = dag.get_task("plan")
        answer["range"] = [plan.start, plan.end]
    if kind in ("replay", "capture"):
        return {"to_lsn": task.to_lsn}
    if kind == "validate":
        scope = task.scope()
        return {**dataclasses.asdict(scope), "tables": list(scope.tables), "repair": task.repair}
    request = task.job_request(None, context)
    return {**answer, "arguments": list(request.arguments), "conn_ids": sorted(request.conn_ids)}

answer = [resolve(kind, given) for kind, given in cases]
"""

RANGE = {"from": "0/16B3748", "to": "16/B374D848"}

PLANNED = ["--from=0/AA", "--to=0/BB"]

ACCEPTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "backfill",
        {"from": "0/16B3748", "to": "16/B374D848"},
        {"range": ["0/16B3748", "16/B374D848"], "arguments": [*PLANNED, "--dry-run"]},
    ),
    (
        "backfill",
        {"from": "2013-01-05", "to": "2013-01-06T07:30:00.25+11:00", "dry_run": False},
        {"range": ["2013-01-05", "2013-01-06T07:30:00.25+11:00"], "arguments": PLANNED},
    ),
    ("backfill", {"from": "2013-01-05 06:00", "to": "2013-01-05T06:00:00Z"}, {}),
    ("backfill", {}, {"range": ["", ""], "arguments": [*PLANNED, "--dry-run"], "conn_ids": []}),
    (
        "backfill",
        {**RANGE, "into_conn_id": "audit", "dry_run": False},
        {"arguments": [*PLANNED, "--into-conn-id=audit"], "conn_ids": ["audit"]},
    ),
    (
        "backfill",
        {**RANGE, "tables": ["public.t", "Sales.o'rder by.day"], "dry_run": False},
        {"arguments": [*PLANNED, "--table=public.t", "--table=Sales.o'rder by.day"]},
    ),
    ("snapshot", {}, {"arguments": []}),
    (
        "snapshot",
        {"tables": ["public.t", "Sales.o'rder<lines>&co"]},
        {"arguments": ["--table=public.t", "--table=Sales.o'rder<lines>&co"]},
    ),
    ("refresh", {}, {"arguments": []}),
    ("refresh", {"reconcile": True}, {"arguments": ["--reconcile"]}),
    ("refresh", {"reconcile": True, "dry_run": True}, {"arguments": ["--reconcile", "--dry-run"]}),
    ("validate", {}, {"tables": [], "is_due": True, "sample": None, "max_seconds": None, "repair": "False"}),
    ("validate", {"due": False}, {"tables": [], "is_due": False}),
    (
        "validate",
        {"tables": ["public.t", "Sales.o'rder"], "sample": "0.5%", "max_seconds": 90, "max_bytes": "2 kB"},
        {
            "tables": ["public.t", "Sales.o'rder"],
            "is_due": False,
            "sample": 0.005,
            "max_seconds": 90.0,
            "max_bytes": 2048,
        },
    ),
    ("replay", {"to_lsn": "0/1"}, {"to_lsn": "0/1"}),
    ("replay", {"to_lsn": None}, {"to_lsn": ""}),
    ("capture", {"to_lsn": "FFFFFFFF/FFFFFFFF"}, {"to_lsn": "FFFFFFFF/FFFFFFFF"}),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("backfill", {**RANGE, "from": "yesterday"}, "yesterday"),
    ("backfill", {**RANGE, "from": "0/16B3748; drop table t"}, "drop table"),
    ("backfill", {**RANGE, "to": "2013-13-05"}, "2013-13-05"),
    ("backfill", {**RANGE, "to": "2013-01-05T25:00"}, "T25:00"),
    ("backfill", {**RANGE, "to": 5}, "5"),
    ("backfill", {**RANGE, "dry_run": "yes"}, "yes"),
    ("backfill", {**RANGE, "into_conn_id": "postgresql://me:secret@db/x"}, "into_conn_id"),
    ("backfill", {**RANGE, "tables": ["t"]}, "'t'"),
    ("snapshot", {"tables": "public.t"}, "public.t"),
    ("snapshot", {"tables": ["t"]}, "'t'"),
    ("snapshot", {"tables": ["public.t", "public.t"]}, "unique"),
    ("validate", {"sample": "101%"}, "101%"),
    ("validate", {"sample": "0.05"}, "0.05"),
    ("validate", {"max_seconds": 0}, "0"),
    ("validate", {"max_bytes": "2 PB"}, "2 PB"),
    ("validate", {"tables": ["t"]}, "'t'"),
    ("validate", {"due": "yes"}, "yes"),
    ("replay", {"to_lsn": "16-B374D848"}, "16-B374D848"),
    ("capture", {"to_lsn": "123456789/0"}, "123456789/0"),
]


def test_valid_params_become_arguments_of_the_job(run_in_airflow: RunInAirflow) -> None:
    """Nothing is quoted or split: each argument is one element of the command."""
    cases = [(kind, given) for kind, given, _ in ACCEPTED]
    answers = run_in_airflow(f"cases = {cases!r}\n{RESOLVE}")
    for (kind, given, expected), answer in zip(ACCEPTED, answers, strict=True):
        assert answer == answer | expected, (kind, given)


def test_bad_params_are_refused_with_the_reason(run_in_airflow: RunInAirflow) -> None:
    cases = [(kind, given) for kind, given, _ in REFUSED]
    answers = run_in_airflow(f"cases = {cases!r}\n{RESOLVE}")
    for (kind, given, reason), answer in zip(REFUSED, answers, strict=True):
        assert reason in answer.get("refused", "accepted"), (kind, given, answer)


def test_unknown_params_are_detected(run_in_airflow: RunInAirflow) -> None:
    """Airflow ignores them: `dry-run` instead of `dry_run` would write."""
    answer = run_in_airflow(
        """
        from cdc_replay.airflow.params import backfill_params, unknown_params

        known = backfill_params()
        answer = [
            unknown_params({"from": "0/1", "to": "0/2", "dry-run": True}, known),
            unknown_params({"from": "0/1", "to": "0/2"}, known),
            unknown_params(None, known),
        ]
        """
    )
    assert answer == ['["dry-run"]', "", ""]


@pytest.mark.parametrize("secret", ["hunter2@:/ü", "x"])
def test_a_connection_reaches_libpq_with_its_secrets_and_its_own_options_only(
    run_in_airflow: RunInAirflow, secret: str
) -> None:
    import psycopg.conninfo

    uri = run_in_airflow(
        f"""
        from airflow.sdk import Connection
        from cdc_replay.airflow.connections import libpq_uri

        answer = libpq_uri(Connection(
            conn_id="dwh", conn_type="postgres", host="db.example", port=6543, login="me@corp",
            password={secret!r}, schema="ware house",
            extra='{{"sslmode": "require", "cursor": "dictcursor", "options": "-c x=1"}}',
        ))
        """
    )
    assert psycopg.conninfo.conninfo_to_dict(uri) == {
        "host": "db.example",
        "port": "6543",
        "user": "me@corp",
        "password": secret,
        "dbname": "ware house",
        "sslmode": "require",
        "options": "-c x=1",
    }


def test_connections_are_exported_only_while_a_job_is_submitted(run_in_airflow: RunInAirflow) -> None:
    answer = run_in_airflow(
        """
        import os
        from cdc_replay.airflow.connections import connections_in_environment

        os.environ["AIRFLOW_CONN_AUDIT"] = '{"conn_type": "postgres", "host": "/run/pg", "schema": "audit"}'
        before = dict(os.environ)
        with connections_in_environment(["dwh", "audit"]):
            inside = [os.environ["AIRFLOW_CONN_DWH"], os.environ["AIRFLOW_CONN_AUDIT"]]
        answer = {"inside": inside, "same_after": dict(os.environ) == before}
        """,
        AIRFLOW_CONN_DWH="postgres://me:secret@db/x?sslmode=require",
    )
    assert answer["inside"] == [
        "postgresql://me:secret@db/x?sslmode=require",
        "postgresql://%2Frun%2Fpg/audit",
    ]
    assert answer["same_after"]


def test_a_connection_of_another_type_is_refused_by_name(run_in_airflow: RunInAirflow) -> None:
    answer = run_in_airflow(
        """
        from cdc_replay.errors import InvalidConfiguration
        from cdc_replay.airflow.connections import dsn

        try:
            answer = dsn("dwh")
        except InvalidConfiguration as error:
            answer = str(error)
        """,
        AIRFLOW_CONN_DWH="mysql://me:secret@db/x",
    )
    assert 'connection "dwh" is of type "mysql"' in answer
    assert "secret" not in answer


def test_a_connection_that_airflow_does_not_have_is_refused_by_name(run_in_airflow: RunInAirflow) -> None:
    """As an error of ours it is a line of the status page, not its end."""
    answer = run_in_airflow(
        """
        from cdc_replay.airflow.connections import airflow_config
        from cdc_replay.commands.status import status

        answer = status(airflow_config()).to_dict()
        """,
        AIRFLOW_CONN_DWH="postgres://me:secret@127.0.0.1:1/x",
        AIRFLOW__DATABASE__SQL_ALCHEMY_CONN="sqlite://",
    )
    errors = {entry["subscription"]: entry["error"] for entry in answer["subscriptions"]}
    assert "cannot connect" in errors["nsw"]
    (publisher,) = (entry for entry in answer["publishers"] if entry["publisher"] == "shop")
    assert 'connection "shop_publisher" is not known' in publisher["error"]
