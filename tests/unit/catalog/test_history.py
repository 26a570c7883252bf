"""Which version of the publisher's catalog applies to a change (R9.10).

Full catalogs and DDL changes are written by hand; their content is the schemas of publications, so a mapping
of publications to schemas identifies a catalog.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_replay.arrow.version_index import CatalogVersions
from cdc_replay.catalog import history
from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.catalog.json_form import catalog_to_json
from cdc_replay.errors import ChangeLogDamaged
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublisherCatalog
from fixtures.catalogs import catalog, publication

NAMES = ("p", "q", "r")


@dataclass(frozen=True)
class Entry:
    """A catalog entry: `says` maps publications to schemas; without an owner it is a full catalog."""

    from_lsn: Lsn
    says: Mapping[str, str]
    owner: Lsn | None = None

    @property
    def text(self) -> str:
        if self.owner is None:
            publications = [
                replace(publication(name, schemas=[schema]), oid=NAMES.index(name) + 1)
                for name, schema in self.says.items()
            ]
            return catalog_to_json(catalog(publications=publications))
        rows = [
            [NAMES.index(name) + 1, name, False, False, True, True, True, True, [schema], False]
            for name, schema in self.says.items()
        ]
        content = {"format": 1, "tables": [], "columns": [], "publications": rows, "memberships": []}
        oids = [row[0] for row in rows]
        return json.dumps(content | {"touched_publications": oids, "schemas_of": oids})


def full_catalog(from_lsn: int, **says: str) -> Entry:
    return Entry(Lsn(from_lsn), says)


def ddl_change(at: int, commit: int, **says: str) -> Entry:
    """DDL whose message is at `at`, in a transaction whose commit ends at `commit`."""
    return Entry(Lsn(at), says, Lsn(commit))


def content(catalog_read: PublisherCatalog) -> dict[str, str]:
    return {
        name: next(iter(published.schemas)) for name, published in sorted(catalog_read.publications.items())
    }


def seen(known: Sequence[Entry], commit_lsn: int, lsn: int) -> dict[str, str]:
    """The catalog of a change, by the history and the decoder's choice of a version."""
    history = CatalogHistory(known)
    [version_id] = (
        CatalogVersions.from_positions(history.positions)
        .indexes(np.array([commit_lsn]), np.array([lsn]))
        .tolist()
    )
    return content(history.catalogs_of([version_id])[version_id])


def expected(entries: Sequence[Entry], commit_lsn: int, lsn: int) -> dict[str, str]:
    """R9.10, word by word: DDL committed before the change, and earlier DDL of the same transaction."""
    full_entries = sorted(
        (entry for entry in entries if entry.owner is None), key=lambda entry: entry.from_lsn
    )
    start = ([entry for entry in full_entries if entry.from_lsn.value <= lsn] or full_entries[:1])[-1]
    schemas = dict(start.says)
    changes = [(entry.owner.value, entry.from_lsn.value, entry.says) for entry in entries if entry.owner]
    for owner, _, says in sorted(changes, key=lambda entry: entry[:2]):
        if start.from_lsn.value < owner <= lsn:
            schemas |= says
    for owner, at, says in sorted(changes, key=lambda entry: entry[:2]):
        if owner == commit_lsn and at <= lsn:
            schemas |= says
    return dict(sorted(schemas.items()))


def test_change_applies_to_own_transaction_at_once_and_to_others_from_commit() -> None:
    """R9.10: T1 alters at 20 and commits at 60; T2 is open meanwhile and commits at 90."""
    known = [full_catalog(0, p="old"), ddl_change(20, 60, p="new")]

    assert [seen(known, 60, lsn)["p"] for lsn in (10, 19, 20, 50)] == ["old", "old", "new", "new"]
    assert [seen(known, 90, lsn)["p"] for lsn in (10, 50, 59, 60, 80)] == ["old", "old", "old", "new", "new"]


def test_catalog_between_two_changes_has_the_first_only() -> None:
    """R9.10's run: T1 inserts at 10, T2 alters and commits at 40, T1 inserts at 50 and commits at 60."""
    known = [full_catalog(0, p="old"), ddl_change(30, 40, p="new")]

    assert [seen(known, 60, lsn)["p"] for lsn in (10, 50)] == ["old", "new"]


def test_open_transactions_with_ddl_keep_each_others_changes() -> None:
    """T1 alters p at 10, T2 alters q at 20; T2 commits at 40, T1 at 60: each sees its own, then both."""
    known = [full_catalog(0, p="old", q="old"), ddl_change(10, 60, p="new"), ddl_change(20, 40, q="new")]

    assert seen(known, 60, 30) == {"p": "new", "q": "old"}
    assert seen(known, 40, 30) == {"p": "old", "q": "new"}
    assert seen(known, 60, 50) == {"p": "new", "q": "new"}
    assert seen(known, 90, 50) == {"p": "old", "q": "new"}
    assert seen(known, 90, 70) == {"p": "new", "q": "new"}


def test_prepared_change_applies_to_others_from_commit_prepared() -> None:
    """Its changes keep the positions of before the PREPARE; its commit is the COMMIT PREPARED, at 80."""
    known = [full_catalog(0, p="old"), ddl_change(20, 80, p="new")]

    assert seen(known, 80, 30)["p"] == "new"
    assert [seen(known, 90, lsn)["p"] for lsn in (70, 80)] == ["old", "new"]


