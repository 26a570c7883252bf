"""The report is one readable page: self-contained, escaped, with plain failures."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cdc_replay.compare.difference import Difference, DifferenceKind
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proof import TableProof
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ValidationOutcome
from cdc_replay.subscriber.history import ValidationRecord
from cdc_replay.subscriber.proofs import TableRecord
from cdc_replay.validate.html_report import LATEST, render, write_page
from cdc_replay.validate.report_context import ReportContext, ReportLinks, first_sentence
from cdc_replay.validate.verdict import (
    Check,
    CheckKind,
    LeftOut,
    LeftReason,
    TableVerdict,
    Verdict,
)

NOW = dt.datetime(2013, 7, 1, 12, 30, tzinfo=dt.UTC)

EQUAL = TableVerdict(
    name=QualifiedName("public", "flights"),
    full=True,
    checks=(Check(CheckKind.CONTENT, success=True, observed="no difference in 1,234 rows"),),
    method="digests",
    publisher_rows=1234,
    subscriber_rows=1234,
)
DIFFERING = TableVerdict(
    name=QualifiedName("public", 'a <"script">'),
    full=True,
    checks=(Check(CheckKind.CONTENT, success=False, observed="30 missing"),),
    method="digests",
    publisher_rows=30,
    subscriber_rows=0,
    counts=((DifferenceKind.MISSING, 30),),
    differences=(Difference(DifferenceKind.MISSING, "id=<b>1</b>", ""),),
)
UNREADABLE = replace(EQUAL, checks=(), error="division by zero", publisher_rows=None, subscriber_rows=None)
INFORMATIVE = replace(
    DIFFERING, full=False, checks=(replace(DIFFERING.checks[0], informational=True),), notes=("why",)
)
CONTEXT = ReportContext("shop", ("p1", "p2"))


def verdict(*tables: TableVerdict) -> Verdict:
    folder = Path("reports")
    return Verdict("nsw", Lsn.parse("16/B374D848"), tables, folder / "index.html", folder / "run.html", 1.5)


def page(*tables: TableVerdict, context: ReportContext = CONTEXT) -> str:
    return render(verdict(*tables), context, now=NOW, run_link="../run.html", index_link="../index.html")


class _Elements(HTMLParser):
    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in {"href", "src"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_loads_nothing_from_elsewhere() -> None:
    text = page(EQUAL, DIFFERING)
    elements = _Elements()
    elements.feed(text)

    assert elements.open == []
    assert {link for link in elements.links if not link.startswith("#")} == {"../run.html", "../index.html"}
    assert re.search(r"https?:|@import|url\(|<script", text) is None


def test_names_and_keys_are_escaped() -> None:
    text = page(DIFFERING)

    assert "id=&lt;b&gt;1&lt;/b&gt;" in text
    assert "<b>" not in text
    assert "public.a &lt;&quot;script&quot;&gt;" in text


def test_page_says_whether_the_subscription_is_consistent() -> None:
    assert "nsw: consistent at 16/B374D848" in page(EQUAL)
    assert "nsw: not consistent at 16/B374D848" in page(EQUAL, DIFFERING)
    assert "nsw: not consistent at 16/B374D848" in page(UNREADABLE)
    assert "nsw: consistent at 16/B374D848" in page(INFORMATIVE)


def test_error_is_not_shown_as_a_difference() -> None:
    text = page(UNREADABLE)

    assert "division by zero" in text
    assert "differs" not in text


BROKEN = replace(EQUAL, checks=(Check(CheckKind.CONTENT, success=False, observed="", error="out of memory"),))
"""A table whose rows were read, and one of whose checks raised."""


@pytest.mark.parametrize("broken", [BROKEN, replace(UNREADABLE, is_broken=True)])
def test_what_could_not_be_judged_is_neither_consistent_nor_a_difference(broken: TableVerdict) -> None:
    judged = verdict(EQUAL, broken)
    assert (judged.outcome, judged.success, broken.can_be_repaired) == (ValidationOutcome.ERROR, False, False)
    text = page(EQUAL, broken)
    assert "nsw: error at 16/B374D848" in text
    assert "it could not be judged whether" in text
    assert '<span class="badge bad">error</span>' in text
    assert all(word not in text for word in ("differs", "not consistent", ">consistent"))
    # A difference that is known outweighs it.
    assert verdict(DIFFERING, broken).outcome is ValidationOutcome.NOT_CONSISTENT


def test_a_part_is_never_called_consistent() -> None:
    part = replace(EQUAL, compared_buckets=13, chosen_buckets=20)
    left = tuple(
        LeftOut(QualifiedName("public", f"<{reason.name}>"), reason, TableProof.nothing())
        for reason in LeftReason
    )
    assert verdict(part).is_partial  # a sample of every table is a part, too
    assert "nsw: no difference in what was compared at 16/B374D848" in page(part)
    judged = replace(verdict(part), left_out=left)
    assert (judged.success, judged.is_partial) == (True, True)
    assert judged.describe_not_reached() == (
        "public.flights: 7 of 20 chosen buckets", "public.<NOT_REACHED>",
    )  # fmt: skip
    text = render(judged, replace(CONTEXT, unknown=("public.<gone>",)), now=NOW, run_link="r", index_link="i")
    assert "nsw: no difference in what was compared at 16/B374D848" in text
    assert "a sample of one table. Nothing is claimed of the rest." in text
    assert "equal in part" in text
    assert "7 of 20 chosen buckets were not reached" in text
    assert "public.&lt;gone&gt; is planned in the configuration" in text
    for reason in LeftReason:
        assert f'public.&lt;{reason.name}&gt;</td><td><span class="badge info">{reason.value}</span>' in text
    assert ">consistent<" not in text


def test_a_proof_that_is_too_old_is_told_apart_from_a_difference() -> None:
    age = Check(
        CheckKind.PROOF_AGE, success=False, observed="the proof is 9 days old, at most 7 days are allowed"
    )
    left = LeftOut(QualifiedName("public", "t"), LeftReason.NOT_DUE, TableProof.nothing(), age)
    for judged in (
        replace(verdict(EQUAL), left_out=(left,)),
        verdict(replace(EQUAL, checks=(*EQUAL.checks, age))),
    ):
        assert (judged.outcome, judged.success) == (ValidationOutcome.TOO_OLD, False)
        assert "age of the proof: the proof is 9 days old" in "\n".join(judged.describe_failures())
        text = render(judged, CONTEXT, now=NOW, run_link="r", index_link="i")
        assert "the last proof of some tables is older than it may be" in text
        assert "differs" not in text


def test_each_table_has_its_trend() -> None:
    records = tuple(
        TableRecord(
            "public", "flights", NOW - dt.timedelta(hours=hours), "0/1", 64, 10, hours == 2, 1 << 20, 1.0,
            None, "0/1", NOW,
        )
        for hours in (1, 2)
    )  # fmt: skip
    text = page(EQUAL, context=replace(CONTEXT, table_history={EQUAL.name: records}))
    assert "Its last 3 validations compared all rows 1.5 times" in text
    assert text.count('class="fails"') == 1
    assert "1 row differs in 64 of 256 buckets, 10 rows, 1024 kB, 1.0 s; proven through 0/1" in text


def test_page_gives_the_number_of_keys_if_there_are_more() -> None:
    assert "the first key" in page(DIFFERING)
    assert "&ge; 30" in page(replace(DIFFERING, counts_exact=False))


def test_last_page_is_also_the_latest(tmp_path: Path) -> None:
    first = replace(verdict(EQUAL), report=tmp_path / "1.html", data_docs=tmp_path / "docs" / "index.html")
    second = replace(first, report=tmp_path / "2.html", tables=(DIFFERING,))
    write_page(first, CONTEXT, now=NOW, run_page=tmp_path / "docs" / "run.html")
    write_page(second, CONTEXT, now=NOW, run_page=tmp_path / "docs" / "run.html")

    assert (tmp_path / LATEST).read_text() == (tmp_path / "2.html").read_text()
    assert (tmp_path / "1.html").read_text() != (tmp_path / "2.html").read_text()
    assert 'href="docs/index.html"' in (tmp_path / LATEST).read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["1.html", "2.html", LATEST]


def test_first_sentence_says_what_holds_and_what_does_not() -> None:
    def sentence(*tables: TableVerdict) -> str:
        return first_sentence(verdict(*tables), CONTEXT, NOW)

    start = "On 01 July 2013 at 12:30:00 UTC, “nsw”"
    source = "exactly what “shop” publishes to it"
    assert sentence(EQUAL, EQUAL) == f"{start} held {source}: all 2 tables are as published."
    assert sentence(EQUAL) == f"{start} held {source}: its one table is as published."
    assert sentence(EQUAL, DIFFERING) == (
        f'{start} did not hold {source}: 1 of 2 tables does not (public.a <"script">: 30 missing).'
        " The other one does."
    )
    assert "public.flights could not be compared" in sentence(UNREADABLE)
    assert sentence(*[DIFFERING] * 5).endswith("; and 2 more).")


def test_times_have_the_zone_of_the_reader() -> None:
    there = NOW.astimezone(dt.timezone(dt.timedelta(hours=10), "AEST"))
    text = render(verdict(EQUAL), CONTEXT, now=there, run_link="r", index_link="i")
    assert "2013-07-01 22:30:00 AEST (UTC+1000)" in text


def test_trend_links_to_earlier_reports() -> None:
    assert "Trend" not in page(EQUAL)
    earlier = [
        ValidationRecord(NOW - dt.timedelta(hours=hours), "0/1", hours != 2, 3, 0, 7, 1.0, f"{hours}.html")
        for hours in (1, 2, 3)
    ]
    text = page(EQUAL, context=replace(CONTEXT, earlier=tuple(earlier)))
    assert "3 of the last 4 validations found the subscription consistent" in text
    assert text.index("3.html") < text.index("2.html") < text.index("1.html")
    assert 'class="fails" href="2.html"' in text


def test_page_names_publisher_filter_and_repair() -> None:
    links = ReportLinks("https://a/plugin", "https://a/run?<", "https://a/dags/validate__nsw")
    filtered = replace(DIFFERING, filters=("(a < 1)", "b"))
    text = page(filtered, EQUAL, context=replace(CONTEXT, links=links))
    assert "rows where <code>(a &lt; 1)</code> or <code>b</code>" in text
    assert "Published: all rows" in text
    assert "p1, p2" in text
    assert "cdc-replay validate nsw --repair" in text
    for link in ("https://a/plugin", "https://a/run?&lt;", "https://a/dags/validate__nsw"):
        assert f'href="{link}"' in text
