"""Bad input: the exit code, and a message that names the object and the remedy; Spark never starts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from cdc_replay.commands.setup import setup
from cdc_replay.config import load_config
from cdc_replay.errors import Retry
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import state_schema, subscription_records, subscription_tables
from embedded.postgres import Cluster
from fixtures.command_line import CommandLine
from fixtures.postgres import Database

TABLES = "create table t (id int primary key, a int); create table u (id int primary key, b int)"


@pytest.fixture
def cli(tmp_path: Path, publisher: Database, subscriber: Database) -> CommandLine:
    """Publication p of two tables; nothing is set up yet, the subscriber is empty."""
    publisher.run(f"{TABLES}; create publication p for table t, u")
    command_line = CommandLine(tmp_path, publisher, subscriber)
    command_line.write("p")
    return command_line


def ready(cli: CommandLine) -> None:
    """Set up, subscribed to without a copy, and with one captured transaction."""
    config = load_config(cli.file)
    setup(config, "pub")
    header = ChangeLog.open(str(cli.change_log)).header
    with connect(cli.subscriber.dsn, purpose="test") as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(
            connection, "s", header.system_identifier, ["p"], header.database
        )
        for name in ("t", "u"):
            subscription_tables.set_table_state(
                connection, "s", QualifiedName("public", name), Ready(header.start_lsn)
            )
    cli.publisher.run("insert into t values (1, 1); insert into u values (1, 1)")
    capture(config, "pub")


def test_usage_errors_exit_with_2(cli: CommandLine) -> None:
    cli.fails(2, "replay", says=["Missing argument 'SUBSCRIPTION'"])
    cli.fails(2, "setup", "pub", "--force", says=["No such option: --force"])
    cli.fails(2, "rewind", says=["No such command 'rewind'"])
    cli.fails(2, "capture", "pub", "--to-lsn", "12", says=['invalid WAL position: "12"', "0/16B3748"])
    cli.fails(2, "snapshot", "s", "--table", "t", says=['"t" is not a table name', "SCHEMA.TABLE"])
    cli.fails(2, "status", "--log-level", "loud", says=['log level "loud" is not one of debug, info'])
    cli.fails(2, "validate", "s", "--sample", "5", says=["Invalid value for --sample: not a share"])
    cli.fails(2, "validate", "s", "--max-bytes", "x", says=["Invalid value for --max-bytes: not a size"])
    cli.fails(2, "certify", "s", "--for", "x", says=["Invalid value for --for: not a duration"])
    cli.fails(2, "status", "--max-lag", "5", says=["Invalid value for --max-lag: not a duration"])
    cli.fails(2, "status", "--max-proof-age", "x", says=["Invalid value for --max-proof-age: not"])
    cli.fails(2, "replay", "nsw", says=['subscription "nsw" is not configured', "has: s"])
    cli.fails(2, "setup", "shop", says=['publisher "shop" is not configured', "has: pub"])


def test_a_configuration_that_cannot_be_used_exits_with_2(cli: CommandLine) -> None:
    """File, line and key are named; a DSN never."""
    nowhere = cli.folder / "nowhere.yaml"
    cli.fails(2, "status", "--config", str(nowhere), says=[f'"{nowhere}" does not exist', "--config"])

    def fails(text: str, *says: str) -> None:
        cli.file.write_text(text, encoding="utf-8")
        cli.fails(2, "status", says=says)

    head = "publishers:\n  pub:\n    change_log: ./log\n"
    fails("publishers: [\n", f"{cli.file}, line 2: not valid YAML")
    fails(head + "    dns: postgresql://u:secret@h\n", f"{cli.file}, line 4: publishers.pub.dns: unknown key")
    fails(
        head + "    dsn: postgresql://u:secret@${NO_HOST}/d\n", f"{cli.file}, line 4", '"NO_HOST" is not set'
    )
    fails(head, f"{cli.file}, line 2: publishers.pub: exactly one of conn_id and dsn")


@pytest.mark.parametrize("password", ["hunter%2-secret", "my@hunter-secret"])
def test_a_dsn_that_is_not_readable_is_not_repeated(cli: CommandLine, password: str) -> None:
    """The library would: what it cannot decode or find is, as a rule, the password."""
    dsn = f"postgresql://me:{password}@127.0.0.1/shop"
    cli.write("p", of_publisher={"dsn": dsn}, dsn=dsn)
    for command in (("setup", "pub"), ("capture", "pub"), ("snapshot", "s")):
        assert "hunter" not in cli.fails(2, *command, says=["the DSN is not readable", "percent-encode"])
    assert "hunter" not in str(cli.succeeds("status"))


def test_a_connection_that_is_not_known_exits_with_2(cli: CommandLine) -> None:
    cli.write("p", of_publisher={"dsn": None, "conn_id": "shop"})
    cli.fails(2, "setup", "pub", says=['connection "shop" is not known', "AIRFLOW_CONN_SHOP", "HINT"])


def test_a_server_that_does_not_answer_exits_with_1(cli: CommandLine) -> None:
    dsn = "postgresql://me:secret@127.0.0.1:1/shop"
    cli.write("p", of_publisher={"dsn": dsn})
    for command in ("setup", "capture"):
        cli.fails(1, command, "pub", says=["cannot connect", "Check that the server runs"])
    cli.write("p", dsn=dsn)
    cli.fails(1, "snapshot", "s", says=["cannot connect", "host, port, database and user of the DSN"])
    # A report is no failure: what does not answer is a line of it.
    (subscription,) = cli.succeeds("status")["subscriptions"]
    assert "cannot connect" in subscription["error"]


def test_a_publisher_that_cannot_be_captured_exits_with_1(
    cli: CommandLine, make_cluster: Callable[..., Cluster]
) -> None:
    """wal_level, the role's attribute, publications: before anything is created."""
    replica = make_cluster("replica", wal_level="replica")
    role = f"poor_{cli.publisher.name}"
    with connect(replica.dsn(), purpose="test") as connection:
        connection.execute(f"create role {role} login".encode())
    cli.write("p", of_publisher={"dsn": replica.dsn("postgres")})
    cli.fails(1, "setup", "pub", says=['wal_level of the publisher is "replica"', "HINT: Set wal_level"])
    cli.write("p", of_publisher={"dsn": replica.dsn("postgres", role)})
    cli.fails(1, "setup", "pub", says=["wal_level", f'role "{role}" lacks the attribute REPLICATION'])
    cli.write("p", "q", "r")
    cli.fails(1, "setup", "pub", says=["do not exist: q, r", "HINT: Create them"])
    cli.fails(2, "setup", "pub", "--config", str(cli.folder), says=["cannot be read"])

    cli.publisher.run(f"create role {role} login")
    try:
        cli.write("p", of_publisher={"dsn": cli.publisher.cluster.dsn(cli.publisher.name, role)})
        cli.fails(
            1, "setup", "pub", says=["lacks the attribute REPLICATION", f'alter role "{role}" replication']
        )
    finally:
        cli.publisher.run(f"drop role {role}")
    assert cli.publisher.rows("select from pg_publication where pubname <> 'p'") == []
    assert not cli.change_log.exists()


