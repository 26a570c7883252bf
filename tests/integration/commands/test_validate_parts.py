"""`validate` of a part: samples in turns, tables, budgets, intervals; only what was compared is proven."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from cdc_replay.airflow.metrics import of_watch
from cdc_replay.commands.status import repeated_status, status
from cdc_replay.commands.validate import validate
from cdc_replay.commands.validate_and_repair import validate_and_repair
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proof import BUCKETS, ProofSummary
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ValidateResult, ValidationOutcome
from cdc_replay.model.validation_scope import ValidationScope
from cdc_replay.monitoring.progress import read_progress
from cdc_replay.monitoring.subscription_details import subscription_details
from cdc_replay.subscriber import proofs
from cdc_replay.subscriber.history import TimeRange, last_validations
from cdc_replay.validate import selection
from cdc_replay.validate.expectations import ExpectContentToEqualPublisher
from cdc_replay.validate.gx import get_context
from fixtures.native import wait_for
from fixtures.postgres import Database
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

QUOTED = '"a.b, ""c"""'
TABLES = f"""
    create table t (id int primary key, a int);
    create table u (id int primary key, a int);
    create table {QUOTED} (id int primary key)
"""
T, U, STRANGE = (QualifiedName("public", name) for name in ("t", "u", 'a.b, "c"'))
QUARTER = ValidationScope(sample=0.25)
RUNS = 4


@pytest.fixture
def equal(twin: Twin) -> Twin:
    """Three tables with equal rows on both sides; `t` has a filter."""
    twin.publisher.run(
        f"{TABLES}; alter table t replica identity full;"
        " insert into t select i, i from generate_series(1, 2000) i;"
        " insert into u select i, i from generate_series(1, 300) i;"
        f" insert into {QUOTED} values (1); create publication p for table t where (a > 0), u, {QUOTED}"
    )
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    return twin


def proven(twin: Twin) -> dict[str, Lsn | None]:
    """Through which position each table is proven."""
    found = summaries(twin)
    return {
        name.name: None if summary.proven is None else summary.proven.lsn for name, summary in found.items()
    }


def summaries(twin: Twin) -> dict[QualifiedName, ProofSummary]:
    with twin.pairs["s"].ours.connect() as connection:
        return proofs.read_summaries(connection, "s")


def compared(result: ValidateResult) -> dict[Any, Any]:
    return {table["table"]: table["compared_buckets"] for table in result.tables}


def ours(twin: Twin, statement: str) -> None:
    twin.pairs["s"].ours.run(statement)


def test_a_whole_validation_proves_every_table_and_keeps_their_history(equal: Twin) -> None:
    result = validate(equal.config, "s")
    expected = (ValidationOutcome.CONSISTENT, False, result.to_lsn)
    assert (result.outcome, result.is_partial, result.proven_through) == expected
    assert set(proven(equal).values()) == {result.to_lsn}
    equal.publish("insert into u values (1000, 1)")
    later = validate(equal.config, "s")
    with equal.pairs["s"].ours.connect() as connection:
        history = proofs.table_history(connection, "s", 10)
    newest, first = history[U]
    assert (newest.row_count, newest.differing_rows, newest.buckets) == (301, 0, BUCKETS)
    assert (newest.lsn, newest.proven_through) == (str(later.to_lsn), str(later.to_lsn))
    assert (first.row_count, first.proven_through) == (300, str(result.to_lsn))
    assert newest.bytes > 0
    assert newest.error is None
    assert "Its last 2 validations compared all rows 2.0 times" in later.report.read_text()


def test_some_tables_advance_alone_and_the_oldest_is_the_proof_of_the_subscription(equal: Twin) -> None:
    first = validate(equal.config, "s")
    equal.publish("insert into u values (1000, 1)")
    second = validate(equal.config, "s", scope=ValidationScope(tables=("public.u", str(STRANGE))))
    assert compared(second) == {"public.u": BUCKETS, str(STRANGE): BUCKETS}
    assert [(left["table"], left["reason"]) for left in second.left_out] == [("public.t", "not chosen")]
    assert proven(equal) == {"t": first.to_lsn, "u": second.to_lsn, STRANGE.name: second.to_lsn}
    assert (second.proven_through, second.is_partial, second.success) == (first.to_lsn, True, True)
    assert read_progress(equal.config, "s").table_proof_ages.keys() == {"public.t", "public.u", str(STRANGE)}
    page = second.report.read_text()
    assert "Not compared" in page
    assert "no difference in what was compared" in page
    with equal.pairs["s"].ours.connect() as connection:
        assert [record.is_partial for record in last_validations(connection, "s", 5)] == [True, False]


