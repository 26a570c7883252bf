"""`why` explains planted differences of different kinds, each by its own cause."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest

from cdc_replay.cli.program import run_line
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.explained_row import Answer, Cause, ClauseRole, EventKind, Fate, WhyResult
from embedded.postgres import Cluster
from fixtures.postgres import Database, create_database, drop_database
from fixtures.twin import Twin
from integration.explain_row.mysteries import Mysteries, plant

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def mysteries(
    spark: object,
    publisher_cluster: Cluster,
    subscriber_cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mysteries]:
    assert spark is not None
    publisher = create_database(publisher_cluster, "publisher")
    twin = Twin(publisher, subscriber_cluster, tmp_path_factory.mktemp("mysteries"))
    yield plant(twin)
    twin.drop()
    publisher.run("select pg_replication_origin_drop('elsewhere_' || current_database())")
    drop_database(publisher)


ANSWERS: list[tuple[str, str, tuple[str, ...], Cause, str]] = [
    ("shop", "orders", ("1",), Cause.SAME, "same row"),
    ("shop", "orders", ("2",), Cause.FILTERED_OUT, "is false for it"),
    ("shop", "orders", ("60",), Cause.FILTERED_OUT, "is null for it"),
    ("shop", "orders", ("3",), Cause.CHANGED_LOCALLY, "updated on the subscriber: note differs"),
    ("shop", "orders", ("4",), Cause.CHANGED_LOCALLY, "deleted on the subscriber"),
    ("shop", "orders", ("999",), Cause.CHANGED_LOCALLY, "inserted on the subscriber"),
    ("shop", "wiped", ("1",), Cause.CHANGED_LOCALLY, "TRUNCATE"),
    ("shop", "wiped", ("2",), Cause.ABSENT, "TRUNCATE"),
    ("shop", "orders", ("5",), Cause.ABSENT, "DELETE"),
    ("shop", "orders", ("4711",), Cause.ABSENT, "no change of one"),
    ("shop", "orders", ("7",), Cause.KEY_MOVED, "another key"),
    ("shop", "orders", ("107",), Cause.SAME, "same row"),
    ("shop", "orders", ("50",), Cause.FILTER_CHANGED, "lets the row in"),
    ("shop", "orders", ("62",), Cause.FILTER_CHANGED, "shuts the row out"),
    ("shop", "orders", ("9",), Cause.NOT_APPLIED, "not applied yet"),
    ("shop", "orders", ("8",), Cause.NOT_CAPTURED_YET, "ends at"),
    ("shop", "quiet", ("1",), Cause.ACTION_NOT_PUBLISHED, "do not publish delete"),
    ("shop", "quiet", ("10",), Cause.CONFLICT, "insert_exists"),
    ("shop", "wide", ("1",), Cause.COLUMNS_CHANGED, "b is published since"),
    ("shop", "events", ("2",), Cause.REWRITTEN, "R11.9"),
    ("shop", "late", ("1",), Cause.NOT_SUBSCRIBED, "cdc-replay refresh shop"),
    ("shop", "unlisted", ("1",), Cause.NOT_PUBLISHED, "No publication"),
    ("shop", "trips", ("1", "2026-02-05"), Cause.SAME, "same row"),
    ("local", "orders", ("10",), Cause.NEVER_COPIED, "copy_data: false"),
    ("local", "orders", ("11",), Cause.NEVER_COPIED, "update_missing"),
    ("rated", "ratio", ("1",), Cause.SKIPPED, "resume --skip"),
    ("rated", "ratio", ("2",), Cause.SAME, "same row"),
    ("rated", "ratio", ("3",), Cause.PARKED, "division by zero"),
    ("rated", "ratio", ("4",), Cause.PARKED, "is parked before transaction"),
]


@pytest.mark.parametrize(
    ("subscription", "table", "key", "cause", "words"),
    ANSWERS,
    ids=[f"{subscription}-{table}-{key[0]}" for subscription, table, key, _, _ in ANSWERS],
)
def test_each_mystery_is_explained(
    mysteries: Mysteries, subscription: str, table: str, key: tuple[str, ...], cause: Cause, words: str
) -> None:
    result = mysteries.why(subscription, table, *key)
    assert (result.cause, words in result.explanation) == (cause, True), result.explanation


def test_a_change_with_an_origin_inside_a_transaction_is_explained(mysteries: Mysteries) -> None:
    """PostgreSQL 15 does not send that origin (R8.20): the row is there."""
    result = mysteries.why("local", "orders", "63")
    if mysteries.twin.publisher.version < 16:
        assert result.cause == Cause.SAME
    else:
        assert (result.cause, "`origin: none`" in result.explanation) == (Cause.ORIGIN, True)


def outcomes(result: WhyResult) -> list[tuple[str, str]]:
    return [(change.kind, change.outcome) for change in result.changes]


def test_clauses_have_three_values_for_both_rows(mysteries: Mysteries) -> None:
    """R3.5, R4.4: the UPDATE leaves one row filter and enters none; the other publications do not list it."""
    (left,) = mysteries.why("shop", "orders", "2").changes
    assert outcomes(mysteries.why("shop", "orders", "2")) == [("UPDATE", "DELETE")]
    answers = {clause.publication: (clause.role, clause.old, clause.new) for clause in left.clauses}
    assert answers["orders_nsw"] == (ClauseRole.FILTER, Answer.TRUE, Answer.FALSE)
    assert answers["orders_big"] == (ClauseRole.FILTER, Answer.FALSE, Answer.FALSE)
    assert answers["plain"] == (ClauseRole.NOT_LISTED, None, None)
    assert left.case == "the old row passes, the new one does not pass: DELETE (R4.4)"
    (unknown,) = mysteries.why("shop", "orders", "60").changes
    assert [(clause.old, clause.new) for clause in unknown.clauses[:2]] == [
        (Answer.NO_ROW, Answer.NULL),
        (Answer.NO_ROW, Answer.FALSE),
    ]
    assert (unknown.outcome, unknown.rule) == ("nothing", "R3.5")


def test_an_applied_change_names_its_transaction_and_window(mysteries: Mysteries) -> None:
    (change,) = mysteries.why("shop", "orders", "1").changes
    assert change.fate is Fate.APPLIED
    window = change.window
    assert window is not None
    assert window.from_lsn < change.commit_lsn <= window.to_lsn
    ((xid,),) = mysteries.twin.publisher.rows("select xmin::text::bigint from orders where id = 1")
    assert change.xid == xid
    (conflict,) = mysteries.why("shop", "quiet", "10").changes
    assert conflict.window is not None
    assert conflict.window.conflict_kinds == ("insert_exists",)


def test_a_failing_clause_is_an_error_and_stops_replay(mysteries: Mysteries) -> None:
    result = mysteries.why("rated", "ratio", "3")
    (change,) = result.changes
    assert (change.clauses[0].new, change.outcome, change.rule) == (Answer.ERROR, "refused", "R1.36")
    assert "division by zero" in (change.clauses[0].error or "")
    assert change.commit_lsn == mysteries.positions["parked"]
    assert mysteries.why("rated", "ratio", "1").changes[0].commit_lsn == mysteries.positions["skipped"]


def test_rows_are_followed_through_keys_and_partitions(mysteries: Mysteries) -> None:
    """The move between partitions is a DELETE and an INSERT (R2.15), published as the root's (R2.4)."""
    moved = mysteries.why("shop", "trips_2", "day=2026-02-05", "id=1")
    (arrived,) = moved.changes
    assert (arrived.kind, arrived.leaf, arrived.published_as) == ("INSERT", "public.trips_2", "public.trips")
    assert "publish_via_partition_root" in arrived.why_published_as
    assert outcomes(mysteries.why("shop", "trips", "1", "2026-01-05")) == [
        ("INSERT", "INSERT"),
        ("DELETE", "DELETE"),
    ]
    renumbered = mysteries.why("shop", "orders", "107")
    assert [change.old_key for change in renumbered.changes] == [{"id": "7"}]
    assert mysteries.why("shop", "orders", "7").changes == renumbered.changes


