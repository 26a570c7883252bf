"""What `plan` predicts is what then happens: to rows, and to changes like those of the log."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.plan import plan
from cdc_replay.commands.refresh import refresh
from cdc_replay.model.lsn import Window
from cdc_replay.model.proposed_change import PlanResult, SentChanges
from cdc_replay.proposal.elsewhere import THROWAWAY
from cdc_replay.proposal.publisher import PUBLISHER
from fixtures.postgres import Database
from fixtures.twin import Twin
from integration.proposal.worlds import World, by_name, decoded_changes, make_world, replay_changes

pytestmark = pytest.mark.spark

PROPOSALS = {
    "another filter": "alter publication a set table public.orders where (region = 'vic')",
    "no filter any more": "alter publication a set table orders",
    "a second publication": "alter publication e add table orders where (total > 300)",
    "a filter on the key": "alter publication b set table items where (id between 3 and 104)",
    "a column list": "alter publication b set table items (id, v) where (id > 5)",
    "a new table": "alter publication e add table late where (id > 3)",
    "a dropped table": "alter publication b drop table items",
    "fewer actions": "alter publication a set (publish = 'insert, update')",
    "partitions as themselves": (
        "alter publication c set table trips; alter publication c set (publish_via_partition_root = false)"
    ),
    "another filter of a root": "alter publication c set table trips where (id > 10 and day > '2026-01-05')",
    "evaluated by PostgreSQL": "alter publication a set table orders where (note ~ 'nn' or region = 'vic')",
}


@pytest.mark.parametrize("script", PROPOSALS.values(), ids=PROPOSALS)
def test_the_prediction_is_what_happens(twin: Twin, script: str) -> None:
    world = make_world(twin)
    before = state_of(world)
    result = world.plan(script)
    assert (result.error, result.parsed_by, result.log_error) == (None, PUBLISHER, None)
    assert state_of(world) == before
    elsewhere = world.plan(script, throwaway=True)
    assert elsewhere.parsed_by == THROWAWAY
    assert comparable(elsewhere) == comparable(result)

    twin.publisher.run(script)
    refreshed = refresh(twin.config, "s", reconcile=True)

    membership = {table.table: table.membership for table in result.tables}
    assert {name for name, word in membership.items() if word == "new"} == set(refreshed.added)
    assert {name for name, word in membership.items() if word == "removed"} == set(refreshed.removed)
    reconciled = {table.table: table for table in refreshed.reconciled}
    for table in result.tables:
        if table.rows is None or table.membership == "removed":
            continue
        assert table.rows.then == count(world.ours, table.table)
        if table.membership == "stays":
            changed = reconciled[table.table]
            assert (changed.inserted, changed.deleted) == (table.rows.enter, table.rows.leave)

    again = world.change_again()
    assert again.updates_to_insert - world.first_replay.updates_to_insert == more(result, "updates_to_insert")
    assert again.updates_to_delete - world.first_replay.updates_to_delete == more(result, "updates_to_delete")
    decoded = decoded_changes(twin)
    planned = {table.table: table for table in result.tables}
    for name, table in planned.items():
        assert as_sent(table.now) == world.first_decoded.get(name, SentChanges()), name
        assert table.uncaptured == (name == "public.late")
        if not table.uncaptured:
            assert as_sent(table.then) == decoded.get(name, SentChanges()), name
    unplanned = (world.first_decoded.keys() | decoded.keys()) - planned.keys()
    assert {name: decoded.get(name) for name in unplanned} == {
        name: world.first_decoded.get(name) for name in unplanned
    }


def as_sent(changes: SentChanges) -> SentChanges:
    """Without what a message does not tell."""
    return dataclasses.replace(changes, updates_to_insert=0, updates_to_delete=0)


def more(result: PlanResult, name: str) -> int:
    return sum(getattr(table.then, name) - getattr(table.now, name) for table in result.tables)


def count(database: Database, table: str) -> int:
    [(rows,)] = database.rows(f"select count(*) from {table}")
    return int(rows)


def comparable(result: PlanResult) -> list[Any]:
    """The tables, without what depends on how a filter is printed."""
    return [
        (table.table, table.membership, table.rows, table.now, table.then, table.transitions)
        for table in result.tables
    ]


def state_of(world: World) -> list[Any]:
    """Everything that a proposal could leave: publications, locks, sessions, messages in the log."""
    publisher = world.twin.publisher
    capture(world.twin.config, "pub")
    log = ChangeLog.open(str(world.twin.change_log))
    return [
        publisher.rows("select p::text from pg_publication p order by 1"),
        publisher.rows("select p::text from pg_publication_rel p order by 1"),
        publisher.rows("select n::text from pg_publication_namespace n order by 1"),
        publisher.rows("select mode, relation::regclass from pg_locks where mode ~ 'Share(Update|Row)'"),
        publisher.rows("select pid from pg_stat_activity where application_name ~ 'cdc_replay plan'"),
        len(log.catalogs()),
        log.summary(Window(log.start_lsn, log.end_lsn)).messages,
    ]


def test_a_filter_on_the_key_turns_updates_into_inserts_and_deletes(twin: Twin) -> None:
    """R4.4. `id > 5` now: 3, 4, 5 move in, 6, 7, 8 stay. `id <= 20` then: 3, 4, 5, 6, 7, 8 move out."""
    world = make_world(twin)
    result = world.plan("alter publication b set table items where (id <= 20)")
    (items,) = result.tables
    assert (items.now.updates_to_insert, items.now.updates_to_delete) == (3, 0)
    assert (items.then.updates_to_insert, items.then.updates_to_delete) == (0, 6)
    moves = [(move.kind, move.now, move.then, move.changes) for move in items.transitions]
    assert moves == [
        # The five rows 1 to 5 have new values: they are sent then.
        ("DELETE", "DELETE", None, 2),
        ("UPDATE", None, "UPDATE", 5),
        ("UPDATE", "INSERT", "DELETE", 3),
        ("UPDATE", "UPDATE", "DELETE", 3),
    ]
    assert items.rows is not None
    # 6 to 36 without 6, 7, 8, and 103 to 108 are there now; 1, 2, 9, ..., 20 then.
    assert (items.rows.now, items.rows.then) == (36, 14)
    assert (items.rows.enter, items.rows.leave) == (2, 24)


def test_bytes_are_those_of_the_messages(twin: Twin) -> None:
    """R1.4: PostgreSQL decodes the same changes for a publication like the proposed one."""
    world = make_world(twin)
    slot = f"sent_{twin.publisher.name}"
    twin.publisher.run("create publication sent for table items (id, w) where (id > 4)")
    twin.publisher.run("create publication whole for table orders where (total > 100)")
    since = world.reset()
    twin.publisher.run(f"select pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    replay_changes(twin)

    result = world.plan(
        "alter publication b set table items (id, w) where (id > 4);"
        " alter publication a set table orders where (total > 100)",
        since=since,
    )

    for table, publication in (("items", "sent"), ("orders", "whole")):
        [(count_of_messages, size)] = twin.publisher.rows(
            "select count(*), sum(length(data)) from pg_logical_slot_peek_binary_changes("
            f"'{slot}', null, null, 'proto_version', '1', 'publication_names', '{publication}')"
            " where get_byte(data, 0) in (ascii('I'), ascii('U'), ascii('D'))"
        )
        planned = by_name(result)[table].then
        assert (planned.changes, planned.bytes) == (count_of_messages, size)


def test_changes_nothing(twin: Twin) -> None:
    world = make_world(twin)
    result = world.plan("create publication other for table items; alter publication other owner to postgres")
    assert (result.tables, result.failing, result.error) == ((), (), None)


def test_default_range_is_the_last_day_of_the_log(twin: Twin) -> None:
    world = make_world(twin)
    result = plan(twin.config, "s", "alter publication a set table orders")
    log = ChangeLog.open(str(twin.change_log))
    assert (result.from_lsn, result.to_lsn) == (log.start_lsn, log.end_lsn)
    assert by_name(result)["orders"].now != SentChanges()
    assert world.since > result.from_lsn
