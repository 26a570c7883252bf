"""The whole pipeline as Airflow runs it: its own scheduler, Spark and PostgreSQL, started by the REST API."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
import pytest

from cdc_replay.config import load_config
from cdc_replay.model.lsn import Lsn
from cdc_replay.monitoring.progress import has_applied, publisher_and_subscriptions, publisher_position
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import subscription_records
from embedded.airflow import USER, Refused, Run, wait_for
from embedded.postgres import Cluster
from fixtures.airflow import PASSWORDS, TOKEN, Pipeline

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.airflow

ORDERS = "select id, region, amount, note from orders order by id"


def nsw_of(rows: list[tuple[int, str, int, str]]) -> list[tuple[int, str, int, str]]:
    """Publication nsw: region = 'nsw'."""
    return [row for row in rows if row[1] == "nsw"]


def nsw_or_big_of(rows: list[tuple[int, str, int, str]]) -> list[tuple[int, str, int, str]]:
    """Publications nsw and big, OR-ed (R3.4): region = 'nsw' or amount > 100."""
    return [row for row in rows if row[1] == "nsw" or row[2] > 100]


@pytest.fixture
def no_validation(pipeline: Pipeline) -> Iterator[None]:
    """Only the test captures and replays: validations, which do so up to their fence, are over and paused."""
    names = ("validate__nsw", "validate__big")
    pipeline.settle("replay__shop")
    for name in names:
        pipeline.settle(name)
        pipeline.client.pause(name)
    yield
    pipeline.client.unpause(*names)


def test_snapshots_bring_the_filtered_rows(pipeline: Pipeline) -> None:
    rows = pipeline.publisher.rows(ORDERS)
    assert pipeline.nsw.rows(ORDERS) == nsw_of(rows)
    assert pipeline.big.rows(ORDERS) == nsw_or_big_of(rows)


def test_captured_changes_are_replayed_and_validated_without_anyone_asking(pipeline: Pipeline) -> None:
    """Capture → asset → replay (one Spark application) → assets → validations."""
    client = pipeline.client
    replays = pipeline.settle("replay__shop")
    validations = {name: pipeline.settle(f"validate__{name}") for name in ("nsw", "big")}
    pipeline.publisher.run(
        """
        begin;
        insert into orders values (10, 'nsw', 10, 'new'), (11, 'qld', 10, 'outside'), (12, 'qld', 200, 'big');
        update orders set region = 'nsw' where id = 2;   -- enters nsw, stays in big
        update orders set region = 'qld' where id = 1;   -- leaves nsw
        delete from orders where id = 3;
        commit;
        """
    )
    pipeline.succeed("capture__shop")
    replay = pipeline.next_run("replay__shop", replays)
    assert (replay.state, replay.run_type) == ("success", "asset_triggered"), pipeline.describe(replay)

    rows = pipeline.publisher.rows(ORDERS)
    #  id  nsw  nsw or big
    #   1  no   no          now qld, 5
    #   2  yes  yes
    #   4  no   no
    #  10  yes  yes
    #  12  no   yes         200 > 100
    assert [row[0] for row in nsw_of(rows)] == [2, 10]
    assert [row[0] for row in nsw_or_big_of(rows)] == [2, 10, 12]
    assert pipeline.nsw.rows(ORDERS) == nsw_of(rows)
    assert pipeline.big.rows(ORDERS) == nsw_or_big_of(rows)

    (history,) = re.findall(r"http://history:18080/history/(.*)/", str(client.links(replay, "replay")))
    assert history.startswith("local-")
    for uri in ("cdc-replay://change-log/shop", "cdc-replay://subscription/nsw"):
        assert client.asset_state(uri, "to_lsn") == client.asset_events(uri)[-1]["to_lsn"]

    reported = client.xcom(replay, "report.nsw")
    assert reported["subscription"] == "nsw"
    assert (reported["updates_to_insert"], reported["updates_to_delete"]) == (1, 1)
    for name, known in validations.items():
        validation = pipeline.next_run(f"validate__{name}", known)
        assert validation.state == "success", pipeline.describe(validation)


def test_a_capture_that_finds_nothing_new_starts_no_replay(pipeline: Pipeline) -> None:
    client = pipeline.client
    pipeline.succeed("capture__shop")
    before = client.asset_events("cdc-replay://change-log/shop")
    run = pipeline.succeed("capture__shop")
    assert client.task_states(run) == {"setup": "success", "capture": "skipped"}
    assert client.asset_events("cdc-replay://change-log/shop") == before
    assert all("to_lsn" in extra for extra in before)


@pytest.mark.parametrize(
    "extra",
    [
        {"to_lsn": "FFFFFFFF/0"},
        pytest.param({"to_lsn": "all of it"}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_an_event_that_somebody_made_by_hand_hides_no_changes(
    pipeline: Pipeline, extra: dict[str, str]
) -> None:
    """What counts is the log: an event may be of another one, or say nothing."""
    client = pipeline.client
    client.make_asset_event("cdc-replay://change-log/shop", extra)
    pipeline.publisher.run("update orders set note = note || '.' where id = 2")
    run = pipeline.succeed("capture__shop")
    assert client.task_states(run)["capture"] == "success"
    assert client.asset_events("cdc-replay://change-log/shop")[-1] not in (extra, {})


@pytest.mark.slow
def test_a_killed_spark_driver_is_started_again_and_does_no_harm(pipeline: Pipeline) -> None:
    client = pipeline.client
    known = pipeline.settle("replay__shop")
    pipeline.publisher.run("insert into orders select i, 'nsw', i, 'bulk' from generate_series(100, 199) i")
    pipeline.succeed("capture__shop")
    os.kill(wait_for(lambda: driver_of(pipeline), "the Spark driver"), signal.SIGKILL)
    replay = pipeline.next_run("replay__shop", known)
    assert replay.state == "success", pipeline.describe(replay)
    assert "exit code 137 (SIGKILL)" in client.log(replay, "replay", 1)
    rows = pipeline.publisher.rows(ORDERS)
    assert pipeline.nsw.rows(ORDERS) == nsw_of(rows)
    assert pipeline.big.rows(ORDERS) == nsw_or_big_of(rows)


def test_unavailable_subscriber_is_retried_and_stops_no_other(pipeline: Pipeline) -> None:
    client = pipeline.client
    known = pipeline.settle("replay__shop")
    pipeline.publisher.run("insert into orders values (40, 'nsw', 1, 'patience')")
    refuse_connections = f"alter database {pipeline.nsw.name} allow_connections"
    pipeline.big.run(f"{refuse_connections} false")
    try:
        pipeline.succeed("capture__shop")
        wait_for(lambda: pipeline.big.rows("select from orders where id = 40"), "the other subscription")
        wait_for(lambda: "up_for_retry" in states_of(pipeline, known), "the second try")
    finally:
        pipeline.big.run(f"{refuse_connections} true")
    replay = pipeline.next_run("replay__shop", known)
    assert replay.state == "success", pipeline.describe(replay)
    # An alert carries the exception's text.
    assert re.search(
        r'AirflowException: subscription "nsw": .*cannot connect', client.log(replay, "replay", 1)
    )
    assert client.task_states(replay) == dict.fromkeys(("replay", "report.nsw", "report.big"), "success")
    assert pipeline.nsw.rows(ORDERS) == nsw_of(pipeline.publisher.rows(ORDERS))


@pytest.mark.usefixtures("no_validation")
@pytest.mark.slow
def test_changes_missed_by_an_unavailable_subscriber_are_replayed_later(
    pipeline: Pipeline, subscriber_cluster: Cluster
) -> None:
    """No retry is left, the publisher is idle, and nobody triggers anything."""
    known = pipeline.settle("replay__shop")
    pipeline.publisher.run("insert into orders values (41, 'nsw', 400, 'missed')")
    subscriber_cluster.stop()
    try:
        pipeline.succeed("capture__shop")
        wait_for(lambda: "up_for_retry" in states_of(pipeline, known), "the first try")
        (run,) = runs_besides(pipeline, known)
        pipeline.client.fail(run)
        status = pipeline.client.request("GET", "/cdc-replay/data")
        for entry in status["subscriptions"]:
            assert entry["behind_reason"].startswith("the subscriber does not answer: "), entry
            assert entry["error"] is not None
        states = {entry["group"]: entry["state"] for entry in status["replay_runs"]}
        assert states["shop"] == "failed"
        watched = pipeline.succeed("watch__shop")
        assert pipeline.client.task_states(watched) == {
            "watch": "success",
            "replay.shop": "skipped",
            "replay.far": "skipped",
        }
        assert runs_besides(pipeline, known) == [pipeline.client.run(run.dag_id, run.run_id)]
    finally:
        subscriber_cluster.start()
    wait_for(lambda: pipeline.nsw.rows("select from orders where id = 41"), "the missed row")
    wait_for(lambda: pipeline.big.rows("select from orders where id = 41"), "the missed row")
    _, replay = pipeline.settle("replay__shop")[len(known) :]
    assert (replay.state, replay.run_type) == ("success", "operator_triggered"), pipeline.describe(replay)


@pytest.mark.usefixtures("no_validation")
@pytest.mark.slow
def test_changes_captured_while_replay_is_paused_are_replayed_later(
    pipeline: Pipeline, publisher_cluster: Cluster
) -> None:
    """The event of the capture is lost: Airflow makes no run of a paused DAG for it.

    The publisher is unavailable meanwhile: replay of the log does not need it.
    """
    client = pipeline.client
    known = pipeline.settle("replay__shop")
    client.pause("replay__shop")
    pipeline.publisher.run("insert into orders values (42, 'nsw', 400, 'paused')")
    pipeline.succeed("capture__shop")
    pipeline.succeed("watch__shop")
    assert runs_besides(pipeline, known) == []
    publisher_cluster.stop()
    try:
        client.unpause("replay__shop")
        assert pipeline.next_run("replay__shop", known).state == "success"
    finally:
        publisher_cluster.start()
    assert pipeline.nsw.rows("select note from orders where id = 42") == [("paused",)]


def runs_besides(pipeline: Pipeline, known: tuple[Run, ...]) -> list[Run]:
    """The replays that are not `known`."""
    ids = {entry.run_id for entry in known}
    return [run for run in pipeline.client.runs("replay__shop") if run.run_id not in ids]


def states_of(pipeline: Pipeline, known: tuple[Run, ...]) -> list[str | None]:
    """The states of the tasks of replays that are not `known`."""
    runs = runs_besides(pipeline, known)
    return [state for run in runs for state in pipeline.client.task_states(run).values()]


def told_of(pipeline: Pipeline, *subjects: str) -> list[tuple[str, str, str]]:
    """What the webhook was told of these subjects: (raised or resolved, subject, kind)."""
    return [
        (verb, alarm["subject"], alarm["kind"])
        for post in pipeline.webhook.posts
        for verb in ("raised", "resolved")
        for alarm in post[verb]
        if alarm["subject"] in subjects
    ]


def test_a_task_that_fails_is_told_once_although_a_channel_was_down(pipeline: Pipeline) -> None:
    """By the callback of the task. A channel that is down fails no task, and is told by the watch later."""
    pipeline.client.unpause("resume__nsw")
    task = "task resume__nsw.resume"
    pipeline.webhook.status = 500
    try:
        failed = pipeline.run("resume__nsw")
        pipeline.succeed("watch__shop")
    finally:
        pipeline.webhook.status = 200
    assert (failed.state, told_of(pipeline, task)) == ("failed", [])
    pipeline.succeed("watch__shop")
    assert pipeline.run("resume__nsw").state == "failed"
    assert told_of(pipeline, task) == [("raised", task, "task failed")]
    (mail,) = (number for number, text in enumerate(pipeline.smtp.subjects) if "resume" in text)
    body = pipeline.smtp.body(mail)
    assert f"{task}: failed of subscription nsw in run {failed.run_id}: NotParked" in body
    assert "hint " in body
    assert f"link   {pipeline.airflow.url}/dags/resume__nsw/runs/" in body
    assert pipeline.webhook.headers[0]["Authorization"] == f"Bearer {TOKEN}"


@pytest.mark.usefixtures("no_validation")
def test_a_parked_subscription_is_told_once_and_when_it_is_resumed(pipeline: Pipeline) -> None:
    """By the watch; the task that resumes it tells that its earlier failure is over."""
    pipeline.client.unpause("resume__nsw")
    assert pipeline.run("resume__nsw").state == "failed"
    task, subject = "task resume__nsw.resume", "subscription nsw"
    of_task, of_subject = (len(told_of(pipeline, name)) for name in (task, subject))
    with connect(pipeline.nsw.dsn, purpose="test") as connection:
        query = "select min(lsn)::text from cdc_replay.subscription_table"
        ((applied,),) = connection.execute(query).fetchall()
        at = Lsn.parse(applied)
        transaction = Lsn(at.value + 8)
        subscription_records.park(connection, "nsw", at, "secret of a row", transaction)
    for _ in range(2):
        pipeline.succeed("watch__shop")
    assert told_of(pipeline, subject)[of_subject:] == [("raised", subject, "parked")]
    body = "\n".join(map(pipeline.smtp.body, range(len(pipeline.smtp.mails))))
    assert f"CRITICAL: subscription nsw: is parked, before transaction {transaction}: nothing" in body
    assert f"LSN    {transaction}" in body
    assert f"link   {pipeline.airflow.url}/plugin/cdc-replay" in body
    assert "secret of a row" not in body

    pipeline.succeed("resume__nsw")
    for _ in range(2):
        pipeline.succeed("watch__shop")
    assert told_of(pipeline, task)[of_task:] == [("resolved", task, "task failed")]
    assert told_of(pipeline, subject)[of_subject + 1 :] == [("resolved", subject, "parked")]


def test_a_job_that_can_only_fail_again_is_started_once(pipeline: Pipeline) -> None:
    client = pipeline.client
    run = pipeline.run("snapshot__nsw", tables=["public.nothing"])
    assert run.state == "failed"
    assert re.search(r"AirflowFailException: .*public\.nothing", client.log(run, "snapshot"))
    with pytest.raises(Refused, match="404"):
        client.log(run, "snapshot", 2)


def test_a_range_that_is_none_starts_no_spark(pipeline: Pipeline) -> None:
    client = pipeline.client
    client.unpause("backfill__nsw")
    run = pipeline.run("backfill__nsw", **{"from": "0/2", "to": "0/1"})
    assert client.task_states(run) == dict.fromkeys(("backfill", "announce"), "upstream_failed") | {
        "plan": "failed"
    }
    assert "AirflowFailException: the range (0/2, 0/1] is empty" in client.log(run, "plan")


def driver_of(pipeline: Pipeline) -> int | None:
    """The Python process of this instance's replay job."""
    mark = f"AIRFLOW_HOME={pipeline.airflow.home}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            ours = mark in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if ours and b"python" in arguments[0] and arguments[1].endswith(b"jobs/replay.py"):
            return int(folder.name)
    return None


