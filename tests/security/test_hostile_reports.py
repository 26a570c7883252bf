"""Names, row filters and values that are markup stay text in every page that a validation writes."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc_replay.subscriber.history import ValidationRecord
from cdc_replay.validate.html_report import write_page
from cdc_replay.validate.report_context import ReportContext
from fixtures.postgres import Database
from integration.validate.bench import Bench

if TYPE_CHECKING:
    from playwright.sync_api import Dialog, Page

pytestmark = pytest.mark.browser


def script(who: str) -> str:
    """Markup that runs as soon as a page shows it."""
    return f"<img src=x onerror=alert('{who}')>"


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@pytest.fixture
def bench(publisher: Database, subscriber: Database, tmp_path: Path) -> Bench:
    """A table whose names, filter and keys all are scripts, with rows that differ and that are outside."""
    made = Bench(publisher, subscriber, tmp_path / "expectations")
    table = f'"{script("schema")}"."{script("table")}"'
    key = f'"{script("column")}"'
    made.both(f'create schema "{script("schema")}"')
    made.both(f"create table {table} ({key} text primary key)")
    publisher.run(f"insert into {table} values ({quoted(script('missing'))})")
    publisher.run(f"create publication p for table {table} where ({key} <> {quoted(script('filter'))})")
    subscriber.run(
        f"insert into {table} values ({quoted(script('unexpected'))}), ({quoted(script('filter'))})"
    )
    return made


def heard(page: Page, pages: list[Path]) -> list[str]:
    """What the scripts of these pages say, opened from disk as a person does."""
    dialogs: list[str] = []

    def listen(dialog: Dialog) -> None:
        dialogs.append(f"{page.url}: {dialog.message}")
        dialog.dismiss()

    page.on("dialog", listen)
    for file in pages:
        page.goto(file.as_uri())
        page.wait_for_timeout(200)
    return dialogs


def test_pages_run_no_script_from_the_databases(bench: Bench, browser_page: Page) -> None:
    verdict = bench.validate(note=f"not mirrored because of {script('note')}")
    failed = bench.validate()
    bench.subscriber.run(f'drop table "{script("schema")}"."{script("table")}"')
    lost = bench.validate()
    assert not failed.success
    assert lost.tables[0].error is not None
    pages = sorted((bench.context_root / "gx" / "uncommitted").rglob("*.html"))
    assert {verdict.report, failed.report, lost.report} < set(pages)

    assert heard(browser_page, pages) == []


def test_pages_show_texts_of_the_databases(bench: Bench, browser_page: Page) -> None:
    verdict = bench.validate()

    documents = [page for page in verdict.data_docs.parent.rglob("*.html") if "validations" in page.parts]
    for page in (verdict.report, *documents):
        browser_page.goto(page.as_uri())
        for who in ("schema", "table", "column", "filter", "missing", "unexpected"):
            assert script(who) in browser_page.locator("body").inner_text(), (page, who)


def test_a_link_to_an_earlier_report_runs_no_script(bench: Bench, browser_page: Page) -> None:
    """Its address is what the subscriber keeps, whose superuser is trusted with nothing elsewhere."""
    verdict = bench.validate()
    now = dt.datetime.now(dt.UTC)
    address = "javascript:void(document.title='ran')"
    record = ValidationRecord(now, "0/1", True, 1, 0, 0, 1.0, address)
    context = ReportContext("shop", ("p",), earlier=(record,))
    write_page(verdict, context, now=now, run_page=verdict.data_docs)

    browser_page.goto(verdict.report.as_uri())
    browser_page.locator(".trend a").click()
    browser_page.wait_for_timeout(200)

    assert browser_page.title() != "ran"
