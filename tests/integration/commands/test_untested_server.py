"""A publisher of a major version that was not tested is refused by whatever reads its catalog (R2.18)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.explain import explain
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.setup import setup
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.sync import sync
from cdc_replay.commands.teardown import teardown
from cdc_replay.commands.validate import validate
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Pending
from cdc_replay.subscriber import subscription_tables
from fixtures.twin import Twin

TABLES = "create table t (id int primary key)"

COMMANDS: dict[str, Callable[[Config], object]] = {
    "setup": lambda config: setup(config, "pub"),
    "setup --dry-run": lambda config: setup(config, "pub", dry_run=True),
    "capture": lambda config: capture(config, "pub"),
    "snapshot of the first time": lambda config: snapshot(config, "new"),
    "snapshot without a copy": lambda config: snapshot(config, "from_now"),
    "sync": lambda config: sync(config, ["copied"]),
    "sync of the first time": lambda config: sync(config, ["new"]),
    "refresh": lambda config: refresh(config, "copied"),
    "refresh --reconcile": lambda config: refresh(config, "copied", reconcile=True),
    "validate": lambda config: validate(config, "copied"),
    "explain": lambda config: explain(config, "copied"),
    "snapshot of what waits": lambda config: snapshot(config, "copied"),
}


@pytest.mark.spark
@pytest.mark.parametrize("is_newer", [True, False], ids=["newer", "older"])
def test_a_version_that_was_not_tested_is_refused(
    twin: Twin, monkeypatch: pytest.MonkeyPatch, is_newer: bool
) -> None:
    twin.publisher.run(f"{TABLES}; insert into t values (1); create publication p for table t")
    twin.subscribe("copied", "p", tables=TABLES, native=False)
    twin.subscribe("new", "p", tables=TABLES, native=False)
    twin.subscribe("from_now", "p", tables=TABLES, native=False, copy_data=False)
    twin.sync_ours("copied")
    twin.publish("insert into t values (2)")
    major = twin.publisher.version
    tested = (major - 2, major - 1) if is_newer else (major + 1, major + 2)
    monkeypatch.setattr("cdc_replay.postgres.server_version.TESTED_VERSIONS", tested)

    for name, run in COMMANDS.items():
        if name == "snapshot of what waits":
            with twin.pairs["copied"].ours.connect() as connection:
                subscription_tables.set_table_state(
                    connection, "copied", QualifiedName("public", "t"), Pending()
                )
        with pytest.raises(CdcReplayError) as refused:
            run(twin.config)
        message = str(refused.value)
        assert f"PostgreSQL {major}" in message, name
        assert f"{tested[0]} to {tested[1]}" in message, name
        assert (
            f"{major}, or a publisher" in message if is_newer else f"Upgrade it to {major + 1}" in message
        ), name
        assert "R2.18" in message, name

    rows = [twin.pairs[name].ours.rows("table t") for name in twin.pairs]
    assert rows == [[(1,)], [], []]
    assert teardown(twin.config, "copied").removed  # what is no longer wanted can go
