"""`prune`, `verify-log` and compaction on a log of a real publisher."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import itertools
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.segment import Segment
from cdc_replay.commands.backfill import backfill
from cdc_replay.commands.capture import capture
from cdc_replay.commands.prune import prune
from cdc_replay.commands.replay import replay
from cdc_replay.commands.setup import setup
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.status import status
from cdc_replay.commands.verify_log import verify_log
from cdc_replay.config import Config, load_config
from cdc_replay.errors import (
    ChangeLogDamaged,
    ChangeLogPruned,
    InvalidConfiguration,
    PruneLimitUnknown,
)
from cdc_replay.failpoints import VARIABLE
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import PruneResult
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready, TableState
from cdc_replay.subscriber import state_schema, subscription_lock, subscription_records, subscription_tables
from embedded.postgres import Cluster
from fixtures.command_line import CommandLine, one_object
from fixtures.native import wait_for
from fixtures.postgres import Database, create_database, drop_database
from fixtures.twin import Twin

TABLES = "create table t (id int primary key, a int)"


class History:
    """Four captured transactions between five positions, and subscribers whose state the tests write."""

    def __init__(self, publisher: Database, cluster: Cluster, folder: Path) -> None:
        self.publisher = publisher
        self.folder = folder
        self._cluster = cluster
        self._dsns: dict[str, str] = {}
        self._databases: list[Database] = []
        self.publisher_options: dict[str, object] = {"keep": 0}
        publisher.run(f"{TABLES}; create publication p for table t")
        self._dsns["first"] = self.database().dsn
        setup(self.config, "pub")
        self.positions = [self.log.end_lsn]
        self.times: list[str] = []
        for index in range(4):
            publisher.run(f"insert into t values ({index}, 0)")
            self.times.append(self.now())
            capture(self.config, "pub")
            self.positions.append(self.log.end_lsn)
        self._dsns.clear()

    def now(self) -> str:
        [(moment,)] = self.publisher.rows("select clock_timestamp()")
        assert isinstance(moment, dt.datetime)
        return moment.isoformat()

    def database(self) -> Database:
        database = create_database(self._cluster, "maintained")
        self._databases.append(database)
        return database

    def subscriber(self, name: str, *states: TableState, system_identifier: str | None = None) -> Database:
        """Add a subscription to the configuration, whose tables are in these states."""
        database = self.database()
        self._dsns[name] = database.dsn
        if not states:
            return database
        with database.connect() as connection:
            state_schema.install(connection)
            identifier = system_identifier or self.log.header.system_identifier
            subscription_records.bind_subscription(
                connection, name, identifier, ["p"], self.log.header.database
            )
            for index, state in enumerate(states):
                database.run(f"create table t{index} ()")
                subscription_tables.set_table_state(
                    connection, name, QualifiedName("public", f"t{index}"), state
                )
        return database

    def subscribe(self, name: str, dsn: str) -> None:
        self._dsns[name] = dsn

    @property
    def file(self) -> Path:
        """The configuration file as it is now."""
        publisher = {
            "dsn": self.publisher.dsn,
            "slot": f"kept_{self.publisher.name}",
            "change_log": self.uri,
            "event_trigger": False,  # their messages would be in the segments that are counted
            **self.publisher_options,
        }
        subscriptions = {
            name: {"publisher": "pub", "publications": ["p"], "dsn": dsn} for name, dsn in self._dsns.items()
        }
        file = self.folder / "cdc_replay.yaml"
        content = {"publishers": {"pub": publisher}, "subscriptions": subscriptions}
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return file

    @property
    def config(self) -> Config:
        return load_config(self.file)

    @property
    def uri(self) -> str:
        return str(self.folder / "change_log")

    @property
    def log(self) -> ChangeLog:
        return ChangeLog.open(self.uri)

    @property
    def files(self) -> int:
        return len(list(Path(self.uri, "changes").glob("*.parquet")))

    def prune(self, **options: object) -> PruneResult:
        result = prune(self.config, "pub", **options)  # type: ignore[arg-type]  # options of one test each
        verify_log(self.config, "pub")
        return result

    def kept(self) -> list[int]:
        """Which of the four transactions are in the log, by number."""
        log = self.log
        commits = [commit.commit_lsn for commit in log.commits(Window(log.start_lsn, log.end_lsn))]
        return [index for index, (after, upto) in enumerate(itertools.pairwise(self.positions))
                if any(after < lsn <= upto for lsn in commits)]  # fmt: skip

    def drop(self) -> None:
        for database in self._databases:
            drop_database(database)


@pytest.fixture
def history(publisher: Database, subscriber_cluster: Cluster, tmp_path: Path) -> Iterator[History]:
    history = History(publisher, subscriber_cluster, tmp_path)
    yield history
    history.drop()


def test_changes_that_the_slowest_subscription_needs_stay(history: History) -> None:
    at = history.positions
    history.subscriber("fast", Ready(at[4]))
    history.subscriber("slow", Ready(at[4]), Ready(at[2]))
    result = history.prune()
    assert (result.needed_lsn, result.needed_by) == (at[2], "slow")
    assert (result.segments, result.messages, result.files, history.files) == (2, 2, 2, 2)
    assert history.kept() == [2, 3]
    assert at[0] == result.from_lsn < result.to_lsn == history.log.start_lsn <= at[2]
    (publisher,) = status(history.config).publishers
    assert (publisher.log_start, publisher.log_end) == (result.to_lsn, at[4])
    again = history.prune()
    assert (again.segments, again.from_lsn, again.to_lsn) == (0, result.to_lsn, result.to_lsn)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda at: (Copying(at[1]), Ready(at[3])), [1, 2, 3]),
        (lambda at: (Parked(at[3], "its reason", at[4]),), [3]),
        (lambda at: (Pending(), Ready(at[3])), [3]),
        (lambda _: (Pending(),), []),
        (lambda _: (), []),
    ],
    ids=["being copied", "parked", "one waits", "all wait", "never snapshotted"],
)
def test_a_table_needs_the_changes_after_its_applied_lsn(
    history: History, make: object, expected: list[int]
) -> None:
    """A snapshot that does not exist yet will be at the log's end or later."""
    assert callable(make)
    history.subscriber("s", *make(history.positions))
    history.prune()
    assert history.kept() == expected


