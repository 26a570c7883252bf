"""TRUNCATE of a table that two subscriptions of one database feed: it empties the rows of both."""

from __future__ import annotations

import pytest

from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key, region text)"


@pytest.fixture
def regions(twin: Twin) -> Twin:
    twin.publisher.run(f"{TABLE}; alter table t replica identity full")
    twin.publisher.run("insert into t values (1, 'NSW'), (2, 'VIC')")
    twin.publisher.run("create publication p for table t where (region = 'NSW')")
    twin.publisher.run("create publication q for table t where (region = 'VIC')")
    twin.subscribe("nsw", "p", tables=TABLE)
    twin.subscribe_beside("nsw", "vic", "q")
    twin.sync()
    return twin


@pytest.mark.parametrize("order", [("nsw", "vic"), ("vic", "nsw")])
def test_rows_inserted_after_it_by_the_other_subscription_stay(regions: Twin, order: tuple[str, str]) -> None:
    """Natively both workers apply it as it arrives, and go on together."""
    regions.publish("insert into t values (3, 'NSW'), (4, 'VIC');\ntruncate t")
    for name in order:
        regions.native(name).wait()
    regions.publish("insert into t values (5, 'NSW'), (6, 'VIC');\ntruncate t")
    for name in order:
        regions.native(name).wait()
    regions.publish("insert into t values (7, 'NSW'), (8, 'VIC')")

    results = regions.sync(*order)

    assert regions.rows("nsw", "t") == [(7, "NSW"), (8, "VIC")]
    assert {result.to_lsn for result in results.values()} == {results["nsw"].to_lsn}
    regions.publish("insert into t values (9, 'NSW')")
    regions.sync(*order)
    assert regions.rows("vic", "t") == [(7, "NSW"), (8, "VIC"), (9, "NSW")]


def test_a_subscription_that_is_ahead_stays(regions: Twin) -> None:
    """Only the other one has the TRUNCATE before it, which empties the table, as natively."""
    regions.publish("truncate t;\ninsert into t values (5, 'NSW'), (6, 'VIC')")
    regions.sync_ours("vic")
    (nsw, vic) = regions.sync_ours("nsw", "vic")
    assert (nsw.replay.error, vic.replay.error) == (None, None)
    assert regions.pairs["nsw"].ours.rows("table t") == [(5, "NSW")]


def address_of_another_role(twin: Twin, name: str) -> str:
    """A DSN of the same database, of another text."""
    ours = twin.pairs[name].ours
    role = f"role_{ours.name}"
    ours.run(f"create role {role} superuser login")
    return ours.cluster.dsn(ours.name, user=role).replace("127.0.0.1", "localhost")


def test_subscriptions_with_roles_of_their_own_share_the_table_too(regions: Twin) -> None:
    """Another DSN, the same database: TRUNCATE comes first, and a row that moves is retried."""
    regions.change("vic", dsn=address_of_another_role(regions, "vic"))
    regions.publish("insert into t values (3, 'NSW'), (4, 'VIC');\ntruncate t")
    for name in ("nsw", "vic"):
        regions.native(name).wait()
    regions.publish("insert into t values (5, 'NSW'), (6, 'VIC')")
    regions.sync("nsw", "vic")
    assert regions.rows("nsw", "t") == [(5, "NSW"), (6, "VIC")]

    regions.publish("update t set region = 'NSW' where id = 6")
    regions.sync("nsw", "vic")
    assert regions.rows("nsw", "t") == [(5, "NSW"), (6, "NSW")]