def test_a_filter_change_is_named_with_its_position(mysteries: Mysteries) -> None:
    result = mysteries.why("shop", "orders", "50")
    definitions = [event for event in result.events if event.kind is EventKind.DEFINITION]
    assert all(event.lsn > mysteries.positions["filter"] for event in definitions)
    assert str(definitions[0].lsn) in result.explanation
    assert "vic" in definitions[0].text
    assert str(definitions[1].lsn) in mysteries.why("shop", "orders", "62").explanation


def test_values_are_shown_on_request_only(mysteries: Mysteries) -> None:
    hidden, shown = (mysteries.why("shop", "orders", "3", values=values) for values in (False, True))
    assert "by hand" not in json.dumps(hidden.to_dict())
    assert hidden.differing == ("note",)
    assert shown.changes[0].values is not None
    assert shown.changes[0].values["note"] == "new"
    assert shown.subscriber.values is not None
    assert shown.subscriber.values["note"] == "by hand"


def test_the_key_is_read_by_its_types(mysteries: Mysteries) -> None:
    assert mysteries.why("shop", "orders", "id= 0001").key == {"id": "1"}
    assert mysteries.why("shop", "trips", "1", "Feb 5, 2026").changes_found == 1
    with pytest.raises(InvalidConfiguration, match='"one" is not a value of column "id"'):
        mysteries.why("shop", "orders", "one")
    with pytest.raises(InvalidConfiguration, match=r"no table \"public\.none\""):
        mysteries.why("shop", "none", "1")


def test_without_the_publisher_the_log_still_answers(mysteries: Mysteries) -> None:
    """Row filters that Arrow evaluates need no server, and the others are unknown."""
    twin = mysteries.twin
    unreachable = dataclasses.replace(
        twin, publisher=Unreachable(twin.publisher.cluster, twin.publisher.name)
    )
    without = Mysteries(unreachable, mysteries.positions)
    result = without.why("shop", "orders", "2")
    assert outcomes(result) == [("UPDATE", "DELETE")]
    assert (result.publisher.rows, result.differs, result.cause) == (None, None, Cause.UNKNOWN)
    assert "cannot connect" in result.explanation
    (rated,) = without.why("rated", "ratio", "2").changes
    assert (rated.outcome, rated.clauses[0].new) == ("unknown", Answer.UNKNOWN)


class Unreachable(Database):
    """A database of a server that is down."""

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port=1 dbname={self.name}"


def test_the_command_line_prints_the_same(mysteries: Mysteries) -> None:
    line = f"why shop public.trips day=2026-02-05 id=1 --config {mysteries.twin.file}"
    result, error = run_line(line)
    assert error is None
    assert result is not None
    expected = mysteries.why("shop", "trips", "1", "2026-02-05").to_dict()
    assert result | {"seconds": 0, "publisher": 0} == expected | {"seconds": 0, "publisher": 0}
    _, error = run_line(f"why shop public.trips 1 --config {mysteries.twin.file}")
    assert "Give `id=… day=…`" in (error or "")
