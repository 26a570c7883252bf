"""A pull that is read in two pieces has the rows of one that is not, wherever it is split."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from cdc_replay.capture import split_peek
from cdc_replay.capture.pull import CaptureOutcome, CaptureSource, current_position
from cdc_replay.capture.split_peek import SplitPeek
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import ServerUnavailable
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.postgres.peek import PeekOptions, RawMessages, peek
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from fixtures.captured import Captured
from fixtures.log_records import warnings_of
from fixtures.native import wait_for
from fixtures.postgres import Database
from fixtures.wal_pages import fill_page
from integration.capture.twins import WORK_MEMORY, Twins

SetUp = Callable[..., Captured]

TABLE = "create table t (id int primary key, a text); create publication p for table t;"
LARGE = 2000
"""Rows whose transaction is streamed if the server has little memory for it."""


def commit_transactions_of_all_kinds(publisher: Database) -> None:
    """Small ones, large ones that are open around others, DDL, a rollback, and messages."""
    with publisher.connect() as first, publisher.connect() as second:
        first.autocommit = second.autocommit = False
        first.execute(f"insert into t select g, 'first' from generate_series(1, {LARGE}) g")
        publisher.run("insert into t values (-1, 'small')")
        second.execute(f"insert into t select g, 'gone' from generate_series(10001, {10000 + LARGE}) g")
        first.execute("savepoint s")
        first.execute("delete from t")
        first.execute("rollback to s")
        publisher.run("insert into t values (-2, 'small')")
        publisher.run("select pg_logical_emit_message(false, 'test', 'outside')")
        second.rollback()
        first.execute("update t set a = 'changed' where id > 0")
        first.commit()
    publisher.run("alter table t add column b int default 7")
    publisher.run("truncate t")
    publisher.run("insert into t values (-3, 'last', 8)")


def split_at(monkeypatch: pytest.MonkeyPatch, lsn: Lsn) -> None:
    """Every pull whose range has it is split there."""
    monkeypatch.setattr(
        SplitPeek, "split_lsn", lambda self: lsn if self.window.after < lsn < self.window.upto else None
    )


def capture_by_a_copy(
    twins: Twins, folder: Path, number: int, upto: Lsn, **options: Any
) -> tuple[Captured, CaptureOutcome]:
    """Capture from a copy of the plain slot into a log of its own."""
    plain = twins.plain
    source: CaptureSource = dataclasses.replace(
        plain.source, slot=f"{plain.source.slot}_{number}", change_log=str(folder / str(number)), **options
    )
    copied = dataclasses.replace(plain, source=source)
    header = dataclasses.replace(plain.log.header, slot=source.slot)
    twins.database.run(f"select pg_copy_logical_replication_slot('{plain.source.slot}', '{source.slot}')")
    ChangeLog.create(source.change_log, header)
    try:
        return copied, copied.capture(upto)
    finally:
        twins.database.run(f"select pg_drop_replication_slot('{source.slot}')")


@pytest.mark.parametrize("streaming", [False, True])
def test_split_anywhere_gives_the_same_rows(
    streaming: bool, publisher: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1.23, R1.26: before, inside and after commit records, and while transactions are open."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, streaming=streaming)
    start = twins.plain.log.end_lsn
    commit_transactions_of_all_kinds(publisher)
    upto = current_position(publisher.dsn)
    split_at(monkeypatch, Lsn(start.value + 1))
    whole, _ = capture_by_a_copy(twins, tmp_path, 0, upto)
    expected = whole.rows()
    ends = sorted({row["commit_lsn"] for row in expected})
    quarters = [start.value + (upto.value - start.value) * part // 4 for part in range(1, 4)]
    splits = sorted({end + offset for end in ends for offset in (-8, 0, 8)} | set(quarters))
    assert len(ends) == 5

    for number, position in enumerate(splits, start=1):
        split_at(monkeypatch, Lsn(position))
        copied, outcome = capture_by_a_copy(twins, tmp_path, number, upto, streaming=streaming)
        assert copied.rows() == expected, f"split at {Lsn(position)}"
        assert (outcome.pulls, outcome.to_lsn) == (1, upto)


@pytest.mark.parametrize("memory", [WORK_MEMORY, "64MB"])
def test_streamed_transaction_with_ddl_is_captured_when_a_split_sends_it_twice(
    memory: str,
    publisher: Database,
    set_up: SetUp,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R1.26: the second piece has its messages again, with their ordinals, streamed or not."""
    publisher.run(TABLE + f"alter database {publisher.name} set logical_decoding_work_mem = '{WORK_MEMORY}'")
    captured = set_up(streaming=True)
    captured.install_event_triggers()
    captured.capture()
    before = len(captured.rows())
    with publisher.connect() as session:
        session.autocommit = False
        session.execute("alter table t add column b int default 7")
        session.execute(f"insert into t select g, 'x', 8 from generate_series(1, {LARGE}) g")
        middle = current_position(publisher.dsn)
        session.execute("alter table t add column c int default 9")
        session.execute(f"insert into t select -g, 'x', 8, 9 from generate_series(1, {LARGE}) g")
        session.commit()
    split_at(monkeypatch, middle)

    def use_memory(ahead: Connection) -> None:
        ahead.execute("select set_config('logical_decoding_work_mem', %s, false)", (memory,))

    monkeypatch.setattr(split_peek, "use_decoding_memory", use_memory)
    captured.capture()

    assert Counter(row["kind"] for row in captured.rows()[before:]) == {"M": 2, "I": 2 * LARGE}
    assert warnings_of(caplog) == []


