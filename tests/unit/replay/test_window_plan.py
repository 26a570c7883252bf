"""Where a window ends, for each reason and for several; the log is a list, the subscriber a few tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from cdc_replay.changelog.queries import LogSummary, SentChanges
from cdc_replay.errors import PublicationRefused, TargetMismatch
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName, Relation, RelationId, ReplicaIdentity
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.route.routes import VersionedRelation
from cdc_replay.replay.table_rewrites import TableRewrites
from cdc_replay.replay.window_end import EndReason, Limit, WindowEnd
from cdc_replay.replay.window_inputs import TableSurvey, Unread, WindowContent, WindowInputs
from cdc_replay.replay.window_plan import WindowPlan, plan
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.subscription_tables import KnownTable
from cdc_replay.subscriber.target_tables import Operator, TargetTable
from fixtures.catalogs import catalog, listed, publication, table
from fixtures.target_tables import target_column, target_table
from unit.replay.route.changes import relation

NOBODY = cast("Connection", object())
"""A connection that whoever used it would fail with."""
T, U = table(1, "s.t"), table(2, "s.u")
ALL = publication("p", all_tables=True)
PUBLISHED = catalog(T, U, publications=[ALL])
REFUSED = catalog(
    T, U, publications=[publication("p", listed(1), listed(2)), publication("q", listed(2, columns="id"))]
)
OLD, NEW = relation(1, "id a", version=10), relation(1, "id a b", version=11)
OTHER = relation(2, "id a", version=20)
FULL = ReplicaIdentity.FULL


def target(oid: int, name: str, columns: str, key: str = "id", rules: tuple[str, ...] = ()) -> TargetTable:
    """A table of the subscriber with the same name, and integer columns."""
    equal = Operator("pg_catalog", "=")
    return target_table(
        name,
        *(target_column(column, equality=equal) for column in columns.split()),
        oid=oid,
        rules=rules,
        identity=tuple(key.split()),
        identity_index="t_pkey" if key else None,
    )


@dataclass(frozen=True)
class World:
    """Changes (commit LSN, relation version) of a log, and tables of a subscriber by applied LSN."""

    changes: Sequence[tuple[int, Relation]]
    truncates: Sequence[tuple[int, Relation]] = field(default=(), kw_only=True)
    """TRUNCATEs, with the version that the relation had."""
    tables: Mapping[TargetTable, int] = field(default_factory=lambda: {target(91, "t", "id a b"): 0})
    present: Sequence[TargetTable] = ()
    """Tables that are not subscribed to."""
    catalog: PublisherCatalog = PUBLISHED
    rewrites: Mapping[int, Sequence[int]] = field(default_factory=dict)
    invalid: tuple[str, ...] = ()
    recorded: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[int, str] = field(default_factory=dict)

    def first_window(self, upto: int = 100) -> WindowPlan:
        """The plan of the first window, which is found by asking again as `plan_window` does."""
        inputs = self.inputs(WindowEnd(Lsn(upto), EndReason.LENGTH))
        for _ in range(10):
            match plan(inputs):
                case WindowPlan() as planned:
                    return planned
                case WindowEnd() as end:
                    inputs = self.inputs(end)
                case Unread() as unread:
                    inputs = self.answer(inputs, unread)
        raise AssertionError("the plan is never finished")

    def first_end(self, upto: int = 100) -> tuple[int, EndReason] | None:
        """The end and the reason of the first answer that is not a question."""
        inputs = self.inputs(WindowEnd(Lsn(upto), EndReason.LENGTH))
        while isinstance(unread := plan(inputs), Unread):
            inputs = self.answer(inputs, unread)
        return (unread.lsn.value, unread.reason) if isinstance(unread, WindowEnd) else None

    def inputs(self, end: WindowEnd) -> WindowInputs:
        lagging = {t.name: Lsn(lsn) for t, lsn in self.tables.items() if lsn < end.lsn.value}
        window = Window(min(lagging.values(), default=end.lsn), end.lsn)
        known = tuple(self._known(t, lsn) for t, lsn in self.tables.items())
        targets = {t.name: t for t in self.tables if t.name in lagging}
        seen = [(lsn, sent) for lsn, sent in (*self.changes, *self.truncates) if Lsn(lsn) in window]
        rewrites = {RelationId(oid): tuple(map(Lsn, lsns)) for oid, lsns in self.rewrites.items()}
        return WindowInputs(
            SubscriptionSession(Subscription("shop", "pub", tuple(self.catalog.publications)), "", NOBODY),
            end,
            TableSurvey(known, targets, lagging, {}, window),
            WindowContent(
                tuple(VersionedRelation(sent, 0, self.catalog) for sent in dict.fromkeys(s for _, s in seen)),
                LogSummary(len(seen), len({lsn for lsn, _ in seen})),
                TableRewrites(rewrites, (self.catalog,) if rewrites else (), self.invalid),
            ),
            {RelationId(oid): QualifiedName("s", name) for oid, name in self.renamed.items()},
        )

    def _known(self, t: TargetTable, lsn: int) -> KnownTable:
        recorded = QualifiedName("s", self.recorded.get(t.name.name, t.name.name))
        return KnownTable(t.oid, recorded, t.name, Ready(Lsn(lsn)))

    def answer(self, inputs: WindowInputs, unread: Unread) -> WindowInputs:
        present = {t.name: t for t in self.present}
        return dataclasses.replace(
            inputs,
            others={**inputs.others, **{name: present.get(name) for name in unread.tables}},
            ends={**inputs.ends, **{limit: self._find(limit) for limit in unread.limits}},
        )

    def _find(self, limit: Limit) -> Lsn:
        sent = limit.sent or SentChanges()
        versions = limit.versions | {version for version, _, _ in sent.kinds}
        found = [lsn for lsn, change in self.changes if change.version in versions]
        found += [lsn for lsn, truncated in self.truncates if (truncated.id, 0) in sent.truncated]
        first = min((lsn for lsn in found if Lsn(lsn) in limit.window), default=None)
        if first is None:
            return limit.window.upto
        seen = [Lsn(lsn) for lsn, _ in (*self.changes, *self.truncates) if Lsn(lsn) in limit.window]
        return max((lsn for lsn in seen if lsn.value < first), default=limit.window.after)


NARROW = {target(91, "t", "id a"): 0}
KEYLESS = {target(91, "t", "id a b", key=""): 0}


def full(*versions: Relation) -> list[Relation]:
    return [dataclasses.replace(version, replica_identity=FULL) for version in versions]


def test_window_without_a_reason_ends_where_requested() -> None:
    planned = World([(10, OLD), (20, NEW)]).first_window()

    assert planned.window == Window(Lsn(0), Lsn(100))
    assert (planned.messages, planned.transactions, planned.advanced) == (2, 2, (91,))
    assert (planned.is_partial, planned.stops_at_error, planned.warnings) == (False, None, ())


def test_rewrite_ends_the_window_after_its_transaction() -> None:
    """R11.9: no window has the keys of one row in two forms."""
    world = World([(10, OLD), (20, OLD), (30, OLD)], rewrites={1: [20, 30]})
    planned = world.first_window()

    assert world.first_end() == (20, EndReason.REWRITE)
    assert planned.window.upto == Lsn(20)
    assert planned.rewritten == (QualifiedName("s", "t"),)


def test_rewrite_that_the_table_has_applied_ends_nothing() -> None:
    world = World([(10, OLD), (20, OLD)], {target(91, "t", "id a"): 15}, rewrites={1: [12]})

    assert world.first_end() is None
    assert world.first_window().rewritten == ()


def test_rewrite_of_a_table_that_is_not_subscribed_ends_nothing() -> None:
    assert World([(10, OLD)], rewrites={2: [5]}).first_end() is None


def test_change_after_a_rewrite_need_not_be_publishable_yet() -> None:
    """R6.4: the window up to the rewrite is applied first, whatever comes then."""
    world = World([(10, OLD), (30, OTHER)], rewrites={1: [20]}, catalog=REFUSED)

    assert world.first_end() == (20, EndReason.REWRITE)


def test_column_that_the_target_lacks_ends_the_window_before_the_change() -> None:
    """R8.1: what fits is applied, and the error names what is missing for the rest."""
    world = World([(10, OLD), (20, OLD), (30, NEW)], NARROW)
    planned = world.first_window()

    assert world.first_end() == (20, EndReason.MISSING_COLUMN)
    assert planned.window.upto == Lsn(20)
    assert isinstance(planned.stops_at_error, TargetMismatch)
    assert 'missing column "b"' in str(planned.stops_at_error)


def test_first_transaction_with_a_missing_column_is_an_error() -> None:
    with pytest.raises(TargetMismatch, match='missing column "b"'):
        World([(10, NEW), (20, NEW)], NARROW).first_window()


def test_truncate_of_a_table_that_lacks_a_column_ends_the_window_before_it() -> None:
    """R8.1: a native worker opens the table for it, as for a row."""
    world = World([(10, OTHER)], tables={**NARROW, target(92, "u", "id a"): 0}, truncates=[(20, NEW)])

    assert world.first_end() == (10, EndReason.MISSING_COLUMN)
    assert 'missing column "b"' in str(world.first_window().stops_at_error)


def test_truncate_is_not_held_by_columns_that_come_after_it() -> None:
    """It has no relation version (R1.1): another one under the same catalog fits."""
    world = World([(10, OLD), (30, NEW)], NARROW, truncates=[(20, OLD)])

    assert world.first_end() == (20, EndReason.MISSING_COLUMN)


def test_truncate_that_a_table_was_copied_with_needs_no_column() -> None:
    tables = {target(91, "t", "id a"): 50, target(92, "u", "id a"): 0}
    planned = World([(10, OTHER)], tables, truncates=[(20, NEW)]).first_window()

    assert planned.window == Window(Lsn(0), Lsn(100))


def test_changes_that_a_table_was_copied_with_need_no_column() -> None:
    """The table is ahead of the window, which starts at another table's position."""
    tables = {target(91, "t", "id a"): 50, target(92, "u", "id a"): 0}
    planned = World([(10, OTHER), (20, NEW), (60, OLD)], tables).first_window()

    assert planned.window == Window(Lsn(0), Lsn(100))
    assert {route.relation.version for route in planned.routes.routes} == {10, 20}


