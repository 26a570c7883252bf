"""Of subscriptions that are synced together, one that fails stops itself only."""

from __future__ import annotations

import pytest
import yaml

from cdc_replay.commands.sync import sync
from cdc_replay.config import load_config
from cdc_replay.errors import CdcReplayError, TargetMismatch
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

T = "create table t (id int primary key, a int)"
U = "create table u (id int primary key, a int)"


def test_a_snapshot_or_a_replay_that_fails_stops_its_own_subscription_only(twin: Twin) -> None:
    """`bare` cannot be copied, `gone` has no server, `stuck` cannot be replayed; `good` gets everything."""
    twin.publisher.run(f"{T}; {U}; create publication p for table t, u; insert into t values (1, 1)")
    for name, tables in {"bare": T, "stuck": f"{T}; {U}", "good": f"{T}; {U}", "gone": f"{T}; {U}"}.items():
        twin.subscribe(name, "p", tables=tables, native=False)
    twin.sync_ours("stuck")
    twin.pairs["stuck"].ours.run("insert into t values (2, 0)")
    twin.publish("insert into u values (1, 1);\ninsert into t values (2, 2)")
    content = yaml.safe_load(twin.file.read_text(encoding="utf-8"))
    content["subscriptions"]["gone"]["dsn"] = twin.cluster.dsn("no_such_database")
    file = twin.folder / "broken.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")

    results = {
        result.subscription: result for result in sync(load_config(file), ("bare", "gone", "stuck", "good"))
    }

    errors = {name: result.replay.error or "" for name, result in results.items()}
    assert errors["good"] == ""
    assert '"public"."u"' in errors["bare"]
    assert "no_such_database" in errors["gone"]
    assert "parked" in errors["stuck"]
    good, stuck = twin.pairs["good"].ours, twin.pairs["stuck"].ours
    assert (good.rows("table t order by id"), good.rows("table u")) == ([(1, 1), (2, 2)], [(1, 1)])
    assert (stuck.rows("table t order by id"), stuck.rows("table u")) == ([(1, 1), (2, 0)], [(1, 1)])

    # Where nothing is left to do, the error is the command's.
    with pytest.raises(TargetMismatch):
        sync(load_config(file), ["bare"])
    with pytest.raises(CdcReplayError, match="no_such_database"):
        sync(load_config(file), ["gone"])
