"""The report for users: one self-contained HTML page per run, readable without a network.

The Data Docs next to it have the same verdicts in Great Expectations' own form; their styles come from public
hosts. Airflow serves only this page: its links to the Data Docs work when it is opened from disk.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Final
from urllib.parse import quote

from cdc_replay.compare.difference import Difference, DifferenceKind
from cdc_replay.model.count import count_in_words, rows_differ
from cdc_replay.model.results import TableReconciled, ValidationOutcome
from cdc_replay.private_files import make_folder
from cdc_replay.subscriber.history import ValidationRecord
from cdc_replay.validate.html_proofs import show_left_out, show_proof, show_table_proof
from cdc_replay.validate.report_context import Repair, ReportContext, first_sentence, time_of_day
from cdc_replay.validate.verdict import Check, TableVerdict, Verdict

LATEST: Final = "latest.html"
"""A copy of the last run's page."""

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6878; --page: #f5f6f8; --card: #fff; --line:
  #dde1e7;
  --good: #0f7b47; --good-bg: #e3f5ec; --bad: #b3261e; --bad-bg: #fdeceb; --info: #8a5a00; --info-bg: #fdf3dc;
  --link: #1a5fb4; --code: #eef0f4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa5b4; --page: #12161c; --card:
  #1b212a;
  --line: #303946; --good: #6fd6a0; --good-bg: #12352a; --bad: #ff9d94; --bad-bg: #411d1c; --info: #f2c66d;
  --info-bg: #3a2f14; --link: #8ab8f5; --code: #252d38; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto,
  sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0; overflow-wrap: anywhere; }
