"""The certificate on a page and on a screen, with names and texts as servers may have them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from pathlib import Path

from cdc_replay.certify.page import KEPT_PAGES, LATEST, render_certificate, write_certificate
from cdc_replay.model.certificate import (
    DEVIATION_TEXTS,
    CertifiedTable,
    CertifyResult,
    Deviation,
    ExplainedRows,
    TableOutcome,
)
from cdc_replay.model.lsn import Lsn
from cdc_replay.terminal.certify_view import certified
from fixtures.screen import joined, screen

HOSTILE = "\x1b[2J[red]<b>x</b>[/red]\u202e"
NOW = dt.datetime(2013, 7, 1, 12, 30, tzinfo=dt.UTC)


def result(folder: Path) -> CertifyResult:
    explained = ExplainedRows(
        Deviation.UNSENT_VALUE, DEVIATION_TEXTS[Deviation.UNSENT_VALUE], 2, (f"id={HOSTILE}",)
    )
    return CertifyResult(
        subscription="nsw",
        publisher="shop",
        publications=("p", HOSTILE),
        version="0.9",
        publisher_version="18.6",
        native_version="18.1",
        from_lsn=Lsn(100),
        to_lsn=Lsn(200),
        transactions=1234,
        followed_seconds=60.4,
        seconds=70.0,
        success=False,
        tables=(
            CertifiedTable("s.equal", TableOutcome.EQUAL, 4321, 4321),
            CertifiedTable(f"s.{HOSTILE}", TableOutcome.DIFFERS, 5, 6, {"unexpected": 1}, (HOSTILE,)),
            CertifiedTable("s.deviates", TableOutcome.DEVIATES, 7, 7, deviations=(explained,)),
            CertifiedTable("s.out", TableOutcome.LEFT_OUT, reason=HOSTILE),
        ),
        report=folder / "reports" / "certificate-1.html",
        removed=("cdc_replay_certify_1",),
        error="s: 1 unexpected",
    )


def test_the_page_is_whole_escaped_and_says_the_verdict(tmp_path: Path) -> None:
    certificate = result(tmp_path)
    write_certificate(certificate, NOW)

    text = certificate.report.read_text(encoding="utf-8")
    assert text == (certificate.report.parent / LATEST).read_text(encoding="utf-8")
    assert text == render_certificate(certificate, NOW)
    assert "<b>x" not in text
    assert "&lt;b&gt;x" in text
    for said in ("not certified", "0/C8", "4,321", "1,234 in 60 s", "R4.6", "did not hold"):
        assert said in text, said
    assert certificate.report.parent.stat().st_mode & 0o077 == 0


def test_the_screen_says_what_differs_and_why(tmp_path: Path) -> None:
    assert "s.equal" in screen(certified(result(tmp_path)), width=80)
    shown = joined(screen(certified(result(tmp_path)), width=140))
    assert "\x1b[2J" not in shown
    for said in (
        "NOT certified",
        "s.equal",
        "4,321",
        "unexpected",
        "R4.6",
        "left out",
        "which a killed run had left",
    ):
        assert said in shown, said


def test_the_result_has_a_json_form(tmp_path: Path) -> None:
    form = result(tmp_path).to_dict()
    assert form["to_lsn"] == "0/C8"
    tables = form["tables"]
    assert isinstance(tables, list)
    assert tables[2] == {
        "table": "s.deviates",
        "outcome": "deviates as documented",
        "native_rows": 7,
        "our_rows": 7,
        "differences": {},
        "keys": [],
        "deviations": [
            {
                "deviation": "R4.6",
                "reason": DEVIATION_TEXTS[Deviation.UNSENT_VALUE],
                "rows": 2,
                "keys": [f"id={HOSTILE}"],
            }
        ],
        "reason": None,
    }


def test_the_newest_pages_are_kept(tmp_path: Path) -> None:
    """By their time, not by the position, which is in their names before it."""
    folder = tmp_path / "reports"
    folder.mkdir()
    names = [f"certificate-{99 - n % 50:X}-0-20120101T000000{n:06}Z.html" for n in range(KEPT_PAGES + 5)]
    for name in [*names, "0-1-20110101T000000000000Z.html"]:
        (folder / name).touch()
    newest = dataclasses.replace(
        result(tmp_path), report=folder / "certificate-0-1-20130101T000000000000Z.html"
    )
    write_certificate(newest, NOW)
    left = {page.name for page in folder.iterdir()}
    assert left == {*names[6:], newest.report.name, LATEST, "0-1-20110101T000000000000Z.html"}