def test_pull_splits_by_itself_and_leaves_no_slot(
    publisher: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at the target in one pull, with what a capture in one piece has."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, split_bytes=0)
    commit_transactions_of_all_kinds(publisher)
    splits, split_lsn = list[Lsn | None](), SplitPeek.split_lsn

    def record(self: SplitPeek) -> Lsn | None:
        splits.append(split_lsn(self))
        return splits[-1]

    monkeypatch.setattr(SplitPeek, "split_lsn", record)

    assert len(twins.settle()) > LARGE

    assert [split is not None for split in splits] == [True, False]
    leftovers = "select from pg_replication_slots where temporary and database = current_database()"
    assert publisher.rows(leftovers) == []


def test_split_is_in_no_page_header(publisher: Database, set_up: SetUp) -> None:
    """R1.23: there, a commit record that begins the page would be in both pieces."""
    publisher.run(TABLE)
    captured = set_up(split_bytes=0)
    page = commit_at_the_beginning_of_a_page(publisher)
    publisher.run(f"insert into t select -g, 'later' from generate_series(1, {LARGE}) g")
    start = captured.log.end_lsn.value
    header = page.value + 8
    upto = Lsn(start + math.ceil((header - start) / split_peek.FIRST_SHARE))
    assert start + int((upto.value - start) * split_peek.FIRST_SHARE) == header
    wait_for(lambda: pass_position(publisher, upto), "WAL up to the target")

    captured.capture(upto)
    captured.capture()

    ((rows,),) = publisher.rows("select count(*) from t")
    assert len(captured.changes()) == rows


def commit_at_the_beginning_of_a_page(publisher: Database) -> Lsn:
    """Commit transactions until the commit record of one is the first record of a page; where that begins."""
    with publisher.connect() as session:
        session.autocommit = False
        for number in range(1, 50):
            session.execute("insert into t values (%s, 'first of a page')", (number,))
            page = fill_page(session)
            session.commit()
            if page is not None:
                return page
    raise AssertionError("others write all the time")


def pass_position(publisher: Database, upto: Lsn) -> bool:
    publisher.run("select pg_logical_emit_message(false, '', repeat('x', 100000))")
    return current_position(publisher.dsn) >= upto


def sessions_ahead(publisher: Database) -> list[tuple[Any, ...]]:
    """Sessions that read a copy of the slot, with what they execute."""
    return publisher.rows(
        "select query from pg_stat_activity where application_name = 'cdc_replay capture ahead'"
        " and datname = current_database()"
    )


def reads_ahead(publisher: Database) -> bool:
    """Whether one of them has begun to."""
    return any("peek_binary_changes" in query for (query,) in sessions_ahead(publisher))


def test_server_decodes_both_pieces_at_once(
    publisher: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is asked for before the first one is there (R1.32)."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path, split_bytes=0)
    commit_transactions_of_all_kinds(publisher)

    def peek_second_first(connection: Connection, *arguments: Any, **options: Any) -> Generator[RawMessages]:
        if connection.info.get_parameters()["application_name"] != "cdc_replay capture ahead":
            wait_for(lambda: reads_ahead(publisher), "a session that reads ahead")
        yield from peek(connection, *arguments, **options)

    monkeypatch.setattr(split_peek, "peek", peek_second_first)
    twins.subject.capture(current_position(publisher.dsn))

    monkeypatch.undo()
    assert len(twins.settle()) > LARGE


def test_reader_that_stops_leaves_no_session(publisher: Database, tmp_path: Path) -> None:
    """Whether the copy has been decoded by then or not."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path)
    source = twins.subject.source
    after = twins.plain.log.end_lsn
    commit_transactions_of_all_kinds(publisher)
    window = Window(after, current_position(publisher.dsn))
    options = PeekOptions(source.slot, tuple(CAPTURE_PUBLICATIONS.values()))
    with connect(source.dsn, purpose="test") as connection:
        for is_decoded in (False, True):
            pieces = SplitPeek(
                connection, source.dsn, options, window, None, least_bytes=0, restart_lsn=after
            )
            with contextlib.closing(pieces.batches()) as batches:
                next(batches)
                if is_decoded:
                    wait_for(lambda: reads_ahead(publisher), "a session that reads ahead")
            assert pieces.split_lsn() is not None
            wait_for(lambda: sessions_ahead(publisher) == [], "the end of the session")

    assert len(twins.settle()) > LARGE


@pytest.mark.parametrize("step", ["connect", "copy_slot"])
def test_without_a_copy_of_the_slot_the_next_pull_reads_the_rest(
    step: str, publisher: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slot or session may be free for the copy."""
    publisher.run(TABLE)
    twins = Twins.of(publisher, tmp_path)
    commit_transactions_of_all_kinds(publisher)
    upto = current_position(publisher.dsn)

    def refuse(*_: object, **__: object) -> None:
        raise ServerUnavailable("none is free")

    monkeypatch.setattr(split_peek, step, refuse)
    outcome = twins.subject.capture(upto, split_bytes=0)

    assert (outcome.pulls, outcome.to_lsn) == (2, upto)
    assert len(twins.settle()) > LARGE