def test_tables_before_the_start_of_the_log_do_not_hold_it(history: History) -> None:
    """They need a new snapshot anyway."""
    at = history.positions
    history.subscriber("s", Ready(Lsn(1)), Ready(at[3]))
    history.prune()
    assert history.kept() == [3]
    history.subscriber("t", Ready(at[1]), Ready(at[4]))
    assert history.prune().segments == 0


def test_options_keep_more_changes_never_fewer(history: History) -> None:
    at = history.positions
    history.subscriber("s", Ready(at[3]))
    assert history.prune(before=str(at[1])).segments == 1
    assert history.prune(before=history.times[0]).segments == 0
    assert history.prune(keep_hours=1).segments == 0
    assert history.prune(before=str(at[4]), keep_hours=1).segments == 0
    assert history.kept() == [1, 2, 3]
    assert history.prune(before=history.times[1]).segments == 1
    assert history.prune(before=str(at[4])).segments == 1
    assert history.kept() == [3]
    assert history.prune(keep_hours=0, before=history.now()).segments == 0


def test_a_dry_run_changes_nothing(history: History) -> None:
    history.subscriber("s", Ready(history.positions[2]))
    plan = history.prune(dry_run=True)
    assert (plan.dry_run, plan.segments, plan.files) == (True, 2, 0)
    assert (history.kept(), history.files) == ([0, 1, 2, 3], 4)
    result = history.prune()
    assert (result.to_lsn, result.segments, result.bytes) == (plan.to_lsn, plan.segments, plan.bytes)


