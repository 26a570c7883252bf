"""Origins of single changes, which pgoutput does not send, are in the log (R8.19, R8.20)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg import sql

from cdc_replay.capture.setup import setup_publisher
from fixtures.captured import Captured
from fixtures.postgres import Database
from integration.capture.partition_tree import LEAVES, ROOT, content

SetUp = Callable[..., Captured]


@pytest.fixture
def origin(publisher: Database) -> Iterator[str]:
    """A replication origin, and a publisher that can leave changes out by origin."""
    publisher.require(16, "option origin of pgoutput (R8.20)")
    with publisher.connect() as connection:
        name = f"origin_{publisher.name}"
        connection.execute("select pg_replication_origin_create(%s)", (name,))
    yield name
    publisher.run(
        f"select pg_replication_origin_drop(roname) from pg_replication_origin where roname = '{name}'"
    )


def publish(publisher: Database, origin: str, script: str) -> None:
    """Run the statements one by one; `+` stands for: from here on with the origin, `-` for: without."""
    setup = sql.SQL("select pg_replication_origin_session_setup({})").format(origin).as_string(None)
    with publisher.connect() as connection:
        for statement in map(str.strip, script.split(";")):
            words = {"+": setup, "-": "select pg_replication_origin_session_reset()"}
            connection.execute(words.get(statement, statement).encode())


def origins(captured: Captured) -> list[tuple[Any, str | None]]:
    """What each row is, with its origin."""
    return [(what, row["origin"]) for (_, what), row in zip(content(captured), captured.rows(), strict=True)]


# Changes 1 to 8, in four transactions.
MIXED = """
    begin; insert into plain values (1); +; insert into plain values (2), (3); -;
    insert into plain values (4); commit;
    begin; insert into plain values (5); +; insert into plain values (6); commit; -;
    +; insert into plain values (7); -; insert into plain values (8)
