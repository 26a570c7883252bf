"""The owner of a schema names it so that two tables have the same text, such as `a.b.c` (R8.1).

Nothing that is kept, found or told by a table's text may be taken for that of the other.
"""

from __future__ import annotations

from typing import Final

import pytest

from cdc_replay.commands.status import status
from cdc_replay.commands.validate import validate
from cdc_replay.commands.validate_and_repair import validate_and_repair
from cdc_replay.model.validation_scope import ValidationScope
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

THEIRS: Final = '"a.b".c'
OURS: Final = 'a."b.c"'
TABLES: Final = (
    'create schema a; create schema "a.b"; '
    f"create table {OURS} (id int primary key, v text); create table {THEIRS} (id int primary key, v text)"
)


def test_tables_of_the_same_text_are_copied_compared_and_repaired_apart(twin: Twin) -> None:
    twin.publisher.run(
        f"{TABLES}; create publication p for table {OURS}, {THEIRS};"
        f" insert into {OURS} select n, repeat('ours', 50) from generate_series(1, 2000) as n;"
        f" insert into {THEIRS} select n, repeat('theirs', 50) from generate_series(1001, 4000) as n"
    )
    twin.subscribe("s", "p", tables=TABLES, snapshot_chunk="32kB")
    twin.sync()
    assert [len(twin.rows("s", table)) for table in (OURS, THEIRS)] == [2000, 3000]

    twin.publisher.run(f"insert into {OURS} values (0, 'new'); delete from {THEIRS} where id = 1001")
    twin.sync()
    assert [len(twin.rows("s", table)) for table in (OURS, THEIRS)] == [2001, 2999]
    assert validate(twin.config, "s").success

    twin.pairs["s"].ours.run(f"set session_replication_role = replica; delete from {THEIRS} where id = 2000")
    result = validate(twin.config, "s")
    assert [(table["table"], table["success"]) for table in result.tables] == [
        ("a.b.c", True),
        (THEIRS, False),
    ]
    assert [table.table for table in status(twin.config, "s").tables] == ["a.b.c", THEIRS]
    chosen = validate(twin.config, "s", scope=ValidationScope(("a.b.c",)))
    assert [(table["table"], table["success"]) for table in chosen.tables] == [("a.b.c", True)]
    assert validate_and_repair(twin.config, "s", confirm=lambda *_: True).success
    assert [len(twin.rows("s", table)) for table in (OURS, THEIRS)] == [2001, 2999]
