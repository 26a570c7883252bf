"""Any role may write logical messages: none of them changes what is captured or applied (R9.13).

Each forged message is what the event triggers would have written, had its author been allowed to do what it
says.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from cdc_replay.capture.ddl.event_triggers import EVENT_TRIGGERS
from cdc_replay.catalog.ddl_change import CATALOG_PREFIX, REWRITE_PREFIX
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.verify_log import verify_log
from fixtures.twin import Twin
from security.stranger import Stranger

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key, tenant text)"


def subscribe(twin: Twin, **options: object) -> None:
    twin.options |= options
    twin.publisher.run(
        f"{TABLE}; create publication p for table t where (tenant = 'ours');"
        "alter table t replica identity full; insert into t values (1, 'ours'), (2, 'theirs')"
    )
    twin.subscribe("s", "p", tables=TABLE, native=False)
    twin.sync_ours()


def rows(twin: Twin) -> list[tuple[Any, ...]]:
    [synced] = twin.sync_ours()
    assert synced.replay.error is None
    return twin.pairs["s"].ours.rows("select id, tenant from t order by id")


def forged(**parts: object) -> str:
    empty: dict[str, object] = {key: [] for key in ("tables", "columns", "publications", "memberships")}
    return json.dumps({"format": 1, **empty, **parts})


def memberships(twin: Twin) -> tuple[int, int]:
    [(publication, table)] = twin.publisher.rows(
        "select prpubid::int8, prrelid::int8 from pg_publication_rel"
        " where prpubid = (select oid from pg_publication where pubname = 'p')"
    )
    return publication, table


def publication_row(twin: Twin) -> list[object]:
    publication, _ = memberships(twin)
    return [publication, "p", False, False, True, True, True, True, [], False]


def write(
    stranger: Stranger, content: str, *, prefix: str = CATALOG_PREFIX, transactional: bool = True
) -> int:
    """Returns the transaction's xid."""
    [(xid, _)] = stranger.run(
        "select pg_current_xact_id()::text::int8, pg_logical_emit_message(%s, %s, %s)",
        *(transactional, prefix, content),
    )
    return int(xid)


@pytest.mark.parametrize("event_trigger", [True, False])
def test_a_forged_filter_lets_no_row_of_another_tenant_in(
    twin: Twin, stranger: Stranger, caplog: pytest.LogCaptureFixture, event_trigger: bool
) -> None:
    """It is restored before anybody compares, so that nothing tells of it."""
    subscribe(twin, event_trigger=event_trigger)
    publication, table = memberships(twin)
    [(qual, text)] = twin.publisher.rows(
        "select prqual::text, pg_get_expr(prqual, prrelid) from pg_publication_rel"
        " where prpubid = (select oid from pg_publication where pubname = 'p')"
    )
    widened = forged(
        touched_publications=[],
        removed_memberships=[[publication, table]],
        touched_tables=[],
        memberships=[],
    )
    open_to_all = forged(
        touched_publications=[publication],
        publications=[publication_row(twin)],
        memberships=[[publication, table, None, None, None]],
    )
    restored = forged(
        touched_publications=[publication],
        publications=[publication_row(twin)],
        memberships=[[publication, table, qual, text, None]],
    )
    first = write(stranger, open_to_all)
    twin.publisher.run("insert into t values (3, 'theirs')")
    write(stranger, restored)
    twin.publisher.run("insert into t values (4, 'ours')")
    write(stranger, widened)
    twin.publisher.run("insert into t values (5, 'ours')")
    write(stranger, restored)

    with caplog.at_level(logging.WARNING):
        rows_now = rows(twin)

    assert rows_now == [(1, "ours"), (4, "ours"), (5, "ours")]
    assert "ignored 4 logical messages" in caplog.text
    assert str(first) in caplog.text


