"""`certify` beside a real native subscription: what it finds equal, what it refuses, and what it leaves."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import cdc_replay
from cdc_replay.certify.publisher_slots import PREFIX, slot_name
from cdc_replay.commands.certify import CertifyOptions, certify
from cdc_replay.errors import (
    MissingPrivilege,
    NativeSubscriptionFailed,
    PublisherNotReady,
    ServerProgramsMissing,
)
from cdc_replay.failpoints import VARIABLE, FailpointReached
from cdc_replay.model.certificate import CertifiedTable, CertifyResult, Deviation, TableOutcome
from cdc_replay.opening import open_subscription
from cdc_replay.postgres import throwaway_server
from cdc_replay.postgres.advisory_locks import advisory_key
from cdc_replay.termination import EXIT_CODE
from embedded.java import spark_environment
from embedded.postgres import Cluster, binaries
from fixtures.command_line import PROGRAM
from fixtures.native import wait_for
from fixtures.postgres import Database
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

T: Final = "create table t (id int primary key, a int, big text)"
BIN: Final = ["--bin", str(binaries())]
SLOTS: Final = (
    "select slot_name::text from pg_replication_slots where slot_name ~ '^(cdc_replay_certify|pg_)'"
)


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the throw-away servers of a test are."""
    with tempfile.TemporaryDirectory(prefix="c_", dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        Path(name).chmod(0o711)
        yield Path(name)


@contextlib.contextmanager
def traffic(publisher: Database, statements: Callable[[int], str]) -> Iterator[None]:
    """Statements, each a transaction, one after the other, while the context is open."""
    ends = threading.Event()

    def write() -> None:
        with publisher.connect() as connection:
            number = 0
            while not ends.wait(0.02):
                number += 1
                connection.execute(statements(number).encode())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        ends.set()
        writer.join()


def certify_here(twin: Twin, name: str = "s", *, transactions: int = 20) -> CertifyResult:
    return certify(twin.config, name, CertifyOptions(transactions=transactions, bin_folder=binaries()))


def certify_now(twin: Twin, name: str = "s") -> CertifyResult:
    """Without traffic: what both hold after the copy."""
    options = CertifyOptions(time=dt.timedelta(seconds=1), bin_folder=binaries())
    return certify(twin.config, name, options)


def by_name(result: CertifyResult) -> dict[str, CertifiedTable]:
    return {table.table: table for table in result.tables}


def assert_nothing_is_left(twin: Twin, folder: Path) -> None:
    assert twin.publisher.rows(SLOTS) == []
    assert [path for path in folder.iterdir() if path.name.startswith(throwaway_server.PREFIX)] == []
    assert processes_naming(str(folder / throwaway_server.PREFIX)) == []


def processes_naming(text: str) -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if text in line]


def test_tables_of_every_shape_are_equal_under_traffic(twin: Twin, temporary_folder: Path) -> None:
    tables = f"""
        {T};
        create table "od""d name.é" ("k ey" text primary key, "v;" text);
        create table keyless (a int, b text);
        create type mood as enum ('sad', 'ok');
        create domain short as varchar(5);
        create table typed (id int primary key, m mood, d short, n numeric(6, 2), j jsonb, l int[]);
        create table parts (id int, region text, primary key (id, region)) partition by list (region);
        create table parts_a partition of parts for values in ('a');
        create table parts_b partition of parts for values in ('b');
    """
    twin.publisher.run(tables)
    twin.publisher.run("""
        alter table keyless replica identity full;
        alter table t replica identity full;
        create publication p for table t where (a > 10), "od""d name.é", keyless, typed;
        create publication q for table parts where (id > 3) with (publish_via_partition_root);
        insert into t select n, n, 'x' from generate_series(1, 50) as n;
        insert into keyless values (1, 'x'), (1, 'x'), (2, null);
        insert into typed values (1, 'sad', 'abc', 1.5, '{"a": 1}', '{1,2}');
    """)
    own_column = "alter table t add mine text default 'ours', add seen timestamptz default now()"
    twin.subscribe("s", "p", "q", tables=f"{tables}; {own_column}", native=False)

    def statements(number: int) -> str:
        return f"""
            begin;
            update t set a = (a * 7 + {number}) % 23 where id % 5 = {number} % 5;
            insert into t values ({1000 + number}, {number} % 20, 'y');
            insert into "od""d name.é" values ('k{number}', null);
            update "od""d name.é" set "k ey" = "k ey" || 'x' where "k ey" = 'k{number - 3}';
            insert into keyless values ({number} % 3, 'z');
            delete from keyless where ctid in (select ctid from keyless where a = {number} % 3 limit 1);
            insert into typed values ({number + 10}, 'ok', 'd', {number} / 7.0, '[]', '{{}}');
            insert into parts values ({number}, 'a');
            update parts set region = 'b' where id = {number - 1};
            commit
        """

    with traffic(twin.publisher, statements):
        result = certify_here(twin, transactions=30)

    assert result.error is None, result.error
    assert {name: table.outcome for name, table in by_name(result).items()} == dict.fromkeys(
        ['public.od"d name.é', "public.keyless", "public.parts", "public.t", "public.typed"],
        TableOutcome.EQUAL,
    )
    assert all(table.native_rows == table.our_rows for table in result.tables)
    assert by_name(result)["public.t"].our_rows
    assert result.transactions >= 30
    assert result.to_lsn > result.from_lsn
    page = result.report.read_text(encoding="utf-8")
    assert (str(result.to_lsn) in page, "od&quot;d name" in page) == (True, True)
    assert_nothing_is_left(twin, temporary_folder)


