"""What the report shows of proofs: per table its proof and trend, and the tables that were not compared."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from html import escape

from cdc_replay.model.count import count_in_words, rows_differ
from cdc_replay.model.duration import duration_in_words
from cdc_replay.model.proof import BUCKETS, TableProof
from cdc_replay.model.size import size_in_words
from cdc_replay.subscriber.proofs import TableRecord
from cdc_replay.validate.report_context import ReportContext, time_of_day
from cdc_replay.validate.verdict import Check, LeftReason, TableVerdict, Verdict


def show_proof(proof: TableProof | None, now: dt.datetime) -> str:
    """The proof of a table with its age, as escaped text."""
    if proof is None:
        return "&ndash;"
    summary = proof.summary
    if (proven := summary.proven) is None:
        return escape(summary.describe())
    age = duration_in_words((now - proven.at).total_seconds())
    return f"{escape(summary.describe())}, {age} ago"


def show_table_proof(table: TableVerdict, context: ReportContext, now: dt.datetime) -> str:
    """What was compared of the table, its proof, and the trend of its validations up to this one."""
    share = "all rows"
    if table.error is not None:
        share = "nothing"
    elif table.is_partial:
        share = f"the rows in {table.compared_buckets:,} of {BUCKETS} buckets"
    read = f"{size_in_words(table.bytes)} of the publisher read, {table.seconds:.1f} s"
    proof = "" if table.proof is None else f" Proof of the table: {show_proof(table.proof, now)}."
    return f'<p class="soft">Compared: {share}; {read}.{proof}</p>{_trend(table, context, now)}'


def show_left_out(verdict: Verdict, context: ReportContext, now: dt.datetime) -> str:
    """The tables and parts that this run says nothing about; empty if it has compared everything."""
    rows = "".join(
        f"<tr><td>{escape(str(left.name))}</td><td>{_badge(left.reason)}</td>"
        f"<td>{show_proof(left.proof, now)}</td><td>{escape(_age_text(left.age))}</td></tr>"
        for left in verdict.left_out
    )
    parts = _items(
        f"{table.name}: {table.not_reached} of {table.chosen_buckets} chosen buckets were not reached"
        for table in verdict.tables
        if table.not_reached
    )
    unknown = _items(
        f"{name} is planned in the configuration, and is no published table of the subscription"
        for name in context.unknown
    )
    if not rows and not parts and not unknown:
        return ""
    table = (
        "<table><tr><th>Table</th><th>Why</th><th>Last proof</th><th>Bound of its age</th></tr>"
        f"{rows}</table>"
    )
    return (
        '<section class="card scroll"><h2>Not compared</h2><p class="soft">This run says nothing about them:'
        f" their last proofs stand.</p>{table if rows else ''}{parts}{unknown}</section>"
    )


def _items(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="soft">{items}</ul>' if items else ""


def _badge(reason: LeftReason) -> str:
    return f'<span class="badge info">{escape(reason.value)}</span>'


def _age_text(age: Check | None) -> str:
    return "" if age is None else age.error or age.observed


def _trend(table: TableVerdict, context: ReportContext, now: dt.datetime) -> str:
    earlier = context.table_history.get(table.name, ())
    if not earlier:
        return ""
    marks = "".join(
        f'<b class="{"fails" if record.error or record.differing_rows else ""}"'
        f' title="{escape(_of_record(record, now))}"></b>'
        for record in reversed(earlier)
    )
    this = f'<b class="{"" if table.success else "fails"}" title="this validation"></b>'
    seen = sum(record.buckets for record in earlier) + table.compared_buckets
    return (
        f'<p class="soft">Its last {len(earlier) + 1} validations compared all rows'
        f" {seen / BUCKETS:.1f} times.</p>"
        f'<div class="trend">{marks}{this}</div>'
    )


def _of_record(record: TableRecord, now: dt.datetime) -> str:
    finished = record.finished.astimezone(now.tzinfo)
    outcome = record.error or (
        rows_differ(record.differing_rows) if record.differing_rows else "no difference"
    )
    return (
        f"{finished:%Y-%m-%d} {time_of_day(finished)}: {outcome} in {record.buckets} of {BUCKETS} buckets,"
        f" {count_in_words(record.row_count, 'row')}, {size_in_words(record.bytes)}, {record.seconds:.1f} s;"
        f" proven through {record.proven_through or 'nothing'}"
    )
