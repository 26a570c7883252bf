"""The report in a browser: a self-contained page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.validate.bench import Bench

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

pytestmark = pytest.mark.browser


@pytest.fixture
def trail(bench: Bench) -> Bench:
    bench.both("create table trail (id int primary key, note text)")
    bench.publisher.run("insert into trail values (1, 'one'), (2, 'two'), (3, 'three')")
    bench.publisher.run("create publication p for table trail")
    bench.copy()
    return bench


def test_report_names_differing_rows_and_contacts_no_other_host(trail: Bench, browser_page: Page) -> None:
    trail.subscriber.run("delete from trail where id = 2")
    verdict = trail.validate()
    requested_urls: list[str] = []

    def note(request: Request) -> None:
        requested_urls.append(request.url)

    browser_page.on("request", note)
    browser_page.goto(verdict.report.as_uri())

    assert browser_page.get_by_text("not consistent").first.is_visible()
    assert browser_page.get_by_text("id=2").first.is_visible()
    assert browser_page.get_by_text(str(verdict.lsn)).first.is_visible()
    assert requested_urls == [verdict.report.as_uri()]
    documents = browser_page.get_by_role("link", name="Data Docs").first
    documents.click()
    browser_page.wait_for_load_state("domcontentloaded")
    assert "data_docs" in browser_page.url


def test_report_of_a_consistent_subscription_says_so(trail: Bench, browser_page: Page) -> None:
    verdict = trail.validate()

    browser_page.goto(verdict.report.as_uri())

    assert browser_page.get_by_text("consistent", exact=True).first.is_visible()
    assert browser_page.get_by_text("not consistent").count() == 0
