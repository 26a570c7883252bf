"""A snapshot without waiting is described by transaction IDs (R1.35)."""

from __future__ import annotations

import pytest

from cdc_replay.model.pg_snapshot import PgSnapshot
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.current_snapshot import CurrentSnapshot, export_current_snapshot
from cdc_replay.postgres.exported_snapshot import import_snapshot
from fixtures.postgres import Database

INSERT = "with inserted as (insert into t values (%s) returning 1) select"
XID = "pg_current_xact_id()::text::bigint %% 4294967296 from inserted"


def test_transactions_in_the_snapshot_are_those_whose_rows_are_visible(publisher: Database) -> None:
    """Committed before it, open (one with a subtransaction), and started after it."""
    publisher.run("create table t (id int primary key)")
    with publisher.connect() as open_then, publisher.connect() as other:
        xids = [_inserted(other, 1)]
        open_then.execute("begin")
        xids.append(_inserted(open_then, 2))
        open_then.execute("savepoint a; insert into t values (20)")
        xids.append(_inserted(other, 3))
        with export_current_snapshot(publisher.dsn) as snapshot:
            open_then.execute("commit")
            xids.append(_inserted(other, 4))
            with import_snapshot(snapshot, purpose="test") as reader:
                rows = reader.execute("select id from public.t order by id").fetchall()
    assert rows == [(1,), (3,)]
    assert [snapshot.transactions.sees(xid) for xid in xids] == [True, False, True, False]


@pytest.mark.parametrize(
    ("xid", "is_seen"),
    [
        (2**32 - 1, True),
        (2**32 - 3, False),
        (2, True),
        (3, False),
        (4, False),
        (2**31 + 3, True),
        (2**31 + 2, False),
    ],
)
def test_transaction_ids_wrap_around(xid: int, is_seen: bool) -> None:
    """The log has their low 32 bits; here 2^32 + 3 is next, and 2^32 - 3 is open."""
    assert PgSnapshot.parse(f"{2**32 - 3}:{2**32 + 3}:{2**32 - 3}").sees(xid) is is_seen


def test_the_snapshot_does_not_show_its_password() -> None:
    assert "secret" not in repr(CurrentSnapshot("password=secret", "1-1", PgSnapshot.parse("3:3:")))


def _inserted(connection: Connection, id_: int) -> int:
    """Insert a row; returns the transaction ID as pgoutput sends it."""
    [(xid,)] = connection.execute(f"{INSERT} {XID}".encode(), (id_,)).fetchall()
    return int(xid)