"""
MIXED_ORIGINS = {"2": "", "3": "", "5": "named", "6": "named", "7": "named"}


def expected_origins(origin: str, count: int) -> list[tuple[str, str | None]]:
    return [
        (str(number), origin if (result := MIXED_ORIGINS.get(str(number))) == "named" else result)
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_changes_with_origin_in_local_transaction_are_marked(
    streaming: bool, publisher: Database, set_up: SetUp, origin: str
) -> None:
    """R8.19, R8.20: NULL where `origin = none` sends the change; the name where the wire says it."""
    publisher.run(f"{ROOT}; alter database {publisher.name} set logical_decoding_work_mem = '64kB'")
    captured = set_up(streaming=streaming, origin_none=True)
    publish(publisher, origin, MIXED)
    many = "insert into plain select generate_series({}, {})"
    publish(
        publisher,
        origin,
        f"begin; {many.format(9, 1500)}; +; {many.format(1501, 3000)}; -; select pg_logical_emit_message("
        f"true, 'p', 'm'); savepoint s; {many.format(3001, 4000)}; rollback to s; commit",
    )

    captured.capture()

    actual = origins(captured)
    assert actual[:8] == expected_origins(origin, 8)
    large: list[tuple[Any, str | None]] = [(str(number), None) for number in range(9, 1501)]
    large += [(str(number), "") for number in range(1501, 3001)]
    assert actual[8:] == large


def test_rows_of_one_copy_share_origin(publisher: Database, set_up: SetUp, origin: str) -> None:
    """R1.22: a multi-insert is one record."""
    publisher.run(ROOT)
    captured = set_up(origin_none=True)
    with publisher.connect() as writer:
        writer.execute("begin")
        for start in (0, 1000):
            if start:
                writer.execute("select pg_replication_origin_session_setup(%s)", (origin,))
            with writer.cursor().copy("copy plain from stdin") as copy:
                for number in range(start, start + 1000):
                    copy.write_row((number,))
        writer.execute("select pg_replication_origin_session_reset()")
        writer.execute("commit")

    captured.capture()

    actual = [origin for _, origin in origins(captured)]
    assert actual == [None] * 1000 + [""] * 1000
    assert len({row["lsn"] for row in captured.rows()}) < 100


def test_bounded_pulls_read_origins_of_backlog_once(
    publisher: Database, set_up: SetUp, origin: str, second_peeks: Callable[[], list[str]]
) -> None:
    """R1.24: the peek ahead is bounded too; one of remote changes only covers all of the backlog."""
    publisher.run(ROOT)
    captured = set_up(origin_none=True, max_changes_per_pull=5)
    publish(publisher, origin, MIXED)
    remote = "; ".join(f"insert into plain values ({number})" for number in range(9, 30))
    publish(publisher, origin, f"+; {remote}; -")
    for number in range(30, 40):
        publisher.run(f"insert into plain values ({number})")

    outcome = captured.capture()

    actual = origins(captured)
    assert actual[:8] == expected_origins(origin, 8)
    assert actual[8:29] == [(str(number), origin) for number in range(9, 30)]
    assert actual[29:] == [(str(number), None) for number in range(30, 40)]
    assert outcome.pulls > 5
    ahead = [line for line in second_peeks() if "origin = none" in line]
    # Local changes, five and a few at a time; the remote ones in between need no further peek.
    assert 1 < len(ahead) < outcome.pulls / 2


def test_origins_of_prepared_transaction_are_stored_with_it(
    publisher: Database, set_up: SetUp, origin: str
) -> None:
    """R8.19 (b), R9.8: of its changes, known at PREPARE; of COMMIT PREPARED, for all of them."""
    publisher.run(ROOT)
    captured = set_up(two_phase=True, origin_none=True)
    mixed = (
        "begin; insert into plain values ({}); +; insert into plain values ({}); -; {} prepare transaction"
    )
    publish(publisher, origin, mixed.format(1, 2, "truncate empty;") + " 'local'")
    publish(publisher, origin, mixed.format(3, 4, "") + " 'remote'")
    captured.capture()
    publisher.run("insert into plain values (5)")
    captured.capture()
    publisher.run("commit prepared 'local'")
    captured.capture()
    publish(publisher, origin, "+; commit prepared 'remote'; -")
    captured.capture()

    assert origins(captured) == [
        ("5", None), ("1", None), ("2", ""), ({"empty"}, None), ("3", ""), ("4", "")
    ]  # fmt: skip


def test_truncates_of_roots_have_origins(publisher: Database, set_up: SetUp, origin: str) -> None:
    """R8.19: shown by a leaf, and by the second peek alone."""
    publisher.run(ROOT)
    captured = set_up(origin_none=True)
    publish(
        publisher, origin, "begin; truncate root; truncate empty; +; truncate root; truncate empty; -; commit"
    )
    publish(publisher, origin, "+; truncate empty; -")

    captured.capture()

    tree = LEAVES | {"root"}
    assert origins(captured) == [
        (tree, None), ({"empty"}, None), (tree, ""), ({"empty"}, ""), ({"empty"}, origin)
    ]  # fmt: skip


def test_dropped_origin_still_counts(publisher: Database, set_up: SetUp, origin: str) -> None:
    """R8.20: whether there are origins now does not say whether there were any."""
    publisher.run(ROOT)
    captured = set_up(origin_none=True)
    publish(publisher, origin, MIXED)
    publisher.run(f"select pg_replication_origin_drop('{origin}')")

    captured.capture()

    assert origins(captured) == expected_origins(origin, 8)


def test_origins_are_read_only_for_origin_none(
    publisher: Database, set_up: SetUp, origin: str, second_peeks: Callable[[], list[str]]
) -> None:
    publisher.run(ROOT)
    captured = set_up()
    publish(publisher, origin, MIXED)

    captured.capture()

    assert {actual for _, actual in origins(captured)} == {None, origin}
    assert [line for line in second_peeks() if "origin = none" in line] == []


def test_setup_warns_of_origin_none_on_15(publisher: Database, set_up: SetUp) -> None:
    """R8.20: there the origin of single changes cannot be had."""
    publisher.run(ROOT)
    captured = set_up()
    request = dataclasses.replace(captured.request, origin_none=True)
    actual = [warning for warning in setup_publisher(request).warnings if "R8.20" in warning]
    assert len(actual) == int(publisher.version < 16)
