"""Backlogs: what is committed while nobody reads the slots, as large as asked for.

| backlog            | what it is                                                                            |
|--------------------|---------------------------------------------------------------------------------------|
| churn              | rows come, cross the filter with each of 3 UPDATEs, and every second one goes         |
| hot_keys           | UPDATEs of the same thousand rows, again and again                                    |
| distinct_keys      | as many UPDATEs as INSERTs, no row twice                                              |
| wide_rows          | 30 columns; a value of 3 kB stored out of line, which most UPDATEs leave as it is     |
| one_transaction    | INSERTs in a single transaction                                                       |
| large_transactions | two of INSERTs, two of UPDATEs, one of DELETEs, each with a fifth of the changes      |
| one_key            | UPDATEs of a single row                                                               |
| small_transactions | INSERTs, each committed alone                                                         |
| many_tables        | INSERTs and UPDATEs in 200 tables, in turn                                            |
| flights            | every departure from New York in 2013 (`demo/flights.py`): partitions, filters, TOAST |

All but `one_transaction`, `large_transactions`, `small_transactions` and `flights` commit a thousand changes
at a time.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import psycopg

import traffic

Connection: TypeAlias = psycopg.Connection[Any]

WARM_UP_CHANGES: Final = 60_000
"""More than the windows that Spark runs without compiling them."""

_DEMO: Final = Path(traffic.__file__).parent


class Backlog(Protocol):
    """Tables, and changes of them. `run` can be called again."""

    @property
    def publisher_script(self) -> str:
        """Tables, publications and what else the publisher needs."""

    @property
    def subscriber_script(self) -> str:
        """Tables of the same names."""

    def prepare(self, connection: Connection, changes: int) -> None:
        """Fill the tables with what is there before."""

    def warm_up(self, connection: Connection, changes: int) -> None:
        """Commit some changes of the same kind before, `changes` at most."""

    def run(self, connection: Connection, changes: int) -> None:
        """Commit about as many row changes."""


@dataclass(frozen=True)
class Procedure:
    """A backlog that a procedure `name(changes)` of the publisher commits.

    `before` is executed once, with the placeholder `{changes}`.
    """

    name: str
    tables: str
    publications: str
    procedure: str
    before: str = ""

    @property
    def publisher_script(self) -> str:
        return f"{self.tables}; {self.publications}; {self.procedure}"

    @property
    def subscriber_script(self) -> str:
        return self.tables

    def prepare(self, connection: Connection, changes: int) -> None:
        if self.before:
            connection.execute(self.before.replace("{changes}", str(changes)).encode())

    def warm_up(self, connection: Connection, changes: int) -> None:
        self.run(connection, min(changes, WARM_UP_CHANGES))

    def run(self, connection: Connection, changes: int) -> None:
        connection.execute(f"call {self.name}({changes})".encode())


@dataclass(frozen=True)
class Flights:
    """The demo's airports; the number of days follows from the number of changes that is asked for."""

    first: dt.date = dt.date(2013, 1, 9)
    warm_up_first: dt.date = dt.date(2013, 1, 2)
    changes_per_day: int = 4000

    @property
    def publisher_script(self) -> str:
        return "".join((_DEMO / name).read_text("utf-8") for name in ("schema.sql", "publications.sql"))

    @property
    def subscriber_script(self) -> str:
        return (_DEMO / "subscriber.sql").read_text("utf-8")

    def prepare(self, connection: Connection, changes: int) -> None:
        del changes
        traffic.load_history(connection, traffic.DateRange(self.warm_up_first, 1))

    def warm_up(self, connection: Connection, changes: int) -> None:
        del changes
        self._play(connection, self.warm_up_first, (self.first - self.warm_up_first).days)

    def run(self, connection: Connection, changes: int) -> None:
        rest = (traffic.LAST_DAY - self.first).days + 1
        self._play(connection, self.first, max(1, min(rest, changes // self.changes_per_day)))

    @staticmethod
    def _play(connection: Connection, first: dt.date, days: int) -> None:
        traffic.play(connection, traffic.DateRange(first, days), seconds=0, progress=lambda _: None)


SIX_COLUMNS: Final = "create table t (id int primary key, a int, b text, c numeric, d timestamptz, e bool)"

PUBLISHED: Final = "create publication p for table t"

FULL_ROWS: Final = "alter table t replica identity full"

CHURN: Final = """
    create procedure churn(changes int) language plpgsql as $$
    declare
        first int := coalesce(max(id), 0) + 1 from t;
        last int := first + greatest(changes * 2 / 9, 1) - 1;
    begin
        for low in first .. last by 1000 loop
            insert into t
            select i, i, 'name ' || i, i * 1.25, now(), i % 2 = 0
            from generate_series(low, least(low + 999, last)) i;
            commit;
        end loop;
        for round in 1 .. 3 loop
            for low in first .. last by 1000 loop
                update t set a = a + 1, b = 'changed ' || a, d = clock_timestamp()
                where id between low and low + 999;
                commit;
            end loop;
        end loop;
        for low in first .. last by 2000 loop
            delete from t where id between low and low + 1999 and id % 2 = 0;
            commit;
        end loop;
    end $$
"""

HOT_KEYS: Final = """
    create procedure hot_keys(changes int) language plpgsql as $$
    begin
        for round in 1 .. greatest(changes / 1000, 1) loop
            update t set a = a + 1, b = 'changed ' || a, d = clock_timestamp();
            commit;
        end loop;
    end $$
"""

DISTINCT_KEYS: Final = """
    create procedure distinct_keys(changes int) language plpgsql as $$
    declare
        behind int := max(id) from t;
    begin
        for low in 1 .. changes / 2 by 500 loop
            insert into t
            select behind + i, i, 'name ' || i, i * 1.25, now(), i % 2 = 0
            from generate_series(low, low + 499) i;
            update t set a = a + 1, b = 'changed ' || a, d = clock_timestamp()
            where id between low and low + 499;
            commit;
        end loop;
    end $$
"""

_NUMBERED: Final = [f"c{number}" for number in range(1, 29)]

WIDE_TABLE: Final = f"""
    create table t (id int primary key, {", ".join(f"{name} text" for name in _NUMBERED)}, body text);
    alter table t alter body set storage external
"""

WIDE_ROWS: Final = f"""
    create procedure wide_rows(changes int) language plpgsql as $$
    declare
        first int := coalesce(max(id), 0) + 1 from t;
        last int := first + greatest(changes / 10, 1) - 1;
    begin
        for low in first .. last by 1000 loop
            insert into t
            select i, {", ".join(f"'value ' || i % {100 + at}" for at in range(len(_NUMBERED)))},
                repeat(md5(i::text), 94)
            from generate_series(low, least(low + 999, last)) i;
            commit;
        end loop;
        for round in 1 .. 9 loop
            for low in first .. last by 1000 loop
                update t set c1 = 'round ' || round, c28 = c27,
                    body = case when (id + round) % 100 = 0 then repeat(md5(c1), 94) else body end
                where id between low and low + 999;
                commit;
            end loop;
        end loop;
    end $$
"""

ONE_TRANSACTION: Final = """
    create procedure one_transaction(changes int) language sql as $$
        insert into t
        select behind + i, i, 'name ' || i, i * 1.25, now(), i % 2 = 0
        from (select coalesce(max(id), 0) as behind from t) as present, generate_series(1, changes) as i
    $$
"""

LARGE_TRANSACTIONS: Final = """
    create procedure large_transactions(changes int) language plpgsql as $$
    declare
        highest int := coalesce(max(id), 0) from t;
        share int := greatest(changes / 5, 1);
    begin
        for half in 0 .. 1 loop
            insert into t
            select highest + half * share + i, i, 'name ' || i, i * 1.25, now(), i % 2 = 0
            from generate_series(1, share) as i;
            commit;
        end loop;
        for half in 0 .. 1 loop
            update t set a = a + 1, b = 'changed ' || a, d = clock_timestamp()
            where id > highest + half * share and id <= highest + (half + 1) * share;
            commit;
        end loop;
        delete from t where id > highest and id % 2 = 0;
        commit;
    end $$
"""

ONE_KEY: Final = """
    create procedure one_key(changes int) language plpgsql as $$
    begin
        for turn in 1 .. greatest(changes / 1000, 1) loop
            for i in 1 .. 1000 loop
                update t set a = i, b = 'changed ' || turn where id = 1;
            end loop;
            commit;
        end loop;
    end $$
"""

SMALL_TRANSACTIONS: Final = """
    create procedure small_transactions(changes int) language plpgsql as $$
    declare
        behind int := coalesce(max(id), 0) from t;
    begin
        for i in 1 .. changes loop
            insert into t values (behind + i, i, 'name ' || i, i * 1.25, now(), i % 2 = 0);
            commit;
        end loop;
    end $$
"""

TABLES: Final = 200

MANY_TABLES: Final = f"""
    create procedure many_tables(changes int) language plpgsql as $$
    declare
        per_table int := greatest(changes / {2 * TABLES}, 1);
        behind int := coalesce(max(id), 0) from t_1;
    begin
        for low in 1 .. per_table by 100 loop
            for number in 1 .. {TABLES} loop
                execute format(
                    'insert into t_%s select $1 + i, i, ''name '' || i, i * 1.25, now(), true'
                    ' from generate_series($2, $3) i', number) using behind, low, least(low + 99, per_table);
                execute format('update t_%s set a = a + 1, e = false where id between $1 + $2 and $1 + $3',
                    number) using behind, low, least(low + 99, per_table);
                if number % 5 = 0 then
                    commit;
                end if;
            end loop;
        end loop;
    end $$
"""


def numbered_tables(count: int) -> str:
    """Tables `t_1`, `t_2` and so on."""
    return "; ".join(SIX_COLUMNS.replace("table t ", f"table t_{number} ") for number in range(1, count + 1))


def filled(table: str, rows: str) -> str:
    """INSERT of so many rows."""
    return (
        f"insert into {table} select i, i, 'name ' || i, i * 1.25, now(), i % 2 = 0"
        f" from generate_series(1, {rows}) i"
    )


def shares(count: int) -> str:
    """Publications `p_0`, `p_1`, …, each with its share of the rows by a filter of its own."""
    publications = (
        f"create publication p_{number} for table t where (id % {count} = {number})"
        for number in range(count)
    )
    return f"{FULL_ROWS}; {'; '.join(publications)}"


def wide_rows(table: str, rows: str) -> str:
    """INSERT of so many rows of `WIDE_TABLE`."""
    values = ", ".join(f"'value ' || i % {100 + at}" for at in range(len(_NUMBERED)))
    return (
        f"insert into {table} select i, {values}, repeat(md5(i::text), 94) from generate_series(1, {rows}) i"
    )


def overlapping(count: int) -> str:
    """Publications `p_0`, `p_1`, …, each with half of the rows, another half each."""
    publications = (
        f"create publication p_{number} for table t where (id % {2 * count} >= {number} and"
        f" id % {2 * count} < {number + count})"
        for number in range(count)
    )
    return f"{FULL_ROWS}; {'; '.join(publications)}"


def filtered(condition: str) -> str:
    """Publication `p` of the rows for which the condition holds."""
    return f"{FULL_ROWS}; create publication p for table t where ({condition})"


BACKLOGS: Final[Mapping[str, Backlog]] = {
    "churn": Procedure("churn", SIX_COLUMNS, filtered("a % 3 <> 0"), CHURN),
    "hot_keys": Procedure("hot_keys", SIX_COLUMNS, PUBLISHED, HOT_KEYS, filled("t", "1000")),
    "distinct_keys": Procedure(
        "distinct_keys", SIX_COLUMNS, PUBLISHED, DISTINCT_KEYS, filled("t", "greatest({changes}, 120000) / 2")
    ),
    "wide_rows": Procedure("wide_rows", WIDE_TABLE, PUBLISHED, WIDE_ROWS),
    "one_transaction": Procedure("one_transaction", SIX_COLUMNS, PUBLISHED, ONE_TRANSACTION),
    "large_transactions": Procedure(
        "large_transactions", SIX_COLUMNS, filtered("id % 5 < 2"), LARGE_TRANSACTIONS
    ),
    "selective": Procedure("churn", SIX_COLUMNS, filtered("id % 100 = 0"), CHURN),
    "one_key": Procedure("one_key", SIX_COLUMNS, PUBLISHED, ONE_KEY, filled("t", "1")),
    "small_transactions": Procedure("small_transactions", SIX_COLUMNS, PUBLISHED, SMALL_TRANSACTIONS),
    "many_tables": Procedure(
        "many_tables", numbered_tables(TABLES), "create publication p for all tables", MANY_TABLES
    ),
    "flights": Flights(),
}