def test_a_backfill_repairs_the_subscriber(pipeline: Pipeline) -> None:
    """The rows that the range touches end as of the subscriber's applied LSN, whatever was done to them."""
    client = pipeline.client
    client.unpause("backfill__nsw")
    known = pipeline.settle("replay__shop")
    start = pipeline.position()
    pipeline.publisher.run("insert into orders values (20, 'nsw', 1, 'first'), (21, 'nsw', 2, 'first')")
    end = pipeline.position()
    pipeline.publisher.run("update orders set note = 'second' where id = 20")
    pipeline.succeed("capture__shop")
    assert pipeline.next_run("replay__shop", known).state == "success"
    pipeline.nsw.run("delete from orders where id = 20; update orders set note = 'damaged' where id = 21")

    dry_run = pipeline.succeed("backfill__nsw", **{"from": start, "to": end, "tables": ["public.orders"]})
    assert client.task_states(dry_run)["announce"] == "skipped"
    assert client.xcom(dry_run, "plan")["from_lsn"] == start
    assert client.xcom(dry_run, "plan")["transactions"] == 1
    assert client.xcom(dry_run, "backfill")["applied"] == {
        "delete": 0,
        "insert": 2,
        "truncate": 0,
        "update": 0,
    }
    assert "1 transactions with 2 changes" in client.log(dry_run, "plan")
    assert client.xcom(dry_run, "backfill")["tables"] == ["public.orders"]
    assert pipeline.nsw.rows("select from orders where id = 20") == []

    run = pipeline.succeed("backfill__nsw", **{"from": start, "to": end, "dry_run": False})
    assert client.task_states(run)["announce"] == "success"
    assert pipeline.nsw.rows(ORDERS) == nsw_of(pipeline.publisher.rows(ORDERS))