def test_rows_changed_on_the_subscriber_refuse_the_certificate(twin: Twin) -> None:
    twin.publisher.run(f"{T}; create publication p for table t; insert into t values (1, 1), (2, 2), (3, 3)")
    twin.subscribe("s", "p", tables=T, native=False)
    twin.sync_ours("s")
    twin.pairs["s"].ours.run(
        "update t set a = 9 where id = 1; delete from t where id = 2;insert into t values (8)"
    )

    result = certify_now(twin)

    [table] = result.tables
    assert table.outcome is TableOutcome.DIFFERS
    assert table.differences == {"missing": 1, "unexpected": 1, "different": 1}
    assert set(table.keys) == {"missing id=2", "unexpected id=8", "different id=1"}
    assert result.error is not None
    assert "public.t: " in result.error


def test_rows_of_another_subscription_are_left_to_its_certificate(twin: Twin) -> None:
    """A row of neither fails both, and so does a row that the subscription itself has kept by mistake."""
    twin.publisher.run(f"""
        {T}; insert into t select n, n, 'x' from generate_series(1, 200) as n;
        alter table t replica identity full;
        create publication p for table t where (a < 100);
        create publication q for table t where (a >= 150 and big = 'x');
    """)
    twin.subscribe("s", "p", tables=T, native=False)
    twin.share("s", "other", "q")
    twin.sync_ours("s", "other")
    ours = twin.pairs["s"].ours

    def move(number: int) -> str:
        moved = f"update t set a = a + 160 where id = {number % 50} and a < 100"
        return f"{moved}; insert into t values ({500 + number}, 7, 'x')"

    with traffic(twin.publisher, move):
        [table] = certify_here(twin).tables
    assert (table.outcome, table.native_rows) == (TableOutcome.EQUAL, table.our_rows)
    twin.sync_ours("s", "other")
    results = {name: by_name(certify_now(twin, name))["public.t"] for name in ("s", "other")}
    assert [table.outcome for table in results.values()] == [TableOutcome.EQUAL] * 2
    ours.run("delete from t where id = 160; insert into t values (120, 120, 'x'), (-1, 5, 'x')")
    results = {name: by_name(certify_now(twin, name))["public.t"] for name in ("s", "other")}
    assert results["s"].differences == {"unexpected": 2}
    assert set(results["s"].keys) == {"unexpected id=-1", "unexpected id=120"}
    assert results["other"].differences == {"missing": 1, "unexpected": 1}
    assert set(results["other"].keys) == {"missing id=160", "unexpected id=120"}


def test_an_unsent_value_that_native_loses_is_named_and_does_not_fail(twin: Twin) -> None:
    """R4.6: the UPDATE moves the row into the filter and does not send `big`."""
    table = T.replace("big text", "big text, note text")
    twin.publisher.run(f"""
        {table};
        alter table t alter big set storage external;
        create unique index i on t (id, a); alter table t alter a set not null;
        alter table t replica identity using index i;
        create publication p for table t where (a > 10);
        insert into t select n, 1, repeat('x', 2500) from generate_series(1, 5000) as n;
    """)
    twin.subscribe("s", "p", tables=table, native=False)

    with traffic(twin.publisher, lambda number: f"update t set a = 30 where id = {number}"):
        result = certify_here(twin)

    [certified] = result.tables
    assert result.error is None, result.error
    assert certified.outcome is TableOutcome.DEVIATES
    [explained] = certified.deviations
    assert explained.deviation is Deviation.UNSENT_VALUE
    # Each UPDATE after the copy, while both followed.
    assert 0 < explained.rows <= len(twin.pairs["s"].ours.rows("select from t where a = 30"))
    assert all(re.fullmatch("id=[0-9]+", key) for key in explained.keys)
    assert certified.differences == {}


