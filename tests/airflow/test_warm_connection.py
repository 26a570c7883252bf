"""What becomes of a Spark Connect connection of Airflow: the URL for pyspark's client, or an error."""

from __future__ import annotations

import json

import pytest

from fixtures.airflow import RunInAirflow

CLIENT = """
from pyspark.sql.connect.client import DefaultChannelBuilder
from cdc_replay.airflow.operators.warm_spark import connect_url

client = DefaultChannelBuilder(connect_url("warm"))
answer = [client.endpoint, client.token, client.userId]
"""
ERROR = """
from cdc_replay.airflow.operators.warm_spark import connect_url

try:
    answer = connect_url("warm")
except Exception as error:
    answer = f"{type(error).__name__}: {error}"
"""


def test_the_client_gets_token_and_user_as_they_are(run_in_airflow: RunInAirflow) -> None:
    user, token = "a/b;c=d", "AbC/dEf+gHi%2F;x=?#="
    warm = {"conn_type": "spark_connect", "host": "localhost", "login": user, "password": token}
    answer = run_in_airflow(CLIENT, AIRFLOW_CONN_WARM=json.dumps(warm))
    assert answer == ["localhost:15002", token, user]


@pytest.mark.parametrize(
    ("host", "says"),
    [("", 'connection "warm" has no host'), ("sc://host/path", 'the host of connection "warm" has a path')],
)
def test_an_unusable_host_is_named_without_the_token(
    run_in_airflow: RunInAirflow, host: str, says: str
) -> None:
    warm = {"conn_type": "spark_connect", "host": host, "password": "secret"}
    answer = run_in_airflow(ERROR, AIRFLOW_CONN_WARM=json.dumps(warm))
    assert answer.startswith(f"InvalidConfiguration: {says}")
    assert "secret" not in answer
