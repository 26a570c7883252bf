"""Which version of the publisher's catalog is in force for a change (R9.10).

Whole catalogs and deltas are written by hand; what each of them says is the schema of a publication, so a
catalog is known by a mapping of publications to schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_replay.arrow.version_index import CatalogVersions
from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.catalog.json_form import catalog_to_json
from cdc_replay.errors import ChangeLogDamaged
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublisherCatalog
from fixtures.catalogs import catalog, publication

NAMES = ("p", "q", "r")


@dataclass(frozen=True)
class Known:
    """A definition: `says` maps publications to schemas; without an owner it says all that there is."""

    from_lsn: Lsn
    says: Mapping[str, str]
    owner: Lsn | None = None

    @property
    def text(self) -> str:
        if self.owner is None:
            found = [
                replace(publication(name, schemas=[schema]), oid=NAMES.index(name) + 1)
                for name, schema in self.says.items()
            ]
            return catalog_to_json(catalog(publications=found))
        rows = [
            [NAMES.index(name) + 1, name, False, False, True, True, True, True, [schema], False]
            for name, schema in self.says.items()
        ]
        content = {"format": 1, "tables": [], "columns": [], "publications": rows, "memberships": []}
        oids = [row[0] for row in rows]
        return json.dumps(content | {"touched_publications": oids, "schemas_of": oids})


def whole(from_lsn: int, **says: str) -> Known:
    return Known(Lsn(from_lsn), says)


def command(at: int, commit: int, **says: str) -> Known:
    """DDL whose message is at `at`, in a transaction whose commit ends at `commit`."""
    return Known(Lsn(at), says, Lsn(commit))


def content(found: PublisherCatalog) -> dict[str, str]:
    return {name: next(iter(each.schemas)) for name, each in sorted(found.publications.items())}


def seen(known: Sequence[Known], commit_lsn: int, lsn: int) -> dict[str, str]:
    """What the history and the decoder's choice of a version give for a change."""
    history = CatalogHistory(known)
    [number] = (
        CatalogVersions.from_positions(history.positions)
        .indexes(np.array([commit_lsn]), np.array([lsn]))
        .tolist()
    )
    return content(history.numbered([number])[number])


def expected(known: Sequence[Known], commit_lsn: int, lsn: int) -> dict[str, str]:
    """R9.10, word by word: DDL committed before the change, and earlier DDL of the same transaction."""
    wholes = sorted((each for each in known if each.owner is None), key=lambda each: each.from_lsn)
    start = ([each for each in wholes if each.from_lsn.value <= lsn] or wholes[:1])[-1]
    found = dict(start.says)
    deltas = [(each.owner.value, each.from_lsn.value, each.says) for each in known if each.owner]
    for owner, _, says in sorted(deltas, key=lambda each: each[:2]):
        if start.from_lsn.value < owner <= lsn:
            found |= says
    for owner, at, says in sorted(deltas, key=lambda each: each[:2]):
        if owner == commit_lsn and at <= lsn:
            found |= says
    return dict(sorted(found.items()))


def test_a_command_is_in_force_at_once_for_its_transaction_and_at_its_commit_for_others() -> None:
    """R9.10: T1 alters at 20 and commits at 60; T2 is open meanwhile and commits at 90."""
    known = [whole(0, p="old"), command(20, 60, p="new")]

    assert [seen(known, 60, lsn)["p"] for lsn in (10, 19, 20, 50)] == ["old", "old", "new", "new"]
    assert [seen(known, 90, lsn)["p"] for lsn in (10, 50, 59, 60, 80)] == ["old", "old", "old", "new", "new"]


def test_the_definitions_of_the_middle_hold_for_the_middle() -> None:
    """R9.10's run: T1 inserts at 10, T2 alters and commits at 40, T1 inserts at 50 and commits at 60."""
    known = [whole(0, p="old"), command(30, 40, p="new")]

    assert [seen(known, 60, lsn)["p"] for lsn in (10, 50)] == ["old", "new"]


def test_open_transactions_with_ddl_do_not_undo_each_other() -> None:
    """T1 alters p at 10, T2 alters q at 20; T2 commits at 40, T1 at 60: each sees its own, then both."""
    known = [whole(0, p="old", q="old"), command(10, 60, p="new"), command(20, 40, q="new")]

    assert seen(known, 60, 30) == {"p": "new", "q": "old"}
    assert seen(known, 40, 30) == {"p": "old", "q": "new"}
    assert seen(known, 60, 50) == {"p": "new", "q": "new"}
    assert seen(known, 90, 50) == {"p": "old", "q": "new"}
    assert seen(known, 90, 70) == {"p": "new", "q": "new"}


