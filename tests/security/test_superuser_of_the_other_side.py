"""A superuser of one server is trusted with everything there, and gets nothing on the other one by that.

He can replace the functions by which the server describes its tables.
"""

from __future__ import annotations

import pytest

from cdc_replay.commands.validate import validate
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

SECRET = "unpublished"

LYING = r"""
    alter function pg_catalog.format_type(oid, integer) rename to honest_format_type;
    create function pg_catalog.format_type(type_oid oid, typemod integer) returns text
    language plpgsql stable set search_path = pg_catalog as $$
    begin
        if type_oid = 'int8'::regtype then
            return $type$int8 + (select word::int8 from ts_stat(
                U&'select to_tsvector(''simple'', body) from public\002Evault'
            ))$type$;
        end if;
        return pg_catalog.honest_format_type(type_oid, typemod);
    end $$
"""


def test_the_subscribers_name_of_a_type_is_not_executed_on_the_publisher(twin: Twin) -> None:
    """A row of an unpublished table would be in an error that the subscriber keeps."""
    twin.publisher.run(
        "create table t (id int primary key, a int); create publication p for table t;"
        f" insert into t values (1, 1); create table vault (body text); insert into vault values ('{SECRET}')"
    )
    twin.subscribe("s", "p", tables="create table t (id int primary key, a bigint)", native=False)
    twin.sync_ours()
    subscriber = twin.pairs["s"].ours
    subscriber.run(LYING)

    result = validate(twin.config, "s")

    assert SECRET not in str(result)
    assert subscriber.rows(f"select from cdc_replay.result where result::text like '%{SECRET}%'") == []