@pytest.mark.slow
def test_a_backfill_goes_into_another_database_by_the_id_of_its_connection(pipeline: Pipeline) -> None:
    client = pipeline.client
    client.unpause("backfill__nsw")
    start = pipeline.position()
    pipeline.publisher.run("insert into orders values (30, 'nsw', 1, 'audited'), (31, 'vic', 2, 'outside')")
    end = pipeline.position()
    pipeline.succeed("capture__shop")
    run = pipeline.succeed(
        "backfill__nsw", **{"from": start, "to": end, "into_conn_id": "audit", "dry_run": False}
    )
    # The subscriber was not written, so nobody has to validate it.
    assert client.task_states(run) == {"plan": "success", "backfill": "success", "announce": "skipped"}
    assert pipeline.audit.rows(ORDERS) == [(30, "nsw", 1, "audited")]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"to": 5}, "5 is not of type"),
        ({"from": "yesterday", "to": "0/1"}, "'yesterday' does not match"),
        ({"from": "0/1", "to": "0/2", "dry_run": "no"}, "'no' is not of type 'boolean'"),
    ],
)
def test_bad_params_are_refused_and_no_run_is_made(
    pipeline: Pipeline, params: dict[str, str], reason: str
) -> None:
    before = pipeline.client.runs("backfill__nsw")
    with pytest.raises(Refused, match=reason) as refused:
        pipeline.client.trigger("backfill__nsw", **params)
    assert refused.value.status == 400
    assert pipeline.client.runs("backfill__nsw") == before