@pytest.mark.slow
def test_rows_of_before_that_the_publications_do_not_determine_are_named(twin: Twin) -> None:
    """R9.12 and R7.5: a filter that was changed, and DELETEs that are not published, before the run."""
    tables = "create table f (id int primary key); create table d (id int primary key)"
    twin.publisher.run(f"""
        {tables};
        create publication p for table f where (id < 10);
        create publication q for table d with (publish = 'insert');
        insert into f select generate_series(1, 20); insert into d select generate_series(1, 5);
    """)
    twin.subscribe("s", "p", "q", tables=tables, native=False)
    twin.sync_ours("s")
    twin.publisher.run("alter publication p set table f where (id > 5)")
    twin.publisher.run("delete from d where id = 2")
    twin.sync_ours("s")

    result = certify_now(twin)

    assert result.error is None, result.error
    certified = by_name(result)
    [filtered] = certified["public.f"].deviations
    assert (filtered.deviation, filtered.rows) == (Deviation.FILTER_CHANGED, 5 + 11)
    [deleted] = certified["public.d"].deviations
    assert (deleted.deviation, deleted.keys) == (Deviation.ACTIONS_NOT_PUBLISHED, ("id=2",))


@pytest.mark.slow
def test_tables_that_cannot_be_compared_are_named_with_the_reason(twin: Twin) -> None:
    tables = "create table t (id int primary key); create table own (id int primary key, v text)"
    twin.publisher.run(f"""
        {tables}; create publication p for all tables;
        insert into t values (1); insert into own values (1, 'a')
    """)
    ours = tables.replace("v text", "v letter")
    twin.subscribe("s", "p", tables=f"create type letter as enum ('a', 'b'); {ours}", native=False)
    twin.sync_ours("s")
    twin.publisher.run("create table late (id int primary key)")

    result = certify_now(twin)

    certified = by_name(result)
    assert result.error is None, result.error
    assert certified["public.t"].outcome is TableOutcome.EQUAL
    assert certified["public.own"].outcome is TableOutcome.LEFT_OUT
    assert "column v is of type public.letter" in str(certified["public.own"].reason)
    assert certified["public.late"].outcome is TableOutcome.LEFT_OUT
    assert "R7.12" in str(certified["public.late"].reason)


def run_program(
    twin: Twin, *options: str, source: Path | None = None, failpoint: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*program(source), "certify", "s", "--config", str(twin.file), "--json", *BIN, *options],
        env=environment_of(source) | ({VARIABLE: failpoint} if failpoint else {}),
        capture_output=True,
        text=True,
        check=False,
    )


@contextlib.contextmanager
def following(twin: Twin, log: Path) -> Iterator[subprocess.Popen[str]]:
    """The program, for an hour; both subscriptions follow the publisher."""
    command = [*program(None), "certify", "s", "--config", str(twin.file), "--json", *BIN]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*command, "--for", "1h", "--log-level", "debug"],
            env=environment_of(None),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as running,
    ):
        try:
            wait_for(lambda: "both follow" in log.read_text("utf-8"), "both to follow")
            yield running
        finally:
            running.kill()


def program(source: Path | None) -> list[str]:
    return [str(PROGRAM)] if source is None else [str(PROGRAM.with_name("python")), "-m", "cdc_replay.cli"]


def environment_of(source: Path | None) -> dict[str, str]:
    found = dict(os.environ) | spark_environment()
    package = source or Path(cdc_replay.__file__).parents[1]
    return found | {"PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def test_a_build_that_ignores_updates_out_of_the_filter_is_refused(
    twin: Twin, tmp_path: Path, temporary_folder: Path
) -> None:
    """R4.4, mutated: nothing in place of the DELETE. A build of its own: the engine has many processes."""
    mutant = tmp_path / "mutant"
    shutil.copytree(Path(cdc_replay.__file__).parent, mutant / "cdc_replay")
    rule = mutant / "cdc_replay" / "replay" / "route" / "update_transformation.py"
    text = rule.read_text(encoding="utf-8")
    assert text.count("(True, False): ChangeKind.DELETE,") == 1
    rule.write_text(
        text.replace("(True, False): ChangeKind.DELETE,", "(True, False): None,"), encoding="utf-8"
    )
    twin.publisher.run(f"""
        {T}; alter table t replica identity full; create publication p for table t where (a > 10);
        insert into t select n, 20 from generate_series(1, 10000) as n
    """)
    twin.subscribe("s", "p", tables=T, native=False)
    twin.sync_ours("s")

    with traffic(twin.publisher, lambda number: f"update t set a = 5 where id = {number}"):
        done = run_program(twin, "--transactions", "5", source=mutant)

    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert re.fullmatch(
        r"public\.t: [0-9,]+ unexpected \(first: unexpected id=[0-9]+(, unexpected id=[0-9]+)*\)",
        result["error"],
    )
    assert result["error"] in done.stderr
    assert_nothing_is_left(twin, temporary_folder)