def test_problem_that_no_end_removes_is_an_error() -> None:
    """R8.13: a rewrite rule is in the way of the first change and of the last."""
    with pytest.raises(TargetMismatch, match="rules would rewrite"):
        World([(10, OLD)], {target(91, "t", "id a", rules=("r",)): 0}).first_window()


def test_other_columns_without_a_key_end_the_window_before_the_change() -> None:
    """R8.10: rows are found by all columns that were sent."""
    old, new = full(OLD, NEW)
    world = World([(10, old), (20, new), (30, old)], KEYLESS)

    assert world.first_end() == (10, EndReason.UNFOLDABLE)
    assert world.first_window().stops_at_error is None


def test_row_that_cannot_be_found_any_more_ends_the_window_before_the_change() -> None:
    """R8.6, R8.7: what can be applied is applied."""
    lost = relation(1, "id a", key="", identity=ReplicaIdentity.NOTHING, version=12)
    world = World([(10, OLD), (20, lost)])

    assert world.first_end() == (10, EndReason.UNFOLDABLE)


def test_transaction_with_both_shapes_stays_whole() -> None:
    old, new = full(OLD, NEW)

    assert World([(10, old), (10, new), (20, old)], KEYLESS).first_end() is None


def test_published_table_that_does_not_exist_ends_the_window_before_its_change() -> None:
    """R7.12, R8.1: a native worker stops there."""
    world = World([(10, OLD), (20, OTHER)])
    planned = world.first_window()

    assert world.first_end() == (10, EndReason.UNSUBSCRIBED)
    assert '"s"."u": the table does not exist' in str(planned.stops_at_error)


