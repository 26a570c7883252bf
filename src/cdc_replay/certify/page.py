"""The certificate as one self-contained HTML page, in the form of the validation reports beside it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from html import escape
from typing import Final

from cdc_replay.model.certificate import CertifiedTable, CertifyResult, TableOutcome
from cdc_replay.model.count import count_in_words
from cdc_replay.private_files import make_folder
from cdc_replay.validate.html_report import (
    PAGE,
    STYLE,
    badge,
    facts_list,
    remove_old_pages,
    write_whole,
)
from cdc_replay.validate.report_context import time_of_day

LATEST: Final = "certificate.html"
"""A copy of the last certificate."""

PAGES: Final = "certificate-*Z.html"
"""The pages of runs."""

KEPT_PAGES: Final = 100
"""Of each subscription, as of its validations."""

_BADGES: Final[Mapping[TableOutcome, str]] = {
    TableOutcome.EQUAL: "good",
    TableOutcome.DEVIATES: "info",
    TableOutcome.DIFFERS: "bad",
    TableOutcome.NOT_COMPARED: "bad",
    TableOutcome.LEFT_OUT: "info",
}


def write_certificate(result: CertifyResult, now: dt.datetime) -> None:
    """Write the page to `result.report`, and as `LATEST` beside it; `now` is in the zone that it shows."""
    folder = result.report.parent
    make_folder(folder)
    text = render_certificate(result, now)
    for target in (result.report, folder / LATEST):
        write_whole(target, text)
    remove_old_pages(folder, PAGES, KEPT_PAGES)


def render_certificate(result: CertifyResult, now: dt.datetime) -> str:
    """The page as text."""
    word = "certified" if result.success else "not certified"
    body = [_head(result, word, now), _overview(result.tables), *map(_table, result.tables), _method()]
    title = escape(f"{result.subscription}: {word} at {result.to_lsn}")
    return PAGE.format(title=title, style=STYLE, body="\n".join(body))


def _head(result: CertifyResult, word: str, now: dt.datetime) -> str:
    rows = sum(table.native_rows or 0 for table in result.tables)
    facts = {
        "Publisher": f"{result.publisher}, PostgreSQL {result.publisher_version}",
        "Native subscriber": f"PostgreSQL {result.native_version}",
        "cdc-replay": result.version,
        "Publications": ", ".join(result.publications),
        "Followed from": str(result.from_lsn),
        "Compared at": str(result.to_lsn),
        "Transactions": f"{result.transactions:,} in {result.followed_seconds:.0f} s",
        "Native rows": f"{rows:,}",
        "Compared on": f"{now:%Y-%m-%d} {time_of_day(now)}",
    }
    error = "" if result.error is None else f'<p class="error bad">{escape(result.error)}</p>'
    return (
        f'<section class="card"><div class="head"><h1>{escape(result.subscription)}</h1>'
        f"{badge('good' if result.success else 'bad', word)}</div>"
        f'<p class="summary">{escape(certificate_sentence(result))}</p>{facts_list(facts)}{error}</section>'
    )


def certificate_sentence(result: CertifyResult) -> str:
    """The verdict in a sentence."""
    by_outcome = {
        outcome: [table for table in result.tables if table.outcome is outcome] for outcome in TableOutcome
    }
    counts = [f"{len(tables)} {outcome.value}" for outcome, tables in by_outcome.items() if tables]
    verb_phrase = (
        "held what a native subscription held" if result.success else "did not hold what a native one held"
    )
    transactions = count_in_words(result.transactions, "transaction")
    return (
        f"{result.subscription} {verb_phrase} at {result.to_lsn}, after {transactions}"
        f" of the publisher: {', '.join(counts) or 'no table'}"
    )


def _overview(tables: Iterable[CertifiedTable]) -> str:
    rows = "".join(
        f"<tr><td>{escape(table.table)}</td><td>{badge(_BADGES[table.outcome], table.outcome.value)}</td>"
        f'<td class="number">{_count(table.native_rows)}</td><td class="number">{_count(table.our_rows)}</td>'
        f'<td class="number">{sum(table.differences.values()):,}</td>'
        f'<td class="number">{sum(explained.rows for explained in table.deviations):,}</td></tr>'
        for table in tables
    )
    return (
        '<section class="card scroll"><h2>Tables</h2><table><tr><th>Table</th><th>Verdict</th>'
        '<th class="number">Native rows</th><th class="number">Our rows</th>'
        '<th class="number">Differing</th><th class="number">By deviation</th></tr>'
        f"{rows}</table></section>"
    )


def _table(table: CertifiedTable) -> str:
    if table.outcome is TableOutcome.EQUAL:
        return ""
    remarks = [] if table.reason is None else [escape(table.reason)]
    remarks += [f"<code>{escape(key)}</code>" for key in table.keys]
    remarks += [
        f"{count_in_words(explained.rows, 'row')} by {escape(explained.deviation.value)}:"
        f" {escape(explained.reason)} ({_keys(explained.keys)})"
        for explained in table.deviations
    ]
    items = "".join(f"<li>{remark}</li>" for remark in remarks)
    return (
        f'<section class="card"><div class="head"><h2>{escape(table.table)}</h2>'
        f"{badge(_BADGES[table.outcome], table.outcome.value)}</div><ul>{items}</ul></section>"
    )


def _keys(keys: Iterable[str]) -> str:
    return " ".join(f"<code>{escape(key)}</code>" for key in keys)


def _count(rows: int | None) -> str:
    return "&ndash;" if rows is None else f"{rows:,}"


def _method() -> str:
    return (
        '<p class="soft">How: a native subscription to the same publications, on a server that was created'
        " for this and removed afterwards, copied the tables and followed the publisher beside this"
        " subscription. It was stopped, this subscription was replayed to exactly where it stopped, and the"
        " rows of both were compared.</p>"
    )
