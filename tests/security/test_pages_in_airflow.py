"""The pages in Airflow: everybody sees what is of the DAGs that he may read, and nothing runs in them.

Airflow's API server is real, with an auth manager that gives rights per DAG. What the page shows of given
answers is tested in `tests/unit/airflow/page`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import pytest

from embedded.airflow import USER, Airflow, Client, Settings, wait_for
from embedded.postgres import Cluster
from fixtures.airflow import ROOT
from fixtures.postgres import create_database, drop_database

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.airflow

CONFIGURATION = """
publishers:
  shop: {dsn: "${SHOP_DSN}", change_log: ./change_log}
  depot: {dsn: "${SHOP_DSN}", change_log: ./change_log_of_depot}
subscriptions:
  nsw: {publisher: shop, publications: [p], dsn: "${SHOP_DSN}"}
  big: {publisher: shop, publications: [p], dsn: "${SHOP_DSN}"}
  lost: {publisher: shop, publications: [p], dsn: "postgresql://app:s3cret-word@127.0.0.1:1/db"}
  mute: {publisher: shop, publications: [p], dsn: "postgresql://app:s3cret-word@127.0.0.1:${MUTE_PORT}/db"}
timeouts: {page: 2s}
"""
"""A server that is not there, and one that takes connections and says nothing."""

PERMITTED = {
    "clerk": ["validate__nsw"],
    "loader": ["capture__shop", "replay__shop"],
    "nobody": [],
    "operator": ["validate__nsw", "snapshot__nsw"],
}
"""Users, each with the DAGs that he may read, and trigger if he is an operator."""

ROLES = {"operator": "op"}

REPORT = "0-1A2B3C-20261125T093847200955Z.html"
SCRIPT = "<script>document.title = 'ran'</script>"


@dataclass(frozen=True)
class Pages:
    """Airflow's API server, and the users of its auth manager."""

    airflow: Airflow
    reports: Path
    _authorizations: dict[str, dict[str, str]] = field(default_factory=dict)

    def get(self, user: str | None, path: str) -> httpx.Response:
        """A page below the plugin's; `path` goes to the server as it is."""
        headers = {} if user is None else self.authorization(user)
        request = httpx.Request("GET", f"{self.airflow.url}/cdc-replay", headers=headers)
        request.url = request.url.copy_with(raw_path=f"/cdc-replay{path}".encode())
        with httpx.Client(timeout=60) as client:
            return client.send(request)

    def post(self, user: str | None, path: str, content: object) -> httpx.Response:
        """JSON for a page below the plugin's."""
        headers = {} if user is None else self.authorization(user)
        return httpx.post(f"{self.airflow.url}/cdc-replay{path}", headers=headers, json=content, timeout=60)

    def authorization(self, user: str) -> dict[str, str]:
        if user not in self._authorizations:
            passwords = json.loads((self.airflow.home / "passwords.json").read_text(encoding="utf-8"))
            with Client(self.airflow.url, user, passwords[user]) as client:
                self._authorizations[user] = client.authorization
        return self._authorizations[user]

    def data(self, user: str, query: str = "") -> dict[str, Any]:
        answer = self.get(user, f"/data{query}")
        assert answer.status_code == 200
        content: dict[str, Any] = answer.json()
        return content


@pytest.fixture(scope="module")
def pages(publisher_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """Reports of two subscriptions, and files beside them."""
    home = tmp_path_factory.mktemp("pages")
    database = create_database(publisher_cluster, "pages")
    mute = socket.create_server(("127.0.0.1", 0))
    (home / "cdc_replay.yaml").write_text(CONFIGURATION, encoding="utf-8")
    uncommitted = home / "expectations" / "gx" / "uncommitted"
    for name in ("nsw", "big"):
        folder = uncommitted / "reports" / name
        folder.mkdir(parents=True)
        for file in (REPORT, "latest.html"):
            (folder / file).write_text(f"<title>{name}</title><p>keys of {name}{SCRIPT}", encoding="utf-8")
    (uncommitted / "data_docs" / "local_site").mkdir(parents=True)
    (uncommitted / "data_docs" / "local_site" / "index.html").write_text(
        f"all keys{SCRIPT}", encoding="utf-8"
    )
    settings = Settings(
        dags=ROOT / "dags",
        plugins=ROOT / "plugins",
        parts=("api-server", "dag-processor"),
        environment={
            "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "AIRFLOW__CORE__AUTH_MANAGER": "fixtures.auth_manager.DagByDag",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(
                (f"{USER}:admin", *(f"{name}:{ROLES.get(name, 'viewer')}" for name in PERMITTED))
            ),
            "PERMITTED_DAGS": json.dumps(PERMITTED),
            "CDC_REPLAY_CONFIG": str(home / "cdc_replay.yaml"),
            "SHOP_DSN": database.dsn,
            "MUTE_PORT": str(mute.getsockname()[1]),
        },
    )
    try:
        with Airflow(home / "airflow", settings) as airflow, airflow.client() as client:
            per_subscription = ("validate", "snapshot", "refresh", "backfill", "resume")
            wanted = {"capture__shop", "replay__shop", *(f"{verb}__nsw" for verb in per_subscription)}
            wait_for(lambda: wanted <= set(client.dag_ids()), "the DAGs")
            yield Pages(airflow, uncommitted / "reports")
    finally:
        mute.close()
        drop_database(database)