def test_changes_younger_than_keep_stay_unless_an_option_says_otherwise(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven days by default, also of changes that no subscription needs."""
    at = history.positions
    history.subscriber("s", Ready(at[4]))
    history.publisher_options = {}
    in_six_days = time.time() + 6 * 86400
    monkeypatch.setattr("cdc_replay.changelog.retention.time.time", lambda: in_six_days)
    assert history.prune().segments == 0
    history.publisher_options = {"keep": "144h"}
    assert history.prune(dry_run=True).segments == 4
    history.publisher_options = {"keep": "8d"}
    assert history.prune(before=str(at[1])).segments == 1
    assert history.prune(keep_hours=0, before=history.times[1]).segments == 1
    assert history.prune().segments == 0
    assert history.kept() == [2, 3]
    assert history.prune(keep_hours=0).segments == 2


@pytest.mark.parametrize(("year", "expected"), [(1900, [0, 1, 2, 3]), (1970, [0, 1, 2, 3]), (2200, [2, 3])])
def test_a_clock_that_jumps_drops_nothing_that_is_needed(
    history: History, monkeypatch: pytest.MonkeyPatch, year: int, expected: list[int]
) -> None:
    """`keep` depends on the clock; what a subscription needs depends on positions."""
    history.subscriber("s", Ready(history.positions[2]))
    history.publisher_options = {}
    then = dt.datetime(year, 1, 2, tzinfo=dt.UTC).timestamp()
    monkeypatch.setattr("cdc_replay.changelog.retention.time.time", lambda: then)
    for _ in range(2):
        history.prune()
        assert history.kept() == expected


def test_the_plan_is_reported_before_pruning(history: History) -> None:
    """The callback can refuse by an exception; changes that become needed after its consent stay."""
    at = history.positions
    database = history.subscriber("s", Ready(at[4]))
    plans: list[PruneResult] = []

    def refuse(plan: PruneResult) -> None:
        plans.append(plan)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        history.prune(confirm=refuse)
    (plan,) = plans
    assert (plan.segments, plan.to_lsn, plan.dry_run) == (4, history.log.end_lsn, True)
    first, last = (dt.datetime.fromisoformat(text) for text in (plan.from_time or "", plan.to_time or ""))
    assert first <= last <= dt.datetime.fromisoformat(history.now())
    assert (history.kept(), history.files) == ([0, 1, 2, 3], 4)

    def set_back(_: PruneResult) -> None:
        with database.connect() as connection:
            subscription_tables.set_table_state(connection, "s", QualifiedName("public", "t0"), Ready(at[2]))

    assert history.prune(confirm=set_back).segments == 2
    assert history.kept() == [2, 3]
    assert history.prune(confirm=refuse).segments == 0  # nothing to prune, no confirmation


def on_a_terminal(history: History, *options: str, answer: str) -> tuple[int, str]:
    """Exit code and screen of a `prune` on a terminal."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ["CDC_REPLAY_CONFIG"] = str(history.file)
        os.execv(sys.executable, [sys.executable, "-m", "cdc_replay.cli", "prune", "pub", *options])
    os.write(terminal, answer.encode())
    screen = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(terminal, 10_000):
            screen += part
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), screen.decode()


def test_prune_asks_for_confirmation_on_a_terminal(history: History) -> None:
    history.subscriber("s", Ready(history.positions[3]))
    code, screen = on_a_terminal(history, answer="n\n")
    assert (code, history.kept()) == (1, [0, 1, 2, 3])
    assert f"{history.positions[0]}, {history.positions[3]}] of pub, 3 segments" in " ".join(screen.split())
    code, screen = on_a_terminal(history, "--dry-run", answer="n\n")
    assert (code, "Go on?" in screen, history.kept()) == (0, False, [0, 1, 2, 3])
    code, _ = on_a_terminal(history, "--before", str(history.positions[1]), answer="y\n")
    assert (code, history.kept()) == (0, [1, 2, 3])
    code, screen = on_a_terminal(history, "--yes", answer="")
    assert (code, "Go on?" in screen, history.kept()) == (0, False, [3])


def test_pruning_without_subscriptions_requires_an_option(history: History) -> None:
    with pytest.raises(InvalidConfiguration, match="no subscription"):
        history.prune()
    assert history.prune(before=str(history.positions[2])).needed_by is None
    assert history.kept() == [2, 3]


def test_an_unreachable_subscriber_prevents_pruning(history: History) -> None:
    history.subscriber("here", Ready(history.positions[4]))
    history.subscribe("gone", "postgresql://postgres@127.0.0.1:1/none")
    with pytest.raises(PruneLimitUnknown, match='"gone"') as refused:
        history.prune()
    assert "nothing is pruned" in str(refused.value)
    assert history.kept() == [0, 1, 2, 3]


def test_a_subscriber_of_another_publisher_prevents_pruning(history: History) -> None:
    """Its positions refer to another WAL."""
    history.subscriber("s", Ready(history.positions[4]), system_identifier="1")
    with pytest.raises(PruneLimitUnknown, match="another publisher"):
        history.prune()
    assert history.kept() == [0, 1, 2, 3]


def test_the_state_of_an_earlier_release_is_upgraded_and_read(history: History) -> None:
    """Its schema lacks tables."""
    database = history.subscriber("s", Ready(history.positions[2]))
    database.run("drop table cdc_replay.lock_key")
    assert history.prune().needed_lsn == history.positions[2]
    assert history.kept() == [2, 3]