def test_a_misspelt_param_fails_the_run_before_anything_is_written(pipeline: Pipeline) -> None:
    pipeline.client.unpause("backfill__nsw")
    run = pipeline.run("backfill__nsw", **{"from": "0/1", "to": "0/2", "dry-run": True})
    assert run.state == "failed"
    assert 'AirflowFailException: unknown Params ["dry-run"]' in pipeline.client.log(run, "plan")


@pytest.mark.slow
def test_jobs_run_on_separate_executor_processes(pipeline: Pipeline) -> None:
    """Group far has the Spark connection `local-cluster`: nothing may share the driver's process."""
    client = pipeline.client
    client.unpause("snapshot__far")
    pipeline.succeed("snapshot__far")
    known = pipeline.settle("replay__far")
    pipeline.publisher.run("insert into orders select i, 'vic', i, 'far' from generate_series(301, 400) i")
    pipeline.succeed("capture__shop")
    replay = pipeline.next_run("replay__far", known)
    assert replay.state == "success", pipeline.describe(replay)
    assert "local-cluster[1,1,1024]" in client.log(replay, "replay")
    assert pipeline.far.rows(ORDERS) == [row for row in pipeline.publisher.rows(ORDERS) if row[2] > 100]


def test_a_damaged_subscriber_fails_validation_and_a_run_with_repair_mends_it(pipeline: Pipeline) -> None:
    client = pipeline.client
    client.unpause("validate__big")
    whole = pipeline.big.rows("select * from orders order by id")
    pipeline.big.run("delete from orders where id = 2; insert into orders values (77777, 'nsw', 1, 'stray')")
    run = pipeline.run("validate__big")
    assert run.state == "failed"
    log = client.log(run, "validate")
    assert "public.orders" in log
    assert "77777" in log
    report = linked_report(pipeline, run)
    assert "77777" in report
    for page in (f"dags/validate__big/runs/{quote(run.run_id, safe='')}", "dags/validate__big"):
        assert f'href="{pipeline.airflow.url}/{page}"' in report

    pipeline.big.run("delete from orders where id = 77777")
    later = pipeline.run("validate__big")
    assert later.state == "failed"  # row 2 is still missing
    assert "77777" not in linked_report(pipeline, later)
    assert "77777" in linked_report(pipeline, run)  # not the latest, but that of its run
    mended = pipeline.succeed("validate__big", repair=True, dry_run=False)
    assert pipeline.big.rows("select * from orders order by id") == whole
    assert "public.orders: 1 inserted, such as (id)=(2)" in client.log(mended, "validate")
    assert "Repaired before this validation" in linked_report(pipeline, mended)