def test_report_is_readable_with_the_right_to_its_subscriptions_dag(pages: Pages) -> None:
    assert "keys of nsw" in pages.get("clerk", f"/reports/nsw/{REPORT}").text
    for user in ("clerk", "loader", "nobody"):
        answer = pages.get(user, f"/reports/big/{REPORT}")
        assert (answer.status_code, "keys of" in answer.text) == (403, False), user
    assert pages.get(USER, f"/reports/big/{REPORT}").status_code == 200
    assert pages.get(None, f"/reports/big/{REPORT}").status_code == 401


@pytest.mark.parametrize("named", ["validate__nsw", "capture__shop", "~", ""])
def test_a_dag_of_the_callers_choice_opens_nothing(pages: Pages, named: str) -> None:
    answer = pages.get("clerk", f"/reports/big/{REPORT}?dag_id={named}")
    assert (answer.status_code, "keys of" in answer.text) == (403, False)
    assert {row["subscription"] for row in pages.data("clerk", f"?dag_id={named}")["subscriptions"]} == {
        "nsw"
    }


def test_unknown_and_forbidden_subscriptions_look_alike(pages: Pages) -> None:
    answers = [pages.get("clerk", f"/reports/{name}/{REPORT}") for name in ("big", "none")]
    assert [(answer.status_code, answer.text) for answer in answers] == [(403, answers[0].text)] * 2
    assert pages.get(USER, f"/reports/none/{REPORT}").status_code == 404


@pytest.mark.parametrize(
    ("user", "publishers", "subscriptions"),
    [
        (USER, {"shop", "depot"}, {"nsw", "big", "lost", "mute"}),
        ("clerk", set(), {"nsw"}),
        ("loader", {"shop"}, set()),
        ("nobody", set(), set()),
    ],
)
def test_status_has_only_readable_objects(
    pages: Pages, user: str, publishers: set[str], subscriptions: set[str]
) -> None:
    status = pages.data(user)
    assert {row["publisher"] for row in status["publishers"]} == publishers
    for rows in (status["subscriptions"], status["tables"], status["copies"]):
        assert {row["subscription"] for row in rows} <= subscriptions
    assert {row["subscription"] for row in status["subscriptions"]} == subscriptions
    assert set(status["dags"]) == {f"capture__{name}" for name in publishers}
    for name in ("nsw", "big", "none"):
        expected = 404 if name == "none" and user == USER else 200 if name in subscriptions else 403
        assert pages.get(user, f"/subscriptions/{name}").status_code == expected, name


@pytest.mark.parametrize(
    ("user", "shown"),
    [
        (USER, dict.fromkeys(("replay", "validate", "snapshot", "refresh", "backfill", "resume"), True)),
        ("operator", {"validate": True, "snapshot": True}),
        ("clerk", {"validate": False}),
    ],
)
def test_buttons_are_for_those_who_may_trigger_the_dag(
    pages: Pages, user: str, shown: dict[str, bool]
) -> None:
    details = pages.get(user, "/subscriptions/nsw").json()
    assert {kind: dag["may_trigger"] for kind, dag in details["dags"].items()} == shown
    url = f"{pages.airflow.url}/api/v2/dags/snapshot__nsw/dagRuns"
    body = {"logical_date": None, "conf": {"tables": ["public.t"]}}
    answer = httpx.post(url, json=body, headers=pages.authorization(user), timeout=60)
    assert answer.status_code == (200 if shown.get("snapshot") else 403)