def test_a_job_that_may_start_a_copy_prevents_pruning(history: History) -> None:
    """Its snapshot may already exist, after the log's end, without being in its state yet."""
    database = history.subscriber("s", Pending(), Ready(history.positions[4]))
    with database.connect() as connection, subscription_lock.lock(connection, "s"):
        with pytest.raises(PruneLimitUnknown, match="about to copy"):
            history.prune()
        assert history.kept() == [0, 1, 2, 3]
    assert history.prune().segments == 4


def test_a_copy_whose_position_is_not_known_prevents_pruning(history: History) -> None:
    """A table that is copied again returns to a snapshot which only that process knows."""
    at = history.positions
    again = history.subscriber("again", Ready(at[4]), Copying(Lsn(1)))
    first = history.subscriber("first", Ready(at[4]), Copying(at[2]))
    with first.connect() as copier, subscription_lock.lock(copier, subscription_lock.copy_lock("first")):
        with again.connect() as other, subscription_lock.lock(other, subscription_lock.copy_lock("again")):
            with pytest.raises(PruneLimitUnknown, match='"again" is being copied'):
                history.prune()
            assert history.kept() == [0, 1, 2, 3]
        assert history.prune().needed_by == "first"
    assert history.kept() == [2, 3]


def test_pruned_files_stay_while_a_job_runs(history: History) -> None:
    """A backfill may read changes before those that its subscription needs."""
    database = history.subscriber("s", Ready(history.positions[3]))
    reader = history.log
    with database.connect() as connection, subscription_lock.lock(connection, "s"):
        result = history.prune()
        assert (result.segments, result.files, history.files) == (3, 0, 4)
        assert reader.summary(Window(history.positions[0], history.positions[4])).transactions == 4
    assert history.prune().files == 0  # not for a day
    assert history.log.delete_removed(older_than_hours=0) == 3
    verify_log(history.config, "pub")