def test_commands_before_setup_and_snapshot_name_the_command_to_run_first(cli: CommandLine) -> None:
    cli.subscriber.run(TABLES)
    for arguments in (("capture", "pub"), ("snapshot", "s"), ("replay", "s"), ("sync", "s")):
        cli.fails(1, *arguments, says=["there is no change log", "cdc-replay setup"])
    created = cli.succeeds("setup", "pub")
    assert created["publisher"] == "pub"
    assert created["from_lsn"] == created["to_lsn"]
    cli.fails(1, "replay", "s", says=['subscription "s" has no tables yet', "cdc-replay snapshot s"])


def test_all_that_the_subscriber_lacks_is_listed_at_once(cli: CommandLine) -> None:
    """R8.1, by the initial copy and by a replay."""
    setup(load_config(cli.file), "pub")
    cli.subscriber.run("create table u (id int primary key)")
    says = ['"public"."t"', '"public"."u"', '"b"', "R8.1", "HINT"]
    cli.fails(1, "snapshot", "s", says=says)
    cli.fails(1, "sync", "s", says=says)
    assert cli.subscriber.rows("table u") == []


def test_a_replay_that_lacks_a_column_leaves_everything_as_it_was(cli: CommandLine) -> None:
    cli.subscriber.run(TABLES)
    ready(cli)
    cli.subscriber.run("drop table t; alter table u drop column b")
    cli.fails(1, "replay", "s", says=['"public"."t"', '"public"."u"', '"b"', "R8.1"])
    assert cli.subscriber.rows("table u") == []
    (subscription,) = cli.succeeds("status")["subscriptions"]
    assert subscription["last_replay"].startswith("failed: ")


def test_read_only_subscriber_is_reported_as_read_only(cli: CommandLine) -> None:
    cli.subscriber.run(TABLES)
    ready(cli)
    name = cli.subscriber.name
    cli.subscriber.run(f"alter database {name} set default_transaction_read_only = on")
    says = ['the subscriber of subscription "s" is read-only', "standby", "default_transaction_read_only"]
    for command in (("replay", "s"), ("sync", "s"), ("snapshot", "s"), ("refresh", "s"), ("teardown", "s")):
        cli.fails(1, *command, says=says)
    (result,) = replay(load_config(cli.file), ["s"])
    assert result.retry is Retry.LATER
    (subscription,) = cli.succeeds("status")["subscriptions"]
    assert subscription["error"] is None
    with connect(cli.subscriber.cluster.dsn(), purpose="test") as admin:
        admin.execute(f"alter database {name} reset default_transaction_read_only".encode())
    assert cli.succeeds("teardown", "s")["removed"] == ["state of subscription s"]


