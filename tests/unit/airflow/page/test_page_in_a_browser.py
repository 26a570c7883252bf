"""The page in Airflow's menu, in a real browser, with its real files and policy, and given answers.

Whose data and buttons these are is tested with Airflow itself, in `tests/security/test_pages_in_airflow.py`.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest

from cdc_replay.airflow.page.policy import HEADERS, PAGE_HEADERS
from cdc_replay.model.results import to_json
from cdc_replay.model.status import TableStatus
from cdc_replay.monitoring.subscription_details import ParkedObject
from fixtures.page_samples import END, REASON, details, status, subscription

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.browser

URL = "http://airflow.test/cdc-replay/"
STATIC = importlib.resources.files("cdc_replay.airflow.page") / "static"
MARKUP = "<img src=x onerror=alert(1)>"
PARKED = ParkedObject(None, END, END, REASON)
PARKED_TABLE = ParkedObject("public.flights", END, END, f"{REASON} [R4.6]")


@dataclass
class Server:
    """Answers the browser's requests; `triggered` are those for a run of a DAG."""

    status: dict[str, Any]
    details: dict[str, dict[str, Any]]
    triggered: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refusal: str | None = None
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Questions for a row."""

    def show(self, page: Page, *opened: str) -> list[str]:
        """Open the page and these subscriptions; what the browser complains of."""
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
        page.route("**/*", self._answer)
        page.goto(URL)
        for name in opened:
            page.locator("summary", has=page.get_by_role("heading", name=name, exact=True)).click()
            page.locator(".u-legend").first.wait_for()
        return complaints

    def _answer(self, route: Route) -> None:
        path = unquote(urlsplit(route.request.url).path).removeprefix("/cdc-replay/")
        if path == "":
            headers = {**HEADERS, **PAGE_HEADERS}
            route.fulfill(body=(STATIC / "page.html").read_text(), content_type="text/html", headers=headers)
        elif path.startswith("static/"):
            kind = "text/css" if path.endswith("css") else "text/javascript"
            route.fulfill(body=(STATIC / path.removeprefix("static/")).read_text(), content_type=kind)
        elif path == "data":
            route.fulfill(json=self.status)
        elif path.endswith("/why") and route.request.method == "POST":
            self._explain(route, path)
        elif path.startswith("subscriptions/"):
            route.fulfill(json=self.details[path.removeprefix("subscriptions/")])
        elif path.startswith("/api/v2/dags/") and route.request.method == "POST":
            self._trigger(route, path)
        else:
            route.fulfill(status=404)

    def _explain(self, route: Route, path: str) -> None:
        question = json.loads(route.request.post_data or "")
        self.asked.append((path.split("/")[1], question))
        if question["key"] == ["id=nothing"]:
            route.fulfill(status=422, json={"detail": 'table "public.flights" has no such key'})
            return
        route.fulfill(json={"text": f"history of {question['key']}\n{MARKUP}"})

    def _trigger(self, route: Route, path: str) -> None:
        if self.refusal is not None:
            route.fulfill(status=403, json={"detail": self.refusal})
            return
        dag_id = path.removeprefix("/api/v2/dags/").removesuffix("/dagRuns")
        self.triggered.append((dag_id, json.loads(route.request.post_data or "")))
        route.fulfill(json={"dag_id": dag_id, "dag_run_id": "manual__1"})


@pytest.fixture
def server() -> Server:
    """One subscription that is well, and one that is parked."""
    rows = (
        subscription("newark"),
        subscription("kennedy", error=f"parked at {END}: {REASON}"),
        subscription("delays", applied_lsn=None, lag_seconds=None),
    )
    given = {"newark": details("newark"), "kennedy": details("kennedy", parked=[PARKED, PARKED_TABLE])}
    return Server(status(*rows), given | {"delays": details("delays")})


def test_publishers_and_subscriptions_are_shown_in_human_units(server: Server, browser_page: Page) -> None:
    complaints = server.show(browser_page, "newark")
    text = browser_page.locator("main").inner_text()
    assert "648 MB of WAL are retained, 32 % of 2.0 GB" in text
    assert "3.2 GB" in text
    assert "cannot connect: timeout expired" in text
    assert "as of 5 min ago" in text
    for part in (
        "up to date",
        "lag 4.2 s · 51 kB",
        "rows where (origin = 'EWR'::text)",
        "all rows",
        "copying",
    ):
        assert part in text, part
    assert browser_page.locator(".proofs a").count() == 30
    assert browser_page.locator(".proofs a.differs").count() == 2
    assert complaints == []


def test_charts_show_the_chosen_range(server: Server, browser_page: Page) -> None:
    asked: list[str] = []
    browser_page.on("request", lambda request: asked.append(request.url))
    server.show(browser_page, "newark")
    assert browser_page.locator(".chart canvas").count() == 2
    browser_page.get_by_role("button", name="7 d").click()
    browser_page.locator("button[data-range='7d'][aria-pressed=true]").wait_for()
    assert f"{URL}subscriptions/newark?time_range=24h" in asked
    assert f"{URL}subscriptions/newark?time_range=7d" in asked


def test_parked_things_have_the_error_and_the_ways_out(server: Server, browser_page: Page) -> None:
    server.show(browser_page, "kennedy")
    text = browser_page.locator("#subscriptions").inner_text()
    assert "Key (id)=(1207) already exists." in text
    buttons = browser_page.locator(".problem").get_by_role("button").all_inner_texts()
    assert buttons == [
        "Retry now",
        "Skip the transaction",
        "Resume",
        "Skip the transaction",
        "Store NULL",
        "Copy again",
    ]
    for label, position in (("Retry now", 0), ("Skip the transaction", 1), ("Store NULL", 0)):
        browser_page.locator(".problem").get_by_role("button", name=label).nth(position).click()
        browser_page.get_by_role("button", name="Run", exact=True).click()
        browser_page.locator("#message").get_by_text("was triggered").wait_for()
        browser_page.locator("#confirm").wait_for(state="hidden")
    table = ["public.flights"]
    assert [(dag_id, run["conf"]) for dag_id, run in server.triggered] == [
        ("replay__flights", {}),
        ("resume__kennedy", {"tables": table, "skip": str(END)}),
        ("resume__kennedy", {"tables": table, "accept_null": True}),
    ]


def test_buttons_ask_first_and_trigger_with_params(server: Server, browser_page: Page) -> None:
    server.show(browser_page, "newark")
    browser_page.get_by_role("button", name="Copy again").nth(1).click()
    browser_page.get_by_role("button", name="Cancel").click()
    assert server.triggered == []
    browser_page.get_by_role("button", name="Refresh").click()
    assert browser_page.get_by_text("This DAG is paused in Airflow").is_visible()
    browser_page.get_by_label("Reconcile").check()
    browser_page.keyboard.press("Escape")
    browser_page.get_by_role("button", name="Refresh").click()
    browser_page.get_by_role("button", name="Run", exact=True).click()
    browser_page.get_by_text("refresh__newark was triggered").wait_for()
    conf = {"reconcile": False, "dry_run": True}
    assert server.triggered == [("refresh__newark", {"logical_date": None, "conf": conf})]


def test_a_backfill_is_asked_for_with_what_the_log_holds(server: Server, browser_page: Page) -> None:
    server.show(browser_page, "newark")
    browser_page.get_by_role("button", name="Backfill a range").click()
    start = browser_page.get_by_label("After this date, time or LSN; the log holds 11/4A002F10 to ")
    assert browser_page.get_by_label("Dry run").is_checked()
    start.fill(" 2026-01-31 ")
    browser_page.locator("#confirm").get_by_label("public.flights").check()
    browser_page.get_by_role("button", name="Run", exact=True).click()
    browser_page.get_by_text("backfill__newark was triggered").wait_for()
    conf = {"from": "2026-01-31", "to": None, "tables": ["public.flights"], "into_conn_id": None}
    assert [run["conf"] for _, run in server.triggered] == [{**conf, "dry_run": True}]


def test_a_row_is_explained_for_those_who_may_validate(server: Server, browser_page: Page) -> None:
    complaints = server.show(browser_page, "newark")
    browser_page.get_by_role("button", name="Explain a row").click()
    browser_page.locator("#why").get_by_label("Table").select_option("public.flights")
    browser_page.get_by_label("Key").fill("carrier=UA  name='New  York'\"s\"")
    browser_page.keyboard.press("Enter")
    answer = browser_page.locator("#why-answer")
    answer.get_by_text("history of").wait_for()
    key = ["carrier=UA", "name=New  Yorks"]
    assert server.asked == [("newark", {"table": "public.flights", "key": key})]
    assert MARKUP in answer.inner_text()
    assert browser_page.locator("#why img").count() == 0

    browser_page.get_by_label("Key").fill("id=nothing")
    browser_page.get_by_role("button", name="Explain", exact=True).click()
    answer.get_by_text('table "public.flights" has no such key').wait_for()
    browser_page.get_by_role("button", name="Close").click()
    assert browser_page.locator("#why").is_hidden()
    assert [text for text in complaints if "422" not in text] == []


def test_tables_show_their_proof_and_its_trend(server: Server, browser_page: Page) -> None:
    server.show(browser_page, "newark")
    cell = browser_page.locator("tr", has_text="public.airlines").locator("td").nth(3)
    assert re.fullmatch(r"proven\s.*\d min ago\s*", cell.inner_text(), re.DOTALL)
    assert cell.locator(".proofs span").count() == 4
    assert cell.locator(".proofs span.differs").count() == 1
    title = cell.locator(".proofs span.differs").get_attribute("title") or ""
    assert title.endswith("3 rows differ in 64 of 256 buckets, 16 rows, 0.1 s")
    assert browser_page.get_by_text("not all proven").count() > 0


def test_the_button_validates_everything(server: Server, browser_page: Page) -> None:
    server.show(browser_page, "newark")
    browser_page.get_by_role("button", name="Validate").click()
    browser_page.get_by_role("button", name="Run", exact=True).click()
    browser_page.get_by_text("validate__newark was triggered").wait_for()
    assert [run["conf"] for _, run in server.triggered] == [{"due": False, "repair": False, "dry_run": True}]


def test_a_refusal_of_airflow_is_shown(server: Server, browser_page: Page) -> None:
    server.refusal = "Forbidden"
    server.show(browser_page, "newark")
    browser_page.get_by_role("button", name="Validate").click()
    browser_page.get_by_role("button", name="Run", exact=True).click()
    browser_page.get_by_text("validate__newark was not triggered: Forbidden").wait_for()


def test_there_is_no_button_for_those_who_may_not_trigger(server: Server, browser_page: Page) -> None:
    server.details["kennedy"] = details("kennedy", parked=[PARKED, PARKED_TABLE], triggers=False)
    server.status["dags"] = {}
    server.show(browser_page, "kennedy")
    assert browser_page.locator("main").get_by_role("button").count() == 0
    text = browser_page.locator("#subscriptions").inner_text()
    assert f"cdc-replay resume kennedy --skip {END}" in text
    assert f"cdc-replay resume kennedy --table public.flights --skip {END}" in text
    assert "cdc-replay resume kennedy --table public.flights --accept-null" in text
    assert "cdc-replay replay kennedy" in browser_page.locator("#subscriptions").inner_text()


@pytest.mark.parametrize("markup", ["<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "\"'><b>"])
def test_texts_of_servers_stay_texts(server: Server, browser_page: Page, markup: str) -> None:
    parked = ParkedObject(f"public.{markup}", END, END, markup)
    server.details["kennedy"] = details("kennedy", filters=[markup], parked=[parked])
    server.status["tables"] = [to_json(TableStatus("kennedy", "public.flights", "ready", notice=markup))]
    server.status["publishers"][1]["error"] = markup
    complaints = server.show(browser_page, "kennedy")
    assert browser_page.locator("main").inner_text().count(markup) >= 4
    assert browser_page.locator("main img, main script, main b").count() == 0
    assert complaints == []


def test_page_works_on_a_phone(server: Server, browser_page: Page) -> None:
    browser_page.set_viewport_size({"width": 390, "height": 800})
    server.show(browser_page, "kennedy")
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser_page.get_by_text("Changes read").first.is_visible()


def test_keyboard_opens_a_subscription_and_keeps_its_place(server: Server, browser_page: Page) -> None:
    server.show(browser_page)
    summary = browser_page.locator("summary").first
    summary.focus()
    browser_page.keyboard.press("Enter")
    browser_page.locator(".u-legend").first.wait_for()
    browser_page.evaluate("poll()")
    assert browser_page.evaluate("document.activeElement.dataset.key") == "subscription newark"


def test_what_is_old_is_said_when_airflow_does_not_answer(server: Server, browser_page: Page) -> None:
    server.show(browser_page)
    browser_page.locator("summary").first.wait_for()
    browser_page.unroute_all()
    browser_page.route("**/data", lambda route: route.fulfill(status=401))
    browser_page.evaluate("poll()")
    assert "you are not logged in" in browser_page.locator("#updated").inner_text()
    assert browser_page.locator("summary").count() == 3
