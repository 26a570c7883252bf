"""Copies of tables that foreign keys link whose triggers fire in replicating sessions (R8.13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cdc_replay.errors import ApplyConflict
from fixtures.postgres import FIRE_ALWAYS, Database
from integration.snapshot.copying import copy_tables, states_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TABLES = """
    create table t (id int primary key, parent int references t);
    create table {child} (id int primary key, t int references t on delete {action})
"""
ROWS = """
    insert into t values (1, null), (2, 1);
    insert into {child} select i, 1 + i % 2 from generate_series(1, 1000) i;
    create publication p for table t, {child}
"""


def link(publisher: Database, subscriber: Database, child: str, action: str) -> None:
    tables = TABLES.format(child=child, action=action)
    publisher.run(f"{tables}; {ROWS.format(child=child)}")
    subscriber.run(f"{tables}; {FIRE_ALWAYS}")


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 8 << 10])
@pytest.mark.parametrize("child", ["a", "z"])
def test_referring_table_is_complete_after_the_other_one(
    spark: SparkSession, publisher: Database, subscriber: Database, child: str, chunk_bytes: int
) -> None:
    """Natively its copy is tried again until the other one is there."""
    link(publisher, subscriber, child, "no action")

    copied = copy_tables(spark, publisher, subscriber, "p", chunk_bytes=chunk_bytes)

    assert [(table.name.name, table.rows) for table in copied] == sorted([(child, 1000), ("t", 2)])
    assert subscriber.rows(f"select count(*) from {child}") == [(1000,)]


@pytest.mark.parametrize("action", ["cascade", "set null"])
@pytest.mark.parametrize("child", ["a", "z"])
def test_resync_whose_deletions_would_act_on_another_table_is_refused(
    spark: SparkSession, publisher: Database, subscriber: Database, child: str, action: str
) -> None:
    link(publisher, subscriber, child, action)
    copy_tables(spark, publisher, subscriber, "p")
    before, states = subscriber.rows(f"table {child}"), states_of(subscriber)

    with pytest.raises(ApplyConflict, match=r'refers to table "public"\."t" of the subscriber would change'):
        copy_tables(spark, publisher, subscriber, "p", replace=True)

    assert subscriber.rows(f"table {child}") == before
    assert subscriber.rows("select count(*) from t") == [(2,)]
    assert states_of(subscriber)["public.t"] == states["public.t"]