def test_leftovers_of_a_killed_run_are_named_and_removed_by_the_next(
    twin: Twin, temporary_folder: Path
) -> None:
    twin.publisher.run(f"{T}; create publication p for table t; insert into t values (1, 1, '')")
    twin.subscribe("s", "p", tables=T, native=False)

    killed = run_program(twin, "--transactions", "5", failpoint="certify.after_subscribe")

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    running = str(temporary_folder / throwaway_server.PREFIX)
    wait_for(lambda: processes_naming(running) == [], "the end of the throw-away server")
    left = [name for (name,) in twin.publisher.rows(SLOTS) if name.startswith(PREFIX)]
    assert len(left) == 1
    assert re.fullmatch(r"cdc_replay_certify_[0-9]+", left[0])
    # A run in progress is no leftover: its lock is held, also before its slot is active.
    twin.publisher.run(f"select pg_create_logical_replication_slot('{slot_name('1')}', 'pgoutput')")
    with twin.publisher.connect() as other:
        other.execute("select pg_advisory_lock(%s)", (advisory_key("certify", slot_name("1")),))
        result = certify_now(twin)

        assert result.success
        assert result.removed[-1] == left[0]
        assert twin.publisher.rows(SLOTS) == [(slot_name("1"),)]
    assert certify_now(twin).removed == (slot_name("1"),)
    assert_nothing_is_left(twin, temporary_folder)