def test_table_that_exists_and_is_not_subscribed_is_skipped_with_a_warning() -> None:
    """R7.12: until a refresh; that it is not writable does not matter."""
    planned = World([(10, OLD), (20, OTHER)], present=[target(92, "u", "id a", rules=("r",))]).first_window()

    assert planned.window.upto == Lsn(100)
    assert planned.unsubscribed == (QualifiedName("s", "u"),)
    (warning,) = planned.warnings
    assert warning.startswith("skipped changes of s.u: published but not in the subscription")


def test_messages_that_only_look_like_a_rewrite_are_warned_of() -> None:
    planned = World([(10, OLD)], invalid=("forged: its transaction committed at 0/A",)).first_window()

    assert planned.warnings == ("forged: its transaction committed at 0/A",)


def test_changes_reach_a_table_that_was_renamed_on_both_sides() -> None:
    """R8.1: they were sent under the old name, and the new one is recorded."""
    tables = {target(91, "v", "id a b"): 0}
    planned = World([(10, OLD)], tables, recorded={"v": "t"}, renamed={1: "v"}).first_window()

    assert [str(route.target.name) for route in planned.routes.routes] == ["s.v"]
    assert planned.found_by_name == ()


def test_table_that_only_the_subscriber_renamed_is_found_by_its_new_name() -> None:
    tables = {target(91, "u", "id a b"): 0}
    planned = World([(10, OTHER)], tables, recorded={"u": "t"}).first_window()

    assert planned.found_by_name == (91,)


