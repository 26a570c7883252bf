"""A filter that fails for some row stops the subscription that has it, and nothing else (R1.36, R11.11)."""

from __future__ import annotations

import psycopg
import pytest

from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key, a int)"


def native_decoding(twin: Twin, publications: str) -> None:
    """What a native subscription to the publications would make of the slot."""
    twin.publisher.rows(
        "select count(*) from pg_logical_slot_peek_binary_changes('native', null, null,"
        f" 'proto_version', '1', 'publication_names', '{publications}')"
    )


def test_only_the_subscription_whose_filter_fails_stops(twin: Twin) -> None:
    """R3.8: behind a filter that is TRUE for the row, the failing one is not evaluated, here as there."""
    twin.publish(
        f"{TABLE};\n"
        "create publication failing for table t where (10 / a > 1);\n"
        "create publication fine for table t where (a < 100);\n"
        "create publication earlier for table t where (a = 0);\n"
        "select pg_create_logical_replication_slot('native', 'pgoutput')"
    )
    twin.subscribe("failing", "failing", tables=TABLE, native=False)
    twin.subscribe("fine", "fine", tables=TABLE)
    twin.subscribe("hidden", "earlier", "failing", tables=TABLE)
    twin.sync("fine", "hidden")
    twin.sync_ours("failing")

    twin.publish("insert into t values (1, 2), (2, 0), (3, 7);\ninsert into t values (4, 3), (5, 200)")
    failed, fine, hidden = twin.sync_ours("failing", "fine", "hidden")

    with pytest.raises(psycopg.errors.DivisionByZero):
        native_decoding(twin, "failing")
    native_decoding(twin, "earlier,failing")
    assert failed.replay.error is not None
    assert failed.replay.error.startswith('subscription "failing" is parked before the transaction that')
    assert (
        'cannot evaluate a row filter of table "public.t": division by zero (SQLSTATE 22012) [R1.36].'
        ' The filter of publication "failing" is ((10 / a) > 1). The row has (id)=(2).'
    ) in failed.replay.error
    assert (fine.replay.error, hidden.replay.error) == (None, None)
    twin.native("fine").wait()
    twin.native("hidden").wait()
    assert twin.rows("fine", "t") == [(1, 2), (2, 0), (3, 7), (4, 3)]
    #  10 / 7 is 1
    assert twin.rows("hidden", "t") == [(1, 2), (2, 0), (4, 3)]
    #  nothing of the window: not even the row before the failing one
    assert twin.pairs["failing"].ours.rows("select * from t") == []


def test_capture_and_other_subscriptions_continue_after_a_failure(twin: Twin) -> None:
    """R11.11: a native slot stays at the change for good."""
    twin.publish(f"{TABLE};\ncreate publication failing for table t where (10 / a > 1)")
    twin.publish("create publication fine for table t where (a < 100)")
    twin.subscribe("failing", "failing", tables=TABLE, native=False)
    twin.subscribe("fine", "fine", tables=TABLE)
    twin.sync_ours("failing")
    twin.sync("fine")
    twin.publish("insert into t values (1, 0)")
    twin.sync_ours("failing", "fine")

    twin.publish("insert into t values (2, 1);\ninsert into t values (3, 4)")
    failed, fine = twin.sync_ours("failing", "fine")

    assert failed.replay.error is not None
    assert (fine.replay.error, fine.capture.transactions) == (None, 2)
    twin.native("fine").wait()
    assert twin.rows("fine", "t") == [(1, 0), (2, 1), (3, 4)]


def test_a_name_that_is_not_known_any_more_stops_no_native_subscription(twin: Twin) -> None:
    """Pgoutput sends the name of an object, the filter of a native walsender reads the oid."""
    twin.publish(
        "create table seen ();\ncreate table t (id int primary key, named regclass);\n"
        "create publication p for table t where (named::oid > 0);\n"
        "select pg_create_logical_replication_slot('native', 'pgoutput')"
    )
    twin.subscribe("s", "p", tables="create table t (id int primary key, named text)", native=False)
    twin.sync_ours()
    twin.publish("insert into t values (1, 'seen');\nalter table seen rename to renamed")

    (failed,) = twin.sync_ours()

    native_decoding(twin, "p")
    assert failed.replay.error is not None
    assert 'relation "public.seen" does not exist' in failed.replay.error
    assert "native" not in failed.replay.error
    assert "give it its name back until the changes are replayed" in failed.replay.error
    twin.publish("alter table renamed rename to seen")
    twin.sync_ours()
    assert twin.pairs["s"].ours.rows("select id from t") == [(1,)]