def test_own_dags_replay_wait_and_link_to_their_report(pipeline: Pipeline) -> None:
    """The examples of the documentation. The sensors wait in a triggerer until the shipped DAGs are done."""
    client = pipeline.client
    client.unpause("morning_report", "after_replay")
    pipeline.publisher.run("insert into orders values (50, 'nsw', 1, 'own')")
    morning = pipeline.succeed("morning_report")
    assert pipeline.nsw.rows("select note from orders where id = 50") == [("own",)]
    report = Path(client.xcom(morning, "tables.validate.nsw")["report"])
    assert linked_report(pipeline, morning, "tables.validate.nsw") == report.read_text(encoding="utf-8")
    published, subscribed = (
        (f"postgres://127.0.0.1:{database.cluster.port}", f"{database.name}.public.orders")
        for database in (pipeline.publisher, pipeline.nsw)
    )
    # The window of a replay is told by its report, too.
    for task, told_by, inputs, outputs in (
        ("replay", "report.nsw", {published}, {subscribed}),
        ("report.nsw", "report.nsw", {published}, {subscribed}),
        ("validate.nsw", "validate.nsw", {published, subscribed}, set()),
    ):
        event = pipeline.lineage(f"morning_report.tables.{task}")
        assert {(table["namespace"], table["name"]) for table in event["outputs"]} == outputs
        tables = {(table["namespace"], table["name"]) for table in event["inputs"]}
        assert {table for table in tables if table[0] != "file"} == inputs
        (window,) = event["run"]["facets"]["cdcReplay"]["windows"]
        to_lsn = client.xcom(morning, f"tables.{told_by}")["to_lsn"]
        assert (window["subscription"], window["toLsn"]) == ("nsw", to_lsn)

    pipeline.publisher.run("insert into orders values (51, 'nsw', 1, 'later')")
    waiting = client.trigger("after_replay")
    wait_for(lambda: client.task_states(waiting).get("caught_up") == "deferred", "the sensor")
    pipeline.succeed("capture__shop")
    assert client.wait_for_run(waiting).state == "success", pipeline.describe(waiting)
    assert pipeline.nsw.rows("select note from orders where id = 51") == [("later",)]