def test_a_slot_that_another_process_reads_exits_with_1(cli: CommandLine) -> None:
    """R1.33: a walsender holds it."""
    setup(load_config(cli.file), "pub")
    cli.publisher.run("insert into t values (1, 1)")
    start = f"START_REPLICATION SLOT {cli.slot} LOGICAL 0/0 (proto_version '1', publication_names 'p')"
    with contextlib.closing(connect(cli.publisher.dsn, purpose="test", replication=True)) as walsender:
        walsender.pgconn.send_query(start.encode())
        deadline = time.monotonic() + 30
        is_active = f"select active from pg_replication_slots where slot_name = '{cli.slot}'"
        while cli.publisher.rows(is_active) != [(True,)]:
            assert time.monotonic() < deadline, "the walsender did not take the slot"
        cli.fails(1, "capture", "pub", says=[cli.slot, "is active", "HINT: Stop the other process"])
        cli.fails(1, "teardown", "pub", says=[cli.slot, "is active"])


def test_lost_slot_exits_with_1_and_names_the_remedy(
    cli: CommandLine, make_cluster: Callable[..., Cluster]
) -> None:
    """R1.33: the server has removed WAL that the slot needs."""
    small = make_cluster("small", max_slot_wal_keep_size="1MB", wal_keep_size="0")
    server = Database(small, "postgres")
    server.run(f"{TABLES}; create publication p for table t")
    cli.write("p", of_publisher={"dsn": server.dsn})
    setup(load_config(cli.file), "pub")
    for key in range(4):
        server.run(f"insert into t values ({key})")
        server.run("select pg_switch_wal()")
    server.run("checkpoint")

    for command in ("capture", "setup"):
        cli.fails(1, command, "pub", says=[f'slot "{cli.slot}" is lost', "cdc-replay teardown", "snapshot"])
    (publisher,) = cli.succeeds("status")["publishers"]
    assert publisher["slot_state"] == "lost"
    assert cli.succeeds("teardown", "pub")["removed"][0] == f"replication slot {cli.slot}"


@pytest.mark.parametrize("damage", ["truncated", "missing", "overwritten"])
def test_a_damaged_segment_exits_with_1_and_names_the_file(cli: CommandLine, damage: str) -> None:
    cli.subscriber.run(TABLES)
    ready(cli)
    (segment,) = (cli.change_log / "changes").glob("*.parquet")
    content = segment.read_bytes()
    match damage:
        case "truncated":
            segment.write_bytes(content[: len(content) // 2])
        case "missing":
            segment.unlink()
        case _:
            segment.write_bytes(b"PAR1" + bytes(len(content) - 8) + b"PAR1")

    cli.fails(1, "replay", "s", says=[segment.name, "is damaged or missing", "HINT"])
    assert cli.subscriber.rows("table t") == []
    with connect(cli.subscriber.dsn, purpose="test") as connection:
        states = subscription_tables.table_states(connection, "s").values()
    assert states
    assert all(isinstance(table_state, Ready) and table_state.applied_lsn > Lsn(0) for table_state in states)
    (subscription,) = cli.succeeds("status")["subscriptions"]
    assert segment.name in subscription["error"]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("relations", "is missing rows that were committed to it"),
        ("catalogs", "is missing the catalog of the log"),
    ],
)
def test_a_side_table_without_its_last_commits_exits_with_1_and_is_named(
    cli: CommandLine, table: str, says: str
) -> None:
    """R9.10: nothing is applied by guesses about shapes and publications."""
    cli.subscriber.run(TABLES)
    ready(cli)
    for commit in (cli.change_log / table / "_delta_log").glob("*.json"):
        if int(commit.stem) > 0:
            commit.unlink()

    named = [f'"{cli.change_log / table}"', "HINT: Run `cdc-replay verify-log`"]
    cli.fails(1, "replay", "s", says=[says, *named])
    cli.fails(1, "verify-log", "pub", says=["HINT"])
    assert cli.subscriber.rows("table t") == []
    if table == "catalogs":
        # What is read of the publisher now says nothing about what was captured before.
        cli.fails(1, "capture", "pub", says=[says, *named])


def test_a_log_of_another_cluster_is_refused(cli: CommandLine, make_cluster: Callable[..., Cluster]) -> None:
    setup(load_config(cli.file), "pub")
    other = Database(make_cluster("other"), "postgres")
    other.run(f"{TABLES}; create publication p for table t, u")
    cli.write("p", of_publisher={"dsn": other.dsn})
    for command in ("setup", "capture"):
        cli.fails(1, command, "pub", says=["belongs to another publisher", "system identifier", "HINT"])
