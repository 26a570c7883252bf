"""One window of two tables, applied once."""

from __future__ import annotations

from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import subscription_tables
from integration.replay.apply.windows import Changes, Target

TABLES = """
    create table t (id int primary key, a int, own text);
    create table u (id int primary key, a int);
    insert into t values (1, 1, 'x'), (2, 2, 'y'), (3, 3, 'z')
"""
PUBLISHED: dict[str, tuple[str, ...]] = {"t": ("id", "a"), "u": ("id", "a")}
EXPECTED = [(1, 11, "x"), (4, 20, "y"), (5, 50, None)]


def fill(changes: Changes) -> None:
    changes.update("t", 1, 10)
    changes.update("t", 1, 11)
    changes.update("t", 4, 20, old=[2])
    changes.delete("t", 3)
    changes.insert("t", 5, 50)
    for number in range(100):
        changes.insert("u", number, number)


def run_once(target: Target) -> bool:
    """Apply the window unless the subscriber says that it is applied, as `replay` decides; whether it was."""
    changes = target.window()
    fill(changes)
    with connect(target.dsn, purpose="test") as connection:
        states = subscription_tables.table_states(connection, "nsw")
    if any(
        isinstance(table_state, Ready) and table_state.applied_lsn.value >= changes.lsn
        for table_state in states.values()
    ):
        return False
    target.apply(changes)
    return True
