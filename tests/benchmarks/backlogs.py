"""Backlogs: what is committed while nobody reads the slots, as large as asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SIX_COLUMNS: Final = """
    create table t (id int primary key, a int, b text, c numeric, d timestamptz, e bool);
    alter table t replica identity full;
    create publication p for table t
"""

CHURN: Final = """
    create procedure churn(rows int) language plpgsql as $$
    declare
        n int := rows / 5;
    begin
        for low in 1 .. n by 1000 loop
            insert into t
            select i, i, 'name ' || i, i * 1.25, now(), i % 2 = 0
            from generate_series(low, least(low + 999, n)) i;
            commit;
        end loop;
        for round in 1 .. 3 loop
            for low in 1 .. n by 1000 loop
                update t set a = a + 1, b = 'changed ' || a, d = clock_timestamp()
                where id between low and low + 999;
                commit;
            end loop;
        end loop;
        for low in 1 .. n by 1000 loop
            delete from t where id between low and low + 999;
            commit;
        end loop;
    end $$
"""

ONE_TRANSACTION: Final = """
    create procedure one_transaction(rows int) language sql as $$
        insert into t
        select i, i, 'name ' || i, i * 1.25, now(), i % 2 = 0
        from generate_series(1, rows) i
    $$
"""

SMALL_TRANSACTIONS: Final = """
    create procedure small_transactions(rows int) language plpgsql as $$
    begin
        for i in 1 .. rows loop
            insert into t values (i, i, 'name ' || i, i * 1.25, now(), i % 2 = 0);
            commit;
        end loop;
    end $$
"""


@dataclass(frozen=True)
class Backlog:
    """Tables with the publication `p`, and a procedure that commits so many row changes."""

    tables: str
    procedure: str
    rows: int


BACKLOGS: Final[Mapping[str, Backlog]] = {
    "churn": Backlog(SIX_COLUMNS, CHURN, 5_000_000),
    "one_transaction": Backlog(SIX_COLUMNS, ONE_TRANSACTION, 2_000_000),
    "small_transactions": Backlog(SIX_COLUMNS, SMALL_TRANSACTIONS, 100_000),
}
"""By the name of the procedure; `rows` is the size to compare at.

| backlog            | what it is                                                                          |
|--------------------|-------------------------------------------------------------------------------------|
| churn              | 1 INSERT, 3 UPDATEs (old and new row are sent) and 1 DELETE per row, 1000 at a time |
| one_transaction    | INSERTs in a single transaction                                                     |
| small_transactions | INSERTs, each committed alone                                                       |
"""
