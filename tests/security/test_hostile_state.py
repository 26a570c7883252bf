"""A superuser of a subscriber can write anything into its state: an error of this subscription only."""

from __future__ import annotations

import pytest

from cdc_replay.commands.status import status
from cdc_replay.monitoring.due_replays import due_replays
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key)"

HOSTILE = {
    "number": "update cdc_replay.result set result = '5'",
    "list": "update cdc_replay.result set result = '[1]'",
    "deep": "update cdc_replay.result set result = (repeat('[', 3000) || repeat(']', 3000))::jsonb",
    "infinity": "update cdc_replay.result set finished = 'infinity'",
    "position": "alter table cdc_replay.subscription_table drop constraint subscription_table_check,"
    " alter lsn type text using 'x'",
}


@pytest.mark.parametrize("statement", HOSTILE.values(), ids=HOSTILE)
def test_status_of_the_other_subscriptions(twin: Twin, statement: str) -> None:
    twin.publisher.run(f"{TABLE}; create publication p for table t; insert into t values (1)")
    twin.subscribe("s", "p", tables=TABLE, native=False)
    twin.subscribe("other", "p", tables=TABLE, native=False)
    twin.sync_ours()
    twin.pairs["s"].ours.run(statement)

    result = status(twin.config)

    errors = {each.subscription: each.error for each in result.subscriptions}
    assert errors["other"] is None
    assert errors["s"]
    assert "other" not in due_replays(twin.config, "pub", ["other", "s"])


@pytest.mark.parametrize("outcome", ['{"a": 1}', '"consistent!"', "true"])
def test_an_outcome_that_no_validation_has(twin: Twin, outcome: str) -> None:
    twin.publisher.run(f"{TABLE}; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLE, native=False)
    twin.sync_ours()
    result = f'{{"success": true, "outcome": {outcome}, "to_lsn": [1]}}'
    twin.pairs["s"].ours.run(
        f"insert into cdc_replay.result (subscription, command, result) values ('s', 'validate', '{result}')"
    )
    (subscription,) = status(twin.config).subscriptions
    assert subscription.error is None
    assert subscription.last_validation == "unknown outcome at [1]"
    assert (subscription.last_validation_outcome, subscription.last_validation_lsn) == (None, None)