EMPTY = '"tables": [], "columns": [], "publications": [], "memberships": []'
NULL_NAME = '"tables": [[99999, null, null, false, true, null, "d", null, null, 0]]'
HOSTILE = {
    "deep": "[" * 100_000,
    "infinity": f'{{"format": 1, "touched_publications": [Infinity], {EMPTY}}}',
    "null": f'{{"format": 1, {EMPTY}, {NULL_NAME}}}',
    "surrogate": f'{{"format": 1, "added_schemas": [[1, "\\ud800"]], {EMPTY}}}',
    "code": f"1 {'0' * 64}\n{{}}",
    "empty": "",
}


@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize("prefix", [CATALOG_PREFIX, REWRITE_PREFIX])
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_no_message_stops_capture(
    twin: Twin, stranger: Stranger, content: str, prefix: str, transactional: bool
) -> None:
    subscribe(twin)
    write(stranger, content, prefix=prefix, transactional=transactional)
    twin.publisher.run("insert into t values (3, 'ours')")

    assert rows(twin) == [(1, "ours"), (3, "ours")]
    verify_log(twin.config, "pub")


def test_messages_of_others_are_not_kept(twin: Twin, stranger: Stranger) -> None:
    subscribe(twin)
    for prefix in ("their own", "cdc_replay.catalog.too", CATALOG_PREFIX):
        for transactional in (True, False):
            write(stranger, "x" * 1000, prefix=prefix, transactional=transactional)
    twin.publisher.run("insert into t values (3, 'ours')")
    end_before = ChangeLog.open(str(twin.change_log)).end_lsn

    captured = capture(twin.config, "pub")

    assert captured.messages == 1
    assert ChangeLog.open(str(twin.change_log)).end_lsn > end_before


def test_a_message_of_the_event_triggers_counts_in_its_own_transaction_and_once(
    twin: Twin, stranger: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even a role that can read the stream can replay a message."""
    subscribe(twin)
    twin.publisher.run("alter publication p set table t")
    [(content,)] = twin.publisher.rows(
        f"select convert_from(substr(data, 11 + {len(CATALOG_PREFIX)} + 1 + 4), 'UTF8') from"
        f" pg_logical_slot_peek_binary_changes('{twin.slot}', null, null, 'proto_version', '1',"
        " 'publication_names', 'cdc_replay_capture_i', 'messages', 'true') where get_byte(data, 0) = 77"
        " and position('added' in convert_from(substr(data, 40), 'SQL_ASCII')) > 0 limit 1"
    )
    twin.publisher.run("alter publication p set table t where (tenant = 'ours')")
    write(stranger, content)
    twin.publisher.run("insert into t values (3, 'theirs'), (4, 'ours')")

    with caplog.at_level(logging.WARNING):
        assert rows(twin) == [(1, "ours"), (4, "ours")]
    assert "ignored 1 logical messages" in caplog.text


def test_the_functions_and_the_secret_are_out_of_reach(twin: Twin, stranger: Stranger) -> None:
    subscribe(twin)
    for statement in (
        "select * from cdc_replay_capture.secret",
        "select cdc_replay_capture.emit('cdc_replay.catalog', '{}')",
        "select cdc_replay_capture.tell_everything()",
        "refresh materialized view cdc_replay_capture.secret",
        "select nextval('cdc_replay_capture.ordinal')",
        "create function cdc_replay_capture.mine() returns int language sql return 1",
    ):
        with pytest.raises(Exception, match=r"permission denied|must be owner"):
            stranger.run(statement)


def test_messages_are_ignored_while_event_triggers_are_missing(twin: Twin, stranger: Stranger) -> None:
    subscribe(twin)
    twin.publisher.run("; ".join(f"drop event trigger {name}" for name in EVENT_TRIGGERS))
    publication, table = memberships(twin)
    write(stranger, forged(removed_memberships=[[publication, table]]))
    twin.publisher.run("insert into t values (3, 'ours')")

    assert rows(twin) == [(1, "ours"), (3, "ours")]
