"""What a slot keeps the publisher from removing: it moves on when nothing is captured, and within a limit.

| the publisher                           | the slot                                                         |
|-----------------------------------------|------------------------------------------------------------------|
| writes other databases, unlogged tables | follows; nothing is added to the log but its end                 |
| is idle                                 | stands still: there is nothing to move to                        |
| has an open transaction                 | follows, but its restart_lsn stays; the transaction comes later, |
|                                         | whole; past the limit the slot is dropped, and the error says so |
| has a prepared transaction              | likewise                                                         |
| is not captured for want of disk        | stays; past the limit it is dropped, and the error says so       |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cdc_replay.capture.pull import current_position
from cdc_replay.capture.slot_lock import only_reader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.setup import setup
from cdc_replay.commands.status import status
from cdc_replay.config import Config, load_config
from cdc_replay.errors import ChangeLogMissing, SlotActive, SlotDroppedOverLimit, SlotMissing
from cdc_replay.model.lsn import Lsn
from embedded.postgres import Cluster
from fixtures.captured import Captured
from fixtures.disturbed import TABLE, content
from fixtures.postgres import IN_LATIN1, Database, create_database, drop_database

SetUp = Callable[..., Captured]

MEGABYTE = 1 << 20


def write_wal(database: Database, megabytes: int) -> None:
    """WAL that is none of a captured change: messages of a session that is rolled back are not sent."""
    for _ in range(megabytes):
        database.run(
            f"begin; select pg_logical_emit_message(true, 'test', repeat('x', {MEGABYTE})); rollback"
        )


@pytest.mark.parametrize("what", ["unlogged", "another database", "rolled back"])
def test_slot_advances_over_uncaptured_wal(what: str, publisher: Database, set_up: SetUp) -> None:
    """R1.29: an empty pull moves the log's end and the slot to where the server writes."""
    publisher.run(TABLE + "create unlogged table u (id int)")
    captured = set_up()
    captured.capture()
    before, commits = captured.log.end_lsn, content(captured.log)
    if what == "unlogged":
        publisher.run("insert into u select generate_series(1, 1000)")
    elif what == "rolled back":
        write_wal(publisher, 1)
    else:
        other = Database(publisher.cluster, "postgres")
        other.run("create table if not exists elsewhere (id int)")
        other.run("insert into elsewhere select generate_series(1, 1000)")
    position = current_position(publisher.dsn)
    assert position > before

    captured.capture()

    assert captured.log.end_lsn >= position
    assert captured.position == captured.log.end_lsn
    assert content(captured.log).equals(commits)


def test_capture_of_idle_publisher_moves_nothing(publisher: Database, set_up: SetUp) -> None:
    """Nothing was written: no commit of the log, no position moves."""
    publisher.run(TABLE)
    captured = set_up()
    captured.capture()
    end = captured.log.end_lsn

    outcome = captured.capture(end)

    assert (outcome.pulls, outcome.from_lsn, outcome.to_lsn) == (0, end, end)
    assert captured.position == end


def test_open_transaction_is_captured_completely_at_commit(publisher: Database, set_up: SetUp) -> None:
    """R1.21, R1.31: three pulls pass its changes; the slot confirms them, and can still send them."""
    publisher.run(TABLE)
    captured = set_up()
    with publisher.connect() as writer:
        writer.autocommit = False
        for number in range(1, 4):
            writer.execute("insert into t values (%s, 'open')", (number,))
            publisher.run(f"insert into t values ({number}0, 'committed')")
            captured.capture()
            assert captured.position == captured.log.end_lsn
            assert Lsn.parse(captured.slot("restart_lsn") or "") < captured.position
        writer.commit()

    captured.capture()

    ids = [values[0] for kind, values in captured.changes() if kind == "I"]
    assert ids == ["10", "20", "30", "1", "2", "3"]


@pytest.fixture
def configured(publisher: Database, tmp_path: Path) -> Callable[..., Config]:
    """The configuration of a publisher `pub` with a limit; it is set up."""
    publisher.run(TABLE)

    def configured(max_retained_wal: str | None) -> Config:
        settings = {
            "dsn": publisher.dsn,
            "slot": f"slot_{publisher.name}",
            "change_log": str(tmp_path / "log"),
            "event_trigger": False,  # so that the log has nothing but what the tests write
        }
        limit = {} if max_retained_wal is None else {"max_retained_wal": max_retained_wal}
        subscription = {"publisher": "pub", "publications": ["p"], "dsn": publisher.dsn}
        tree = {"publishers": {"pub": settings | limit}, "subscriptions": {"s": subscription}}
        file = tmp_path / "cdc_replay.yaml"
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        setup(load_config(file), "pub")
        return load_config(file)

    return configured


def slot_exists(publisher: Database) -> bool:
    slot = f"slot_{publisher.name}"
    return publisher.rows(f"select from pg_replication_slots where slot_name = '{slot}'") != []


def test_status_shows_what_the_slot_retains_from_its_restart_lsn(
    publisher: Database, configured: Callable[..., Config]
) -> None:
    config = configured(None)
    capture(config, "pub")
    with publisher.connect() as writer:
        writer.autocommit = False
        writer.execute("insert into t values (1, 'open')")
        write_wal(publisher, 2)
        capture(config, "pub")
        (publisher_status,) = status(config).publishers
    assert publisher_status.slot_state == "reserved"
    # Everything is captured, but for what was written since; the open transaction keeps the rest.
    assert publisher_status.behind_bytes is not None
    assert publisher_status.behind_bytes < MEGABYTE
    assert publisher_status.retained_wal_bytes is not None
    assert publisher_status.retained_wal_bytes > 2 * MEGABYTE
    assert publisher_status.safe_wal_size_bytes is None