a { color: var(--link); }
code, .mono { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { background: var(--code); border-radius: 4px; padding: .1em .35em; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.badge { display: inline-block; border-radius: 99px; padding: .1rem .7rem; font-size: .85rem; font-weight:
  600;
  white-space: nowrap; }
.good { color: var(--good); background: var(--good-bg); }
.bad { color: var(--bad); background: var(--bad-bg); }
.info { color: var(--info); background: var(--info-bg); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1.1rem 1.3rem;
  margin-top: 1.1rem; }
.head { display: flex; gap: .8rem; align-items: center; justify-content: space-between; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .8rem; margin: 1rem
  0 0; }
.facts div { border-left: 3px solid var(--line); padding-left: .7rem; }
.facts dt { color: var(--soft); font-size: .8rem; }
.facts dd { margin: 0; font-size: 1.05rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: .9rem; }
th { text-align: left; color: var(--soft); font-size: .8rem; font-weight: 500; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.kind { white-space: nowrap; width: 14rem; }
td.key { overflow-wrap: anywhere; }
ul { margin: .7rem 0 0; padding-left: 1.2rem; }
.summary { font-size: 1.1rem; margin: .6rem 0 .2rem; overflow-wrap: anywhere; }
.trend { display: flex; flex-wrap: wrap; gap: 4px; margin-top: .7rem; }
.trend a, .trend b { width: .8rem; height: 1.5rem; border-radius: 3px; background: var(--good); }
.trend .fails { background: var(--bad); }
.error { margin: .9rem 0 0; padding: .6rem .8rem; border-radius: 8px; overflow-wrap: anywhere; }
"""

PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def write_page(verdict: Verdict, context: ReportContext, *, now: dt.datetime, run_page: Path) -> None:
    """Write the page to `verdict.report` and as `LATEST`; a reader never sees half a page.

    `now` is in the zone in which the page shows it; `run_page` is the run's page in the Data Docs.
    """
    folder = verdict.report.parent
    make_folder(folder)
    text = render(
        verdict,
        context,
        now=now,
        run_link=Path(os.path.relpath(run_page, folder)).as_posix(),
        index_link=Path(os.path.relpath(verdict.data_docs, folder)).as_posix(),
    )
    for target in (verdict.report, folder / LATEST):
        write_whole(target, text)


def write_whole(target: Path, text: str) -> None:
    """Write a file of which nobody sees a half."""
    part = target.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(target)


def remove_old_pages(folder: Path, pattern: str, kept: int) -> None:
    """Remove all but the newest pages; the names of pages of the pattern end with their time."""
    pages = sorted(folder.glob(pattern), key=lambda page: page.name.rpartition("-")[2], reverse=True)
    for page in pages[kept:]:
        page.unlink(missing_ok=True)


def render(
    verdict: Verdict, context: ReportContext, *, now: dt.datetime, run_link: str, index_link: str
) -> str:
    """The page as text; the links are relative to its folder."""
    body = [
        _head(verdict, context, now),
        "" if context.repair is None else _repaired(context.repair),
        _trend(verdict, context.earlier),
        _overview(verdict.tables, now) if verdict.tables else "",
        show_left_out(verdict, context, now),
        *(_table(verdict.subscription, context, table, now) for table in verdict.tables),
        _data_docs(run_link, index_link),
    ]
    title = escape(f"{verdict.subscription}: {_word(verdict)} at {verdict.lsn}")
    return PAGE.format(title=title, style=STYLE, body="\n".join(body))


def _data_docs(run_link: str, index_link: str) -> str:
    return (
        '<p class="soft">The same verdicts as recorded by Great Expectations, on disk next to this file: '
        f'<a href="{escape(run_link)}">this run in the Data Docs</a>, '
        f'<a href="{escape(index_link)}">all runs</a>.</p>'
    )


def badge(kind: str, text: str) -> str:
    """A word on a coloured ground: `good`, `bad` or `info`."""
    return f'<span class="badge {kind}">{escape(text)}</span>'


def _head(verdict: Verdict, context: ReportContext, now: dt.datetime) -> str:
    word = badge(_COLOURS[verdict.outcome], _word(verdict))
    rows = sum(table.publisher_rows or 0 for table in verdict.tables)
    facts = {
        "Publisher": context.publisher,
        "Publications": ", ".join(context.publications),
        "Fence LSN": str(verdict.lsn),
        "Tables": f"{sum(table.success for table in verdict.tables)} of {len(verdict.tables)} hold",
        **({"Not compared": count_in_words(len(verdict.left_out), "table")} if verdict.left_out else {}),
        "Published rows": f"{rows:,}",
        "Validated at": f"{now:%Y-%m-%d} {time_of_day(now)}",
        "Took": f"{verdict.seconds:.1f} s",
    }
    error = "" if verdict.error is None else f'<p class="error bad">{escape(verdict.error)}</p>'
    return (
        f'<section class="card"><div class="head"><h1>{escape(verdict.subscription)}</h1>{word}</div>'
        f'<p class="summary">{escape(first_sentence(verdict, context, now))}</p>'
        '<div class="soft">Subscriber and publisher compared as of one WAL position; '
        f"later writes of the publisher are not included.</div>{facts_list(facts)}{error}{_links(context)}"
        "</section>"
    )


_COLOURS: Final = {
    ValidationOutcome.CONSISTENT: "good",
    ValidationOutcome.NOT_CONSISTENT: "bad",
    ValidationOutcome.ERROR: "bad",
    ValidationOutcome.TOO_OLD: "info",
}


def _word(verdict: Verdict) -> str:
    return verdict.outcome.in_words(is_partial=verdict.is_partial)


def _repaired(repair: Repair) -> str:
    """What was written before this validation, and the verdict before that."""
    rows = "".join(
        f'<tr><td>{escape(table.table)}</td><td class="number">{table.inserted:,}</td>'
        f'<td class="number">{table.updated:,}</td><td class="number">{table.deleted:,}</td>'
        f'<td class="key mono">{escape(", ".join(_repaired_keys(table)))}</td></tr>'
        for table in repair.tables
    )
    left = "".join(f"<li>{escape(reason)}</li>" for reason in repair.not_repaired)
    return (
        '<section class="card scroll"><h2>Repaired before this validation</h2><p class="soft">At '
        f"{escape(str(repair.before.lsn))} the subscriber was not consistent"
        f" ({_link(repair.before.report.name, 'that report')}). These rows were written as they are published"
        ' since.</p><table><tr><th>Table</th><th class="number">Inserted</th><th class="number">Updated</th>'
        f'<th class="number">Deleted</th><th>First keys</th></tr>{rows}</table>'
        + (f'<p class="soft">Left as they are:</p><ul class="soft">{left}</ul>' if left else "")
        + "</section>"
    )


def _repaired_keys(table: TableReconciled) -> Iterable[str]:
    return (f"{kind} {key}" for kind, (_, keys) in table.by_kind().items() for key in keys)


def _links(context: ReportContext) -> str:
    known = {"the run that wrote this": context.links.run, "all subscriptions": context.links.page}
    links = ", ".join(_link(address, text) for text, address in known.items() if address is not None)
    return f'<p class="soft">In Airflow: {links}.</p>' if links else ""


def _link(address: str, text: str) -> str:
    return f'<a href="{escape(address)}">{escape(text)}</a>'


def _trend(verdict: Verdict, earlier: tuple[ValidationRecord, ...]) -> str:
    """The validations in order of time, each with a link to its report; the last one is this."""
    if not earlier:
        return ""
    holding = sum(record.consistent for record in earlier) + (not _differs(verdict))
    marks = "".join(
        f'<a class="{"" if record.consistent else "fails"}" href="{_file(record)}"'
        f' title="{escape(_of_earlier(record))}" aria-label="{escape(_of_earlier(record))}"></a>'
        for record in reversed(earlier)
    )
    this = f'<b class="{"fails" if _differs(verdict) else ""}" title="this validation"></b>'
    is_partial = verdict.is_partial or any(record.is_partial for record in earlier)
    saw = "found no difference in what they compared" if is_partial else "found the subscription consistent"
    return (
        f'<section class="card"><h2>Trend</h2><p class="soft">{holding} of the last {len(earlier) + 1}'
        f' validations {saw}.</p><div class="trend">{marks}{this}</div></section>'
    )


def _file(record: ValidationRecord) -> str:
    """The address of its page, beside this one: the subscriber keeps its name, which may be a script."""
    return quote(record.report, safe="")


def _differs(verdict: Verdict) -> bool:
    return verdict.outcome in {ValidationOutcome.NOT_CONSISTENT, ValidationOutcome.ERROR}


def _of_earlier(record: ValidationRecord) -> str:
    outcome = "consistent" if record.consistent else rows_differ(record.differing_rows)
    finished = record.finished.astimezone()
    return f"{finished:%Y-%m-%d} {time_of_day(finished)}: {outcome} at {record.lsn}"


def facts_list(facts: dict[str, str]) -> str:
    """Names and values beside each other."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items()
    )
    return f'<dl class="facts">{items}</dl>'


def _overview(tables: Iterable[TableVerdict], now: dt.datetime) -> str:
    rows = "".join(
        f'<tr><td><a href="#{escape(_anchor(table))}">{escape(str(table.name))}</a></td>'
        f"<td>{_outcome(table)}</td>"
        f'<td class="number">{_count(table.publisher_rows)}</td>'
        f'<td class="number">{_count(table.subscriber_rows)}</td>'
        f'<td class="number">{_differing(table)}</td><td>{show_proof(table.proof, now)}</td></tr>'
        for table in tables
    )
    return (
        '<section class="card scroll"><h2>Tables</h2><table><tr><th>Table</th><th>Verdict</th>'
        '<th class="number">Rows published</th><th class="number">Rows on the subscriber</th>'
        f'<th class="number">Differing</th><th>Proof</th></tr>{rows}</table></section>'
    )


def _anchor(table: TableVerdict) -> str:
    return f"table {table.name}".replace(" ", "-")


def _count(rows: int | None) -> str:
    return "&ndash;" if rows is None else f"{rows:,}"


def _differing(table: TableVerdict) -> str:
    if table.error is not None:
        return "&ndash;"
    total = sum(count for _, count in table.counts)
    return f"{total:,}" if table.counts_exact else f"&ge; {total:,}"


def _outcome(table: TableVerdict) -> str:
    if table.error is not None or (table.has_error and not table.fails):
        return badge("bad", "error")
    if table.fails:
        return badge("bad", "differs")
    if not table.success:
        return badge("info", "proof too old")
    if not table.full:
        return badge("info", "not comparable")
    return badge("good", "equal in part" if table.is_partial else "equal")


def _table(subscription: str, context: ReportContext, table: TableVerdict, now: dt.datetime) -> str:
    parts = [
        f'<section class="card" id="{escape(_anchor(table))}">',
        f'<div class="head"><h2>{escape(str(table.name))}</h2>{_outcome(table)}</div>',
        f'<p class="soft">Published: {_filter(table)}.</p>',
        "" if table.error is None else f'<p class="error bad">{escape(table.error)}</p>',
        _checks(table.checks),
        _differences(table),
        _keys("Duplicate keys on the subscriber", table.duplicate_keys),
        _keys("Rows on the subscriber outside the present filter", table.outside_filter),
        show_table_proof(table, context, now),
        _remarks(subscription, context.links.repair, table),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _filter(table: TableVerdict) -> str:
    if table.filters is None:
        return "all rows"
    return f"rows where {' or '.join(f'<code>{escape(text)}</code>' for text in table.filters)}"


def _checks(checks: tuple[Check, ...]) -> str:
    if not checks:
        return ""
    rows = "".join(
        f"<tr><td>{escape(check.kind.value)}</td><td>{_check_badge(check)}</td>"
        f"<td>{escape(check.error or check.observed)}</td></tr>"
        for check in checks
    )
    return f"<table><tr><th>Check</th><th>Result</th><th>Observed</th></tr>{rows}</table>"


def _check_badge(check: Check) -> str:
    if check.error is not None:
        return badge("bad", "error")
    if check.success:
        return badge("good", "holds")
    return badge("info", "for information") if check.informational else badge("bad", "fails")


def _differences(table: TableVerdict) -> str:
    if not table.differences:
        return ""
    rows = "".join(
        f'<tr><td class="kind">{escape(difference.kind.value)}</td>'
        f'<td class="key mono">{escape(difference.key)}{_values(table.columns, difference)}</td></tr>'
        for difference in table.differences
    )
    total = sum(count for _, count in table.counts)
    shown = len(table.differences)
    keys = "key" if shown == 1 else f"{shown:,} keys"
    title = f"Differing rows (the first {keys})" if shown < total else "Differing rows"
    return f"<table><tr><th>Difference</th><th>{title}</th></tr>{rows}</table>"


def _values(columns: tuple[str, ...], difference: Difference) -> str:
    """The rows of both sides beside each other; of one row with other values, the columns that differ."""
    sides = difference.publisher, difference.subscriber
    if not any(sides):
        return ""
    is_one_row = all(len(side) == 1 for side in sides)
    rows = "".join(
        f"<tr><td>{escape(column)}</td>"
        + "".join(
            f"<td>{'<br>'.join(_value(row[position]) for row in side) or '&ndash;'}</td>" for side in sides
        )
        + "</tr>"
        for position, column in enumerate(columns)
        if not is_one_row or sides[0][0][position] != sides[1][0][position]
    )
    return f"<table><tr><th>Column</th><th>Publisher</th><th>Subscriber</th></tr>{rows}</table>"


def _value(value: str | None) -> str:
    return '<span class="soft">NULL</span>' if value is None else escape(value)


def _keys(title: str, keys: tuple[str, ...]) -> str:
    if not keys:
        return ""
    items = " ".join(f"<code>{escape(key)}</code>" for key in keys)
    return f'<p><span class="soft">{title}:</span> {items}</p>'


def _remarks(subscription: str, repair: str | None, table: TableVerdict) -> str:
    remarks = [escape(note) for note in table.notes]
    if table.error is None:
        remarks.append(f"How: {escape(table.method)}.")
    remedies = _remedies(subscription, repair, table)
    items = "".join(f"<li>{remark}</li>" for remark in (*remarks, *remedies))
    return f'<ul class="soft">{items}</ul>' if items else ""


def _remedies(subscription: str, repair: str | None, table: TableVerdict) -> Iterable[str]:
    kinds = {kind for kind, _ in table.counts}
    form = "" if repair is None else f" In Airflow: {_link(repair, 'trigger it with “Repair”')}."
    reconcile = f"<code>cdc-replay refresh {escape(subscription)} --reconcile</code>"
    if DifferenceKind.OUTSIDE_FILTER in kinds or table.outside_filter:
        yield (
            f"A changed filter is not applied to existing rows. {reconcile} deletes them and inserts missing"
            f" ones.{form}"
        )
    elif table.fails and kinds:
        yield (
            f"<code>cdc-replay validate {escape(subscription)} --repair</code> writes only the rows that"
            f" differ, and validates again; with <code>--dry-run</code> it counts them.{form}"
        )
    if table.fails and kinds:
        yield (
            f"<code>cdc-replay snapshot {escape(subscription)} --table {escape(table.name.argument)}</code> "
            "copies the table again."
        )
