"""The tab *Windows and reports* of a run, in a real browser, with the page's style sheet."""

from __future__ import annotations

import importlib.resources
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from cdc_replay.airflow.page.policy import HEADERS, PAGE_HEADERS
from cdc_replay.airflow.page.run_page import render
from fixtures.page_samples import run_summary

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.browser

URL = "http://airflow.test/cdc-replay/runs/replay__flights/r"
STATIC = importlib.resources.files("cdc_replay.airflow.page") / "static"


def show(page: Page) -> list[str]:
    """Open the page of a run; what the browser complains of."""
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.route("**/*", _answer)
    page.goto(URL)
    return complaints


def _answer(route: Route) -> None:
    path = urlsplit(route.request.url).path.removeprefix("/cdc-replay/")
    if path.startswith("static/"):
        kind = "text/css" if path.endswith("css") else "text/javascript"
        route.fulfill(body=(STATIC / path.removeprefix("static/")).read_text(), content_type=kind)
    elif path.startswith("runs/"):
        body = render(run_summary(), "/cdc-replay")
        route.fulfill(body=body, content_type="text/html", headers={**HEADERS, **PAGE_HEADERS})
    else:
        route.fulfill(status=404)


def test_windows_and_reports_of_a_run(browser_page: Page) -> None:
    complaints = show(browser_page)
    rows = browser_page.locator("tbody tr")
    assert rows.nth(1).locator("td").all_inner_texts() == [
        "newark", "16/B3700000", "16/B374D848", "41,207", "8,112", "311", "208", "33,095", "0", "3.4 s",
    ]  # fmt: skip
    assert browser_page.locator(".badge").all_inner_texts() == ["not consistent", "consistent"]
    (link,) = browser_page.get_by_role("link").all()[1:]
    assert "/cdc-replay/reports/newark/16-B374D848-" in (link.get_attribute("href") or "")
    assert complaints == []


def test_on_a_phone_every_cell_has_its_label(browser_page: Page) -> None:
    browser_page.set_viewport_size({"width": 390, "height": 800})
    show(browser_page)
    for cell in browser_page.locator("tbody tr").first.locator("td").all():
        label = cell.evaluate("cell => getComputedStyle(cell, '::before').content")
        assert label.strip('"') not in {"", "none"}
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= 390
