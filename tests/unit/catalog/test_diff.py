"""What is said of two catalogs that differ."""

from __future__ import annotations

from dataclasses import replace

from cdc_replay.catalog.diff import differences
from cdc_replay.model.publication import RowFilter
from fixtures.catalogs import catalog, listed, publication, table

T = table(1, "s.t")
BEFORE = catalog(T, table(2, "s.u"), publications=[publication("p", listed(1, "a > 1")), publication("q")])


def test_differences_name_publications_and_tables() -> None:
    after = catalog(
        table(1, "s.t2"),
        table(3, "s.v"),
        publications=[publication("p", listed(1, "a > 2")), publication("r")],
    )

    assert differences(BEFORE, after) == (
        'publication "p"', 'publication "q"', 'publication "r"',
        "table s.t", "table s.t2", "table s.u", "table s.v",
    )  # fmt: skip


def test_differences_ignore_printed_texts() -> None:
    """Positions, oids of publications, and what the server prints of expressions and types."""
    [column, *others] = T.columns
    printed = replace(T, columns=(replace(column, type_sql="int4"), *others))
    membership = replace(listed(1), row_filter=RowFilter("{a > 1}", "(a > 1)"))
    after = catalog(
        printed, table(2, "s.u"), publications=[publication("p", membership), publication("q")], lsn=7
    )
    renumbered = {name: replace(published, oid=5) for name, published in after.publications.items()}

    assert differences(BEFORE, replace(after, publications=renumbered)) == ()
    assert differences(BEFORE, BEFORE) == ()
