"""Tables that foreign keys link, where these are checked and act in replicating sessions (R8.13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cdc_replay.errors import ApplyConflict
from cdc_replay.model.subscription import ConflictPolicy
from fixtures.postgres import FIRE_ALWAYS
from integration.replay.apply.windows import Changes, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fixtures.postgres import Database

PARENT, CHILD = "z", "a"
"""The child's table is the first one of a window."""

TABLES = """
    create table z (id int primary key, v text unique);
    create table a (id int primary key, p int references z on delete {action});
    insert into z values (1, 'one'), (2, 'two'), (3, 'three');
    insert into a values (1, 1), (2, 2)
"""

ROWS = "select 'z', id, v from z union all select 'a', id, p::text from a order by 1 desc, 2"


@pytest.fixture(params=["no action", "restrict", "cascade", "set null"])
def action(request: pytest.FixtureRequest) -> str:
    """What a foreign key does when the referenced row is deleted."""
    return str(request.param)


def linked(subscriber: Database, action: str, policy: ConflictPolicy = ConflictPolicy.ERROR) -> Target:
    subscriber.run(TABLES.format(action=action))
    subscriber.run(FIRE_ALWAYS)
    return Target(subscriber.dsn, {CHILD: ("id", "p"), PARENT: ("id", "v")}, policy)


def move_to_a_new_row(changes: Changes) -> None:
    """Row 1 of the child gets a new parent, the old one is deleted, and so is row 2 with its parent."""
    changes.insert(PARENT, 4, "four")
    changes.update(CHILD, 1, 4)
    changes.delete(PARENT, 1)
    changes.delete(CHILD, 2)
    changes.delete(PARENT, 2)
    changes.insert(CHILD, 5, 4)


MOVED = [("z", 3, "three"), ("z", 4, "four"), ("a", 1, "4"), ("a", 5, "4")]


def test_net_changes_are_applied_in_an_order_that_the_foreign_key_allows(
    subscriber: Database, action: str
) -> None:
    target = linked(subscriber, action)
    changes = target.window()
    move_to_a_new_row(changes)

    applied = target.apply(changes)

    assert target.rows(ROWS) == MOVED
    assert (applied.insert, applied.update, applied.delete) == (2, 1, 3)
    assert applied.conflicts == {}


def test_rows_are_replaced_with_the_rows_that_refer_to_them(subscriber: Database, action: str) -> None:
    target = linked(subscriber, action)
    changes = target.window()
    for table in (CHILD, PARENT):
        changes.delete(table, 1)
        changes.delete(table, 2)
    changes.insert(PARENT, 2, "one")
    changes.insert(PARENT, 4, "two")
    changes.insert(CHILD, 2, 4)

    applied = target.apply(changes)

    assert target.rows(ROWS) == [("z", 2, "one"), ("z", 3, "three"), ("z", 4, "two"), ("a", 2, "4")]
    assert (applied.insert, applied.update, applied.delete) == (3, 0, 4)
    assert applied.conflicts == {}


def test_key_that_is_taken_again_is_kept_although_its_old_row_is_missing(subscriber: Database) -> None:
    """Were the new row inserted first, the DELETE of the missing one, or its move, would find it."""
    target = linked(subscriber, "cascade")
    subscriber.run("delete from a; delete from z")
    changes = target.window()
    changes.delete(PARENT, 1)
    changes.insert(PARENT, 1, "one again")
    changes.update(PARENT, 5, "five", old=[2])
    changes.insert(PARENT, 2, "two again")
    changes.insert(CHILD, 1, 1)

    applied = target.apply(changes)

    assert target.rows(ROWS) == [("z", 1, "one again"), ("z", 2, "two again"), ("a", 1, "1")]
    assert applied.conflicts == {"delete_missing": 1, "update_missing": 1}


@pytest.mark.parametrize("policy", [ConflictPolicy.OVERWRITE, ConflictPolicy.SKIP])
def test_conflict_of_a_window_that_is_merged_in_the_second_order_is_counted_once(
    subscriber: Database, policy: ConflictPolicy
) -> None:
    target = linked(subscriber, "no action", policy)
    changes = target.window()
    changes.delete(CHILD, 1)
    changes.delete(PARENT, 1)
    changes.insert(PARENT, 4, "one")  # the value is free once row 1 is deleted
    changes.insert(PARENT, 3, "other")

    applied = target.apply(changes)

    third = "other" if policy is ConflictPolicy.OVERWRITE else "three"
    assert target.rows(ROWS) == [("z", 2, "two"), ("z", 3, third), ("z", 4, "one"), ("a", 2, "2")]
    assert applied.conflicts == {"insert_exists": 1}