def test_another_site_cannot_trigger_with_the_users_cookie(pages: Pages) -> None:
    """A form of another site can send JSON only as text, and no cookie that is SameSite."""
    token = pages.authorization(USER)["Authorization"].removeprefix("Bearer ")
    answer = httpx.post(
        f"{pages.airflow.url}/api/v2/dags/snapshot__nsw/dagRuns",
        content=b'{"logical_date": null}',
        headers={"Content-Type": "text/plain", "Cookie": f"_token={token}"},
        timeout=60,
    )
    assert answer.status_code == 422


def test_silent_server_does_not_hide_the_others(pages: Pages) -> None:
    errors = {row["subscription"]: row["error"] for row in pages.data(USER)["subscriptions"]}
    assert (errors["nsw"], errors["big"]) == (None, None)
    assert "cannot connect" in errors["lost"]
    assert re.search("timeout|no answer within 2 s", errors["mute"])


def test_status_contains_no_part_of_a_dsn(pages: Pages) -> None:
    for text in (json.dumps(pages.data(USER)), pages.get(USER, "/subscriptions/lost").text):
        assert "cannot connect" in text
        assert "s3cret-word" not in text
        assert "postgresql://" not in text


@pytest.mark.parametrize(
    "path",
    [
        f"nsw/%2e%2e/big/{REPORT}",
        f"nsw/..%2fbig%2f{REPORT}",
        f"nsw%2f..%2fbig/{REPORT}",
        f"nsw/%2e%2e%2fbig%2f{REPORT}",
        f"nsw//{REPORT}",
        f"nsw/{REPORT}%00.html",
        f"nsw/%2ftmp%2f{REPORT}",
        f"nsw/{REPORT}.part",
        "nsw/",
        "..%2f..%2fgreat_expectations.yml/latest.html",
        "./nsw.html",
    ],
)
def test_a_path_leads_out_of_no_folder(pages: Pages, path: str) -> None:
    for user in ("clerk", USER):
        answer = pages.get(user, f"/reports/{path}")
        assert answer.status_code in {400, 403, 404}, answer.text
        assert "keys of big" not in answer.text


def test_no_link_on_disk_leads_out_of_the_folder_of_a_subscription(pages: Pages) -> None:
    file = pages.reports / "nsw" / "0-2-20261125T093847200956Z.html"
    file.symlink_to(pages.reports / "big" / REPORT)
    (pages.reports / "lost").symlink_to(pages.reports / "big")
    try:
        for path in (f"nsw/{file.name}", f"lost/{REPORT}"):
            answer = pages.get(USER, f"/reports/{path}")
            assert (answer.status_code, "keys of" in answer.text) == (404, False), path
    finally:
        file.unlink()
        (pages.reports / "lost").unlink()


def test_pages_of_great_expectations_are_not_served(pages: Pages) -> None:
    for path in ("/data_docs/local_site/index.html", "/reports/../data_docs/local_site/index.html"):
        answer = pages.get(USER, path)
        assert (answer.status_code, "all keys" in answer.text) == (404, False)