def test_a_prepared_transaction_is_in_force_for_others_from_commit_prepared_on() -> None:
    """Its changes keep the positions of before the PREPARE; its commit is the COMMIT PREPARED, at 80."""
    known = [whole(0, p="old"), command(20, 80, p="new")]

    assert seen(known, 80, 30)["p"] == "new"
    assert [seen(known, 90, lsn)["p"] for lsn in (70, 80)] == ["old", "new"]


def test_a_whole_catalog_supersedes_what_was_committed_before_it_and_no_open_command() -> None:
    known = [whole(0, p="old", q="old"), command(10, 20, p="new"), command(15, 50, q="own"), whole(30, p="x")]

    assert [seen(known, 90, lsn) for lsn in (20, 30, 50)] == [
        {"p": "new", "q": "old"},
        {"p": "x"},
        {"p": "x", "q": "own"},
    ]
    assert seen(known, 50, 40) == {"p": "x", "q": "own"}


LSNS = st.integers(1, 30)
SAYS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from("abcdef"), min_size=1, max_size=2)


@st.composite
def histories(draw: st.DrawFn) -> list[Known]:
    """Up to five transactions of up to three commands each, and up to two more whole catalogs."""
    known = [Known(Lsn(draw(st.integers(0, 2))), draw(SAYS))]
    for owner in draw(st.sets(st.integers(6, 40), max_size=5)):
        commands = draw(st.sets(st.integers(3, owner - 1), min_size=1, max_size=3))
        known += [Known(Lsn(at), draw(SAYS), Lsn(owner)) for at in commands]
    known += [Known(Lsn(at), draw(SAYS)) for at in draw(st.sets(st.integers(3, 40), max_size=2))]
    return draw(st.permutations(known))


@given(histories(), st.data())
@settings(max_examples=300, deadline=None)
def test_every_change_gets_the_catalog_of_the_rule(known: list[Known], data: st.DataObject) -> None:
    owners = [each.owner.value for each in known if each.owner]
    commit_lsn = data.draw(st.sampled_from(owners) if owners else st.just(41))
    for commit in (commit_lsn, 41):
        for lsn in range(commit):
            assert seen(known, commit, lsn) == expected(known, commit, lsn), (commit, lsn)


@given(histories(), st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_a_window_has_the_version_of_every_change_in_it(known: list[Known], after: int, upto: int) -> None:
    """Of changes whose position is in it as well; and all its catalogs are those that their numbers mean."""
    history = CatalogHistory(known)
    found = history.within(Window(Lsn(after), Lsn(upto)))
    choice = CatalogVersions.from_positions(history.positions)
    for commit in range(after + 1, upto + 1):
        lsns = np.arange(after, commit)
        assert set(choice.indexes(np.full(len(lsns), commit), lsns).tolist()) <= found.keys()
    assert list(found) == sorted(found)
    assert found == history.numbered(found)
    for number, each in found.items():
        assert each.lsn == history.versions[number].from_lsn


@given(histories(), st.integers(6, 40))
@settings(max_examples=200, deadline=None)
def test_what_is_captured_later_changes_no_number(known: list[Known], end: int) -> None:
    """A pull adds what committed behind the log's end: frames that were decoded before stay right."""

    def position(each: Known) -> int:
        return (each.owner or each.from_lsn).value

    before = CatalogHistory([each for each in known if position(each) <= end])
    assert CatalogHistory(known).versions[: len(before.versions)] == before.versions


def test_before_all_versions_the_first_is_in_force() -> None:
    """Nothing older is known."""
    history = CatalogHistory([whole(100, p="first"), whole(200, p="second")])

    assert [content(history.at(Lsn(lsn)))["p"] for lsn in (0, 99, 199, 200)] == ["first"] * 3 + ["second"]


def test_whole_catalogs_are_found_backwards() -> None:
    history = CatalogHistory([whole(0, p="a"), command(5, 10, p="b"), whole(20, p="c"), whole(30, p="d")])
    last = len(history.versions) - 1

    assert [content(each)["p"] for each in history.whole_catalogs(last)] == ["c", "a"]


@pytest.mark.parametrize("known", [[], [command(1, 2, p="a")]])
def test_a_history_without_a_whole_catalog_says_so(known: list[Known]) -> None:
    with pytest.raises(ChangeLogDamaged, match="no version of the publisher's catalog"):
        CatalogHistory(known).at(Lsn(1))


def test_a_delta_that_cannot_be_read_is_damage() -> None:
    @dataclass(frozen=True)
    class Torn(Known):
        @property
        def text(self) -> str:
            return super().text[:-1]

    history = CatalogHistory([whole(0, p="a"), Torn(Lsn(1), {"p": "b"}, Lsn(2))])
    with pytest.raises(ChangeLogDamaged, match="what a command changed at 0/1"):
        history.at(Lsn(3))
