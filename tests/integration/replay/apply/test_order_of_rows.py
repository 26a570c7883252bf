"""The join method by which a window's rows are found: a merge join if they lie in key order."""

from __future__ import annotations

import pytest

from cdc_replay.replay.apply import merge
from fixtures.native import wait_for
from fixtures.postgres import Database
from integration.replay.apply.windows import Target

ROWS = 300
SEEN = """
    create table seen (operation text, hashjoin text, unique (operation, hashjoin));
    create function note() returns trigger language plpgsql as $$
        begin
            insert into public.seen values (tg_op, current_setting('enable_hashjoin')) on conflict do nothing;
            return coalesce(new, old);
        end
    $$;
    create trigger note before insert or update or delete on t for each row execute function note();
    alter table t enable always trigger note
"""
IN_ORDER = f"select n, 7, 0 from generate_series(1, {ROWS}) n"
REVERSED = f"{IN_ORDER} order by n desc"
TWO_RUNS = f"{IN_ORDER} order by md5(n::text) < '8', n"
IN_NONE = f"{IN_ORDER} order by md5(n::text)"


@pytest.fixture(autouse=True)
def _few_rows_are_worth_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MIN_ROWS_TO_SAMPLE", ROWS // 3)


@pytest.mark.parametrize(
    ("key", "options", "rows", "hashjoin"),
    [
        ("primary key (id)", "", IN_ORDER, "off"),
        ("primary key (id)", "", REVERSED, "off"),
        ("primary key (id)", "", TWO_RUNS, "off"),
        ("primary key (id)", "", IN_NONE, "on"),
        ("primary key (a, id)", "", IN_ORDER, "off"),
        ("primary key (id)", "partition by range (id)", IN_ORDER, "on"),
        ("check (true)", "", IN_ORDER, "on"),
    ],
    ids=["in order", "reversed", "in two runs", "in no order", "two columns", "partitioned", "without a key"],
)
def test_join_method_follows_the_physical_order(
    subscriber: Database, key: str, options: str, rows: str, hashjoin: str
) -> None:
    subscriber.run(f"create table t (id int, a int, b int, {key}) {options}")
    if options:
        subscriber.run("create table p partition of t default")
    subscriber.run(f"insert into t {rows}; {SEEN}")
    target = Target(subscriber.dsn, {"t": ("id", "a", "b")})
    changes = target.window()
    identity = changes.tables[0].identity
    half = ROWS // 2
    for number in range(1, ROWS + 1):
        row = {"id": number, "a": 7, "b": 0}
        old = [row[name] for name in identity]
        if number <= half:
            changes.update("t", number, 7, 1, old=old)
        else:
            changes.delete("t", *old)
    changes.insert("t", ROWS + 1, 7, 0)
    applied = target.apply(changes)
    assert (applied.insert, applied.update, applied.delete) == (1, half, ROWS - half)
    operations = target.rows("select operation, hashjoin from seen order by operation")
    assert operations == [("DELETE", hashjoin), ("INSERT", "on"), ("UPDATE", hashjoin)]


@pytest.mark.parametrize("key", ["primary key (id)", "primary key (a, id)"])
def test_rows_before_the_first_key_of_a_window_are_not_read(subscriber: Database, key: str) -> None:
    # The merge join is faster for many rows only; the window changes half of the table.
    before, changed = 20_000, 10_000
    subscriber.run(f"create table t (id int, a int, b int, {key})")
    subscriber.run(f"insert into t select n, n, 0 from generate_series(1, {before + changed}) n; analyze t")
    target = Target(subscriber.dsn, {"t": ("id", "a", "b")})
    changes = target.window()
    for number in range(before + 1, before + changed + 1):
        changes.update("t", number, number, 1)
    reads = "select idx_tup_read from pg_stat_user_indexes where relname = 't'"
    [(read_before,)] = target.rows(reads)
    assert target.apply(changes).update == changed
    assert target.rows("select b, count(*) from t group by b order by b") == [(0, before), (1, changed)]

    def read_since() -> int:
        [(read,)] = target.rows(reads)
        return int(read) - int(read_before)

    # A session reports what it has read when it is idle, or ends.
    wait_for(lambda: read_since() >= changed, "the statistics")
    # Each row once, the sample, and the uniqueness check of its new version.
    assert read_since() < changed + before // 2
