"""Whatever servers, disks and operators do to a capture, its log ends as that of an undisturbed one.

Every capture here runs in a process of its own, beside a second slot of the same database that nobody
disturbs. A failpoint stops the process, the world changes, the process goes on. Then: the error says what
happened and what to do, the log is as it was or one whole pull further, and once the cause is gone the next
capture brings both logs to the same rows.

| where it stops            | what happens there                       | error                | log       |
|---------------------------|------------------------------------------|----------------------|-----------|
| every `capture.*` point   | SIGKILL in the first pull and the second |                      | by point  |
| reading in two pieces     | SIGKILL; the session ahead is terminated |                      | as before |
| in the peek               | the backend is terminated                | ServerUnavailable    | as before |
| before the commit         | the publisher is shut down               | ServerUnavailable    | as before |
| before the advance        | the publisher crashes; the line is cut   | ServerUnavailable    | one pull  |
| before the third commit   | the backend is terminated                | ServerUnavailable    | two pulls |
| before the advance        | another process takes the slot           | SlotActive           | one pull  |
| before the commit         | somebody advances the slot               | SlotLost             | as before |
| before the advance        | somebody advances the slot               | SlotLost             | one pull  |
| before the commit         | the slot is dropped                      | SlotMissing          | as before |
| before commit, or advance | the slot is dropped and made anew        | SlotLost             | likewise  |
| writing the segment       | the disk is full; a read-only folder     | ChangeLogNotWritable | as before |
| writing an empty commit   | the disk is full                         | ChangeLogNotWritable | as before |
| spooling a transaction    | the temporary folder is full             | ChangeLogNotWritable | as before |
| before pull, or commit    | the log's folder is gone                 | ChangeLogMissing     | as before |

The first three sessions that end do so in each of the three places. Where changes are gone for good, nothing
can bring them back: the refusal stays, and no later capture passes over the gap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdc_replay.capture.pull import current_position
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import CdcReplayError, SlotLost, SlotMissing
from cdc_replay.failpoints import FAILPOINTS
from cdc_replay.postgres.connection import connect
from cdc_replay.postgres.slot import advance_slot, create_slot
from embedded.postgres import Cluster
from fixtures.disturbed import TABLE, Disturbed, disturb
from fixtures.native import wait_for
from fixtures.postgres import Database, create_database, drop_database
from fixtures.proxy import Line

IN_PEEK = "capture.after_peek"
BETWEEN_PIECES = "peek.between_pieces"
BEFORE_COMMIT = "capture.after_segment"
BEFORE_ADVANCE = "capture.after_commit"

TRAFFIC = (
    "insert into t values ({n}1, 'one'), ({n}2, 'two')",
    "begin; update t set a = 'changed' where id = {n}1; savepoint s; delete from t; rollback to s; commit",
    "begin; select pg_logical_emit_message(true, 'test', 'inside'); insert into t values ({n}4); commit",
    "select pg_logical_emit_message(false, 'test', 'outside')",
    "begin; insert into t select {n}000 + g, repeat('x', 100) from generate_series(1, 900) g; commit",
    "begin; insert into t values ({n}3, 'prepared'); prepare transaction '{database}_{n}'",
    "delete from t where id = {n}2",
    "commit prepared '{database}_{n}'",
    "truncate t",
)
# More than the batch that the failpoint waits for and the sockets' buffers hold.
SMALL = "insert into t select g, repeat('x', 100) from generate_series(1, 1000) g"
LARGE = "insert into t select g, repeat('x', 100) from generate_series(1, 150000) g"
TEMPORARY_SLOTS = (
    "select slot_name from pg_replication_slots where temporary and database = current_database()"
)


def traffic(database: Database, n: int) -> None:
    """Transactions of all kinds."""
    for script in TRAFFIC:
        database.run(script.format(n=n, database=database.name))


@pytest.fixture
def disturbed(publisher: Database, tmp_path: Path) -> Iterator[Disturbed]:
    """Small pulls: one or two transactions each."""
    publisher.run(TABLE)
    with disturb(publisher, tmp_path, max_changes_per_pull=4) as disturbed:
        yield disturbed


@pytest.mark.parametrize("failpoint", [name for name in FAILPOINTS if name.startswith("capture.")])
def test_a_killed_capture_is_completed_by_the_next_one(
    failpoint: str, publisher: Database, tmp_path: Path
) -> None:
    """R1.26, R1.30, R9.8: with streamed and prepared transactions, two kills, and changes between them."""
    publisher.run(TABLE)
    publisher.run(f"alter database {publisher.name} set logical_decoding_work_mem = '64kB'")
    with disturb(publisher, tmp_path, two_phase=True, streaming=True, wal_bytes_per_pull=4096) as disturbed:
        traffic(publisher, 1)
        disturbed.start(failpoint).killed()
        traffic(publisher, 2)
        disturbed.start(f"{failpoint}@2").killed()
        disturbed.check()


@pytest.mark.parametrize("failpoint", [IN_PEEK, BETWEEN_PIECES, BEFORE_ADVANCE])
def test_a_capture_that_is_killed_while_it_reads_two_pieces_is_completed(
    failpoint: str, publisher: Database, tmp_path: Path
) -> None:
    """R1.26, R1.30; the copy of the slot ends with its session."""
    publisher.run(TABLE)
    with disturb(publisher, tmp_path, split_bytes=0) as disturbed:
        for n in (1, 2):
            traffic(publisher, n)
            disturbed.start(failpoint).killed()
        disturbed.check()
        wait_for(lambda: not publisher.rows(TEMPORARY_SLOTS), "the copies of the slot to end")


def test_a_capture_whose_session_ahead_ends_is_completed(publisher: Database, tmp_path: Path) -> None:
    """What it has read by then is thrown away, or the next pull reads the rest."""
    publisher.run(TABLE)
    with disturb(publisher, tmp_path, split_bytes=0) as disturbed:
        publisher.run(SMALL)
        publisher.run(LARGE.replace("g,", "-g,"))
        process = disturbed.start(f"{BETWEEN_PIECES}=stop")
        process.wait_until_stopped()
        publisher.run(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where datname = current_database() and application_name = 'cdc_replay capture ahead'"
        )
        process.go_on()
        process.process.communicate(timeout=300)
        disturbed.check()


@pytest.fixture(scope="module")
def faulty_cluster(servers_folder: Path) -> Iterator[Cluster]:
    """A server that tests stop and start."""
    with Cluster(servers_folder, "faulty") as cluster:
        yield cluster


@pytest.fixture
def on_faulty(faulty_cluster: Cluster, tmp_path: Path) -> Iterator[Disturbed]:
    """A capture from that server; one pull takes all."""
    database = create_database(faulty_cluster, "publisher")
    database.run(TABLE)
    with disturb(database, tmp_path) as disturbed:
        yield disturbed
    drop_database(database)


def terminate_backends(disturbed: Disturbed) -> None:
    disturbed.database.run(
        "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
        " where datname = current_database() and application_name like 'cdc_replay capture%'"
    )


def restart(disturbed: Disturbed) -> None:
    disturbed.database.cluster.stop("fast")
    disturbed.database.cluster.start()


def crash(disturbed: Disturbed) -> None:
    disturbed.database.cluster.stop("immediate")
    disturbed.database.cluster.start()


@pytest.mark.parametrize(
    "event",
    [terminate_backends, pytest.param(restart, marks=pytest.mark.slow), crash],
    ids=lambda event: event.__name__,
)
@pytest.mark.parametrize("failpoint", [IN_PEEK, BEFORE_COMMIT, BEFORE_ADVANCE])
def test_capture_reports_a_lost_session_and_the_next_one_continues(
    failpoint: str, event: Callable[[Disturbed], None], on_faulty: Disturbed
) -> None:
    """R1.30: a commit of the log stays, whatever becomes of the slot; before it there is nothing."""
    disturbed, before = on_faulty, on_faulty.captured.log.end_lsn
    disturbed.database.run(LARGE if failpoint == IN_PEEK else SMALL)
    process = disturbed.start(f"{failpoint}=stop")
    process.wait_until_stopped()
    event(disturbed)
    message = process.error()
    assert message.startswith("ServerUnavailable: cannot ")
    assert "HINT: " in message
    assert (disturbed.captured.log.end_lsn > before) is (failpoint == BEFORE_ADVANCE)
    disturbed.database.run("insert into t values (0, 'later')")
    disturbed.check()


@pytest.mark.parametrize("failpoint", [IN_PEEK, BEFORE_COMMIT, BEFORE_ADVANCE])
def test_cut_connection_is_an_error_and_the_next_capture_continues(
    failpoint: str, publisher: Database, tmp_path: Path
) -> None:
    publisher.run(TABLE)
    port = str(publisher.cluster.port)
    with disturb(publisher, tmp_path) as disturbed, Line(publisher.cluster.port) as line:
        publisher.run(LARGE if failpoint == IN_PEEK else SMALL)
        process = disturbed.start(f"{failpoint}=stop", dsn=publisher.dsn.replace(port, str(line.port)))
        process.wait_until_stopped()
        line.cut()
        message = process.error()
        assert message.startswith("ServerUnavailable: cannot ")
        assert "HINT: " in message
        # The server must learn of it too, before it gives the slot and the lock to another session.
        wait_for(lambda: sessions(publisher) == 0, "the server to see that the client is gone")
        disturbed.check()


def sessions(database: Database) -> int:
    [(count,)] = database.rows(
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and application_name like 'cdc_replay capture%'"
    )
    return int(count)


def test_a_capture_that_fails_starts_again_at_its_own_pull(disturbed: Disturbed) -> None:
    """What earlier pulls have made durable stays; the pull that failed is the first of the next capture."""
    traffic(disturbed.database, 1)
    process = disturbed.start(f"{BEFORE_COMMIT}@3=stop")
    process.wait_until_stopped()
    two_pulls = disturbed.captured.log.end_lsn
    terminate_backends(disturbed)
    process.error()
    assert disturbed.captured.log.end_lsn == two_pulls == disturbed.captured.position
    assert disturbed.captured.rows()
    assert disturbed.captured.capture().from_lsn == two_pulls
    disturbed.check()


@contextlib.contextmanager
def another_reader(disturbed: Disturbed) -> Iterator[None]:
    """Somebody streams from the slot, without confirming anything."""
    source = disturbed.captured.source
    with contextlib.closing(connect(source.dsn, purpose="test", replication=True)) as walsender:
        walsender.pgconn.send_query(
            f"START_REPLICATION SLOT {source.slot} LOGICAL 0/0 (proto_version '1',"
            " publication_names 'cdc_replay_capture_i')".encode()
        )
        wait_for(lambda: disturbed.captured.slot("active") == "true", "the walsender to take the slot")
        yield
    wait_for(lambda: disturbed.captured.slot("active") == "false", "the walsender to leave the slot")


def test_slot_acquired_by_another_process_is_left_to_it(disturbed: Disturbed) -> None:
    """R1.33, SQLSTATE 55006: the pull is in the log, the slot is at an earlier position."""
    traffic(disturbed.database, 1)
    process = disturbed.start(f"{BEFORE_ADVANCE}=stop")
    process.wait_until_stopped()
    with another_reader(disturbed):
        message = process.error()
    assert message.startswith(
        f'SlotActive: cannot advance replication slot "{disturbed.captured.source.slot}"'
    )
    assert "HINT: Stop the other process" in message
    assert disturbed.captured.position < disturbed.captured.log.end_lsn
    disturbed.check()


def advanced_to_the_end(disturbed: Disturbed) -> None:
    with disturbed.database.connect() as connection:
        advance_slot(connection, disturbed.captured.source.slot, current_position(disturbed.database.dsn))


def dropped(disturbed: Disturbed) -> None:
    disturbed.database.run(f"select pg_drop_replication_slot('{disturbed.captured.source.slot}')")


def made_anew(disturbed: Disturbed) -> None:
    dropped(disturbed)
    with disturbed.database.connect() as connection:
        create_slot(connection, disturbed.captured.source.slot, two_phase=False)


@pytest.mark.parametrize(
    ("failpoint", "event", "error"),
    [
        (BEFORE_COMMIT, advanced_to_the_end, SlotLost),
        (BEFORE_ADVANCE, advanced_to_the_end, SlotLost),
        (BEFORE_COMMIT, dropped, SlotMissing),
        (BEFORE_COMMIT, made_anew, SlotLost),
        (BEFORE_ADVANCE, made_anew, SlotLost),
    ],
)
def test_changes_that_are_taken_from_the_slot_meanwhile_are_never_passed_over(
    failpoint: str, event: Callable[[Disturbed], None], error: type[CdcReplayError], disturbed: Disturbed
) -> None:
    """R1.29: the next peek would begin after them. The log ends before the gap, and stays there."""
    traffic(disturbed.database, 1)
    process = disturbed.start(f"{failpoint}@2=stop")
    process.wait_until_stopped()
    end, rows = disturbed.captured.log.end_lsn, disturbed.captured.rows()
    event(disturbed)
    message = process.error()
    assert message.startswith(f"{error.__name__}: ")
    assert f'"{disturbed.captured.source.slot}"' in message.partition("\n")[0]
    assert "cdc-replay snapshot" in message
    assert "[R1." in message
    for _ in range(2):
        with pytest.raises(error, match=disturbed.captured.source.slot) as refused:
            disturbed.captured.capture()
        assert str(end) in str(refused.value.detail)
    assert disturbed.captured.rows() == rows


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("file_bytes", "script"),
    [
        (2000, "insert into t select g, md5(g::text) from generate_series(1, 500) g"),
        (100, "create table other (id int)"),
    ],
    ids=["segment", "commit of an empty pull"],
)
def test_a_full_disk_stops_the_capture_and_leaves_the_log_as_it_was(
    file_bytes: int, script: str, disturbed: Disturbed
) -> None:
    """No file can grow beyond the limit, which is the same to a process as a disk without room."""
    disturbed.captured.capture()
    log = Path(disturbed.captured.source.change_log)
    end, before = disturbed.captured.log.end_lsn, files(log)
    disturbed.database.run(script)
    message = disturbed.start(file_bytes=file_bytes).error()
    assert message.startswith(f'ChangeLogNotWritable: change log "{log}')
    assert "File too large" in message
    assert "HINT: Free space" in message
    assert disturbed.captured.log.end_lsn == end
    assert files(log) == before
    disturbed.check()


def test_a_full_temporary_folder_stops_the_capture_with_its_name(publisher: Database, tmp_path: Path) -> None:
    """A transaction that exceeds the memory limit is spooled to a file."""
    publisher.run(TABLE)
    with disturb(publisher, tmp_path) as disturbed:
        publisher.run(LARGE)
        end = disturbed.captured.log.end_lsn
        message = disturbed.start(file_bytes=1 << 20).error()
        assert message.startswith("ChangeLogNotWritable: temporary folder ")
        assert "TMPDIR" in message
        assert disturbed.captured.log.end_lsn == end
        disturbed.check()


def test_a_folder_that_is_not_writable_stops_the_capture_and_leaves_the_log_as_it_was(
    disturbed: Disturbed,
) -> None:
    traffic(disturbed.database, 1)
    log = Path(disturbed.captured.source.change_log)
    end, before = disturbed.captured.log.end_lsn, files(log)
    folders = [path for path in (log, *log.rglob("*")) if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        message = disturbed.start(without_privileges=True).error()
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert message.startswith(f'ChangeLogNotWritable: change log "{log}')
    assert "Permission denied" in message
    assert "HINT: Free space, or make the folder writable" in message
    assert disturbed.captured.log.end_lsn == end
    assert files(log) == before
    disturbed.check()


@pytest.mark.parametrize("failpoint", ["", BEFORE_COMMIT])
def test_missing_log_folder_is_an_error_and_not_created_again(failpoint: str, disturbed: Disturbed) -> None:
    """A file system that is not mounted: the folder comes back as it was."""
    traffic(disturbed.database, 1)
    log = Path(disturbed.captured.source.change_log)
    elsewhere = log.with_name("elsewhere")
    if failpoint:
        process = disturbed.start(f"{failpoint}=stop")
        process.wait_until_stopped()
        log.rename(elsewhere)
    else:
        log.rename(elsewhere)
        process = disturbed.start()
    message = process.error()
    assert message.startswith("ChangeLogMissing: there is no change log ")
    assert str(log) in message
    assert "HINT: " in message
    assert not ChangeLog.exists(str(log))
    assert not log.exists()
    elsewhere.rename(log)
    disturbed.check()