def test_full_catalog_supersedes_committed_changes_but_not_open_ones() -> None:
    known = [
        full_catalog(0, p="old", q="old"),
        ddl_change(10, 20, p="new"),
        ddl_change(15, 50, q="own"),
        full_catalog(30, p="x"),
    ]

    assert [seen(known, 90, lsn) for lsn in (20, 30, 50)] == [
        {"p": "new", "q": "old"},
        {"p": "x"},
        {"p": "x", "q": "own"},
    ]
    assert seen(known, 50, 40) == {"p": "x", "q": "own"}


LSNS = st.integers(1, 30)
SAYS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from("abcdef"), min_size=1, max_size=2)


@st.composite
def histories(draw: st.DrawFn) -> list[Entry]:
    """Up to five transactions of up to three commands each, and up to two more whole catalogs."""
    known = [Entry(Lsn(draw(st.integers(0, 2))), draw(SAYS))]
    for owner in draw(st.sets(st.integers(6, 40), max_size=5)):
        commands = draw(st.sets(st.integers(3, owner - 1), min_size=1, max_size=3))
        known += [Entry(Lsn(at), draw(SAYS), Lsn(owner)) for at in commands]
    known += [Entry(Lsn(at), draw(SAYS)) for at in draw(st.sets(st.integers(3, 40), max_size=2))]
    return draw(st.permutations(known))


@given(histories(), st.data())
@settings(max_examples=300, deadline=None)
def test_every_change_has_catalog_of_the_rule(known: list[Entry], data: st.DataObject) -> None:
    owners = [entry.owner.value for entry in known if entry.owner]
    commit_lsn = data.draw(st.sampled_from(owners) if owners else st.just(41))
    for commit in (commit_lsn, 41):
        for lsn in range(commit):
            assert seen(known, commit, lsn) == expected(known, commit, lsn), (commit, lsn)


@given(histories(), st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_window_has_version_of_every_change_in_it(known: list[Entry], after: int, upto: int) -> None:
    """Of changes whose position is in it as well; and all its catalogs are those that their numbers mean."""
    history = CatalogHistory(known)
    catalogs = history.within(Window(Lsn(after), Lsn(upto)))
    choice = CatalogVersions.from_positions(history.positions)
    for commit in range(after + 1, upto + 1):
        lsns = np.arange(after, commit)
        assert set(choice.indexes(np.full(len(lsns), commit), lsns).tolist()) <= catalogs.keys()
    assert list(catalogs) == sorted(catalogs)
    assert catalogs == history.catalogs_of(catalogs)
    for version_id, version_catalog in catalogs.items():
        assert version_catalog.lsn == history.versions[version_id].from_lsn


@given(histories(), st.integers(6, 40))
@settings(max_examples=200, deadline=None)
def test_later_captures_keep_version_ids(known: list[Entry], end: int) -> None:
    """A pull adds later commits only, so frames that were decoded before stay valid."""

    def position(entry: Entry) -> int:
        return (entry.owner or entry.from_lsn).value

    before = CatalogHistory([entry for entry in known if position(entry) <= end])
    assert CatalogHistory(known).versions[: len(before.versions)] == before.versions


def test_position_before_all_versions_has_the_first() -> None:
    """Nothing older is known."""
    history = CatalogHistory([full_catalog(100, p="first"), full_catalog(200, p="second")])

    assert [content(history.at(Lsn(lsn)))["p"] for lsn in (0, 99, 199, 200)] == ["first"] * 3 + ["second"]


def test_full_catalogs_are_returned_backwards() -> None:
    known = CatalogHistory(
        [full_catalog(0, p="a"), ddl_change(5, 10, p="b"), full_catalog(20, p="c"), full_catalog(30, p="d")]
    )
    last = len(known.versions) - 1

    assert [content(state)["p"] for state in known.full_catalogs(last)] == ["c", "a"]


def test_later_reader_builds_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window opens the log again; a catalog of thousands of tables takes a second to build."""
    built: list[str] = []

    def record(parse: Callable[[str], object], text: str) -> object:
        built.append(parse.__name__)
        return parse(text)

    for name in ("catalog_from_json", "parse_ddl_change"):
        monkeypatch.setattr(history, name, functools.partial(record, getattr(history, name)))
    known = [full_catalog(0, p="old", q="of this test"), ddl_change(10, 20, p="new")]
    later = [*known, ddl_change(30, 40, p="newer")]

    states = [content(CatalogHistory(list(entries)).at(Lsn(50)))["p"] for entries in (known, later) * 2]

    assert states == ["new", "newer", "new", "newer"]
    assert built == ["catalog_from_json", "parse_ddl_change", "parse_ddl_change"]


@pytest.mark.parametrize("known", [[], [ddl_change(1, 2, p="a")]])
def test_history_without_full_catalog_raises(known: list[Entry]) -> None:
    with pytest.raises(ChangeLogDamaged, match="no version of the publisher's catalog"):
        CatalogHistory(known).at(Lsn(1))


def test_unreadable_change_raises_change_log_damaged() -> None:
    @dataclass(frozen=True)
    class Torn(Entry):
        @property
        def text(self) -> str:
            return super().text[:-1]

    history = CatalogHistory([full_catalog(0, p="a"), Torn(Lsn(1), {"p": "b"}, Lsn(2))])
    with pytest.raises(ChangeLogDamaged, match="the DDL change at 0/1"):
        history.at(Lsn(3))
