"""`why` of a key that several rows have."""

from __future__ import annotations

import pytest

from cdc_replay.commands.why import why
from cdc_replay.model.explained_row import Cause
from cdc_replay.model.relation import QualifiedName
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLES = "create table keyless (a int, b text); create table keyed (a int, b text)"


def test_several_rows_are_neither_the_same_nor_different(twin: Twin) -> None:
    twin.publisher.run(f"""
        {TABLES}; alter table keyless replica identity full; alter table keyed add primary key (a);
        create publication p for table keyless, keyed;
        insert into keyless values (1, 'x'), (1, 'y'), (2, 'x'), (3, 'x'); insert into keyed values (1, 'x')
    """)
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours("s")
    twin.pairs["s"].ours.run("""
        truncate keyless; insert into keyless values (1, 'y'), (1, 'x'), (2, 'x'), (2, 'x'), (3, 'x');
        insert into keyed values (1, 'mine')
    """)
    questions = [("keyless", "a=1"), ("keyless", "a=2"), ("keyed", "1"), ("keyless", "a=3")]
    answers = [why(twin.config, "s", QualifiedName("public", table), [key]) for table, key in questions]
    assert [(row.cause, row.differs, row.differing) for row in answers] == [
        *[(Cause.UNKNOWN, None, ())] * 3,
        (Cause.SAME, False, ()),
    ]
    assert "Several rows of the subscriber have this key" in answers[1].explanation
