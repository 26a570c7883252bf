"""A table of many types, with the values at which exactness is decided."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embedded.postgres import Cluster
from fixtures.postgres import Database
from fixtures.stored_filters import FilteredTable
from fixtures.twin import Twin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TABLE = """
create table t (
    id int primary key, a int, i2 int2, i8 int8, b bool, s text, v varchar(20), c char(5), d date, u uuid,
    n numeric(20, 2), f float8, ts timestamp, tz timestamptz, iv interval, arr int[], tarr text[], j jsonb,
    js json, o oid, nm name, bits bit(4), by bytea, ip inet, r int4range, m money, pt point, ch "char",
    cc text collate "C"
)
"""

_ROWS = r"""
insert into t values
(1, 1, 1, 1, true, 'abc', 'abc', 'abc', '2020-01-01', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 1.50, 1.5,
    '2020-01-01 10:00', '2020-01-01 10:00+02', '1 day', '{1,2}', '{a,b}', '{"k": "v"}', '{"k": "v"}', 5,
    'abc', '1010', '\x00ff', '10.0.0.1', '[1,5)', 1.50, '(1,2)', 'q', 'abc'),
(2, 2147483647, 32767, 9223372036854775807, false, 'ABC', 'ABC', 'ab', '9999-12-31',
    'ffffffff-ffff-ffff-ffff-ffffffffffff', 'NaN', 'NaN', 'infinity', 'infinity', '-1 mon', '{}', '{}',
    '[1, 2]', '1', 4294967295, '', '0000', '', '::1', 'empty', -1, '(0,0)', '', 'B'),
(3, -2147483648, -32768, -9223372036854775808, null, '', '', '', '0001-01-01',
    '00000000-0000-0000-0000-000000000000', -0.01, '-0', '-infinity', '-infinity', null, '{NULL,5}',
    '{NULL,""}', 'null', 'null', 0, 'X', '1111', '\x0d0a', '192.168.0.0/16', '(,)', 0, null, 'a', ''),
(4, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
    null, null, null, null, null, null, null, null, null, null, null),
(5, -7, -7, -7, true, E'a,"b"\n\\.\n\ttab', 'abc ', 'abc', '0044-03-15 BC',
    'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12', 1.5, 'Infinity', '0044-03-15 BC', '2020-03-29 01:00+00',
    '1 year', '{1}', '{"a b"}', '{}', '{}', 5, 'n', '0101', 'abc', '10.0.0.0/8', '[5,9]', 2, '(-1,1e10)',
    'z', 'é'),
(6, 10, 10, 10, false, 'é\ü€𝄞', '\N', 'é', 'infinity', '00000000-0000-0000-0000-00000000000a', 10, 10,
    '2020-06-15', '2020-06-15 12:00+00', '10:00', '{10}', '{é}', '{"k": 10}', '{"k": 10}', 10, 'abc',
    '1010', 'x', '10.0.0.1', '[10,11)', 10, '(1,2)', 'n', '\N'),
(7, 0, 0, 0, true, 'n', 't', 'f', '2000-01-01', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 0, 0,
    '2000-01-01', '2000-01-01 00:00+00', '0', '{0}', '{n}', '0', '0', 0, 'n', '0000', 'n', '0.0.0.0',
    '[0,0]', 0, '(0,0)', 'n', 'n')
"""


@pytest.fixture
def filtered(publisher: Database) -> FilteredTable:
    """A table `t` with extremes, NULLs, and text that is hard to quote."""
    publisher.run(_TABLE)
    publisher.run(_ROWS)
    return FilteredTable(publisher)


@pytest.fixture
def twin(
    spark: SparkSession, publisher: Database, subscriber_cluster: Cluster, tmp_path: Path
) -> Iterator[Twin]:
    """A publisher whose subscriptions exist twice: ours, and a native one to the same publications."""
    assert spark.version
    twins = Twin(publisher, subscriber_cluster, tmp_path)
    yield twins
    twins.drop()