def test_window_that_neither_order_allows_is_refused_as_a_whole(subscriber: Database, action: str) -> None:
    """With ON DELETE CASCADE the second order would lose the row; with SET NULL it is set again."""
    target = linked(subscriber, action)
    before = target.rows(ROWS)
    changes = target.window()
    changes.update(CHILD, 1, 2)
    changes.delete(PARENT, 1)
    changes.insert(PARENT, 4, "one")

    if action == "set null":
        target.apply(changes)
        assert target.rows("select * from a order by id") == [(1, 2), (2, 2)]
        return
    with pytest.raises(ApplyConflict, match="foreign key"):
        target.apply(changes)

    assert target.rows(ROWS) == before


@pytest.mark.parametrize("tables", [(PARENT,), (PARENT, CHILD)])
def test_rows_that_exchange_values_are_not_deleted_for_it_where_a_foreign_key_would_act(
    subscriber: Database, action: str, tables: tuple[str, ...]
) -> None:
    target = linked(subscriber, action)
    before = target.rows(ROWS)
    changes = target.window()
    changes.update(PARENT, 1, "none")
    changes.update(PARENT, 2, "one")
    changes.update(PARENT, 1, "two")
    if CHILD in tables:
        changes.insert(CHILD, 4, 1)

    with pytest.raises(ApplyConflict, match="foreign key"):
        target.apply(changes)

    assert target.rows(ROWS) == before


def test_table_that_refers_to_itself(subscriber: Database) -> None:
    subscriber.run("create table t (id int primary key, p int references t on delete cascade)")
    subscriber.run("insert into t values (1, null), (2, 1), (3, 2), (9, null), (10, 9)")
    subscriber.run(FIRE_ALWAYS)
    target = Target(subscriber.dsn, {"t": ("id", "p")})
    changes = target.window()
    changes.insert("t", 4, None)
    changes.insert("t", 5, 4)
    changes.update("t", 2, 5)
    changes.delete("t", 1)
    changes.delete("t", 10)
    changes.delete("t", 9)

    applied = target.apply(changes)

    assert target.rows("select * from t order by id") == [(2, 5), (3, 2), (4, None), (5, 4)]
    assert (applied.insert, applied.update, applied.delete, applied.conflicts) == (2, 1, 3, {})


@pytest.fixture
def owners(subscriber: Database) -> Iterator[tuple[str, str]]:
    """Two roles that own nothing."""
    roles = (f"parent_{subscriber.name}", f"child_{subscriber.name}")
    for role in roles:
        subscriber.run(f"create role {role}; grant usage on schema public to {role}")
    yield roles
    subscriber.run(f"drop owned by {', '.join(roles)} cascade; drop role {', '.join(roles)}")


def test_tables_of_other_owners(subscriber: Database, owners: tuple[str, str]) -> None:
    """Every statement runs as the owner of its table, in both orders (R8.21)."""
    target = linked(subscriber, "no action")
    parent, child = owners
    subscriber.run(
        "create table ran (what text, by text); grant insert on ran to public;"
        "create function note() returns trigger language plpgsql as $$ begin"
        " insert into public.ran values (tg_table_name || ' ' || tg_op, current_user); return null; end $$"
    )
    for table, owner in ((PARENT, parent), (CHILD, child)):
        subscriber.run(
            f"alter table {table} owner to {owner};"
            f"create trigger note after insert or update or delete on {table}"
            " for each row execute function note();"
            f"alter table {table} enable always trigger note"
        )
    subscriber.run(f"grant references, select, update on z to {child}; grant select, update on a to {parent}")
    changes = target.window()
    move_to_a_new_row(changes)
    target.apply(changes)
    assert target.rows(ROWS) == MOVED
    changes = target.window()
    changes.lsn += 100
    changes.delete(CHILD, 1)
    changes.delete(CHILD, 5)
    changes.delete(PARENT, 4)
    changes.insert(PARENT, 5, "four")
    changes.insert(CHILD, 7, 5)
    target.apply(changes)

    assert target.rows(ROWS) == [("z", 3, "three"), ("z", 5, "four"), ("a", 7, "5")]
    assert set(target.rows("select left(what, 1), by from ran")) == {("z", parent), ("a", child)}