def test_backlog_beyond_limit_is_captured_and_slot_kept(
    publisher: Database, configured: Callable[..., Config]
) -> None:
    """Capturing is the best remedy: it releases the WAL that was retained for it."""
    config = configured("1MB")
    write_wal(publisher, 4)
    publisher.run("insert into t values (1, 'x')")

    assert capture(config, "pub").transactions == 1

    assert slot_exists(publisher)
    (publisher_status,) = status(config).publishers
    assert publisher_status.retained_wal_bytes is not None
    assert publisher_status.retained_wal_bytes < MEGABYTE


@pytest.mark.parametrize("kind", ["open", "prepared"])
def test_slot_is_dropped_for_open_transaction_and_error_names_it(
    kind: str, publisher: Database, configured: Callable[..., Config]
) -> None:
    """R1.31: the log is complete, but the server cannot remove WAL; the error says what was done and why."""
    config = configured("1MB")
    gid = f"gid_{publisher.name}"
    with publisher.connect() as writer:
        writer.autocommit = False
        writer.execute("insert into t values (1, 'open')")
        pid = writer.info.backend_pid
        if kind == "prepared":
            writer.execute(f"prepare transaction '{gid}'".encode())
        publisher.run("insert into t values (2, 'committed')")
        write_wal(publisher, 2)

        with pytest.raises(SlotDroppedOverLimit) as given_up:
            capture(config, "pub")

        writer.rollback()
    text = str(given_up.value)
    assert f'replication slot "slot_{publisher.name}" retained ' in text
    assert "of WAL and was dropped [R1.31]" in text
    assert "`max_retained_wal` of publisher pub is 1024 kB" in text
    named = f'prepared transaction "{gid}"' if kind == "prepared" else f"transaction of process {pid}"
    assert f"but {named} (xid " in text
    assert f'database "{publisher.name}"' in text
    assert "cdc-replay setup" in text
    assert not slot_exists(publisher)
    log = ChangeLog.open(config.publisher("pub").change_log)
    assert content(log).num_rows == 1
    with pytest.raises(SlotMissing, match="no longer exists"):
        capture(config, "pub")


def test_slot_is_dropped_for_prepared_transaction_whose_name_is_in_another_encoding(
    publisher_cluster: Cluster, publisher: Database, configured: Callable[..., Config]
) -> None:
    """A database of the server in LATIN1: the name of a transaction is sent to the publisher's as it is."""
    config = configured("1MB")
    elsewhere = create_database(publisher_cluster, "latin1", IN_LATIN1)
    try:
        elsewhere.run("create table u (); begin; create table v (); prepare transaction 'café'")
        write_wal(publisher, 2)
        with pytest.raises(SlotDroppedOverLimit, match=r'but prepared transaction "caf\\xe9" \(xid '):
            capture(config, "pub")
    finally:
        elsewhere.run("rollback prepared 'café'")
        drop_database(elsewhere)


def test_slot_is_dropped_after_failed_capture_and_error_has_both_reasons(
    publisher: Database, configured: Callable[..., Config], tmp_path: Path
) -> None:
    """The log's folder is missing and WAL accumulates: protecting the server's disk has priority."""
    config = configured("3MB")
    capture(config, "pub")
    (tmp_path / "log").rename(tmp_path / "gone")
    publisher.run("insert into t values (1, 'x')")
    with pytest.raises(ChangeLogMissing):
        capture(config, "pub")
    assert slot_exists(publisher)

    write_wal(publisher, 4)
    with pytest.raises(SlotDroppedOverLimit) as given_up:
        capture(config, "pub")

    assert "The capture failed: there is no change log at" in str(given_up.value.detail)
    assert isinstance(given_up.value.__cause__, ChangeLogMissing)
    assert not slot_exists(publisher)


def test_slot_is_kept_while_another_capture_runs(
    publisher: Database, configured: Callable[..., Config]
) -> None:
    config = configured("1MB")
    write_wal(publisher, 2)
    with publisher.connect() as other, only_reader(other, f"slot_{publisher.name}"):
        with pytest.raises(SlotActive):
            capture(config, "pub")
        assert slot_exists(publisher)


def test_foreign_slot_is_not_dropped(
    publisher: Database, configured: Callable[..., Config], tmp_path: Path
) -> None:
    """Its publications carry the name of the slot that they were made for."""
    config = configured("1MB")
    publisher.run("select pg_create_logical_replication_slot('foreign_" + publisher.name + "', 'pgoutput')")
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(file.read_text().replace(f"slot_{publisher.name}", f"foreign_{publisher.name}"))
    (tmp_path / "log").rename(tmp_path / "gone")
    write_wal(publisher, 2)
    with pytest.raises(ChangeLogMissing):
        capture(load_config(file), "pub")
    assert publisher.rows("select from pg_replication_slots where slot_name like 'foreign%'") != []
    assert config.publisher("pub").slot == f"slot_{publisher.name}"