@pytest.mark.parametrize("user", [USER, "clerk", None])
@pytest.mark.parametrize(
    "path",
    [
        "/", "/runs/validate__nsw/r", "/data", "/static/page.js", f"/reports/nsw/{REPORT}",
        f"/reports/big/{REPORT}", "/none",
    ],
)  # fmt: skip
def test_every_answer_has_a_strict_policy(pages: Pages, user: str | None, path: str) -> None:
    headers = pages.get(user, path).headers
    (policy,) = headers.get_list("content-security-policy")
    directives = dict(directive.strip().partition(" ")[::2] for directive in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["base-uri"] == directives["form-action"] == "'none'"
    if path in {"/", "/runs/validate__nsw/r"} and user is not None:
        assert directives["frame-ancestors"] == "'self'"
        assert directives["require-trusted-types-for"] == "'script'"
        assert {directives[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    else:
        assert not {"script-src", "connect-src", "img-src"} & directives.keys()
        assert directives["sandbox"] == ""
        assert directives["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def push_xcom(
    pages: Pages, dag_id: str, run_id: str, task: str, key: str, value: str | dict[str, Any]
) -> None:
    url = f"{pages.airflow.url}/api/v2/dags/{dag_id}/dagRuns/{quote(run_id)}/taskInstances/{task}/xcomEntries"
    answer = httpx.post(url, json={"key": key, "value": value}, headers=pages.authorization(USER), timeout=60)
    assert answer.status_code == 201, answer.text


def run_with_report(pages: Pages, report: str) -> str:
    """The id of a run of `validate__nsw` whose task has pushed this text as its report."""
    url = f"{pages.airflow.url}/api/v2/dags/validate__nsw/dagRuns"
    answer = httpx.post(url, json={"logical_date": None}, headers=pages.authorization(USER), timeout=60)
    run_id = str(answer.json()["dag_run_id"])
    push_xcom(pages, "validate__nsw", run_id, "validate", "report", report)
    return run_id


def test_run_leads_to_its_own_report(pages: Pages) -> None:
    run_id = run_with_report(pages, f"nsw/{REPORT}")
    for user in (USER, "clerk"):
        (link,) = re.findall(r'href="([^"]+\.html)"', pages.get(user, f"/runs/validate__nsw/{run_id}").text)
        assert "keys of nsw" in pages.get(user, link.removeprefix("/cdc-replay")).text
    assert pages.get("loader", f"/runs/validate__nsw/{run_id}").status_code == 403
    assert pages.get(None, f"/runs/validate__nsw/{run_id}").status_code == 401
    assert "No task of this run" in pages.get(USER, "/runs/validate__nsw/another").text


@pytest.mark.parametrize(
    "report",
    [f"big/{REPORT}", f"nsw/../big/{REPORT}", f"none/{REPORT}", f"nsw/<b>{REPORT}", "<script>1</script>", ""],
)
def test_run_shows_no_report_but_one_that_its_reader_may_read(pages: Pages, report: str) -> None:
    """A task of anybody's DAG can push any text under the name of the report."""
    answer = pages.get("clerk", f"/runs/validate__nsw/{run_with_report(pages, report)}")
    assert answer.status_code == 200
    assert "No task of this run" in answer.text
    assert "<script>" not in answer.text


WINDOW = {"subscription": "nsw", "from_lsn": "0/1", "to_lsn": "0/2", "changes_read": 4711, "seconds": 1.5}


def run_with_window(pages: Pages, window: dict[str, Any]) -> str:
    """The id of a run of `validate__nsw` whose task has pushed this as the window that it applied."""
    run_id = run_with_report(pages, "")
    push_xcom(pages, "validate__nsw", run_id, "validate", "window", window)
    return run_id


def test_run_shows_the_windows_that_it_applied(pages: Pages) -> None:
    path = f"/runs/validate__nsw/{run_with_window(pages, WINDOW)}"
    for user in (USER, "clerk"):
        text = pages.get(user, path).text
        for label, shown in (("Subscription", "nsw"), ("After", "0/1"), ("Up to", "0/2")):
            assert f'<td data-label="{label}">{shown}</td>' in text
        assert "4,711" in text
    assert pages.get("loader", path).status_code == 403


@pytest.mark.parametrize(
    "changed",
    [
        {"subscription": "big"},
        {"subscription": "<script>1</script>"},
        {"from_lsn": "<script>1</script>"},
        {"to_lsn": None},
    ],
)
def test_run_shows_no_window_but_one_that_its_reader_may_read(pages: Pages, changed: dict[str, Any]) -> None:
    """A task of anybody's DAG can push anything under the name of the window."""
    answer = pages.get("clerk", f"/runs/validate__nsw/{run_with_window(pages, WINDOW | changed)}")
    assert answer.status_code == 200
    assert "No task of this run" in answer.text
    assert "<script>1" not in answer.text


def test_documented_calls_of_the_api_are_answered(pages: Pages, tmp_path: Path) -> None:
    """The commands of the how-to guide as a person enters them; the runs stay queued here."""
    page = (ROOT / "docs" / "how-to" / "rest-api.md").read_text(encoding="utf-8")
    commands = "\n".join(re.findall(r"^ {4}(.*)$", page, re.MULTILINE))
    before, apart, after = commands.partition("for TASK in")
    script = f"{before}echo; echo RUN=$RUN; read GO; {apart}{after}"
    passwords = json.loads((pages.airflow.home / "passwords.json").read_text(encoding="utf-8"))
    (tmp_path / "login.json").write_text(json.dumps({"username": USER, "password": passwords[USER]}))
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script.replace("http://localhost:8080", pages.airflow.url)],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as shell:  # fmt: skip
        assert shell.stdin is not None
        assert shell.stdout is not None
        shown = []
        for line in shell.stdout:
            shown.append(line)
            if line.startswith("RUN="):
                run_id = line.removeprefix("RUN=").strip()
                for task in ("plan", "backfill"):
                    push_xcom(pages, "backfill__nsw", run_id, task, "return_value", f"result of {task}")
                shell.stdin.write("\n")
                shell.stdin.flush()
    output = "".join(shown)
    assert shell.returncode == 0, output
    assert "result of plan" in output
    assert "result of backfill" in output
    started = set(re.findall(r'"dag_id":"([a-z]+)__', output))
    assert started == {"capture", "replay", "validate", "snapshot", "refresh", "resume", "backfill"}
    assert '"subscriptions":' in output
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0


@pytest.mark.browser
def test_a_script_in_a_report_does_not_run(pages: Pages, browser_page: Page) -> None:
    browser_page.context.set_extra_http_headers(pages.authorization(USER))
    browser_page.goto(f"{pages.airflow.url}/cdc-replay/reports/nsw/{REPORT}")
    assert browser_page.get_by_text("keys of nsw").is_visible()
    assert browser_page.title() == "nsw"


@pytest.mark.browser
def test_the_page_shows_in_airflows_menu_and_its_links_leave_the_frame(
    pages: Pages, browser_page: Page
) -> None:
    complaints: list[str] = []
    browser_page.on("console", lambda message: complaints.append(message.text))
    token = pages.authorization(USER)["Authorization"].removeprefix("Bearer ")
    browser_page.context.add_cookies([{"name": "_token", "value": token, "url": pages.airflow.url}])
    browser_page.goto(f"{pages.airflow.url}/plugin/cdc-replay")
    frame = browser_page.frame_locator("iframe")
    frame.locator("summary", has_text="lost").wait_for()
    frame.locator("summary", has_text="nsw").click()
    frame.get_by_role("button", name="Validate").click()
    frame.get_by_role("button", name="Run", exact=True).click()
    frame.get_by_text("validate__nsw was triggered").wait_for()
    assert not [text for text in complaints if "Content Security Policy" in text]
    frame.locator("#message a").click()
    browser_page.wait_for_url(f"{pages.airflow.url}/dags/validate__nsw/runs/*")


@pytest.mark.browser
def test_a_runs_page_has_a_tab_that_leads_to_its_report(pages: Pages, browser_page: Page) -> None:
    run_id = run_with_report(pages, f"nsw/{REPORT}")
    token = pages.authorization(USER)["Authorization"].removeprefix("Bearer ")
    browser_page.context.add_cookies([{"name": "_token", "value": token, "url": pages.airflow.url}])
    browser_page.goto(f"{pages.airflow.url}/dags/validate__nsw/runs/{quote(run_id)}")
    browser_page.get_by_role("link", name="Windows and reports", exact=True).click()
    frame = browser_page.frame_locator("iframe")
    frame.get_by_role("heading", name="nsw").wait_for()
    frame.get_by_role("link", name="Open the report").click()
    browser_page.get_by_text("keys of nsw").wait_for()


@pytest.mark.browser
def test_the_form_of_a_backfill_leads_to_what_the_log_holds(pages: Pages, browser_page: Page) -> None:
    token = pages.authorization(USER)["Authorization"].removeprefix("Bearer ")
    browser_page.context.add_cookies([{"name": "_token", "value": token, "url": pages.airflow.url}])
    browser_page.goto(f"{pages.airflow.url}/dags/backfill__nsw")
    browser_page.get_by_role("button", name="Trigger").first.click()
    browser_page.get_by_role("button", name="Range").click()
    browser_page.get_by_text("Start after this").wait_for()
    link = browser_page.get_by_role("link", name="Browse → CDC replay")
    assert (link.get_attribute("href") or "").endswith("/plugin/cdc-replay")


def test_rows_are_explained_only_to_those_who_may_validate(pages: Pages) -> None:
    question = {"table": "public.t", "key": ["id=1"]}
    for user, path in (
        ("clerk", "/subscriptions/nsw/why"),
        ("operator", "/subscriptions/big/why"),
        ("nobody", "/subscriptions/nsw/why"),
    ):
        assert pages.post(user, path, question).status_code == 403, (user, path)
    assert pages.post(None, "/subscriptions/nsw/why", question).status_code == 401
    assert pages.get("operator", "/subscriptions/nsw/why").status_code == 405

    answer = pages.post("operator", "/subscriptions/nsw/why", question)
    assert answer.status_code == 422
    assert "change log" in answer.json()["detail"]
    for wrong in ({}, {"table": "public.t", "key": "id=1"}, {"table": "t" * 5000, "key": ["id=1"]}):
        assert pages.post("operator", "/subscriptions/nsw/why", wrong).status_code == 422
    assert "s3cret-word" not in pages.post(USER, "/subscriptions/lost/why", question).text