def test_a_table_without_any_proof_leaves_the_subscription_without_one(equal: Twin) -> None:
    result = validate(equal.config, "s", scope=ValidationScope(tables=("public.t",)))
    assert (result.success, result.proven_through) == (True, None)
    progress = read_progress(equal.config, "s")
    assert (progress.proof_age_seconds, set(progress.table_proofs)) == (None, {"public.t"})
    [subscription] = status(equal.config, "s").subscriptions
    assert subscription.proven_at is None
    assert subscription.last_validation == f"no difference in what was compared at {result.to_lsn}"
    with pytest.raises(InvalidConfiguration, match="not a published table"):
        validate(equal.config, "s", scope=ValidationScope(tables=("public.typo",)))


@pytest.mark.parametrize("damage", [
    "update t set a = -7 where id = 77", "delete from t where id = 1999", "insert into t values (5001, 1)",
])  # fmt: skip
def test_a_difference_is_seen_within_the_promised_runs_and_stays_known(equal: Twin, damage: str) -> None:
    whole = validate(equal.config, "s")
    ours(equal, damage)
    results = [validate(equal.config, "s", scope=QUARTER) for _ in range(RUNS)]
    assert [result.success for result in results].count(False) == 1
    assert all(set(compared(result).values()) == {BUCKETS // RUNS} for result in results)
    seen = next(index for index, result in enumerate(results) if not result.success)
    # Until then the proof is the whole validation's; from then on there is none.
    assert all(result.proven_through == whole.to_lsn for result in results[:seen])
    assert all(result.proven_through is None for result in results[seen:])
    assert summaries(equal)[T].differing == 1
    with repeated_status(equal.config, "s") as read:
        assert any("1 of 256 buckets differ" in problem.message for problem in read().problems) or (
            seen == RUNS - 1
        )


def test_snapshots_are_closed_before_the_report_is_made(equal: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep VACUUM from its work, and the pages of all subscriptions wait for one lock."""
    sides = (equal.publisher, equal.pairs["s"].ours)
    held: list[str] = []

    def open_context(**options: Any) -> object:
        wait_for(lambda: not any(map(snapshots, sides)), "the end of the snapshots")
        held.append("none")
        return get_context(**options)

    monkeypatch.setattr("cdc_replay.validate.run.get_context", open_context)
    assert validate(equal.config, "s").success
    assert held == ["none"]


def snapshots(side: Database) -> list[tuple[Any, ...]]:
    """The sessions of validations that hold one in this database."""
    return side.rows(
        "select pid from pg_stat_activity where application_name like 'cdc_replay validate%'"
        " and datname = current_database() and backend_xmin is not null"
    )


@pytest.mark.slow
def test_rotation_survives_processes_and_kills(equal: Twin) -> None:
    """Each run is a process of its own; one that is killed before it records is as if it had not been."""
    seen = []
    for crash in (None, "validate.after_report", None, None, "validate.after_fence", None):
        run_program(equal, crash)
        [record] = equal.pairs["s"].ours.rows(
            "select array(select bucket from unnest(turns) with ordinality as b (turn, bucket) where turn ="
            " (select max(turn) from unnest(turns) as turn)) from cdc_replay.table_proof"
            " where relation = 't'::regclass"
        )
        if crash is None:
            seen.append(set(record[0]))
    assert [len(buckets) for buckets in seen] == [BUCKETS // RUNS] * RUNS
    assert len(set(itertools.chain(*seen))) == BUCKETS
    assert proven(equal)["t"] is not None


def run_program(twin: Twin, crash: str | None) -> None:
    program = (
        "import sys; from cdc_replay.cli import main;"
        f" main(['validate', 's', '--sample', '25%', '--json', '--config', {str(twin.file)!r}])"
    )
    environment = os.environ | ({"CDC_REPLAY_FAILPOINT": crash} if crash else {})
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert (done.returncode == 0) == (crash is None), done.stderr.decode()[-2000:]


def test_a_repair_of_a_sample_writes_only_what_it_compared(equal: Twin) -> None:
    """Rows outside of the filter, missing rows and others: in the compared buckets, and elsewhere."""
    ours(
        equal,
        "update t set a = a + 100000; update t set a = -1 where id % 3 = 0; delete from t where id % 5 = 0",
    )
    before = dict(equal.pairs["s"].ours.rows("select id, a from t"))
    chosen = set(range(BUCKETS // RUNS))

    planned = validate_and_repair(equal.config, "s", scope=QUARTER, dry_run=True)
    assert dict(equal.pairs["s"].ours.rows("select id, a from t")) == before
    turn = {bucket + BUCKETS // RUNS for bucket in chosen}  # the dry run has had the first turn
    result = validate_and_repair(equal.config, "s", scope=QUARTER)

    assert (result.success, result.is_partial, result.proven_through) == (True, True, None)
    assert planned.repaired[0].updated > 0
    after = dict(equal.pairs["s"].ours.rows("select id, a from t"))
    query = "select id, ('x' || left(md5(row(id)::text), 8))::bit(32)::bit(8)::int from t"
    buckets = dict(equal.publisher.rows(query))
    for key in range(1, 2001):
        expected = key if buckets[key] in turn else before.get(key)
        assert after.get(key) == expected, key
    # The rest is still to be replayed from where it was: nothing is lost.
    equal.publish("update t set a = a + 1 where id in (1, 2, 4, 7)")
    equal.sync_ours()
    assert dict(equal.pairs["s"].ours.rows("select id, a from t where id in (1, 2, 4, 7)")) == {
        key: key + 1 for key in (1, 2, 4, 7)
    }
    assert not validate(equal.config, "s").success
    assert validate_and_repair(equal.config, "s").success


def test_a_repair_of_a_table_leaves_the_others(equal: Twin) -> None:
    ours(equal, "delete from t where id = 1; delete from u where id = 1")
    result = validate_and_repair(equal.config, "s", scope=ValidationScope(tables=("public.u",)))
    assert (result.success, [table.table for table in result.repaired]) == (True, ["public.u"])
    assert equal.pairs["s"].ours.rows("select count(*) from t") == [(1999,)]
    assert not validate(equal.config, "s").success


def test_what_a_budget_does_not_reach_is_named_not_proven_and_first_next_time(
    equal: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "STEP_BYTES", 1 << 14)
    first = validate(equal.config, "s", scope=ValidationScope(max_bytes=1))
    [(name, buckets)] = compared(first).items()
    assert (name, buckets) == (str(STRANGE), BUCKETS)
    assert set(first.not_reached) == {"public.t", "public.u"}
    assert {left["reason"] for left in first.left_out} == {"not reached"}
    assert (first.success, first.proven_through) == (True, None)
    assert proven(equal)["t"] is None
    page = first.report.read_text()
    assert "not reached" in page
    assert ">consistent<" not in page

    second = validate(equal.config, "s", scope=ValidationScope(max_bytes=1))
    [(name, buckets)] = compared(second).items()
    assert name in {"public.t", "public.u"}
    assert buckets < BUCKETS
    assert any(text.startswith(f"{name}: {BUCKETS - buckets} of {BUCKETS}") for text in second.not_reached)
    turns = 0
    while summaries_unproven(equal):
        assert validate(equal.config, "s", scope=ValidationScope(max_bytes=1)).success
        turns += 1
        assert turns < 2 * selection.MOST_STEPS
    assert validate(equal.config, "s", scope=ValidationScope(max_seconds=3600)).not_reached == ()


def summaries_unproven(twin: Twin) -> set[str]:
    return {name for name, lsn in proven(twin).items() if lsn is None}


def test_what_is_due_follows_the_configuration(equal: Twin) -> None:
    plan = {
        "every": "1d",
        "tables": {"public.t": {"every": "7d", "sample": "5%"}, "public.gone": {"every": "1d"}},
    }
    equal.change("s", validation=plan)
    due = ValidationScope(is_due=True)
    first = validate(equal.config, "s", scope=due)
    assert compared(first) == {"public.t": 13, "public.u": BUCKETS, str(STRANGE): BUCKETS}
    assert "public.gone is planned in the configuration" in first.report.read_text()
    second = validate(equal.config, "s", scope=due)
    assert (second.success, compared(second)) == (True, {})
    reasons = {left["table"]: (left["reason"], left["proven_at"]) for left in second.left_out}
    assert reasons["public.u"] == ("not due", first.tables[-1]["proven_at"])
    assert reasons["public.t"] == ("not due", None)
    assert "there was nothing to compare" in second.report.read_text()

    age(equal, days=2)
    assert compared(validate(equal.config, "s", scope=due)).keys() == {"public.u", str(STRANGE)}
    age(equal, days=7)
    assert compared(validate(equal.config, "s", scope=due))["public.t"] == 13
    assert summaries(equal)[T].never_compared == BUCKETS - 26


def age(twin: Twin, days: int) -> None:
    """Let what is recorded be some days older."""
    ours(
        twin,
        "update cdc_replay.table_proof set times = array(select at - interval"
        f" '{days} days' from unnest(times) with ordinality as b (at, place) order by place)",
    )


def test_a_proof_that_is_too_old_fails_by_itself(equal: Twin) -> None:
    equal.change("s", validation={"tables": {"public.t": {"max_proof_age": "3d"}}})
    only_u = ValidationScope(tables=("public.u",))
    never = validate(equal.config, "s", scope=only_u)
    assert (never.outcome, never.success) == (ValidationOutcome.TOO_OLD, False)
    assert "there is no proof of all its rows, at most 3 days are allowed (not chosen)" in (never.error or "")
    with equal.pairs["s"].ours.connect() as connection:
        assert last_validations(connection, "s", 1)[0].consistent  # no row differs
    assert validate(equal.config, "s").success
    assert validate(equal.config, "s", scope=only_u).success
    age(equal, days=4)
    old = validate(equal.config, "s", scope=only_u)
    assert "the proof is 4 days old, at most 3 days are allowed" in (old.error or "")
    assert "older than it may be" in old.report.read_text()
    recorded = [file.read_text() for file in old.data_docs.parents[2].rglob("validations/**/*.json")]
    assert any(expectation(text, "expect_proof_to_be_recent") is False for text in recorded)
    problems = status(equal.config, "s").problems
    assert any("table public.t: its proof is 4 days old" in problem.message for problem in problems)
    assert validate(equal.config, "s").success
    assert status(equal.config, "s").problems == ()


def expectation(text: str, kind: str) -> bool | None:
    results = json.loads(text)["results"]
    return next((r["success"] for r in results if r["expectation_config"]["type"] == kind), None)


def test_an_expectation_that_raises_is_an_error_and_proves_nothing(
    equal: Twin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = validate(equal.config, "s")

    def fail(_class: object, _comparison: object) -> None:
        raise ValueError("no memory <b>")

    with monkeypatch.context() as patched:
        patched.setattr(ExpectContentToEqualPublisher, "judge", classmethod(fail))
        result = validate_and_repair(equal.config, "s")
        code = exit_code(equal)
    assert (result.outcome, result.success, result.repaired) == (ValidationOutcome.ERROR, False, ())
    assert "content: error: no memory <b>" in (result.error or "")
    assert code == 3
    assert "could not be judged" in capsys.readouterr().out
    assert set(proven(equal).values()) == {first.to_lsn}
    page = result.report.read_text()
    assert "no memory &lt;b&gt;" in page
    assert all(word not in page for word in ("differs", "not consistent"))
    assert status(equal.config, "s").problems[0].message.startswith("the last validation: error at")
    ours(equal, "delete from u where id = 1")
    assert exit_code(equal) == 1


def exit_code(twin: Twin) -> int:
    from cdc_replay.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["validate", "s", "--config", str(twin.file)])
    return int(ended.value.code or 0)


def test_a_changed_filter_begins_the_proof_anew(equal: Twin) -> None:
    validate(equal.config, "s")
    equal.publish(f"alter publication p set table t where (a > 1000), u, {QUOTED}")
    equal.sync_ours()
    ours(equal, "delete from t where a <= 1000")
    part = validate(equal.config, "s", scope=QUARTER)
    assert (part.success, summaries(equal)[T].never_compared) == (True, BUCKETS - BUCKETS // RUNS)
    # A table that is no longer published takes no part in the proof of the subscription.
    equal.publish(f"alter publication p set table u, {QUOTED}")
    result = validate(equal.config, "s")
    assert (set(proven(equal)), result.proven_through) == ({"u", STRANGE.name}, result.to_lsn)


def test_page_and_gauges_have_the_age_per_table(equal: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    validate(equal.config, "s")
    ours(equal, "delete from u where id = 1")
    validate(equal.config, "s", scope=ValidationScope(tables=("public.u",)))
    details = subscription_details(equal.config, "s", TimeRange.DAY, 5)
    tables = {table.table: table for table in details.tables}
    assert details.proven_at is None
    assert tables["public.u"].proof == "not proven: 1 of 256 buckets differ"
    assert tables["public.t"].proven_at is not None
    assert [record.differing_rows for record in tables["public.u"].validations] == [1, 0]
    gauges: dict[tuple[str, str], float] = {}

    def gauge(name: str, value: float, tags: dict[str, str]) -> None:
        gauges[name, tags.get("table", "")] = value

    monkeypatch.setattr("cdc_replay.airflow.metrics.Stats.gauge", gauge)
    monkeypatch.setattr("cdc_replay.airflow.metrics.conf.getboolean", lambda *_, **__: True)
    of_watch(equal.config, "pub", ["s"])
    assert ("cdc_replay.table_proof_age_seconds", "public.t") in gauges
    assert ("cdc_replay.table_proof_age_seconds", "public.u") not in gauges
    assert ("cdc_replay.proof_age_seconds", "") not in gauges