@pytest.mark.usefixtures("no_validation")
def test_progress_is_that_of_transactions(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sensors wait for and metrics show; a WAL position without published changes is not waited for."""
    databases = {"shop_publisher": pipeline.publisher, "nsw_target": pipeline.nsw}
    for name, database in (("BIG_DSN", pipeline.big), ("FAR_DSN", pipeline.far)):
        monkeypatch.setenv(name, database.dsn)
    config = load_config(
        pipeline.home / "cdc_replay.yaml", connections=lambda conn_id: databases[conn_id].dsn
    )
    pipeline.publisher.run("select pg_switch_wal()")
    position = publisher_position(config, "shop")
    assert not has_applied(config, "nsw", position)
    pipeline.succeed("capture__shop")
    assert has_applied(config, "nsw", position)

    state = publisher_and_subscriptions(config, "shop", ["nsw", "big"])
    assert state.retained_wal_bytes is not None
    assert state.subscriptions["nsw"].lag_seconds == 0
    assert state.subscriptions["nsw"].proof_age_seconds is not None
    pipeline.big.run(f"alter database {pipeline.nsw.name} allow_connections false")
    try:
        assert set(publisher_and_subscriptions(config, "shop", ["nsw", "big"]).subscriptions) == {"big"}
    finally:
        pipeline.big.run(f"alter database {pipeline.nsw.name} allow_connections true")


def linked_report(pipeline: Pipeline, run: Run, task: str = "validate") -> str:
    """The report to which the validate task of this run links."""
    link = pipeline.client.links(run, task)["Validation report"]
    assert link is not None
    report = httpx.get(link, headers=pipeline.client.authorization)
    assert report.status_code == 200
    return report.text


def test_the_status_page_wants_a_token(pipeline: Pipeline) -> None:
    url = f"{pipeline.airflow.url}/cdc-replay"
    assert httpx.get(f"{url}/data").status_code == 401
    assert httpx.get(f"{url}/").status_code == 401
    assert httpx.get(f"{url}/reports/nsw/latest.html").status_code == 401
    assert httpx.get(f"{url}/data_docs/index.html").status_code == 404
    assert httpx.get(f"{url}/data", headers={"Authorization": "Bearer nonsense"}).status_code == 403
    status = pipeline.client.request("GET", "/cdc-replay/data")
    assert {entry["subscription"] for entry in status["subscriptions"]} == {"nsw", "big", "far"}
    assert [entry["error"] for entry in status["publishers"]] == [None]
    assert [entry["error"] for entry in status["subscriptions"] if entry["subscription"] != "far"] == [
        None,
        None,
    ]


@pytest.mark.browser
def test_a_person_logs_in_and_sees_the_status_inside_airflow(pipeline: Pipeline, browser_page: Page) -> None:
    browser_page.goto(pipeline.airflow.url)
    browser_page.locator("input[name=username]").fill(USER)
    browser_page.locator("input[name=password]").fill(pipeline.airflow.password)
    browser_page.locator("button[type=submit]").click()
    browser_page.get_by_text("Dags", exact=True).first.wait_for()

    browser_page.goto(f"{pipeline.airflow.url}/plugin/cdc-replay")

    status = browser_page.frame_locator("iframe")
    status.get_by_role("heading", name="CDC replay").wait_for()
    for name in ("nsw", "big"):
        status.get_by_text(name, exact=True).first.wait_for()


def test_passwords_are_in_no_log_and_in_no_database_of_airflow(pipeline: Pipeline) -> None:
    """After all the runs above: connections go to jobs through the environment of their driver only."""
    files = [path for path in pipeline.airflow.home.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" for path in files)
    for path in files:
        content = path.read_bytes()
        for password in PASSWORDS.values():
            assert password.encode() not in content, path