@pytest.mark.parametrize(
    ("changes", "rewrites", "expected"),
    [
        # The rewrite is decided first; the shorter window may end earlier again.
        ([(10, OLD), (20, NEW), (30, OTHER)], {1: [40]}, (10, EndReason.MISSING_COLUMN)),
        ([(10, OLD), (20, OTHER), (30, NEW)], {1: [40]}, (10, EndReason.UNSUBSCRIBED)),
        ([(10, OLD), (20, NEW)], {1: [5]}, (5, EndReason.REWRITE)),
        ([(10, OLD), (20, NEW), (30, OTHER)], {}, (10, EndReason.MISSING_COLUMN)),
        ([(10, OLD), (20, OTHER), (30, NEW)], {}, (10, EndReason.UNSUBSCRIBED)),
        # Both before one change: the error names the two.
        ([(10, OLD), (20, NEW), (20, OTHER)], {}, (10, EndReason.UNSUBSCRIBED)),
    ],
)
def test_earliest_of_several_reasons_counts(
    changes: Sequence[tuple[int, Relation]],
    rewrites: Mapping[int, Sequence[int]],
    expected: tuple[int, EndReason],
) -> None:
    planned = World(changes, NARROW, rewrites=rewrites).first_window()

    lsn, reason = expected
    assert planned.window.upto == Lsn(lsn)
    assert (planned.stops_at_error is not None) == reason.stops


def test_error_names_all_that_is_missing_at_one_position() -> None:
    planned = World([(10, OLD), (20, NEW), (20, OTHER)], NARROW).first_window()

    assert 'missing column "b"' in str(planned.stops_at_error)
    assert '"s"."u": the table does not exist' in str(planned.stops_at_error)


def test_window_that_ends_before_the_error_is_reported_without_it() -> None:
    """Another window lies before the error, and finds it."""
    keyless = {target(91, "t", "id a", key=""): 0}
    old, new = full(OLD, NEW)
    last = dataclasses.replace(old, version=13, columns=old.columns[:1])
    planned = World([(10, last), (20, old), (30, new)], keyless).first_window()

    assert planned.window.upto == Lsn(10)
    assert planned.stops_at_error is None


def test_tables_at_other_positions_have_ends_of_their_own() -> None:
    tables = {target(91, "t", "id a b", key=""): 20, target(92, "u", "id a"): 0}
    old, new = full(OLD, NEW)
    world = World([(5, OTHER), (10, old), (30, new), (40, OTHER)], tables)

    assert world.first_end() is None


def test_nothing_to_advance_is_an_empty_window() -> None:
    planned = World([], {target(91, "t", "id a b"): 100}).first_window()

    assert planned.window.is_empty
    assert planned.advanced == ()


def test_publications_that_disagree_are_refused() -> None:
    """R6.4."""
    with pytest.raises(PublicationRefused):
        World([(10, OTHER)], catalog=REFUSED).first_window()