def test_pruned_files_stay_for_a_job_that_began_before_they_left_the_log(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question to its subscriber and the commit: other subscribers may take their time."""
    database = history.subscriber("s", Ready(history.positions[3]))
    readers: list[ChangeLog] = []
    with contextlib.ExitStack() as job:

        def begin_job(log: ChangeLog, segments: Sequence[Segment], *, keep_files: Callable[[], bool]) -> int:
            connection = job.enter_context(database.connect())
            job.enter_context(subscription_lock.lock(connection, "s"))
            readers.append(ChangeLog.open(history.uri))
            return prune_now(log, segments, keep_files=keep_files)

        prune_now = ChangeLog.prune
        monkeypatch.setattr(ChangeLog, "prune", begin_job)
        result = history.prune()
        assert (result.segments, result.files, history.files) == (3, 0, 4)
        assert readers[0].summary(Window(history.positions[0], history.positions[4])).transactions == 4


def test_pruning_does_not_need_the_publisher(history: History) -> None:
    history.subscriber("s", Ready(history.positions[4]))
    content = yaml.safe_load(history.file.read_text())
    content["publishers"]["pub"]["dsn"] = "postgresql://postgres@127.0.0.1:1/none"
    (history.folder / "other.yaml").write_text(yaml.safe_dump(content))
    config = load_config(history.folder / "other.yaml")
    assert prune(config, "pub").segments == 4
    assert verify_log(config, "pub").segments == 0


def test_capture_continues_after_a_log_was_pruned_to_its_end(history: History) -> None:
    history.subscriber("s", Ready(history.positions[4]))
    history.prune()
    history.publisher.run("insert into t values (9, 9)")
    captured = capture(history.config, "pub")
    assert (captured.from_lsn, captured.transactions) == (history.positions[4], 1)
    verified = verify_log(history.config, "pub")
    assert (verified.transactions, verified.to_lsn) == (1, captured.to_lsn)


def test_a_killed_prune_leaves_the_log_pruned_or_unchanged(history: History) -> None:
    """Killed between commit and deletion: the log is shorter, its files stay for a day."""
    history.subscriber("s", Ready(history.positions[2]))
    process = subprocess.run(
        [sys.executable, "-m", "cdc_replay.cli", "prune", "pub"],
        env=os.environ | {VARIABLE: "prune.after_commit", "CDC_REPLAY_CONFIG": str(history.file)},
        capture_output=True,
        check=False,
    )
    assert process.returncode == -9, process.stderr
    assert (history.kept(), history.files) == ([2, 3], 4)
    assert history.prune().segments == 0
    assert history.log.delete_removed(older_than_hours=0) == 2


def test_small_segments_are_merged_at_the_end_of_a_capture(history: History) -> None:
    """Pulls of one transaction each; the 200th small segment triggers a merge."""
    with history.publisher.connect() as connection:
        for number in range(100, 300):
            connection.execute(f"insert into t values ({number}, 0)".encode())
    content = yaml.safe_load(history.file.read_text())
    content["publishers"]["pub"]["max_changes_per_pull"] = 1
    (history.folder / "small_pulls.yaml").write_text(yaml.safe_dump(content))
    config = load_config(history.folder / "small_pulls.yaml")
    captured = capture(config, "pub")
    assert captured.pulls >= 200
    verified = verify_log(config, "pub")
    assert (verified.segments, verified.transactions, verified.to_lsn) == (1, 204, captured.to_lsn)


TRAFFIC = """
    begin; insert into t select n, n from generate_series(1000, 4000) n; savepoint one;
    insert into t values (5000, 0); rollback to one; truncate u; update t set id = id + 10000 where id = 1000;
    commit;
    select pg_logical_emit_message(true, 'p', 'in'), pg_logical_emit_message(false, 'p', 'out');
    alter table t add b text default 'ö';
    update t set b = 'ß' where id between 3000 and 3010;
    begin; delete from t where id = 2000; insert into u values ('x'); prepare transaction 'one';
    begin; insert into t values (6000, 0); prepare transaction 'two';
    commit prepared 'one'
"""


@pytest.mark.parametrize("streaming", [False, True])
def test_a_captured_log_of_any_traffic_is_verified_without_fault(
    publisher: Database, subscriber: Database, tmp_path: Path, streaming: bool
) -> None:
    """Streamed, prepared, truncated, rolled back, altered: counted as captured."""
    publisher.run(f"{TABLES}; create table u (a text); create publication p for table t, u")
    file = tmp_path / "cdc_replay.yaml"
    options = {"streaming": streaming, "two_phase": True, "slot": f"sound_{publisher.name}"}
    content = {
        "publishers": {"pub": {"dsn": publisher.dsn, "change_log": str(tmp_path / "log"), **options}},
        "subscriptions": {"s": {"publisher": "pub", "publications": ["p"], "dsn": subscriber.dsn}},
    }
    file.write_text(yaml.safe_dump(content))
    config = load_config(file)
    setup(config, "pub")
    with publisher.connect() as connection:
        connection.execute("set logical_decoding_work_mem = '64kB'")
        for statement in TRAFFIC.split(";\n"):
            for part in statement.split("; "):
                connection.execute(part.strip().encode())
    captured = capture(config, "pub")
    verified = verify_log(config, "pub")
    assert (verified.transactions, verified.messages) == (captured.transactions, captured.messages)
    assert (verified.bytes, verified.to_lsn, verified.prepared) == (captured.bytes, captured.to_lsn, 1)


@pytest.fixture
def cli(tmp_path: Path, publisher: Database, subscriber: Database) -> CommandLine:
    publisher.run(f"{TABLES}; create publication p for table t")
    command_line = CommandLine(tmp_path, publisher, subscriber)
    command_line.write("p")
    return command_line


def test_compact_prune_and_verify_log_run_from_the_command_line(cli: CommandLine) -> None:
    """One object per command, exit code 1 for a damaged log, 2 for a usage error; `batch` knows them too."""
    lines = [
        "prune pub",
        "verify-log pub",
        "setup pub",
        "prune pub --keep-hours 1",
        "prune pub --before soon",
    ]
    process = cli.run("batch", lines=lines)
    answers = [one_object(line) for line in process.stdout.splitlines()]
    assert [answer["ok"] for answer in answers] == [False, False, True, True, False]
    assert all("no change log" in answer["error"] for answer in answers[:2])
    assert (answers[3]["result"]["segments"], "soon" in answers[4]["error"]) == (0, True)

    cli.publisher.run("insert into t values (1, 1), (2, 2)")
    captured = cli.succeeds("capture", "pub")
    verified = cli.succeeds("verify-log", "pub")
    assert (verified["publisher"], verified["segments"]) == ("pub", 1)
    assert (verified["messages"], verified["to_lsn"]) == (captured["messages"], captured["to_lsn"])
    for hours in ("-1", "inf", "-inf", "nan"):
        cli.fails(2, "prune", "pub", "--keep-hours", hours, says=["--keep-hours"])
    assert cli.succeeds("prune", "pub", "--keep-hours", "1e308")["segments"] == 0
    (file,) = (cli.change_log / "changes").glob("*.parquet")
    content = bytearray(file.read_bytes())
    content[60] ^= 1
    file.write_bytes(content)
    cli.fails(1, "verify-log", "pub", says=[file.name, "Row group 0"])
    cli.fails(1, "prune", "pub", says=[file.name])  # nobody knows how old it is
    process = cli.run("prune", "pub", "--keep-hours", "0")
    assert (process.returncode, file.exists()) == (0, False)
    assert "pruned the change log of pub" in process.stderr


def test_an_unreadable_stored_catalog_is_reported(history: History) -> None:
    from cdc_replay.changelog.metadata_tables import CatalogRow

    history.log.add_catalogs([CatalogRow(history.positions[2], history.positions[3], "{}")])
    with pytest.raises(ChangeLogDamaged, match=f"{history.positions[2]}"):
        verify_log(history.config, "pub")


@pytest.mark.spark
def test_subscriptions_replay_while_their_log_is_pruned(twin: Twin) -> None:
    """A lagging subscription keeps its changes. A restored one gets an error, and a snapshot repairs it."""
    twin.publisher.run(f"{TABLES}; create publication p for table t")
    for name in ("fast", "slow"):
        twin.subscribe(name, "p", tables=TABLES, native=False)
    twin.sync_ours()
    begin = twin.position()
    twin.publish("insert into t values (1, 1)")
    twin.sync_ours()
    twin.publish("insert into t values (2, 2)")
    twin.sync_ours("fast")
    twin.publish("update t set a = 20 where id = 2")
    twin.sync_ours("fast")

    result = prune(twin.config, "pub", keep_hours=0)

    # One has the definitions that `setup` has written, the other one the first row.
    assert (result.segments, result.needed_by) == (2, "slow")
    (slow,) = replay(twin.config, ["slow"])
    assert (slow.error, slow.transactions) == (None, 2)
    assert twin.pairs["slow"].ours.rows("table t order by id") == [(1, 1), (2, 20)]
    assert prune(twin.config, "pub", keep_hours=0).segments == 2
    with pytest.raises(ChangeLogPruned):
        backfill(twin.config, "fast", str(begin), str(twin.position()))
    with pytest.raises(ChangeLogPruned):
        backfill(twin.config, "fast", "2020-01-01", "2100-01-01")

    # As a subscriber that is restored from a backup.
    with twin.pairs["fast"].ours.connect() as connection:
        connection.execute("delete from t where id = 2")
        subscription_tables.set_table_state(connection, "fast", QualifiedName("public", "t"), Ready(begin))
    twin.publish("insert into t values (3, 3)")
    capture(twin.config, "pub")
    (replayed,) = replay(twin.config, ["fast"])
    assert "no longer contains" in (replayed.error or "")
    assert "cdc-replay snapshot" in (replayed.error or "")
    reported = {each.subscription: each for each in status(twin.config).subscriptions}
    assert "pruned" in (reported["fast"].error or "")
    snapshot(twin.config, "fast")
    twin.sync_ours()
    rows = [(1, 1), (2, 20), (3, 3)]
    assert [twin.pairs[name].ours.rows("table t order by id") for name in ("fast", "slow")] == [rows, rows]


def has_reached(history: History, position: Lsn) -> bool:
    return history.log.end_lsn > position


def test_captures_compactions_and_prunes_at_the_same_time_lose_nothing(history: History) -> None:
    """Each in a separate process, repeatedly: needed changes are there, and every transaction once."""
    at = history.positions
    history.subscriber("s", Ready(at[2]))
    program, file = str(Path(__file__).with_name("maintaining.py")), str(history.file)
    workers = [
        subprocess.Popen([sys.executable, program, file, what], stderr=subprocess.PIPE, text=True)
        for what in ("capture", "compact", "prune")
    ]
    try:
        with history.publisher.connect() as connection:
            for number in range(1000, 1030):
                [(text,)] = connection.execute(
                    f"insert into t values ({number}, 0) returning pg_current_wal_insert_lsn()::text".encode()
                ).fetchall()
                wait_for(functools.partial(has_reached, history, Lsn.parse(text)), "a capture")
    finally:
        (history.folder / "stop").touch()
        outputs = [worker.communicate(timeout=300) for worker in workers]
    for worker, (_, complaint) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, complaint
    verify_log(history.config, "pub")
    log = history.log
    assert log.summary(Window(at[2], log.end_lsn)).transactions == 2 + 30
    assert len(log.segments(Window(log.start_lsn, log.end_lsn))) < 30