def test_an_error_removes_everything_and_passes(
    twin: Twin, temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin.publisher.run(f"{T}; create publication p for table t; insert into t values (1, 1, '')")
    twin.subscribe("s", "p", tables=T, native=False)
    monkeypatch.setenv(VARIABLE, "certify.at_fence=error")

    with pytest.raises(FailpointReached):
        certify_now(twin)

    assert_nothing_is_left(twin, temporary_folder)


@pytest.mark.slow
def test_it_waits_for_another_process_that_works_on_the_subscription(twin: Twin) -> None:
    twin.publisher.run(f"{T}; create publication p for table t; insert into t values (1, 1, '')")
    twin.subscribe("s", "p", tables=T, native=False)
    twin.sync_ours("s")
    held, waited = threading.Event(), threading.Event()
    waiting = "select count(*) from pg_stat_activity where application_name ~ '^cdc_replay (certify|sync) s$'"
    waiting += " and wait_event_type = 'Lock' and datname = current_database()"

    def work() -> None:
        with open_subscription(twin.config, "s", "other work"):
            held.set()
            wait_for(lambda: twin.pairs["s"].ours.rows(waiting) == [(1,)], "certify to wait")
            waited.set()

    worker = threading.Thread(target=work)
    worker.start()
    assert held.wait(60)
    result = certify_now(twin)
    worker.join()

    assert (waited.is_set(), result.success) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_the_time_early_and_no_secret_is_shown(
    twin: Twin, temporary_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    secret = "s3cr3t@of/the:publisher"
    twin.publisher.run(f"{T}; create publication p for table t; insert into t values (1, 1, '')")
    twin.subscribe("s", "p", tables=T, native=False)
    quoted = secret.replace("@", "%40").replace("/", "%2F").replace(":", "%3A")
    twin.options["dsn"] = twin.publisher.dsn.replace("postgres@", f"postgres:{quoted}@")
    log = tmp_path / "stderr"
    with following(twin, log) as running:
        assert (secret in str(processes_naming("")), quoted in str(processes_naming(""))) == (False, False)
        for path in temporary_folder.rglob("log"):
            assert secret not in path.read_text(encoding="utf-8")
        running.send_signal(number)
        output, _ = running.communicate(timeout=300)

    errors = log.read_text("utf-8")
    assert running.returncode == 0, errors
    result: dict[str, Any] = json.loads(output)
    assert result["success"] is True
    assert result["followed_seconds"] < 3600
    page = Path(result["report"]).read_text(encoding="utf-8")
    for text in (output, errors, page):
        assert (secret in text, quoted in text) == (False, False)
    assert_nothing_is_left(twin, temporary_folder)


def test_the_end_of_the_throwaway_server_is_told_at_once(
    twin: Twin, temporary_folder: Path, tmp_path: Path
) -> None:
    """Not when both have followed for hours, for which a slot has retained WAL."""
    twin.publisher.run(f"{T}; create publication p for table t; insert into t values (1, 1, '')")
    twin.subscribe("s", "p", tables=T, native=False)
    log = tmp_path / "stderr"
    with following(twin, log) as running:
        (server,) = temporary_folder.glob(f"{throwaway_server.PREFIX}*/server/data/postmaster.pid")
        (server.parent.parent / "log").write_text("PANIC:  No space left on device\n", encoding="utf-8")
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                program, *arguments = path.read_bytes().split(b"\0")
                if program.endswith(b"/postgres") and str(server.parent).encode() in arguments:
                    os.kill(int(path.parent.name), signal.SIGKILL)
        running.communicate(timeout=60)

    errors = log.read_text("utf-8")
    assert (running.returncode, "Traceback" in errors) == (1, False)
    assert "the throw-away server ended before the comparison" in errors
    assert "It said: No space left on device" in errors
    assert_nothing_is_left(twin, temporary_folder)


@pytest.mark.slow
def test_a_second_signal_ends_it_and_nothing_is_left(
    twin: Twin, temporary_folder: Path, tmp_path: Path
) -> None:
    twin.publisher.run(f"{T}; create publication p for table t; insert into t values (1, 1, '')")
    twin.subscribe("s", "p", tables=T, native=False)
    log = tmp_path / "stderr"
    with following(twin, log) as running:
        running.send_signal(signal.SIGINT)
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=300)

    assert running.returncode == EXIT_CODE, log.read_text("utf-8")
    assert "terminated by SIGTERM" in log.read_text("utf-8")
    left = str(temporary_folder / throwaway_server.PREFIX)
    wait_for(lambda: processes_naming(left) == [], "the end of the throw-away server")
    assert twin.publisher.rows(SLOTS) == []


@pytest.mark.slow
def test_native_that_cannot_apply_is_an_error_that_says_why(
    twin: Twin, temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our subscriber has no key, so a native one finds rows by it: a second row of a key stops it."""
    monkeypatch.setattr("cdc_replay.certify.native_side.STANDSTILL_SECONDS", 5.0)
    twin.publisher.run("create table t (id int, a int); alter table t replica identity full")
    twin.publisher.run("insert into t values (1, 1), (1, 2); create publication p for table t")
    twin.subscribe("s", "p", tables="create table t (id int, a int)", native=False)
    twin.sync_ours("s")
    twin.pairs["s"].ours.run("delete from t where a = 2; alter table t add primary key (id)")

    with pytest.raises(NativeSubscriptionFailed, match="did not copy its tables") as failed:
        certify_now(twin)

    assert "duplicate key value violates unique constraint" in str(failed.value)
    assert "(1)" not in str(failed.value)
    assert_nothing_is_left(twin, temporary_folder)


def test_what_the_publisher_lacks_is_refused_before_anything_starts(
    twin: Twin, make_cluster: Callable[..., Cluster], temporary_folder: Path
) -> None:
    twin.publisher.run(f"{T}; create publication p for table t")
    twin.subscribe("s", "p", tables=T, native=False)
    twin.sync_ours("s")
    role = f"weak_{twin.publisher.name}"
    twin.publisher.run(f"create role {role} login; grant select on t to {role}")
    twin.options["dsn"] = twin.publisher.dsn.replace("postgres@", f"{role}@")
    with pytest.raises(MissingPrivilege, match="may not create a replication slot") as refused:
        certify_now(twin)
    assert f"alter role {role} replication" in str(refused.value)
    del twin.options["dsn"]
    twin.publisher.run(f"drop owned by {role}; drop role {role}")

    full = Database(make_cluster("full", max_replication_slots="2", max_wal_senders="2"), "postgres")
    from cdc_replay.certify.publisher_slots import check_headroom

    with full.connect() as connection, pytest.raises(PublisherNotReady) as lacking:
        check_headroom(connection)
    assert "2 of max_replication_slots are free; 2 of max_wal_senders are free" in str(lacking.value)
    with pytest.raises(ServerProgramsMissing, match="no server there"):
        certify(twin.config, "s", CertifyOptions(bin_folder=temporary_folder))
    assert_nothing_is_left(twin, temporary_folder)
